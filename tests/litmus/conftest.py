"""Litmus tests of the memory model (ARCHITECTURE.md), over every way in which ranks reach each other."""

from collections.abc import Iterator
from pathlib import Path

import fake_verbs
import pytest
from fixtures import processes
from harness import Processes, kind_named
from litmus.play import LIMIT_S, REACHES, SEED, Litmus, Reach

__all__ = ["fake_process", "litmus", "processes", "reach"]

HERE = Path(__file__).parent


@pytest.fixture(params=[pytest.param(reach, id=reach.name) for reach in REACHES.values()])
def reach(request: pytest.FixtureRequest) -> Reach:
    """Every kind of transport, and the other ways of play.py; the skip says why one cannot be here."""
    if request.param.fake:
        fake_verbs.load()  # skips where it cannot be built
        return request.param
    needs = kind_named("rdma" if request.param.spans_hosts else request.param.transport)
    reason = needs.unsupported_reason()
    if reason is not None:
        pytest.skip(f"transport {needs.name}: {reason}")
    return request.param


@pytest.fixture(scope="module")
def fake_process() -> Iterator[Processes]:
    """Of its own: a process that has used real devices cannot change to the fake's."""
    team = Processes()
    yield team
    team.close()


@pytest.fixture
def litmus(request: pytest.FixtureRequest, reach: Reach) -> Litmus:
    processes = request.getfixturevalue("fake_process" if reach.fake else "processes")
    print(f"ONESIDED_LITMUS_SEED={SEED}")  # shown if the test fails
    return Litmus(processes, reach)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More rounds take longer."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(LIMIT_S + 20))
