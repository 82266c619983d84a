"""What the tests of transports and windows share; their conftest.py files import it from here."""

from collections.abc import Iterator

import pytest
from harness import KINDS, Kind, Process, Processes, Threads

__all__ = ["kind", "lasting", "processes", "ranks", "spawn"]


@pytest.fixture(params=[pytest.param(kind, id=kind.name) for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Every kind of transport; the skip says why one cannot be here."""
    reason = request.param.unsupported_reason()
    if reason is not None:
        pytest.skip(f"transport {request.param.name}: {reason}")
    return request.param


@pytest.fixture
def lasting(kind: Kind) -> Kind:
    """Kinds whose asynchronous operations are still under way when they have been issued."""
    if kind.name == "rdma":
        pytest.skip(
            "Soft-RoCE on one processor moves bytes while they are posted; tests/rdma has this on a fake device"
        )
    return kind


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """Ranks as processes, for tests that only make sense so."""
    team = Processes()
    yield team
    team.close()


@pytest.fixture(params=["threads", "processes"])
def ranks(request: pytest.FixtureRequest) -> Threads | Processes:
    """Ranks as threads, and as processes: both keep the same promises."""
    return Threads() if request.param == "threads" else request.getfixturevalue("processes")


@pytest.fixture
def spawn() -> Iterator[type[Process]]:
    """Starts processes that do not outlive the test."""
    started: list[Process] = []

    def start(name: str = "child", environment: dict[str, str] | None = None) -> Process:
        started.append(Process(name, environment))
        return started[-1]

    yield start  # type: ignore[misc]
    for process in started:
        process.close()
