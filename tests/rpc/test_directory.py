"""Directories, with the same promises over gRPC and in memory."""

import threading
import time

import pytest
from onesided.rpc import Directory, Entry, Group, Server

from onesided.errors import BoundsError, ConnectionLost, DeadlineExceeded, HandleError, RemoteAccessError, StaleHandle


@pytest.fixture(params=["grpc", "local"])
def pair(request: pytest.FixtureRequest):
    """Two clients of one directory."""
    if request.param == "grpc":
        server = request.getfixturevalue("server")
        with Directory(server.address) as one, Directory(server.address) as two:
            yield one, two
    else:
        groups = Group.local(2)
        yield groups[0].directory, groups[1].directory
        for group in groups:
            group.leave()


def test_publish_and_lookup(pair) -> None:
    one, two = pair
    entry = one.publish("weights", b"\0handle")
    assert isinstance(entry, Entry)
    assert (entry.name, entry.value, entry.version) == ("weights", b"\0handle", 1)
    assert two.lookup("weights") == entry
    assert one.publish("weights", bytearray(b"2")).version == 2
    assert two.lookup("weights").value == b"2"
    assert two.lookup("weights").owner == entry.owner


def test_lookup_waits(pair) -> None:
    one, two = pair
    found: list[Entry] = []
    thread = threading.Thread(target=lambda: found.append(two.lookup("later", timeout_s=30)))
    thread.start()
    entry = one.publish("later", b"x")
    thread.join(30)
    assert found == [entry]


def test_lookup_in_vain(pair) -> None:
    one, two = pair
    one.publish("weights/0", b"")
    with pytest.raises(HandleError, match="nothing is published as 'weights/1'; near it: 'weights/0'"):
        two.lookup("weights/1")
    begun_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"nothing was published as 'weights/1' within 0\.\d+ s; near it"):
        two.lookup("weights/1", timeout_s=0.2)
    assert 0.15 < time.monotonic() - begun_s < 10


def test_owners(pair) -> None:
    one, two = pair
    owner = one.publish("n", b"1").owner
    with pytest.raises(RemoteAccessError, match=owner):
        two.publish("n", b"2")
    with pytest.raises(RemoteAccessError, match=owner):
        two.withdraw("n")
    taken = two.publish("n", b"2", replace=True)
    assert (taken.version, taken.owner == owner) == (2, False)
    with pytest.raises(RemoteAccessError):
        one.withdraw("n")


def test_withdraw(pair) -> None:
    one, two = pair
    one.publish("n", b"1")
    one.withdraw("n")
    one.withdraw("n")
    one.withdraw("never there")
    with pytest.raises(HandleError):
        two.lookup("n")
    assert two.publish("n", b"2").version == 2


def test_list(pair) -> None:
    one, two = pair
    for name in ("b/2", "a", "b/1", "b"):
        one.publish(name, name.encode())
    assert [(entry.name, entry.value) for entry in two.list("b/")] == [("b/1", b"b/1"), ("b/2", b"b/2")]
    assert [entry.name for entry in two.list()] == ["a", "b", "b/1", "b/2"]
    assert two.list("zz") == []


def test_a_list_larger_than_a_message(pair) -> None:
    one, two = pair
    for number in range(20):
        one.publish(f"n{number:02}", bytes([number]) * (1 << 20))
    entries = two.list()
    assert [(entry.name, entry.value[:1], len(entry.value)) for entry in entries] == [
        (f"n{number:02}", bytes([number]), 1 << 20) for number in range(20)
    ]


def test_watch_replays_and_follows(pair) -> None:
    one, two = pair
    one.publish("p/b", b"1")
    one.publish("p/a", b"1")
    one.publish("q", b"1")
    with two.watch("p/") as watch:
        assert [watch.next(timeout_s=30).entry.name for _ in range(2)] == ["p/a", "p/b"]
        one.publish("p/a", b"2")
        one.publish("q", b"2")
        one.withdraw("p/b")
        one.publish("p/c", b"3")
        events = [watch.next(timeout_s=30) for _ in range(3)]
        assert [(event.kind, event.entry.name, event.entry.value, event.entry.version) for event in events] == [
            ("published", "p/a", b"2", 2),
            ("withdrawn", "p/b", b"1", 1),
            ("published", "p/c", b"3", 1),
        ]
        with pytest.raises(DeadlineExceeded, match="no event"):
            watch.next(timeout_s=0.05)
    with pytest.raises(StaleHandle):
        watch.next()
    watch.close()


def test_closing_a_watch_ends_its_iteration(pair, eventually) -> None:
    one, two = pair
    watch = two.watch()
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.extend(event.entry.name for event in watch))
    thread.start()
    one.publish("a", b"")
    eventually(lambda: not watch._mailbox._events, "the event was read")
    watch.close()
    thread.join(30)
    assert not thread.is_alive()
    assert seen in (["a"], [])


def test_closing_a_directory_withdraws_and_ends_watches(server: Server, directory: Directory) -> None:
    with Directory(server.address) as other:
        other.publish("n", b"")
        watch = other.watch()
        watch.next(timeout_s=30)
        mine = directory.watch()
        mine.next(timeout_s=30)
    assert list(watch) == []
    assert mine.next(timeout_s=30).kind == "withdrawn"
    other.close()
    with pytest.raises(StaleHandle):
        other.list()


@pytest.mark.parametrize("name", ["", "x" * 256, "\udc80"])
def test_names_that_cannot_be(pair, name: str) -> None:
    one, _ = pair
    for use in (lambda: one.publish(name, b""), lambda: one.lookup(name), lambda: one.withdraw(name)):
        with pytest.raises(BoundsError, match="entry name"):
            use()


def test_wrong_arguments(pair) -> None:
    one, _ = pair
    with pytest.raises(TypeError, match="entry name"):
        one.publish(3, b"")
    with pytest.raises(TypeError, match="value"):
        one.publish("n", "text")
    with pytest.raises(BoundsError, match="value of 'n' has 1048577 bytes; at most 1048576 fit"):
        one.publish("n", bytes((1 << 20) + 1))
    with pytest.raises(BoundsError, match="lease_s"):
        one.publish("n", b"", lease_s=0)
    with pytest.raises(BoundsError, match="timeout_s"):
        one.lookup("n", timeout_s=-1)
    for wrong in (None, 3, b""):
        with pytest.raises(TypeError, match="prefix"):
            one.list(wrong)
        with pytest.raises(TypeError, match="prefix"):
            one.watch(wrong)
    assert one.list() == []


def test_names_of_every_alphabet(pair) -> None:
    one, two = pair
    for name in ("模型/权重", "a\nb\tc", "x" * 255, " ", "%2F"):
        one.publish(name, name.encode())
        assert two.lookup(name).value == name.encode()
        with pytest.raises(HandleError):
            two.lookup(name[:-1] + "!")


def test_entries_of_other_processes_end_with_their_lease(server: Server, directory: Directory, spawn) -> None:
    child = spawn(
        """
        directory = Directory(sys.argv[1], lease_s=0.5)
        directory.publish("n", b"v")
        say("ready")
        sys.stdin.read()
    """,
        server.address,
    )
    child.said("ready")
    watch = directory.watch()
    event = watch.next(timeout_s=30)
    assert f":{child.process.pid}:" in event.entry.owner
    time.sleep(1.0)  # twice the lease: it is renewed
    assert directory.lookup("n").value == b"v"
    child.process.kill()
    event = watch.next(timeout_s=30)
    assert (event.kind, event.entry.name, event.entry.value) == ("expired", "n", b"v")
    assert directory.publish("n", b"new").version == 2, "the name is free"


def test_a_short_lease_among_long_ones_is_renewed(server: Server, directory: Directory) -> None:
    with Directory(server.address, lease_s=3600) as other:
        other.publish("long", b"")
        other.publish("short", b"", lease_s=0.3)
        time.sleep(1.0)
        assert [entry.name for entry in directory.list()] == ["long", "short"]


def test_a_watch_that_fell_behind_ends_with_the_truth(server: Server, directory: Directory, monkeypatch) -> None:
    from onesided.rpc import client
    from onesided.rpc.catalog import Watcher

    monkeypatch.setattr(Watcher, "LIMIT", 20)
    monkeypatch.setattr(client, "MAILBOX", 4)
    overruns: list[Watcher] = []
    see = Watcher.see
    monkeypatch.setattr(Watcher, "see", lambda self, event: (see(self, event), self.overrun and overruns.append(self)))
    watch = directory.watch()
    with Directory(server.address) as other:
        for number in range(500):
            other.publish(f"n{number % 7}", b"%d " % number + bytes(100_000))
        for name in ("n3", "n4"):
            other.withdraw(name)
        other.publish("last", b"")
        assert overruns, "nothing was left out"
        expected = {entry.name: entry for entry in other.list()}
        known: dict[str, Entry] = {}
        while known != expected:  # a missing event fails the test by its own deadline
            event = watch.next(timeout_s=30)
            if event.kind == "published":
                assert known.get(event.entry.name) != event.entry, "told twice"
                known[event.entry.name] = event.entry
            else:
                del known[event.entry.name]


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from onesided.rpc import client

    monkeypatch.setattr(client, "REPLY_S", 0.1)
    monkeypatch.setattr(client, "LATE_S", 0.1)
    directory = Directory("127.0.0.1:9")
    for use in (
        lambda: directory.publish("n", b""),
        lambda: directory.lookup("n"),
        directory.list,
        lambda: directory.withdraw("n"),
    ):
        with pytest.raises(ConnectionLost, match=r"no answer from the control plane at 127\.0\.0\.1:9"):
            use()
    with pytest.raises(DeadlineExceeded, match=r"127\.0\.0\.1:9"):
        directory.lookup("n", timeout_s=0.2)
    directory.close()


def test_proxies_of_the_environment_are_ignored(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with Directory(server.address) as directory:
        directory.publish("n", b"")


def test_many_threads_share_a_directory(directory: Directory, together) -> None:
    def act(index: int) -> list[int]:
        return [directory.publish(f"t{index}", b"%d" % number).version for number in range(20)]

    assert together(act, list(range(8))) == [list(range(1, 21))] * 8
