"""Windows: one memory on every rank of a group, written, read and signalled by all without code at the target."""

from .fabric import Countdown
from .plan import Plan
from .window import Window

__all__ = ["Countdown", "Plan", "Window"]
