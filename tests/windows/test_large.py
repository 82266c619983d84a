"""Sizes beyond 31 and 32 bits (case 5)."""

import ctypes
import time
from pathlib import Path

import numpy as np
import pytest
from harness import Kind, Processes, pattern, raises

from onesided import BoundsError, Group, Window

GIB = 1 << 30
LARGEST = (1 << 32) + 4096
NEEDED = 12 * GIB
POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
PERIOD = 1_000_003  # odd, so that bytes that land at a wrong power of two do not look right


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def fill(array: np.ndarray) -> None:
    """A pattern of PERIOD bytes, over and over."""
    array[:PERIOD] = pattern(PERIOD)
    done = PERIOD
    while done < array.size:
        step = min(done, array.size - done)
        array[done : done + step] = array[:step]
        done += step


def check(array: np.ndarray, first: int) -> None:
    """`array` is the pattern from its byte `first` on. Compared by memcmp: NumPy would take many seconds."""
    piece = np.tile(pattern(PERIOD), 65)[first % PERIOD :][: 64 * PERIOD]
    for start in range(0, array.size, piece.size):
        part = array[start : start + piece.size]
        differ = ctypes.CDLL(None).memcmp(part.ctypes.data_as(POINTER), piece.ctypes.data_as(POINTER), SIZE(part.size))
        assert differ == 0, f"wrong somewhere in [{start}, {start + part.size})"


PUTS = [((1 << 31) - 1, 0, 4097), (1 << 31, 77, 0), (LARGEST, 0, 0)]  # bytes, where from in the source, where to


def put_large(group: Group, kind: Kind) -> None:
    """Rank 1 puts, rank 0 looks at every byte."""
    window = Window.allocate(group, LARGEST if group.rank == 0 else 8, signals=2, transport=kind.name)
    if group.rank == 0:
        for turn, (nbytes, first, to) in enumerate(PUTS, 1):
            window.wait_signal(0, turn, timeout_s=60)
            check(window.array[to : to + nbytes], first)
            window.signal(1, 1)
        window.wait_signal(0, 4, timeout_s=60)
        assert window.array[-3:].tobytes() == b"end"
        window.close()
        return
    source = np.empty(LARGEST, np.uint8)
    fill(source)
    for turn, (nbytes, first, to) in enumerate(PUTS, 1):
        window.put(source[first : first + nbytes], 0, to, signal=0, async_op=turn == 2)
        window.wait_signal(1, turn, timeout_s=60)
    with raises(BoundsError):
        window.put(source, 0, 1)
    with raises(BoundsError):
        window.get(source, 0, 1)
    window.put(b"end", 0, LARGEST - 3)
    source[: (1 << 31) + 5] = 0
    window.get(source[: (1 << 31) + 5], 0, 3, timeout_s=60)
    check(source[: (1 << 31) + 5], 3)
    window.signal(0, 0)
    window.close()


@pytest.mark.timeout(150)
def test_case_5_sizes_of_2_and_4_gib(processes: Processes, kind: Kind, capsys) -> None:
    available = available_bytes()
    if available < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of available memory, there are {available >> 30}")
    begun = time.monotonic()
    processes.run(put_large, 2, kind, timeout_s=120)
    processes.restart()  # gives the memory back at once
    with capsys.disabled():
        print(f"[{time.monotonic() - begun:.0f} s] ", end="")
