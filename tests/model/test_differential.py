"""Random programs on real windows: whatever ranks see, the memory model allows it.

The programs are the same on every kind of transport, with ranks as threads and as processes. In the environment:

- ONESIDED_MODEL_STEPS: how many steps the long run takes, on each.
- ONESIDED_MODEL_SEED: which programs those are. A failure tells it, with the part of the program that shows it.

`python tests/model/long_run.py` does a million steps.
"""

import os
from collections.abc import Iterator

import fake_verbs
import pytest
from harness import Function, Process
from hypothesis import HealthCheck, given, settings
from model.fake_run import run_on_fake
from model.programs import Maker, Program, program_of, programs
from model.runner import Team, long_run

# A processor alone hands over to another process in up to 10 ms, where a kernel has no better clock.
SLOW = "ONESIDED_SOFTROCE" in os.environ
EXAMPLES = 40 if SLOW else 100
STEPS = int(os.environ.get("ONESIDED_MODEL_STEPS", 8_000 if SLOW else 40_000))


def test_programs_of_hypothesis(team: Team) -> None:
    """Their counterexamples are small."""

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def run(program: Program) -> None:
        team.check(program)

    run()


@pytest.mark.timeout(120 + STEPS / 500)
def test_long_run(team: Team, seed: int) -> None:
    done = long_run(team, STEPS, seed)
    assert done.steps >= STEPS
    print(f"{team}: {done.steps} steps of seed {seed} in {done.seconds:.1f} s")


def test_ranks_that_failed_are_replaced(team: Team) -> None:
    """A program that raises does not spoil the next."""
    maker = Maker(2, lambda n: 0)
    maker.add(0, "fence", peer=7)
    with pytest.raises(ValueError, match="rank 7"):
        team.check(maker.end())
    team.check(program_of(0, 0))


@pytest.fixture(scope="module")
def fake_process() -> Iterator[Process]:
    """The table of verbs is one for a whole process. Skips where the fake cannot be built."""
    fake_verbs.load()
    process = Process("the process of the fake")
    yield process
    process.close()


@pytest.mark.timeout(120 + STEPS / 200)
@pytest.mark.parametrize(("how", "rails"), [("at once", 1), ("in a thread", 2), ("by chance", 2), ("by chance", 3)])
def test_long_run_on_fake_devices(fake_process: Process, seed: int, how: str, rails: int) -> None:
    """The rdma kind again: what its devices may do and Soft-RoCE does not."""
    call = Function.of(run_on_fake), rails, (seed, STEPS // 4, how)
    done = fake_process.call(fake_verbs.on_fake, *call, timeout_s=60 + STEPS / 200)
    assert done.steps >= STEPS // 4
