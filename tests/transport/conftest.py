"""The tests of transports: every kind keeps the same promises."""

from fixtures import kind, lasting, processes, ranks, spawn

__all__ = ["kind", "lasting", "processes", "ranks", "spawn"]
