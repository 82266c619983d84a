"""Groups, with the same promises over gRPC and in memory."""

import threading
import time

import pytest
from onesided.rpc import Group, Server

from onesided.errors import BoundsError, ConnectionLost, DeadlineExceeded, HandleError, OnesidedError, StaleHandle


def test_all_gather_orders_by_rank(make_groups, together) -> None:
    groups = make_groups(4)
    payloads = [b"", b"one", bytes(100_000), b"\0\xff"]
    for _ in range(3):
        assert together(lambda group: group.all_gather(payloads[group.rank]), groups) == [payloads] * 4


def test_what_a_group_says_of_itself(make_groups) -> None:
    groups = make_groups(3)
    assert [group.rank for group in groups] == [0, 1, 2]
    for group in groups:
        assert (group.size, group.epoch, group.incarnation, group.closed) == (3, 1, 1, False)
        assert group.name in ("world", "local")
        assert group.lost_ranks() == frozenset()
        assert f"rank {group.rank} of 3" in repr(group)


def test_a_group_of_one(make_groups) -> None:
    (group,) = make_groups(1)
    group.barrier()
    assert group.all_gather(b"x") == [b"x"]


def test_no_barrier_returns_early(make_groups, together) -> None:
    groups = make_groups(4)
    arrived = [0] * 4

    def rounds(group: Group) -> bool:
        fine = True
        for number in range(1, 40):
            arrived[group.rank] = number
            group.barrier()
            fine &= min(arrived) >= number
        return fine

    assert together(rounds, groups) == [True] * 4


def test_a_rank_that_never_arrives_is_named(make_groups, together) -> None:
    groups = make_groups(4)
    outcomes = together(lambda group: group.barrier(timeout_s=0.3), groups[:2] + groups[3:])
    for error in outcomes:
        assert isinstance(error, DeadlineExceeded)
        assert isinstance(error, TimeoutError)
        assert "rank 2" in str(error)
    with pytest.raises(DeadlineExceeded, match=r"rank"):
        groups[2].barrier(timeout_s=5)
    assert together(lambda group: group.all_gather(b"%d" % group.rank), groups) == [[b"0", b"1", b"2", b"3"]] * 4


def test_the_deadline_is_kept(make_groups) -> None:
    groups = make_groups(2)
    for timeout_s in (0, 0.2):
        begun_s = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="rank 1"):
            groups[0].barrier(timeout_s=timeout_s)
        assert time.monotonic() - begun_s < timeout_s + 5


def test_leaving_fails_pending_and_later_collectives(make_groups, together, eventually) -> None:
    groups = make_groups(3)

    def act(group: Group) -> object:
        if group.rank == 1:
            group.leave()
            return None
        with pytest.raises(ConnectionLost, match="rank 1"):
            group.barrier()
        with pytest.raises(ConnectionError, match="rank 1"):
            group.all_gather(b"")
        assert group.lost_ranks() == {1}
        return "fine"

    assert together(act, groups) == ["fine", None, "fine"]


def test_leaving_after_the_last_barrier_disturbs_nobody(make_groups, together) -> None:
    def act(group: Group) -> str:
        group.barrier()
        group.leave()
        return "fine"

    for _ in range(10):
        groups = make_groups(4)
        assert together(act, groups) == ["fine"] * 4


def test_leave_is_idempotent_and_ends_everything(make_groups) -> None:
    (group,) = make_groups(1)
    directory = group.directory
    group.leave()
    group.leave()
    group.close()
    assert group.closed
    assert directory.closed
    for use in (
        group.barrier,
        lambda: group.all_gather(b""),
        group.lost_ranks,
        lambda: directory.lookup("x"),
        lambda: directory.publish("x", b""),
        directory.watch,
        lambda: group.add_close_callback(print),
    ):
        with pytest.raises(StaleHandle):
            use()
    assert "closed" in repr(group)


def test_close_callbacks_run_newest_first_before_leaving(make_groups) -> None:
    groups = make_groups(2)
    ran: list[object] = []
    groups[0].add_close_callback(lambda: ran.append(("first", groups[0].closed, groups[1].lost_ranks())))
    groups[0].add_close_callback(lambda: ran.append("second"))
    with groups[0] as group:
        assert ran == []
        assert group is groups[0]
    assert ran == ["second", ("first", False, frozenset())]
    groups[0].leave()
    assert len(ran) == 2


def test_a_failing_close_callback_is_told_after_all_is_closed(make_groups) -> None:
    groups = make_groups(2)
    ran = []
    groups[0].add_close_callback(lambda: ran.append(1))
    groups[0].add_close_callback(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        groups[0].leave()
    assert ran == [1]
    assert groups[0].closed
    with pytest.raises(ConnectionLost):
        groups[1].barrier(timeout_s=5)


def test_a_close_callback_may_use_the_group(make_groups, together) -> None:
    groups = make_groups(2)
    for group in groups:
        group.add_close_callback(group.barrier)
        group.add_close_callback(group.leave)
    assert together(lambda group: group.leave(), groups) == [None, None]


def test_leaving_goes_on_after_an_interrupt(make_groups) -> None:
    groups = make_groups(2)
    ran = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    groups[0].add_close_callback(lambda: ran.append(1))
    groups[0].add_close_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        groups[0].leave()
    assert (ran, groups[0].closed) == ([], False)
    groups[0].leave()
    assert (ran, groups[0].closed) == ([1], True)
    with pytest.raises(ConnectionLost, match="rank 0 left"):
        groups[1].barrier(timeout_s=10)


def test_closing_the_directory_is_not_leaving(make_groups, together) -> None:
    groups = make_groups(2)
    groups[0].directory.publish("n", b"")
    groups[0].directory.close()
    with pytest.raises(StaleHandle):
        groups[0].directory.list()
    assert together(lambda group: group.barrier(), groups) == [None, None]
    assert groups[1].directory.lookup("n").version == 1


def test_leaving_during_a_collective_of_another_thread(make_groups, together, eventually) -> None:
    groups = make_groups(2)
    outcomes: list[object] = []

    def wait() -> None:
        try:
            groups[0].barrier()
        except OnesidedError as error:
            outcomes.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(groups[0]._turn.locked, "the barrier began")
    groups[0].leave()
    thread.join(10)
    assert isinstance(outcomes[0], StaleHandle)


def test_threads_of_one_member_take_turns(make_groups, together) -> None:
    groups = make_groups(2)
    outcomes = together(lambda index: groups[index % 2].all_gather(b"x"), list(range(8)))
    assert outcomes == [[b"x", b"x"]] * 8


def test_wrong_arguments(make_groups) -> None:
    groups = make_groups(2)
    group = groups[0]
    for payload in ("text", None, 3):
        with pytest.raises(TypeError, match="payload"):
            group.all_gather(payload)
    with pytest.raises(BoundsError, match="payload has 15728641 bytes"):
        group.all_gather(bytes((15 << 20) + 1))
    with pytest.raises(BoundsError, match="timeout_s"):
        group.barrier(timeout_s=-1)
    with pytest.raises(TypeError, match="timeout_s"):
        group.barrier(timeout_s="1")
    # None of them counted as a collective.
    thread = threading.Thread(target=groups[1].barrier)
    thread.start()
    group.barrier()
    thread.join(10)


def test_collectives_that_differ(make_groups, together) -> None:
    groups = make_groups(2)
    outcomes = together(lambda group: group.barrier() if group.rank else group.all_gather(b""), groups)
    assert all(isinstance(error, OnesidedError) and "called" in str(error) for error in outcomes), outcomes


def test_payloads_too_large_together_fail_at_all_members(make_groups, together) -> None:
    groups = make_groups(2)
    outcomes = together(lambda group: group.all_gather(bytes(8 << 20)), groups)
    assert all(isinstance(error, BoundsError) for error in outcomes), outcomes
    sizes = together(lambda group: list(map(len, group.all_gather(bytes(7 << 20)))), groups)
    assert sizes == [[7 << 20] * 2] * 2


def test_the_directory_of_a_group(make_groups) -> None:
    groups = make_groups(2)
    groups[0].directory.publish("window/0", b"handle")
    entry = groups[1].directory.lookup("window/0", timeout_s=5)
    assert (entry.name, entry.value, entry.version) == ("window/0", b"handle", 1)
    groups[0].leave()
    with pytest.raises(HandleError, match="window/0"):
        groups[1].directory.lookup("window/0")


# What only groups over a server do.


def test_ranks_are_given_in_order_of_arrival(server: Server, together) -> None:
    groups = together(lambda _: Group.join(server.address, "g", 5), list(range(5)))
    assert sorted(group.rank for group in groups) == [0, 1, 2, 3, 4]
    names = together(lambda group: group.all_gather(b"%d" % group.rank), groups)
    assert names == [[b"0", b"1", b"2", b"3", b"4"]] * 5
    for group in groups:
        group.leave()


def test_join_says_who_is_missing(server: Server) -> None:
    with pytest.raises(DeadlineExceeded, match=r"not formed within 0\.\d* s: 2 of 3 members missing: ranks 0, 2"):
        Group.join(server.address, "g", 3, rank=1, timeout_s=0.3)


def test_join_with_another_size(joined, server: Server) -> None:
    joined(2)
    with pytest.raises(BoundsError, match=r"'world' has size 2; .* with size 3"):
        Group.join(server.address, "world", 3, timeout_s=5)


def test_join_with_a_taken_rank(joined, server: Server) -> None:
    joined(2, lease_s=0.3)
    with pytest.raises(BoundsError, match=r"rank 1 \(.*\) of 2 taken by a live member"):
        Group.join(server.address, "world", 2, rank=1, timeout_s=20)
    with pytest.raises(BoundsError, match="all ranks of 2 taken"):
        Group.join(server.address, "world", 2, timeout_s=20)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (("g", 0), {}, BoundsError, "group size"),
        (("g", "2"), {}, TypeError, "group size"),
        (("g", 2), {"rank": 2}, BoundsError, "rank"),
        (("g", 2), {"rank": -1}, BoundsError, "rank"),
        (("g", 2), {"rank": 1.5}, TypeError, "rank"),
        (("", 2), {}, BoundsError, "group name"),
        (("g" * 256, 2), {}, BoundsError, "group name"),
        ((b"g", 2), {}, TypeError, "group name"),
        (("g", 2), {"lease_s": 0}, BoundsError, "lease_s"),
        (("g", 2), {"timeout_s": -1}, BoundsError, "timeout_s"),
    ],
)
def test_join_with_wrong_arguments(arguments, options, error, text) -> None:
    with pytest.raises(error, match=text):
        Group.join("127.0.0.1:1", *arguments, **options)


@pytest.mark.parametrize("address", ["", "localhost", "::1:3", "host:port", "127.0.0.1:0"])
def test_join_with_no_address(address: str) -> None:
    with pytest.raises(BoundsError, match="port"):
        Group.join(address, "g", 1)


def test_join_where_nobody_serves() -> None:
    begun_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"joining group 'g': no answer from .* at 127\.0\.0\.1:9 "):
        Group.join("127.0.0.1:9", "g", 1, timeout_s=0.5)
    assert time.monotonic() - begun_s < 10


def test_a_group_is_formed_anew_under_its_name(joined, together) -> None:
    for epoch in (1, 2, 3):
        groups = joined(3)
        assert {group.epoch for group in groups} == {epoch}
        assert {group.incarnation for group in groups} == {epoch}
        together(lambda group: (group.barrier(), group.leave()), groups)


def test_groups_of_several_names_are_independent(joined, together) -> None:
    a, b = joined(2, "a"), joined(2, "b")
    a[0].leave()
    with pytest.raises(ConnectionLost):
        a[1].barrier(timeout_s=5)
    assert together(lambda group: group.barrier(), b) == [None, None]


def test_many_wait_at_once(server: Server, together) -> None:
    groups = together(lambda _: Group.join(server.address, "many", 64), list(range(64)))
    threads = sum(thread.name == "onesided-rpc" for thread in threading.enumerate())
    assert threads == 1
    results = together(lambda group: group.all_gather(group.rank.to_bytes(1, "big")), groups)
    assert results == [[bytes([rank]) for rank in range(64)]] * 64
    together(lambda group: group.leave(), groups)
