"""Window.expose and attach: windows by name, whose members come and go."""

import contextlib
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from harness import Kind, Process, Processes, in_threads, parent, pattern, raises, same, wait_until

from onesided import (
    BoundsError,
    ConnectionLost,
    DeadlineExceeded,
    Directory,
    HandleError,
    LayoutError,
    RegistrationError,
    RemoteAccessError,
    Server,
    StaleHandle,
    Unsupported,
    Window,
)


@pytest.fixture
def directory(processes: Processes) -> Iterator[Directory]:
    with Directory(processes.server.address) as directory:
        yield directory


# ---- In another process ----------------------------------------------------------------------------------------------


def expose(address: str, kind: Kind, name: str, how: dict, lease_s: float = 10.0) -> None:
    """Exposes a window and does what it is told until it is to end."""
    with Directory(address, lease_s=lease_s) as directory:
        buffer = how.pop("buffer", None)
        tensor = None if buffer is None else bytearray(buffer)
        window = Window.expose(directory, name, tensor, **how, signals=2, transport=kind.name)
        parent.say("exposed")
        while (word := parent.hear()) != "end":
            if word == "close":
                window.close()
                parent.say("closed")
            elif word == "value":
                parent.say(bytes(window.memory))
            elif word == "signal":
                parent.say(window.wait_signal(0, timeout_s=20))


def exposed(spawn: Callable[..., Process], address: str, kind: Kind, name: str, **how: object) -> Process:
    process = spawn("exposer")
    process.begin(expose, address, kind, name, how)
    assert process.said() == "exposed"
    return process


@pytest.mark.parametrize("private", [False, True], ids=["allocated", "private"])
def test_put_get_and_signal(processes: Processes, directory: Directory, spawn, kind: Kind, private: bool) -> None:
    how = {"buffer": bytes(4096)} if private else {"nbytes": 4096}
    process = exposed(spawn, processes.server.address, kind, "w", **how)
    window = Window.attach(directory, "w", timeout_s=20)
    assert (window.rank, window.size, window.nbytes, window.name) == (None, 1, 4096, "w")
    window.put(pattern(4096, 1), 0, signal=0)
    process.tell("signal")
    assert process.said() == 1
    process.tell("value")
    same(process.said(), pattern(4096, 1))
    into = np.zeros(100, np.uint8)
    window.get(into, 0, 1000)
    same(into, pattern(4096, 1)[1000:1100])
    if private and not kind.private_atomics:
        with pytest.raises(Unsupported):
            window.fetch_add(0, 0, 1)
    else:
        first = int(pattern(8, 1).view(np.uint64)[0])
        assert window.fetch_add(0, 0, 1) == first
        assert window.compare_swap(0, 0, first + 1, 5) == first + 1
    window.flush()
    for use in (lambda: window.wait_signal(0, 0), lambda: window.signal_value(0),
        lambda: window.memory, lambda: window.array,
                lambda: window.tensor, lambda: window.test_signal(0, 0)):  # fmt: skip
        with pytest.raises(Unsupported, match="owner"):
            use()
    with pytest.raises(BoundsError):
        window.put(b"x", 0, 4096)
    with pytest.raises(BoundsError):
        window.put(b"x", 1)
    with pytest.raises(BoundsError):
        window.signal(0, 2)
    said = window.describe()
    assert (said["nbytes"], said["rank"], said["memory"], said["peers"][0]["state"]) == (4096, None, None, "open")
    window.close()
    process.tell("end")
    process.result()


@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes"),
    [
        ((3, 5), "float32", 60),
        ((7,), "float64", 56),
        ((2, 2), "bfloat16", 8),
        ((0, 3), "int32", 0),
        ((), "int64", 8),
        (4, "float8_e5m2", 4),
    ],
)
def test_shape_and_size_travel(directory: Directory, kind: Kind, shape, dtype: str, nbytes: int) -> None:
    with Window.expose(directory, "shaped", shape=shape, dtype=dtype, transport=kind.name) as window:
        with Window.attach(directory, "shaped", timeout_s=20) as attached:
            assert attached.nbytes == window.nbytes == nbytes
            assert (attached.shape, attached.dtype) == (window.shape, window.dtype) == (window.shape, dtype)
            said = attached.describe()
            assert (said["shape"], said["dtype"]) == (window.describe()["shape"], dtype)
            attached.put(bytes(nbytes), 0)
            with pytest.raises(BoundsError):
                attached.put(b"x", 0, nbytes)
        window.put(bytes(nbytes), 0)
        assert (window.rank, window.size) == (0, 1)


def test_an_exposer_uses_its_own_window(directory: Directory, kind: Kind) -> None:
    with Window.expose(directory, "own", nbytes=16, signals=1, transport=kind.name) as window:
        window.put(b"abc", 0, 1, signal=0)
        assert window.wait_signal(0) == 1
        assert bytes(window.array[:5]) == b"\0abc\0"
        assert window.fetch_add(0, 8, 3) == 0
        assert window.lost() == []


def test_many_attach_at_once(directory: Directory, kind: Kind) -> None:
    with Window.expose(directory, "many", nbytes=32, signals=1, transport=kind.name) as window:

        def one(number: int) -> None:
            with Window.attach(directory, "many", timeout_s=20) as attached:
                attached.put(bytes([number + 1]), 0, number, signal=0)

        in_threads([lambda number=number: one(number) for number in range(32)])
        assert window.wait_signal(0, 32) == 32
        assert bytes(window.array) == bytes(range(1, 33))


def test_attach_twice(directory: Directory, kind: Kind) -> None:
    """Two attached windows of one process are independent."""
    with Window.expose(directory, "twice", nbytes=8, transport=kind.name) as window:
        first, second = (Window.attach(directory, "twice", timeout_s=20) for _ in range(2))
        first.put(b"1", 0)
        first.close()
        second.put(b"2", 0, 1)
        assert bytes(window.array[:2]) == b"12"
        with pytest.raises(StaleHandle):
            first.put(b"3", 0)
        second.close()


def test_no_more_than_max_peers(directory: Directory, kind: Kind) -> None:
    with Window.expose(directory, "few", nbytes=8, max_peers=2, transport=kind.name) as window:
        first, second = (Window.attach(directory, "few", timeout_s=20) for _ in range(2))
        with pytest.raises(Unsupported, match="all 3 places"):
            Window.attach(directory, "few", timeout_s=20)
        first.close()
        wait_until(lambda: attaches(directory, "few"), "the place of the first is free again")
        second.put(b"x", 0)
        second.close()
        window.put(b"y", 0, 1)


def attaches(directory: Directory, name: str) -> bool:
    with contextlib.suppress(Unsupported):
        Window.attach(directory, name, timeout_s=20).close()
        return True
    return False


# ---- Names -----------------------------------------------------------------------------------------------------------


def test_attach_before_expose_waits(directory: Directory, kind: Kind) -> None:
    attached: list[Window] = []
    attacher = threading.Thread(target=lambda: attached.append(Window.attach(directory, "later", timeout_s=20)))
    attacher.start()
    with Window.expose(directory, "later", nbytes=8, transport=kind.name):
        attacher.join(20)
        assert attached
        attached[0].put(b"x", 0)
        attached[0].close()


def test_attach_gives_up_at_its_deadline(directory: Directory) -> None:
    with pytest.raises(DeadlineExceeded, match="never"):
        Window.attach(directory, "never", timeout_s=0.1)
    with pytest.raises((DeadlineExceeded, HandleError), match="never"):
        Window.attach(directory, "never", timeout_s=0)


def test_a_name_that_is_taken(processes: Processes, directory: Directory, spawn, kind: Kind) -> None:
    process = exposed(spawn, processes.server.address, kind, "taken", nbytes=8)
    with pytest.raises(RemoteAccessError, match="taken"):
        Window.expose(directory, "taken", nbytes=16, transport=kind.name)
    with Window.attach(directory, "taken", timeout_s=20) as window:
        assert window.nbytes == 8  # still the other's
    process.tell("close")
    assert process.said() == "closed"
    with Window.expose(directory, "taken", nbytes=16, transport=kind.name):
        with Window.attach(directory, "taken", timeout_s=20) as window:
            assert window.nbytes == 16


def test_the_name_goes_with_the_window(directory: Directory, kind: Kind) -> None:
    window = Window.expose(directory, "goes", nbytes=8, transport=kind.name)
    assert [entry.name for entry in directory.list("goes")] == ["goes"]
    window.close()
    assert directory.list("goes") == []
    with pytest.raises((DeadlineExceeded, HandleError)):
        Window.attach(directory, "goes", timeout_s=0)


def test_a_name_exposed_again_by_the_same_process(directory: Directory, kind: Kind) -> None:
    """Only when asked to. The newer window has the name, also when the older one is closed."""
    first = Window.expose(directory, "again", nbytes=8, transport=kind.name)
    with pytest.raises(RemoteAccessError, match="'again' is the name of another open window of this process"):
        Window.expose(directory, "again", nbytes=16, transport=kind.name)
    with Window.attach(directory, "again", timeout_s=20) as attached:
        assert attached.nbytes == 8
    second = Window.expose(directory, "again", nbytes=16, transport=kind.name, replace=True)
    first.close()
    with Window.attach(directory, "again", timeout_s=20) as attached:
        assert attached.nbytes == 16
    second.close()
    assert directory.list("again") == []


def test_the_name_goes_with_a_forgotten_window(directory: Directory, kind: Kind) -> None:
    window = Window.expose(directory, "forgotten", nbytes=8, transport=kind.name)
    del window
    gc.collect()
    wait_until(lambda: directory.list("forgotten") == [], "the name is withdrawn")
    window = Window.expose(directory, "forgotten", nbytes=8, transport=kind.name)
    del window
    gc.collect()
    with Window.expose(directory, "forgotten", nbytes=16, transport=kind.name):  # before or after the withdrawal
        time.sleep(0.1)  # for the withdrawal, which must not take what is another's now
        with Window.attach(directory, "forgotten", timeout_s=20) as attached:
            assert attached.nbytes == 16


def test_forgetting_a_window_does_not_wait_for_the_control_plane(kind: Kind) -> None:
    with Server() as server:
        directory = Directory(server.address)
        window = Window.expose(directory, "away", nbytes=8, transport=kind.name)
    begun = time.monotonic()
    del window
    gc.collect()
    assert time.monotonic() - begun < 10
    directory.close()


def test_a_process_ends_with_an_exposed_window(processes: Processes, directory: Directory, kind: Kind) -> None:
    """Nothing is printed, and the name is gone."""
    code = f"""if True:
        from onesided import Directory, Window
        directory = Directory({processes.server.address!r})
        window = Window.expose(directory, "ended", nbytes=8, transport={kind.name!r})
        window.itself = window  # forgotten at the very end
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert directory.list("ended") == []


@pytest.mark.parametrize(
    "value",
    [b"", b"x", b"[]", b"{}", b"null", b"1", b'"text"', b"\xff\xfe", b'{"version": 1}', b'{"version": 2}',
    b"[" * 100_000,
     b'{"version": 1, "kind": "shm", "endpoint": "zz", "handle": "", "shape": [], "dtype": "uint8"}',
     b'{"version": 1, "kind": "shm", "endpoint": "", "handle": "", "shape": [], "dtype": "uint8"}',
     b'{"version": 1, "kind": "shm", "endpoint": 5, "handle": 5, "shape": 5, "dtype": 5}'],
    ids=range(14),
)  # fmt: skip
def test_an_entry_that_is_no_window(directory: Directory, value: bytes) -> None:
    directory.publish("other", value)
    with pytest.raises(HandleError):
        Window.attach(directory, "other", timeout_s=5)
    directory.withdraw("other")


def test_an_entry_of_another_kind_or_altered(directory: Directory, kind: Kind) -> None:
    with Window.expose(directory, "real", nbytes=8, transport=kind.name) as window:
        record = json.loads(directory.lookup("real").value)
        for change in (
            {"kind": "no such"}, {"kind": 5}, {"endpoint": record["endpoint"][:-2]}, {"handle": record["handle"][:-2]},
            {"handle": record["endpoint"]}, {"endpoint": record["handle"]}, {"shape": "x"}, {"shape": [-1]},
            {"shape": [2**70]},
            {"shape": [{}]}, {"dtype": 5}, {"dtype": "no such"}, {"shape": [9]}, {"shape": None},
        ):  # fmt: skip
            directory.publish("altered", json.dumps({**record, **change}).encode())
            with raises((HandleError, Unsupported)):
                Window.attach(directory, "altered", timeout_s=5)
                raise AssertionError(f"{change} was taken")
        window.put(b"x", 0)


# ---- The end of the owner --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [False, True], ids=["allocated", "private"])
def test_case_20_the_owner_closes(processes: Processes, directory: Directory, spawn, kind: Kind, private: bool) -> None:
    how = {"buffer": bytes(64)} if private else {"nbytes": 64}
    process = exposed(spawn, processes.server.address, kind, "closing", **how)
    with Window.expose(directory, "other", nbytes=8, transport=kind.name) as other:
        window = Window.attach(directory, "closing", timeout_s=20)
        window.put(b"before", 0)
        process.tell("close")
        assert process.said() == "closed"
        uses = [lambda: window.put(b"x", 0), lambda: window.put(b"", 0), lambda: window.get(bytearray(1), 0),
                lambda: window.signal(0, 0), lambda: window.put(b"x", 0, signal=0, async_op=True).wait()]  # fmt: skip
        if not private:
            uses += [lambda: window.fetch_add(0, 0, 1), lambda: window.compare_swap(0, 0, 0, 1)]
        for use in uses:
            with pytest.raises((StaleHandle, RemoteAccessError)):
                use()
        other.put(b"x", 0)
        window.close()
        with pytest.raises((DeadlineExceeded, HandleError)):
            Window.attach(directory, "closing", timeout_s=0)
    process.tell("end")
    process.result()


def test_attach_to_a_stale_record(directory: Directory, kind: Kind) -> None:
    """The record of a window that was closed, kept by somebody."""
    window = Window.expose(directory, "stale", nbytes=8, transport=kind.name)
    record = directory.lookup("stale").value
    window.close()
    directory.publish("stale", record)
    with pytest.raises(StaleHandle, match="'stale'"):
        Window.attach(directory, "stale", timeout_s=2)  # all of it: a restarted owner is looked for
    directory.withdraw("stale")


def test_the_owner_is_killed(processes: Processes, directory: Directory, spawn, kind: Kind) -> None:
    """Its users are told at once; its name goes when its lease ends, and can be taken again then."""
    process = spawn("exposer")
    process.begin(expose, processes.server.address, kind, "killed", {"nbytes": 64}, 0.5)
    assert process.said() == "exposed"
    window = Window.attach(directory, "killed", timeout_s=20)
    window.put(b"before", 0)
    process.kill()
    wait_until(lambda: window.lost() == [0], "the loss of the owner is seen", 5)
    for use in (lambda: window.put(b"x", 0), lambda: window.get(bytearray(1), 0), lambda: window.signal(0, 0),
        window.flush,
                lambda: window.flush(0), lambda: window.fetch_add(0, 0, 1),
                lambda: window.put(b"x", 0, async_op=True).wait()):  # fmt: skip
        with pytest.raises(ConnectionLost, match="killed"):
            use()
    window.close()
    with contextlib.suppress(DeadlineExceeded, HandleError):  # in case that the lease has ended already
        with pytest.raises(ConnectionLost, match="window 'killed'"):
            Window.attach(directory, "killed", timeout_s=0)
    wait_until(lambda: not directory.list("killed"), "the name goes when the lease ends", 10)
    with Window.expose(directory, "killed", nbytes=8, transport=kind.name):
        Window.attach(directory, "killed", timeout_s=5).close()


def test_the_owner_is_killed_and_restarts(processes: Processes, directory: Directory, spawn, kind: Kind) -> None:
    """attach() in the meantime finds the new one; until the lease of the dead ends, its name is only taken over."""
    process = exposed(spawn, processes.server.address, kind, "restarts", nbytes=8)
    process.kill()
    begun = time.monotonic()
    with pytest.raises(ConnectionLost, match="window 'restarts'"):
        Window.attach(directory, "restarts", timeout_s=0.3)
    assert 0.3 <= time.monotonic() - begun < 10
    with pytest.raises(RemoteAccessError, match=r"whose lease runs for another \d.\d s"):
        Window.expose(directory, "restarts", nbytes=16, transport=kind.name)
    attached: list[Window] = []
    attacher = threading.Thread(target=lambda: attached.append(Window.attach(directory, "restarts", timeout_s=20)))
    attacher.start()
    time.sleep(0.1)  # it has met the dead one then; the test holds if not
    with Window.expose(directory, "restarts", nbytes=16, transport=kind.name, replace=True):
        attacher.join(20)
        assert attached[0].nbytes == 16
        attached[0].close()


def test_the_attached_is_killed(processes: Processes, directory: Directory, spawn, kind: Kind) -> None:
    """The owner goes on, and its place is free again."""
    with Window.expose(directory, "owner", nbytes=64, signals=1, max_peers=1, transport=kind.name) as window:
        for _ in range(3):
            process = spawn("attached")
            wait_until(
                lambda process=process: process.call(attach_and_stay, processes.server.address, "owner"), "attached"
            )
            process.kill()
        assert window.wait_signal(0, 3, timeout_s=5) == 3
        window.close(timeout_s=5)


def attach_and_stay(address: str, name: str) -> bool:
    global staying
    directory = Directory(address)
    try:
        window = Window.attach(directory, name, timeout_s=20)
    except Unsupported:  # the place is not free yet
        return False
    window.put(b"x", 0, signal=0)
    staying = (directory, window)  # so that it ends only with the process
    return True


# ---- Bad arguments ---------------------------------------------------------------------------------------------------


def test_expose_refuses(directory: Directory, kind: Kind) -> None:
    def refused(error: type[BaseException] | tuple, *args: object, **how: object) -> None:
        with raises(error):
            Window.expose(directory, *args, **{"transport": kind.name, **how})
            raise AssertionError(f"{args} {how} was taken")
        assert directory.list("bad") == []

    for name in (None, 1, b"bad", ["bad"], object()):
        refused(TypeError, name, nbytes=8)
    for name in ("", "x" * 256, "\ud800"):
        refused(BoundsError, name, nbytes=8)
    refused(TypeError, "bad")
    refused(TypeError, "bad", bytearray(8), nbytes=8)
    refused(TypeError, "bad", bytearray(8), dtype="u1")
    refused(TypeError, "bad", nbytes=8, shape=8)
    refused(TypeError, "bad", 5)
    refused(LayoutError, "bad", b"read-only")
    refused(LayoutError, "bad", np.zeros((3, 3)).T)
    refused(BoundsError, "bad", nbytes=-1)
    refused(RegistrationError, "bad", nbytes=1 << 50)
    refused((BoundsError, TypeError), "bad", nbytes=8, max_peers=-1)
    refused(TypeError, "bad", nbytes=8, max_peers="1")
    refused(BoundsError, "bad", nbytes=8, max_peers=1 << 20)
    refused(BoundsError, "bad", nbytes=8, max_peers=0)
    refused(BoundsError, "bad", nbytes=8, signals=1 << 40)
    refused(LayoutError, "bad", nbytes=8, access="rwx")
    refused(TypeError, "bad", nbytes=8, access=None)
    refused(Unsupported, "bad", nbytes=8, transport="none")
    refused(TypeError, "bad", nbytes=8, transport=None)
    for lease_s in (-1, 0, float("nan"), float("inf"), 1e9):
        refused(BoundsError, "bad", nbytes=8, lease_s=lease_s)
    for lease_s in ("1", [1], object()):
        refused(TypeError, "bad", nbytes=8, lease_s=lease_s)


def test_attach_refuses(directory: Directory, kind: Kind) -> None:
    with Window.expose(directory, "good", nbytes=8, transport=kind.name):
        for name in (None, 1, b"good", ["good"], object()):
            with pytest.raises(TypeError):
                Window.attach(directory, name, timeout_s=1)  # type: ignore[arg-type]
        for timeout_s in ("1", [1], object(), 1j):
            with pytest.raises(TypeError):
                Window.attach(directory, "good", timeout_s=timeout_s)  # type: ignore[arg-type]
        for timeout_s in (-1, float("nan"), float("-inf")):
            with pytest.raises(BoundsError):
                Window.attach(directory, "good", timeout_s=timeout_s)
        for bad in (None, "directory", 1, object()):
            with pytest.raises(TypeError, match="directory must be a Directory"):
                Window.attach(bad, "good")  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="directory must be a Directory"):
                Window.expose(bad, "bad", nbytes=8, transport=kind.name)  # type: ignore[arg-type]


def test_a_closed_directory(processes: Processes, kind: Kind) -> None:
    directory = Directory(processes.server.address)
    window = Window.expose(directory, "left", nbytes=8, transport=kind.name)
    directory.close()
    with pytest.raises(StaleHandle):
        Window.expose(directory, "more", nbytes=8, transport=kind.name)
    with pytest.raises(StaleHandle, match="'left'"):
        Window.attach(directory, "left")
    window.put(b"x", 0)
    window.close()  # its name is gone already
    gc.collect()


def test_nothing_is_held_after_failures(directory: Directory, kind: Kind) -> None:
    """What expose and attach made before they failed is let go of."""
    transport_before = described(kind)
    for _ in range(3):
        with raises(BoundsError):
            Window.expose(directory, "", nbytes=8, transport=kind.name)
        with raises((DeadlineExceeded, HandleError)):
            Window.attach(directory, "nobody", timeout_s=0)
    window = Window.expose(directory, "few", nbytes=8, max_peers=1, transport=kind.name)
    attached = Window.attach(directory, "few", timeout_s=5)
    for _ in range(3):
        with raises(Unsupported):
            Window.attach(directory, "few", timeout_s=5)
    attached.close()
    window.close()
    assert described(kind) == transport_before


def described(kind: Kind) -> dict[str, str]:
    from onesided.windows.fabric import shared_transport

    gc.collect()
    said = shared_transport(kind.name).describe()
    return {key: said[key] for key in ("memories", "connections")}
