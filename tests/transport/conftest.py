"""The tests of transports: every kind keeps the same promises."""

from fixtures import kind, processes, ranks, spawn

__all__ = ["kind", "processes", "ranks", "spawn"]
