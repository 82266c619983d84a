"""`python -m onesided` is the command `onesided`."""

from .cli import main

main(prog_name="onesided")
