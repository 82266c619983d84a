"""Who may reach a window: tickets, rights of single peers, and their end, while others go on."""

import threading
from collections.abc import Callable

import numpy as np
from harness import Kind, Process, Processes, Threads, parent, pattern, raises, same

from onesided import (
    BoundsError,
    Directory,
    Group,
    HandleError,
    OnesidedError,
    RemoteAccessError,
    Server,
    StaleHandle,
    Unsupported,
    Window,
)

Ranks = Threads | Processes

# ---- Groups ----------------------------------------------------------------------------------------------------------


def revoked_rank(group: Group, kind: Kind) -> None:
    """Rank 0 ends the access of rank 2: that one fails, on this window only; rank 1 goes on without noticing."""
    window = Window.allocate(group, 4096, signals=3, transport=kind.name)
    other = Window.allocate(group, 4096, signals=3, transport=kind.name)
    data = pattern(1000, seed=group.rank)
    if group.rank != 0:
        window.put(data, 0, 1000 * group.rank, signal=group.rank)
    else:
        for rank in (1, 2):
            window.wait_signal(rank)
        window.revoke(2)
        window.revoke(2)  # legal
        same(window.array[2000:3000], pattern(1000, seed=2))
        window.array[2000:3000] = 0x5A
    group.barrier()
    if group.rank == 2:
        for use in (
            lambda: window.put(data, 0), lambda: window.get(bytearray(8), 0), lambda: window.signal(0, 2),
            lambda: window.fetch_add(0, 0, 1), lambda: window.put_many([(data, 0)], 0),
            lambda: window.put(data, 0, async_op=True).wait(),
        ):  # fmt: skip
            with raises(StaleHandle):
                use()
        window.put(data, 1, signal=2)  # its right at rank 1 is another matter
        other.put(data, 0, signal=2)
    if group.rank == 1:
        for turn in range(20):
            window.put(pattern(1000, seed=turn), 0, 1000, signal=1)
            window.fetch_add(0, 8, 1)
        window.flush(0)
        window.wait_signal(2)
        same(window.array[:1000], pattern(1000, seed=2))
    group.barrier()
    if group.rank == 0:
        assert (window.array[2000:3000] == 0x5A).all()
        same(window.array[1000:2000], pattern(1000, seed=19))
        assert [window.signal_value(index) for index in range(3)] == [0, 21, 1]
        assert window.atomic_load(8) == 20
        assert not window.array[16:1000].any()
        window.put(data, 0, 3000)  # its own way is not cut
        window.flush(0)
        same(window.array[3000:4000], data)
        other.wait_signal(2)
        same(other.array[:1000], pattern(1000, seed=2))
        for error, wrong in (
            (BoundsError, 3),
            (BoundsError, -1),
            (BoundsError, 0),
            (TypeError, "2"),
            (TypeError, None),
        ):
            with raises(error):
                window.revoke(wrong)  # type: ignore[arg-type]
        with raises(Unsupported):
            window.permit("x")
    group.barrier()
    window.close()
    with raises(StaleHandle):
        window.revoke(1)
    other.close()


def test_revoked_rank(ranks: Ranks, kind: Kind) -> None:
    ranks.run(revoked_rank, 3, kind)


def revoked_in_the_middle(group: Group, kind: Kind) -> None:
    """All put all the time; whoever loses its access fails, and no byte of it comes after revoke() has returned."""
    nbytes = 1 << 18
    window = Window.allocate(group, shape=(group.size, nbytes), dtype=np.uint8, signals=group.size, transport=kind.name)
    if group.rank == 0:
        for rank in range(1, group.size):
            window.wait_signal(rank, 3, timeout_s=30)
        for rank in (1, 3):
            window.revoke(rank, timeout_s=30)
            count = window.signal_value(rank)
            window.array[rank] = 0x5A
            counts = [window.signal_value(r) for r in range(group.size)]
            for going_on in {2, 4} | ({3} if rank == 1 else set()):
                window.wait_signal(going_on, counts[going_on] + 3, timeout_s=30)
            assert (window.array[rank] == 0x5A).all()
            assert window.signal_value(rank) == count
        for rank in (2, 4):
            window.signal(rank, 0)
    else:
        turn = 0
        try:
            while not window.test_signal(0, 1):
                turn += 1
                for part in range(4):
                    offset = group.rank * nbytes + part * nbytes // 4
                    window.put(np.full(nbytes // 4, turn % 64, np.uint8), 0, offset, async_op=part % 2 == 0)
                window.signal(0, group.rank)
            assert group.rank in (2, 4)
        except StaleHandle:
            assert group.rank in (1, 3)
        else:
            window.flush(0)
    group.barrier()
    if group.rank == 0:
        assert (window.array[[1, 3]] == 0x5A).all()
        assert (window.array[[2, 4]] < 64).all()
    group.barrier()
    window.close()


def test_revoked_in_the_middle(ranks: Ranks, kind: Kind) -> None:
    ranks.run(revoked_in_the_middle, 5, kind)


# ---- Exposed windows -------------------------------------------------------------------------------------------------


def test_tickets(kind: Kind) -> None:
    with Group.local(1)[0] as group:
        directory = group.directory
        window = Window.expose(directory, "private", nbytes=4096, signals=2, transport=kind.name, public=False)
        with raises(RemoteAccessError, "private"):
            Window.attach(directory, "private", timeout_s=5)
        reader_ticket, writer_ticket = window.permit("reader", "r"), window.permit("writer", "w")
        reader = Window.attach(directory, "private", ticket=reader_ticket)
        writer = Window.attach(directory, "private", ticket=writer_ticket)
        again = Window.attach(directory, "private", ticket=reader_ticket)
        writer.put(pattern(4096), 0, signal=1)
        window.wait_signal(1)
        for one in (reader, again):
            into = bytearray(4096)
            one.get(into, 0)
            same(into, pattern(4096))
            for use in (lambda w=one: w.put(b"x", 0), lambda w=one: w.fetch_add(0, 0, 1)):
                with raises(RemoteAccessError):
                    use()
            one.signal(0, 0)
        with raises(RemoteAccessError):
            writer.get(into, 0)
        assert window.signal_value(0) == 2

        window.revoke("reader")
        for one in (reader, again):
            with raises(StaleHandle):
                one.get(into, 0)
            one.close()
        with raises(RemoteAccessError, "private"):
            Window.attach(directory, "private", ticket=reader_ticket, timeout_s=5)
        writer.put(pattern(4096, seed=2), 0, signal=1)
        window.wait_signal(1)
        same(window.array, pattern(4096, seed=2))
        # The name may be used again. Who has the old ticket does not come back with it.
        new_ticket = window.permit("reader", "rw")
        with raises(RemoteAccessError, "private"):
            Window.attach(directory, "private", ticket=reader_ticket, timeout_s=5)
        with Window.attach(directory, "private", ticket=new_ticket) as back:
            back.put(b"back", 0)
            back.flush(0)
        assert bytes(window.array[:4]) == b"back"
        writer.close()
        window.close()
        for use in (lambda: window.permit("x"), lambda: window.revoke("x")):
            with raises(StaleHandle):
                use()
        with raises(OnesidedError):
            Window.attach(directory, "private", ticket=writer_ticket, timeout_s=0.2)


def test_ticket_mistakes(kind: Kind) -> None:
    with Group.local(1)[0] as group:
        directory = group.directory
        with Window.expose(directory, "w", nbytes=64, access="r", transport=kind.name) as window:
            for error, use in (
                (RemoteAccessError, lambda: window.permit("x", "rw")),
                (BoundsError, lambda: window.permit("x", "q")),
                (BoundsError, lambda: window.permit("x", "")),
                (TypeError, lambda: window.revoke("")),
                (TypeError, lambda: window.permit("")),
                (TypeError, lambda: window.permit(7)),  # type: ignore[arg-type]
                (TypeError, lambda: window.revoke(0)),
                (HandleError, lambda: Window.attach(directory, "w", ticket="zz")),
                (HandleError, lambda: Window.attach(directory, "w", ticket="00")),
                (HandleError, lambda: Window.attach(directory, "w", ticket=7)),  # type: ignore[arg-type]
            ):
                with raises(error):
                    use()
            window.revoke("nobody has ever been called that")
            with Window.attach(directory, "w") as attached:
                attached.get(bytearray(64), 0)
                for use in (lambda: attached.permit("x"), lambda: attached.revoke("x")):
                    with raises(Unsupported):
                        use()


def test_a_ticket_is_of_one_window(kind: Kind) -> None:
    with Group.local(1)[0] as group:
        directory = group.directory
        with (
            Window.expose(directory, "a", nbytes=64, transport=kind.name, public=False) as a,
            Window.expose(directory, "b", nbytes=64, transport=kind.name, public=False) as b,
        ):
            ticket = a.permit("bob", "r")
            b.permit("bob", "rw")
            with raises(RemoteAccessError, "'b'"):
                Window.attach(directory, "b", ticket=ticket, timeout_s=5)
            with Window.attach(directory, "a", ticket=ticket) as attached:
                attached.get(bytearray(8), 0)
                b.revoke("bob")
                attached.get(bytearray(8), 0)


def test_public_and_private_side_by_side(kind: Kind) -> None:
    """A peer with a name loses its access; those without one keep theirs."""
    with Group.local(1)[0] as group:
        directory = group.directory
        with (
            Window.expose(directory, "both", nbytes=64, access="rw", transport=kind.name) as window,
            Window.attach(directory, "both") as anybody,
            Window.attach(directory, "both", ticket=window.permit("named", "r")) as named,
        ):
            named.get(bytearray(8), 0)
            window.revoke("named")
            with raises(StaleHandle):
                named.get(bytearray(8), 0)
            anybody.put(b"12345678", 0)
            anybody.flush(0)
            assert bytes(window.array[:8]) == b"12345678"


# ---- A peer that is stopped, and one that dies -----------------------------------------------------------------------


def holder(address: str, ticket: str) -> None:
    """Attaches, says so, and then does what it is told."""
    with Directory(address) as directory, Window.attach(directory, "held", ticket=ticket) as window:
        parent.say("attached")
        turn = 0
        while parent.hear():
            turn += 1
            try:
                window.put(np.full(1 << 20, turn, np.uint8), 0)
                window.flush(0)
                parent.say("put")
            except OnesidedError as error:
                parent.say(type(error).__name__)


def test_a_stopped_peer_loses_its_access(kind: Kind, spawn: Callable[[], Process]) -> None:
    with Server() as server, Directory(server.address) as directory:
        window = Window.expose(directory, "held", nbytes=1 << 20, transport=kind.name, public=False)
        children = [spawn(), spawn()]
        for name, child in zip(("a", "b"), children, strict=True):
            child.begin(holder, server.address, window.permit(name))
            assert child.said() == "attached"
            child.tell("go")
            assert child.said() == "put"
        children[0].stop()
        window.revoke("a", timeout_s=1)  # it was idle: on shm at once, over RDMA when its queue pairs are gone
        window.array[:] = 0x5A
        children[0].resume()
        children[0].tell("go")
        assert children[0].said() == "StaleHandle"
        assert (window.array == 0x5A).all()
        children[1].tell("go")
        assert children[1].said() == "put"
        assert (window.array == 2).all()
        children[1].kill()
        window.revoke("b")  # nobody is left to lose it
        window.close()


def test_others_are_not_disturbed(kind: Kind) -> None:
    """Keys change under operations of a peer that keeps its access: it notices nothing."""
    with Group.local(1)[0] as group:
        with (
            Window.expose(group.directory, "keys", nbytes=64, transport=kind.name) as window,
            Window.attach(group.directory, "keys") as attached,
        ):
            attached.put(b"x", 0)
            attached.flush(0)
            window.revoke("a stranger")
            for turn in range(10):
                attached.put(bytes([turn]), 0)
                attached.flush(0)
                assert window.array[0] == turn
            done = threading.Event()

            def put_on() -> None:
                while not done.is_set():
                    attached.put(b"abcdefgh", 0)
                    attached.fetch_add(0, 8, 1)

            putting = threading.Thread(target=put_on)
            putting.start()
            for _ in range(20):
                window.revoke("a stranger")
            done.set()
            putting.join()
            attached.flush(0)
            assert bytes(window.array[:8]) == b"abcdefgh"
