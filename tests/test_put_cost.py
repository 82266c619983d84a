"""What an 8-byte put over rdma costs: instructions, allocations and system calls, counted by callgrind.

Everything is the difference between 2N and N puts, so what happens once does not count and what happens now and then
(a completion that is asked for and polled) counts by its share. The provider is the fake of csrc/tests/fake_verbs.h;
what it costs itself is taken off.
"""

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fake_verbs
import pytest

PUTS = 1024  # a whole number of all that happens every 16th or 64th put
FAKE, CORE = "fake_verbs.so", "_core."
WRITE = "onesided::verbs::RdmaTarget::write("
ALLOCATING = re.compile(r"(malloc|calloc|realloc|posix_memalign|aligned_alloc|operator new.*)(@.*)?$")


@dataclass(frozen=True)
class Call:
    """An edge of callgrind's graph: how often, and what it cost with all below."""

    caller_object: str
    object: str
    function: str
    count: int
    instructions: int


@dataclass(frozen=True)
class Cost:
    """Of one stretch of the main thread."""

    instructions: int
    system_calls: int
    in_fake: int
    in_write: int  # with the fake
    allocations: Counter[str]

    def minus(self, other: "Cost") -> "Cost":
        return Cost(
            self.instructions - other.instructions,
            self.system_calls - other.system_calls,
            self.in_fake - other.in_fake,
            self.in_write - other.in_write,
            self.allocations - other.allocations,
        )


def calls(text: str) -> Iterator[Call]:
    """The edges in a dump of callgrind; its format is in Valgrind's manual, "Callgrind Format Specification"."""
    names: dict[tuple[str, str], str] = {}

    def name(kind: str, value: str) -> str:
        number, _, said = value.partition(" ")
        if said:
            names[kind, number] = said
        return names[kind, number]

    here = caller_object = called_object = function = ""
    lines = iter(text.splitlines())
    for line in lines:
        key, equals, value = line.partition("=")
        if not equals:
            continue
        if key == "ob":
            caller_object = called_object = name("ob", value)
        elif key == "cob":
            called_object = name("ob", value)
        elif key == "fn":
            here = name("fn", value)
        elif key == "cfn":
            function = name("fn", value)
        elif key == "calls":
            count, cost = int(value.split()[0]), next(lines).split()
            if function != here:  # a function's calls of itself are within its own cost
                yield Call(caller_object, called_object, function, count, int(cost[1]) if len(cost) > 1 else 0)
            called_object = caller_object
    assert names


def cost_in(dump: Path) -> Cost:
    text = dump.read_text()
    events = next(line.split()[1:] for line in text.splitlines() if line.startswith("events:"))
    summary = next(line.split()[1:] for line in text.splitlines() if line.startswith("summary:"))
    totals = dict(zip(events, map(int, summary), strict=False))
    in_fake = in_write = 0
    allocations: Counter[str] = Counter()
    for call in calls(text):
        if FAKE in call.object and FAKE not in call.caller_object:
            in_fake += call.instructions
        if CORE in call.object and call.function.startswith(WRITE) and "::{lambda" not in call.function:
            in_write += call.instructions
        # What the fake allocates, it does by operator new of the C++ library.
        if ALLOCATING.match(call.function) and FAKE not in call.caller_object and "libstdc++" not in call.caller_object:
            allocations[call.function] += call.count
    return Cost(totals["Ir"], totals.get("sysCount", 0), in_fake, in_write, allocations)


def measured(source: str, folder: Path) -> Cost:
    """The cost of PUTS puts."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        pytest.skip("valgrind counts the instructions: apt-get install valgrind")
    fake_verbs.load()
    options = ["--tool=callgrind", "--collect-systime=yes", "--separate-threads=yes", "--dump-line=no"]
    command = [
        *(valgrind, *options, "--dump-before=*fake::reset_counts*", f"--callgrind-out-file={folder}/out"),
        *(sys.executable, Path(__file__).with_name("put_cost.py"), fake_verbs.load()._name, source, str(PUTS)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    # A part of thread 1 ends wherever the counts are reset: when the fake is, before the loops, and after each.
    return cost_in(folder / "out.4-01").minus(cost_in(folder / "out.3-01"))


@pytest.mark.parametrize(
    ("source", "budget"),
    [
        ("view", 1500),
        ("array", 2300),  # 850 of them are numpy's, which makes a description of its bytes each time
    ],
)
def test_a_small_put(source: str, budget: int, tmp_path: Path) -> None:
    """Up to the call of ibv_post_send, and back."""
    cost = measured(source, tmp_path)
    call = (cost.instructions - cost.in_fake) / PUTS
    core = (cost.in_write - cost.in_fake) / PUTS
    print(f"put of 8 bytes from a {source}: {call:.0f} instructions from Python to the device, {core:.0f} in the core")
    assert not cost.allocations
    assert cost.system_calls == 0
    assert 0 < core < 250
    assert core < call < budget
