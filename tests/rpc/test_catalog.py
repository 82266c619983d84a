"""The directory, on the bare state machine; random runs against a dict."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onesided.rpc.catalog import Catalog, Watcher
from onesided.rpc.state import ControlState
from onesided.rpc.timing import Timers

from onesided.errors import BoundsError, DeadlineExceeded, HandleError, RemoteAccessError


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def advance(clock: Clock, state: ControlState, seconds: float) -> None:
    end_s = clock.now_s + seconds
    while clock.now_s < end_s:
        clock.now_s = min(clock.now_s + 0.1, end_s)
        state.run_due()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> ControlState:
    return ControlState(clock)


def publish(
    state: ControlState,
    owner: str,
    name: str,
    value: bytes,
    lease_s: float = 10.0,
    replace: bool = False,
    version: int = 0,
) -> tuple[int, str, bytes]:
    entry = state.publish(owner, name, value, lease_s, replace, version)
    return entry.version, entry.owner, entry.value


def test_versions_grow_over_withdrawals_and_owners(state: ControlState) -> None:
    assert publish(state, "a", "n", b"1") == (1, "a", b"1")
    assert publish(state, "a", "n", b"1") == (2, "a", b"1")
    assert publish(state, "b", "n", b"2", replace=True) == (3, "b", b"2")
    state.catalog.withdraw("b", "n")
    assert publish(state, "a", "n", b"3") == (4, "a", b"3")
    assert publish(state, "a", "other", b"") == (1, "a", b"")


def test_a_live_owner_is_not_overwritten(state: ControlState) -> None:
    publish(state, "a", "n", b"1")
    with pytest.raises(RemoteAccessError, match="'n' is published by a, whose lease runs for another"):
        publish(state, "b", "n", b"2")
    with pytest.raises(RemoteAccessError, match="only that client can withdraw it"):
        state.catalog.withdraw("b", "n")
    assert state.lookup("n", 0).result().value == b"1"


def test_an_entry_ends_with_its_own_lease(state: ControlState, clock: Clock) -> None:
    publish(state, "a", "short", b"", lease_s=1.0)
    publish(state, "a", "long", b"", lease_s=5.0)
    publish(state, "b", "other", b"", lease_s=1.0)
    for _ in range(4):
        advance(clock, state, 0.9)
        assert state.heartbeat("a", False, 2) == (set(), False)
    assert [entry.name for entry in state.catalog.page("", "")[0]] == ["long", "short"]
    advance(clock, state, 1.2)
    assert [entry.name for entry in state.catalog.page("", "")[0]] == ["long"]
    assert state.heartbeat("a", False, 2) == (set(), True), "the client is told that one is missing"
    assert publish(state, "b", "short", b"x") == (2, "b", b"x")


def test_restoring_never_overwrites(state: ControlState) -> None:
    assert publish(state, "a", "n", b"old", version=7) == (7, "a", b"old")
    assert publish(state, "a", "n", b"new") == (8, "a", b"new")
    assert publish(state, "a", "n", b"old", version=7) == (8, "a", b"new")
    with pytest.raises(RemoteAccessError):
        publish(state, "b", "n", b"x", version=9, replace=True)


def test_lookup_waits_for_what_is_published_later(state: ControlState, clock: Clock) -> None:
    tickets = [state.lookup("n", 5), state.lookup("n", 5)]
    advance(clock, state, 4.9)
    publish(state, "a", "n", b"v")
    assert [ticket.result().value for ticket in tickets] == [b"v", b"v"]
    assert state.catalog._waiting == {}
    advance(clock, state, 1)


def test_lookup_in_vain(state: ControlState, clock: Clock) -> None:
    with pytest.raises(HandleError, match="nothing is published as 'weights/1'; the directory is empty"):
        state.lookup("weights/1", 0).result()
    publish(state, "a", "weights/0", b"")
    publish(state, "a", "zebra", b"")
    with pytest.raises(HandleError, match=r"nothing is published as 'weights/1'; near it: 'weights/0'$"):
        state.lookup("weights/1", 0).result()
    with pytest.raises(HandleError, match="'qqq'; there are 2 other names"):
        state.lookup("qqq", 0).result()
    ticket = state.lookup("weights/1", 2)
    advance(clock, state, 2)
    with pytest.raises(DeadlineExceeded, match="nothing was published as 'weights/1' within 2 s; near it"):
        ticket.result()
    assert state.catalog._waiting == {}


def test_what_is_too_large(state: ControlState) -> None:
    with pytest.raises(BoundsError, match="value of 'n' has 1048577 bytes"):
        publish(state, "a", "n", bytes((1 << 20) + 1))
    with pytest.raises(BoundsError, match="entry name"):
        publish(state, "a", "n" * 256, b"")
    publish(state, "a", "n" * 255, bytes(1 << 20))


def test_pages_are_bounded(state: ControlState) -> None:
    for number in range(20):
        publish(state, "a", f"p/{number:02}", bytes(1 << 20))
    publish(state, "a", "q", b"")
    names: list[str] = []
    pages = 0
    more = True
    while more:
        entries, more = state.catalog.page("p/", names[-1] if names else "")
        assert sum(len(entry.value) for entry in entries) <= 5 << 20
        names += [entry.name for entry in entries]
        pages += 1
    assert names == [f"p/{number:02}" for number in range(20)]
    assert pages == 5


def test_watchers_see_their_names_in_order(state: ControlState, clock: Clock) -> None:
    publish(state, "a", "p/0", b"0")
    seen = []
    entries, watcher = state.catalog.watch("p/", lambda: seen.append(1))
    assert [entry.name for entry in entries] == ["p/0"]
    publish(state, "a", "p/1", b"1", lease_s=1)
    publish(state, "a", "q", b"")
    state.catalog.withdraw("a", "p/0")
    advance(clock, state, 1.2)
    assert [(event.kind, event.entry.name) for event in watcher.events] == [
        ("published", "p/1"),
        ("withdrawn", "p/0"),
        ("expired", "p/1"),
    ]
    assert len(seen) == 3
    state.catalog.unwatch(watcher)
    publish(state, "a", "p/2", b"")
    assert len(seen) == 3


def test_a_slow_watcher_is_cut_off(state: ControlState) -> None:
    _, watcher = state.catalog.watch("", lambda: None)
    for _ in range(Watcher.LIMIT + 100):
        publish(state, "a", "n", b"")
    assert watcher.overrun
    assert len(watcher.events) == Watcher.LIMIT + 1


def test_leaving_withdraws_all(state: ControlState) -> None:
    publish(state, "a", "n", b"")
    publish(state, "b", "m", b"")
    _, watcher = state.catalog.watch("", lambda: None)
    state.leave("a")
    assert [(event.kind, event.entry.name) for event in watcher.events] == [("withdrawn", "n")]
    assert len(state.catalog) == 1


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["publish", "replace", "withdraw", "drop"]),
            st.sampled_from("ab"),
            st.sampled_from("xyz"),
            st.binary(max_size=3),
        ),
        max_size=40,
    )
)
def test_random_runs_agree_with_a_dict(steps: list[tuple[str, str, str, bytes]]) -> None:
    catalog = Catalog(Timers(lambda: 0.0))
    _, watcher = catalog.watch("", lambda: None)
    model: dict[str, tuple[bytes, int, str]] = {}
    versions: dict[str, int] = {}
    for action, owner, name, value in steps:
        held = model.get(name)
        foreign = held is not None and held[2] != owner
        if action in ("publish", "replace"):
            if foreign and action == "publish":
                with pytest.raises(RemoteAccessError):
                    catalog.publish(owner, name, value, 10.0)
                continue
            versions[name] = versions.get(name, 0) + 1
            model[name] = (value, versions[name], owner)
            catalog.publish(owner, name, value, 10.0, replace=action == "replace")
        elif action == "withdraw":
            if foreign:
                with pytest.raises(RemoteAccessError):
                    catalog.withdraw(owner, name)
                continue
            model.pop(name, None)
            catalog.withdraw(owner, name)
        else:
            model = {n: entry for n, entry in model.items() if entry[2] != owner}
            catalog.withdraw_all(owner)
        entries, _ = catalog.page("", "")
        assert {e.name: (e.value, e.version, e.owner) for e in entries} == model
        assert [e.name for e in entries] == sorted(model)
        for client in "ab":
            mine = sum(entry[2] == client for entry in model.values())
            assert catalog.renew(client, mine)
            assert not catalog.renew(client, mine + 1)
    told: dict[str, tuple[bytes, int, str]] = {}
    for event in watcher.events:  # who follows the events knows what is there
        if event.kind == "published":
            told[event.entry.name] = (event.entry.value, event.entry.version, event.entry.owner)
        else:
            del told[event.entry.name]
    assert told == model
