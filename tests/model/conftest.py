"""Ranks that run programs, kept for all tests of a module: of each kind of transport, as threads and as processes."""

import os
from collections.abc import Iterator

import pytest
from harness import KINDS, Kind
from model.runner import Team

__all__ = ["team"]


def teams() -> Iterator[object]:
    for kind in KINDS:
        for separate in (False, True):
            how = "processes" if separate else "threads"
            yield pytest.param((kind, separate), id=f"{kind.name}-{how}")


@pytest.fixture(scope="module", params=list(teams()))
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """The skip says why a kind cannot be here."""
    kind: Kind = request.param[0]
    reason = kind.unsupported_reason()
    if reason is not None:
        pytest.skip(f"transport {kind.name}: {reason}")
    made = Team(*request.param)
    yield made
    made.close()


@pytest.fixture(scope="session")
def seed() -> int:
    return int(os.environ.get("ONESIDED_MODEL_SEED", "1"))
