"""The tests of windows, with ranks as threads and as processes."""

from fixtures import kind, processes, ranks, spawn

__all__ = ["kind", "processes", "ranks", "spawn"]
