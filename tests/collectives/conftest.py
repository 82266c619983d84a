"""The tests of windows, with ranks as threads and as processes."""

from fixtures import kind, lasting, processes, ranks, spawn

__all__ = ["kind", "lasting", "processes", "ranks", "spawn"]
