"""The command line: `onesided serve` and `onesided bench`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

import onesided

if TYPE_CHECKING:
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
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {value.absolute().parent}")
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
    """Measure an operation between two processes, beside a one-thread memcpy in the same run.

    Each size takes one to a few seconds. "python" rows time the call from Python, "core" rows the same loop in C++.
    Latency is half a round trip for signal, and for put up to 64 KiB; else the duration of one operation.
    """
    from rich.console import Console
    from rich.status import Status

    from . import bench as benchmark

    console = Console()
    try:
        with Status("starting the second process", console=console) as status:
            rows = benchmark.run(op, transport, sizes, lambda size: status.update(f"{op} of {size:,} bytes"))
    except onesided.OnesidedError as error:
        raise click.ClickException(str(error)) from error
    show(rows, console)
    if json_file is not None:
        json_file.write_text(json.dumps({"rows": [row.as_dict() for row in rows]}, indent=1) + "\n")
    if plot_file is not None:
        try:
            benchmark.plot(rows, plot_file)
        except ImportError as error:
            raise click.ClickException(f"--plot needs matplotlib: pip install 'onesided[bench]' ({error})") from error


def show(rows: "list[Row]", console: object) -> None:
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    table = Table(title=f"{rows[0].op} between two processes over {rows[0].transport}")
    for column in ("size", "from", "latency, µs", "GB/s", "memcpy GB/s", "ratio"):
        table.add_column(column, justify="left" if column == "from" else "right")
    for row in rows:
        table.add_row(
            f"{row.size:,}",
            row.api,
            f"{row.latency_us:,.3f}",
            f"{row.gbps:.2f}",
            f"{row.limit_gbps:.2f}",
            f"{row.ratio:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
