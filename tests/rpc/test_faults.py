"""Processes that die, stop, fork and are interrupted, and servers that restart."""

import contextlib
import os
import signal
import socket
import textwrap
import threading
import time
from collections.abc import Callable

import pytest
from onesided.rpc import Directory, Group, Server, client

from onesided import Window
from onesided.errors import ConnectionLost, DeadlineExceeded, HandleError

MEMBER = """
    group = Group.join(sys.argv[1], "g", int(sys.argv[2]), rank=int(sys.argv[3]), lease_s=float(sys.argv[4]))
    say("joined", group.epoch)
"""


def join_with_children(server: Server, spawn, size: int, code: str, lease_s: float = 1.0):
    """Rank 0 here, the others in processes of their own."""
    code = textwrap.dedent(MEMBER) + textwrap.dedent(code)
    children = [spawn(code, server.address, str(size), str(rank), str(lease_s)) for rank in range(1, size)]
    return Group.join(server.address, "g", size, rank=0, timeout_s=30, lease_s=lease_s), children


def test_a_killed_member_is_lost_after_its_lease(server: Server, spawn, eventually) -> None:
    group, children = join_with_children(
        server,
        spawn,
        3,
        """
        group.directory.publish(f"n{group.rank}", b"v")
        group.barrier()
        say("ready")
        sys.stdin.readline()
        try:
            group.barrier()
        except ConnectionLost as error:
            say("lost", error)
        sys.stdin.read()
    """,
    )
    group.barrier()
    assert [entry.name for entry in group.directory.list()] == ["n1", "n2"]
    children[0].process.kill()
    begun_s = time.monotonic()
    children[1].process.stdin.write("go\n")
    children[1].process.stdin.flush()
    with pytest.raises(ConnectionLost, match=r"rank 1 of 3 gone: rank 1 was lost: no sign of .* for 1 s"):
        group.barrier()
    assert time.monotonic() - begun_s < 5
    assert group.lost_ranks() == {1}
    assert "rank 1" in children[1].said("lost")
    with pytest.raises(ConnectionLost, match="rank 1"):
        group.all_gather(b"")
    eventually(lambda: [entry.name for entry in group.directory.list()] == ["n2"], "n1 expired")
    group.leave()


def test_a_killed_member_is_restarted_under_its_rank(server: Server, spawn) -> None:
    code = """
        try:
            while True: group.barrier()
        except ConnectionLost:
            group.leave()
    """
    group, (child,) = join_with_children(server, spawn, 2, code, lease_s=0.7)
    assert group.incarnation == 1
    child.process.kill()
    # At once: its ghost is still a member.
    again = spawn(textwrap.dedent(MEMBER) + textwrap.dedent(code), server.address, "2", "1", "0.7")
    with pytest.raises(ConnectionLost, match="rank 1"):  # noqa: PT012  # some barriers may still complete
        while True:
            group.barrier()
    group.leave()
    group = Group.join(server.address, "g", 2, rank=0)
    assert again.said("joined") == "2"
    assert (group.epoch, group.incarnation, group.lost_ranks()) == (2, 2, frozenset())
    group.barrier()
    group.leave()
    assert again.end() == 0


def test_a_stopped_member_delays_others_to_their_deadline_only(server: Server, spawn) -> None:
    group, (child,) = join_with_children(
        server,
        spawn,
        2,
        """
        group.barrier()
        sys.stdin.read()
    """,
        lease_s=30,
    )
    group.barrier()
    child.process.send_signal(signal.SIGSTOP)
    begun_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="rank 1"):
        group.barrier(timeout_s=0.3)
    assert time.monotonic() - begun_s < 10
    child.process.send_signal(signal.SIGCONT)
    group.leave()


def test_a_member_stopped_for_longer_than_its_lease_learns_that_it_is_out(server: Server, spawn, eventually) -> None:
    group, (child,) = join_with_children(
        server,
        spawn,
        2,
        """
        say("ready")
        sys.stdin.readline()
        try:
            group.barrier()
        except ConnectionLost as error:
            say("lost", sorted(group.lost_ranks()), error)
        group.leave()
    """,
    )
    child.said("ready")
    child.process.send_signal(signal.SIGSTOP)
    with pytest.raises(ConnectionLost, match="rank 1 was lost"):
        group.barrier()
    child.process.send_signal(signal.SIGCONT)
    child.process.stdin.write("\n")
    child.process.stdin.flush()
    assert child.said("lost").startswith("[1]")
    assert child.end() == 0
    group.leave()


def test_a_stopped_server_loses_nobody(spawn) -> None:
    child = spawn("""
        server = Server()
        say("at", server.address)
        sys.stdin.read()
    """)
    address = child.said("at")
    groups: list[Group] = []
    joiner = threading.Thread(target=lambda: groups.append(Group.join(address, "g", 2, rank=1, lease_s=0.5)))
    joiner.start()
    with Group.join(address, "g", 2, rank=0, lease_s=0.5) as group:
        joiner.join(30)
        group.directory.publish("n", b"v")
        child.process.send_signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match="no answer from the control plane"):
            group.barrier(timeout_s=1)
        child.process.send_signal(signal.SIGCONT)
        failed: list[Exception] = []

        def other() -> None:
            try:
                groups[0].barrier()  # number 1, which failed at rank 0
            except DeadlineExceeded as error:
                failed.append(error)
            groups[0].barrier()

        thread = threading.Thread(target=other)
        thread.start()
        group.barrier()
        thread.join(30)
        # If rank 0's question was still in the server's socket when rank 1 came, the two of them met after all.
        assert not failed or "rank 0 gave up" in str(failed[0])
        assert not thread.is_alive()
        assert group.lost_ranks() == frozenset()
        assert [entry.name for entry in group.directory.list()] == ["n"]
        groups[0].leave()


NOBODY = "127.0.0.1:9"


def within(timeout_s: float, use: Callable[[], object], error: type[Exception] = DeadlineExceeded) -> None:
    """Raises at its deadline: not sooner, and not with what an answer of a server would be waited for."""
    begun_s = time.monotonic()
    with pytest.raises(error, match="no answer from the control plane"):
        use()
    assert timeout_s <= time.monotonic() - begun_s < timeout_s + 5


def test_deadlines_hold_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LATE_S", 20.0)
    monkeypatch.setattr(client, "REPLY_S", 0.3)
    for timeout_s in (0.0, 0.2, 1.0):
        within(timeout_s, lambda timeout_s=timeout_s: Group.join(NOBODY, "g", 2, timeout_s=timeout_s))
    with Directory(NOBODY) as directory:
        within(0.2, lambda: directory.lookup("n", timeout_s=0.2))
        within(0.2, lambda: Window.attach(directory, "n", timeout_s=0.2))
        within(0.3, lambda: directory.lookup("n"), ConnectionLost)
        within(0.3, lambda: directory.publish("n", b""), ConnectionLost)
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < client.LEAVE_S + 5


def test_deadlines_hold_after_the_server_was_killed(spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LATE_S", 20.0)
    child = spawn("""
        server = Server()
        say("at", server.address)
        sys.stdin.read()
    """)
    group = Group.join(child.said("at"), "g", 1)
    group.barrier()
    child.process.kill()
    child.process.wait()
    for timeout_s in (0.2, 0.5):
        within(timeout_s, lambda timeout_s=timeout_s: group.barrier(timeout_s=timeout_s))
        within(timeout_s, lambda timeout_s=timeout_s: group.directory.lookup("n", timeout_s=timeout_s))
    group.leave()


def test_a_silent_server_gets_no_more_than_its_grace(spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LATE_S", 0.3)
    child = spawn("""
        server = Server()
        say("at", server.address)
        sys.stdin.read()
    """)
    group = Group.join(child.said("at"), "g", 1)
    group.barrier()
    child.process.send_signal(signal.SIGSTOP)
    within(0.5, lambda: group.barrier(timeout_s=0.2))
    child.process.send_signal(signal.SIGCONT)
    group.leave()


def test_putting_back_what_a_server_lost_keeps_the_deadline() -> None:
    """Another thread is in the middle of it, and does not get on."""
    with Server() as server:
        address = server.address
        group = Group.join(address, "g", 1)
        group.directory.publish("n", b"v")
        group.barrier()
    for lock in (group._seat._restore_lock, group._seat._entries_lock):  # type: ignore[attr-defined]
        with Server(address):
            held, free = threading.Event(), threading.Event()

            def hold(lock: threading.Lock = lock, held=held, free=free) -> None:
                with lock:
                    held.set()
                    free.wait(30)

            thread = threading.Thread(target=hold)
            thread.start()
            held.wait(30)
            within(0.3, lambda: group.barrier(timeout_s=0.3))
            free.set()
            thread.join(30)
            group.barrier()
    group.leave()


def test_waiting_for_another_thread_counts() -> None:
    (group, _) = Group.local(2)
    first = threading.Thread(target=lambda: suppressed(lambda: group.barrier(timeout_s=2)))
    first.start()
    while not group._turn.locked():
        time.sleep(0.001)
    begun_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        group.barrier(timeout_s=3)
    assert time.monotonic() - begun_s < 4.5
    first.join(30)
    group.leave()


def suppressed(use: Callable[[], object]) -> None:
    with contextlib.suppress(DeadlineExceeded):
        use()


def test_a_restarted_server_gets_everything_back(together, eventually) -> None:
    servers = [Server()]
    address = servers[0].address
    groups = together(lambda rank: Group.join(address, "g", 3, rank=rank, lease_s=2), [0, 1, 2])
    watcher = Directory(address)
    watch = watcher.watch()
    entries = [group.directory.publish(f"n{group.rank}", b"%d" % group.rank) for group in groups]
    groups[1].directory.publish("n1", b"second")
    seen = [watch.next(timeout_s=30).entry for _ in range(4)]
    assert [entry.version for entry in seen] == [1, 1, 1, 2]
    stop = threading.Event()

    def work(group: Group) -> int:
        """Collectives without a pause, over all restarts; every result is checked."""
        rounds = 0
        while True:
            mine = b"%d.%d" % (group.rank, rounds)
            last = stop.is_set() and group.rank == 0
            results = group.all_gather(mine + (b"!" if last else b""), timeout_s=30)
            assert [result.rstrip(b"!") for result in results] == [b"%d.%d" % (rank, rounds) for rank in range(3)]
            rounds += 1
            if results[0].endswith(b"!"):
                return rounds

    def restart(_: object) -> str:
        for _ in range(3):
            time.sleep(0.2)
            servers[-1].close()
            servers.append(Server(address))
            eventually(lambda: servers[-1].members == 3, "all members are back")
        stop.set()
        return "restarted"

    jobs = [(work, group) for group in groups] + [(restart, None)]
    outcomes = together(lambda job: job[0](job[1]), jobs, timeout_s=60)
    assert outcomes[3] == "restarted", outcomes
    assert outcomes[0] == outcomes[1] == outcomes[2], outcomes
    assert outcomes[0] > 3
    # The entries are back under their versions, with the same owners, and nobody was told that they had gone.
    eventually(lambda: len(watcher.list()) == 3, "all entries are back")
    assert [(e.name, e.value, e.version, e.owner) for e in watcher.list()] == [
        ("n0", b"0", 1, entries[0].owner),
        ("n1", b"second", 2, entries[1].owner),
        ("n2", b"2", 1, entries[2].owner),
    ]
    with pytest.raises(DeadlineExceeded):
        watch.next(timeout_s=0.3)
    groups[0].directory.withdraw("n0")
    event = watch.next(timeout_s=30)
    assert (event.kind, event.entry.name) == ("withdrawn", "n0")
    assert all(group.lost_ranks() == frozenset() and group.epoch == 1 for group in groups)
    together(lambda group: (group.barrier(), group.leave()), groups)
    watcher.close()
    servers[-1].close()


def test_joiners_wait_through_a_restart_of_the_server(together, eventually) -> None:
    servers = [Server()]
    address = servers[0].address

    def restart_then_join(_: int) -> Group:
        eventually(lambda: servers[0]._host.state.members._groups, "the others wait")
        servers[0].close()
        servers.append(Server(address))
        return Group.join(address, "g", 3, timeout_s=30)

    def join(_: int) -> Group:
        return Group.join(address, "g", 3, timeout_s=30)

    groups = together(lambda job: job(0), [join, join, restart_then_join])
    assert sorted(group.rank for group in groups) == [0, 1, 2]
    together(lambda group: (group.barrier(), group.leave()), groups)
    servers[1].close()


def test_many_entries_come_back(eventually) -> None:
    server = Server()
    address = server.address
    with Directory(address, lease_s=1) as directory, Directory(address) as other:
        for number in range(200):
            directory.publish(f"n{number:03}", b"%d" % number)
        other.publish("theirs", b"")
        server.close()
        with Server(address):
            eventually(lambda: len(other.list()) == 201, "all are back")
            assert [(entry.value, entry.version) for entry in other.list("n")] == [(b"%d" % n, 1) for n in range(200)]


def test_an_entry_taken_over_meanwhile_is_let_go(server: Server, directory: Directory, eventually) -> None:
    with Directory(server.address, lease_s=0.3) as owner:
        owner.publish("n", b"mine")
        directory.publish("n", b"over", replace=True)
        eventually(lambda: not owner._link._published, "its owner noticed")
        assert directory.lookup("n").value == b"over"
    assert directory.lookup("n").value == b"over"


def test_an_entry_that_does_not_come_back_after_a_restart_is_told(monkeypatch, spawn) -> None:
    from onesided.rpc import client

    monkeypatch.setattr(client, "BACK_S", 0.5)
    server = Server()
    child = spawn(
        """
        directory = Directory(sys.argv[1])
        directory.publish("dead", b"")
        say("ready")
        sys.stdin.read()
    """,
        server.address,
    )
    child.said("ready")
    with Directory(server.address) as directory:
        directory.publish("alive", b"", lease_s=0.3)
        watch = directory.watch()
        assert [watch.next(timeout_s=30).entry.name for _ in range(2)] == ["alive", "dead"]
        child.process.kill()
        address = server.address
        server.close()
        with Server(address):
            event = watch.next(timeout_s=30)
            assert (event.kind, event.entry.name) == ("expired", "dead")
            assert directory.lookup("alive").version == 1


def test_a_member_that_dies_with_the_server_is_lost_in_the_next_one(spawn, monkeypatch) -> None:
    from onesided.rpc import membership

    monkeypatch.setattr(membership, "AWAITED_MIN_S", 1.0)
    server = Server()
    address = server.address
    group, (child,) = join_with_children(server, spawn, 2, "sys.stdin.read()", lease_s=0.6)
    child.process.kill()
    server.close()
    with Server(address):
        with pytest.raises(ConnectionLost, match="rank 1 was lost: no sign of it"):
            group.barrier(timeout_s=30)
        group.leave()


def test_fork_after_use(server: Server, spawn) -> None:
    child = spawn(
        """
        import multiprocessing, warnings
        group = Group.join(sys.argv[1], "g", 1)
        directory = Directory(sys.argv[1])
        watch = directory.watch()
        local = Group.local(1)[0]
        server = Server()
        group.barrier()
        uses = (group.barrier, lambda: group.all_gather(b""), group.lost_ranks, lambda: directory.lookup("n"),
                lambda: directory.publish("n", b""), lambda: group.directory.list(), lambda: next(watch),
                lambda: local.barrier(), lambda: local.directory.list(), server.close, lambda: server.members,
                lambda: Server(), lambda: Group.join(sys.argv[1], "h", 1), lambda: Directory(sys.argv[1]))
        pid = os.fork()
        if pid == 0:
            begun = time.monotonic()
            for number, use in enumerate(uses):
                try:
                    use()
                except OnesidedError as error:
                    assert "fork" in str(error), error
                else:
                    say("no error", number)
            Group.local(1)[0].barrier()
            group.leave(), directory.close(), watch.close(), local.leave()
            say("child", len(uses), time.monotonic() - begun < 20)
            sys.exit(7)
        say("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        group.barrier()
        assert directory.publish("n", b"").version == 1
        say("unharmed")
    """,
        server.address,
    )
    assert child.said("child") == "14 True"
    assert child.said("ended") == "7"
    child.said("unharmed")
    assert child.end() == 0


@pytest.mark.parametrize("use", ["list", "publish", "close"])
def test_interrupted_anywhere_it_still_closes(server: Server, spawn, use: str) -> None:
    """Ctrl-C wherever the interpreter looks for signals: as a Python function begins, or a C function returns."""
    child = spawn(
        """
        import gc
        at, seen = 0, 0

        def profile(frame, event, argument):
            global seen
            if event in ("call", "c_return"):
                seen += 1
                if seen == at:
                    raise KeyboardInterrupt

        while True:
            directory = Directory(sys.argv[1])
            at, seen = at + 1, 0
            if sys.argv[2] == "close":
                directory.publish(f"n{at}", b"v", replace=True)
            sys.setprofile(profile)
            try:
                if sys.argv[2] == "list":
                    directory.list()
                elif sys.argv[2] == "publish":
                    directory.publish(f"n{at}", b"v", replace=True)
                else:
                    directory.close()
                sys.setprofile(None)
                break
            except KeyboardInterrupt:  # which ended the profile
                pass
            directory.close()
            del directory
            gc.collect()
        say("tried", at)
    """,
        server.address,
        use,
    )
    assert int(child.said("tried")) > 20
    assert child.end() == 0


SETTINGS = bytes.fromhex("000000040000000000")  # frames of HTTP/2
GOAWAY = bytes.fromhex("0000080700000000000000000000000002")  # no stream was taken, for an error


@pytest.mark.parametrize("verbosity", [None, "INFO"])
def test_grpc_keeps_its_news_to_itself(spawn, verbosity: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        child = spawn(
            """
            directory = Directory(sys.argv[1])
            threading.Thread(target=directory.list, daemon=True).start()
            sys.stdin.readline()
            os._exit(0)
            """,
            f"127.0.0.1:{listener.getsockname()[1]}",
            env=env if verbosity is None else {**env, "GRPC_VERBOSITY": verbosity},
        )
        first, _ = listener.accept()
        with first:
            first.sendall(SETTINGS)
            said = b""
            while b"Directory/List" not in said:
                said += first.recv(1 << 16)
            first.sendall(GOAWAY)
            listener.accept()[0].close()  # it has read the news, and comes again
        child.process.stdin.close()
        assert child.end() == 0
    assert ("goaway" in child.errors) == (verbosity == "INFO"), child.errors


@pytest.mark.parametrize(
    "use",
    [
        "h.barrier(timeout_s=30)",
        "Group.join(sys.argv[1], 'other', 2, timeout_s=30)",
        "Group.join('127.0.0.1:9', 'other', 2, timeout_s=30)",
        "Directory(sys.argv[1]).lookup('n', timeout_s=30)",
        "next(Directory(sys.argv[1]).watch())",
        "Group.local(2)[0].barrier(timeout_s=30)",
        "run_local(2, lambda group: time.sleep(30) if group.rank else group.barrier())",
    ],
)
def test_ctrl_c_interrupts_at_once(server: Server, spawn, use: str, record_property) -> None:
    child = spawn(
        f"""
        groups = []
        thread = threading.Thread(target=lambda: groups.append(Group.join(sys.argv[1], "g", 2, rank=0)))
        thread.start()
        h = Group.join(sys.argv[1], "g", 2, rank=1)
        thread.join()
        sent = []
        def press():
            time.sleep(0.2)  # into the call; earlier would be as good
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=press).start()
        try:
            {use}
            say("not interrupted")
        except KeyboardInterrupt:
            say("interrupted", time.monotonic() - sent[0])
    """,
        server.address,
    )
    took_s = float(child.said("interrupted"))
    record_property("interrupted_after_s", took_s)
    assert took_s < 10  # it would take for ever
    assert child.end() == 0


def test_an_interrupted_collective_leaves_the_group_in_step(server: Server, spawn) -> None:
    group, (child,) = join_with_children(
        server,
        spawn,
        2,
        """
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        def alarm(*_): raise InterruptedError
        signal.signal(signal.SIGALRM, alarm)
        try:
            group.all_gather(b"interrupted")
        except InterruptedError:
            say("interrupted")
        say("next", group.all_gather(b"next"))
        group.leave()
    """,
    )
    child.said("interrupted")
    assert group.all_gather(b"a") == [b"a", b"interrupted"]
    assert group.all_gather(b"b") == [b"b", b"next"]
    assert child.said("next") == "[b'b', b'next']"
    assert child.end() == 0
    group.leave()


@pytest.mark.parametrize(
    "code",
    [
        "server = Server()",
        "server = Server(); group = Group.join(server.address, 'g', 1); group.directory.publish('n', b'')",
        "server = Server(); group = Group.join(server.address, 'g', 1); server.close()",
        "server = Server(); directory = Directory(server.address); "
        "watch = directory.watch(); directory.publish('n', b''); "
        "watch.next()",
        "group = Group.local(2)[0]; watch = group.directory.watch()",
        "directory = Directory('127.0.0.1:9'); watch = directory.watch()",
        "import contextlib\nserver = Server()\ndef join():\n  with contextlib.suppress(StaleHandle):\n"
        "    Group.join(server.address, 'g', 2)\nthreading.Thread(target=join, daemon=True).start(); time.sleep(0.2)",
        "server = Server(); group = Group.join(server.address, 'g', 1); sys.modules['keep'] = group; del server, group",
    ],
)
def test_the_interpreter_ends_with_everything_open(spawn, code: str) -> None:
    begun_s = time.monotonic()
    child = spawn(code + "\nsay('end')")
    child.said("end")
    assert child.end() == 0
    assert child.errors == ""
    assert time.monotonic() - begun_s < 10


def test_a_process_that_ends_leaves_its_group(server: Server, spawn) -> None:
    code = "group.add_close_callback(lambda: say('callback'))"
    group, (child,) = join_with_children(server, spawn, 2, code, lease_s=60)
    with pytest.raises(ConnectionLost, match="rank 1 left"):
        group.barrier(timeout_s=30)
    child.said("callback")
    assert child.end() == 0
    group.leave()


def test_a_joiner_that_is_killed_frees_its_place(server: Server, spawn, eventually) -> None:
    child = spawn("Group.join(sys.argv[1], 'g', 2, rank=0)", server.address)
    groups = server._host.state.members._groups
    eventually(lambda: groups and len(groups["g"].joiners) == 1, "the child asked for its place")
    child.process.kill()
    eventually(lambda: not groups, "its place is free")


def test_other_threads_run_while_one_waits(server: Server) -> None:
    counted = [0]
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    with pytest.raises(DeadlineExceeded):
        Group.join(server.address, "g", 2, timeout_s=0.3)
    stop.set()
    thread.join()
    assert counted[0] > 1000


def test_an_idle_group_uses_no_cpu(server: Server) -> None:
    with Group.join(server.address, "g", 1, lease_s=10) as group:
        group.barrier()
        time.sleep(0.2)
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.05


def test_serve(spawn) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        child = spawn("from onesided.rpc.serve import serve; serve('127.0.0.1:0')")
        address = child.said("onesided").rsplit(" ", 1)[1]
        with Directory(address) as directory:
            directory.publish("n", b"")
            with pytest.raises(HandleError):
                directory.lookup("m")
            child.process.send_signal(number)
            assert child.end() == 0
        assert child.errors == ""
