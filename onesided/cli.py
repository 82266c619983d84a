"""The command line: `onesided serve` and `onesided bench`."""

import click

import onesided

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(onesided.__version__, prog_name="onesided")
def main() -> None:
    """One-sided communication for PyTorch."""


@main.command()
@click.option("--bind", default="127.0.0.1:7777", show_default=True, metavar="ADDR:PORT",
              help="The one address to listen on; port 0 takes a free one, IPv6 as [ADDR]:PORT.")
def serve(bind: str) -> None:
    """Run the control plane alone, until Ctrl-C."""
    from .rpc.serve import serve as run

    try:
        run(bind)
    except onesided.OnesidedError as error:
        raise click.ClickException(str(error)) from error
