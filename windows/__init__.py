"""Windows: one memory on every rank of a group, written, read and signalled by all without code at the target."""

from .window import Window

__all__ = ["Window"]
