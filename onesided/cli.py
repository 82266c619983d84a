"""The command line: `onesided serve`, `onesided bench` and `onesided doctor`."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

import onesided

if TYPE_CHECKING:
    from rich.console import Console

    from .bench import Row

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(onesided.__version__, prog_name="onesided")
def main() -> None:
    """One-sided communication for PyTorch."""


@main.command()
@click.option(
    "--bind",
    default="127.0.0.1:7777",
    show_default=True,
    metavar="ADDR:PORT",
    help="The one address to listen on; port 0 takes a free one, IPv6 as [ADDR]:PORT.",
)
def serve(bind: str) -> None:
    """Run the control plane alone, until Ctrl-C."""
    from .rpc.serve import serve as run

    try:
        run(bind)
    except onesided.OnesidedError as error:
        raise click.ClickException(str(error)) from error


def to_sizes(_context: click.Context, _parameter: click.Parameter, value: str) -> list[int]:
    try:
        sizes = [int(size) for size in value.split(",")]
    except ValueError:
        raise click.BadParameter("give whole numbers of bytes with commas between them") from None
    if not sizes or min(sizes) < 1:
        raise click.BadParameter("sizes begin at 1 byte")
    return sizes


def to_file(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
    """A file that can be written is found out before minutes of measuring."""
    if value is not None:
        folder = value.absolute().parent
        if not folder.is_dir():
            raise click.BadParameter(f"there is no folder {folder}")
        if not value.exists() and not os.access(folder, os.W_OK):
            raise click.BadParameter(f"nothing can be written into {folder}")
    return value


@main.command()
@click.argument("op", type=click.Choice(["put", "get", "signal", "atomic"]))
@click.option("--transport", default="shm", show_default=True, help="The kind of transport.")
@click.option(
    "--sizes",
    default="8,4096,65536,1048576,16777216,268435456",
    show_default=True,
    callback=to_sizes,
    metavar="N,N,...",
    help="Sizes in bytes. An atomic has 8.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=to_file,
    help='Write {"rows": [...]} to this file.',
)
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=to_file,
    help="Draw bandwidth and latency over size into this PNG file.",
)
def bench(op: str, transport: str, sizes: list[int], json_file: Path | None, plot_file: Path | None) -> None:
    """Measure an operation between two processes, beside what the machine can do at best, in the same run.

    That is a one-thread memcpy on shm, and perftest on the same device on rdma (ONESIDED_NICS chooses it).

    Each size takes one to a few seconds on shm and up to a minute on rdma, where perftest starts again and again, and
    several times that on a busy machine: two processes that answer each other
    then wait for the scheduler. Loops end by time too, so it always comes to an end.

    "python" rows time the call from Python, "core" rows the same loop in C++. Puts one at a time are flushed each;
    "completed" ones are asynchronous and waited for each, "128 in flight" with so many under way. Latency is half a
    round trip for signals and puts one at a time up to 64 KiB; else the duration of one operation.
    """
    from rich.status import Status

    from . import bench as benchmark

    console = wide_console()
    try:
        if plot_file is not None:
            benchmark.check_plot()
        with Status("starting the second process", console=console) as status:
            rows = benchmark.run(op, transport, sizes, lambda size: status.update(f"{op} of {size:,} bytes"))
    except onesided.OnesidedError as error:
        raise click.ClickException(str(error)) from error
    show(rows, console)
    if json_file is not None:
        json_file.write_text(json.dumps({"rows": [row.as_dict() for row in rows]}, indent=1) + "\n")
    if plot_file is not None:
        benchmark.plot(rows, plot_file)


def wide_console() -> "Console":
    """A console that cuts no figures where it does not know its width, as in a pipe."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=110)


def show(rows: "list[Row]", console: "Console") -> None:
    from rich.table import Table

    table = Table(title=f"{rows[0].op} between two processes over {rows[0].transport}")

    def figure(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:,.{digits}f}"

    limit = "memcpy" if rows[0].transport == "shm" else "perftest"
    for column in ("size", "from", "mode", "latency, µs", f"{limit}, µs", "GB/s", f"{limit} GB/s", "of the limit"):
        words = column in ("from", "mode")
        table.add_column(column, justify="left" if words else "right", no_wrap=not words)
    for row in rows:
        table.add_row(
            f"{row.size:,}",
            row.api,
            row.mode,
            figure(row.latency_us, 3),
            figure(row.limit_latency_us, 3),
            figure(row.gbps, 2),
            figure(row.limit_gbps, 2),
            figure(row.ratio, 2),
        )
    console.print(table)
    if limit == "perftest" and all(row.limit_gbps is None and row.limit_latency_us is None for row in rows):
        console.print("The limit is missing: install perftest (apt-get install perftest).")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead; onesided.doctor documents it.")
def doctor(as_json: bool) -> None:
    """Look at RDMA devices, limits, memory and GPUs: what would be chosen, why, and what is in the way.

    Changes nothing, and ends with exit status 0 whatever is found.
    """
    from rich.console import Console

    from . import doctor as examination

    report = examination.examine()
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=1))
    else:
        examination.show(report, Console())


if __name__ == "__main__":
    main()
