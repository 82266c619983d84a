"""What this process has done so far, by transport and peer."""

from . import _core

__all__ = ["stats"]


def stats() -> dict[str, dict[str, dict[str, int]]]:
    """Counters since the process started, as `{transport: {peer: {counter: count}}}`.

    Counters: puts, gets, signals, atomics, flushes, bytes_put, bytes_got, copies (passes of the CPU over payload),
    registrations (memory made known, and remote memory mapped), cache_hits (remote memory that was mapped already),
    waits, sleeps (waits that outlasted their spin), errors. The peer "" stands for the transport itself. Waits for
    signals are counted by window, under the transport "window". Counters of closed connections stay.

    Counting is part of every operation and costs a few nanoseconds; nothing is collected until this is called.
    """
    found: dict[str, dict[str, dict[str, int]]] = {}
    for transport, peer, counts in _core.stats_snapshot():
        found.setdefault(transport, {})[peer] = counts
    return found
