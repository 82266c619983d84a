"""The fixtures of the tests of windows."""

from fixtures import kind, lasting, processes, ranks, spawn

__all__ = ["kind", "lasting", "processes", "ranks", "spawn"]
