"""Groups, leases and epochs, on the bare state machine and a clock that the test sets."""

import pytest
from onesided.rpc.membership import Forgotten
from onesided.rpc.state import ControlState
from onesided.rpc.timing import Ticket

from onesided.errors import BoundsError, ConnectionLost, DeadlineExceeded


class Plane:
    """A state machine with a hand-driven clock. Clients are named by letters."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.restart()

    def restart(self) -> None:
        self.state = ControlState(lambda: self.now_s)

    def advance(self, seconds: float, beating: str = "") -> None:
        """Lets time pass; the clients in `beating` send their heartbeats."""
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s = min(self.now_s + 0.1, end_s)
            for client in beating:
                self.state.heartbeat(client, True, 0)
            self.state.run_due()

    def join(self, client: str, size: int, rank: int | None = None, group: str = "g", timeout_s: float = 60) -> Ticket:
        return self.state.join(client, group, size, rank, 10.0, timeout_s)

    def form(self, clients: str, **options: object) -> None:
        tickets = [self.join(client, len(clients), rank, **options) for rank, client in enumerate(clients)]
        assert [ticket.result().rank for ticket in tickets] == list(range(len(clients)))

    def gather(self, client: str, sequence: int, payload: bytes = b"", timeout_s: float = 60) -> Ticket:
        return self.state.gather(client, sequence, "all_gather", payload, timeout_s)

    def resume(
        self, client: str, size: int, rank: int, epoch: int = 1, sequence: int = 0, payload: bytes | None = None
    ) -> None:
        self.state.resume(client, "g", size, rank, epoch, 10.0, sequence, "all_gather", payload)


@pytest.fixture
def plane() -> Plane:
    return Plane()


def test_ranks_in_order_of_arrival(plane: Plane) -> None:
    tickets = [plane.join(client, 3) for client in "abc"]
    assert [ticket.result().rank for ticket in tickets] == [0, 1, 2]
    assert {ticket.result().epoch for ticket in tickets} == {1}


def test_wanted_ranks_are_kept_and_the_rest_fills_up(plane: Plane) -> None:
    a, b, c, d = plane.join("a", 4), plane.join("b", 4, 0), plane.join("c", 4), plane.join("d", 4, 2)
    assert [t.result().rank for t in (a, b, c, d)] == [1, 0, 3, 2]


def test_nobody_is_seated_before_all_are_there(plane: Plane) -> None:
    first = plane.join("a", 2)
    plane.advance(59)
    assert not first.done
    second = plane.join("b", 2)
    assert first.result().rank == 0
    assert second.result().rank == 1


def test_deadline_names_who_is_missing(plane: Plane) -> None:
    ticket = plane.join("a", 5, 1, timeout_s=3)
    plane.join("b", 5, 4)
    plane.advance(3)
    with pytest.raises(DeadlineExceeded, match=r"'g' was not formed within 3 s: 3 of 5 members missing: ranks 0, 2-3"):
        ticket.result()
    # Its place is free again.
    plane.form("cdefh", group="other")
    assert not plane.join("z", 5, 1).done


def test_deadline_counts_where_ranks_are_not_known(plane: Plane) -> None:
    ticket = plane.join("a", 3, timeout_s=1)
    plane.advance(1)
    with pytest.raises(DeadlineExceeded, match=r"2 of 3 members missing$"):
        ticket.result()


def test_sizes_that_disagree(plane: Plane) -> None:
    plane.join("a", 3)
    with pytest.raises(BoundsError, match="has size 3; b wants to join it with size 4"):
        plane.join("b", 4).result()
    plane.form("cd", group="h")
    with pytest.raises(BoundsError, match="has size 2; e wants to join it with size 3"):
        plane.join("e", 3, group="h").result()


def test_a_rank_taken_by_a_joiner(plane: Plane) -> None:
    plane.join("a", 3, 1)
    with pytest.raises(BoundsError, match="rank 1 of group 'g' is taken by a"):
        plane.join("b", 3, 1).result()


def test_a_joiner_whose_call_broke_is_forgotten_unless_it_called_again(plane: Plane) -> None:
    broken = plane.join("a", 2, 0)
    again = plane.join("a", 2, 0)
    plane.state.members.withdraw_join("a", "g", broken)
    assert not again.done
    plane.state.members.withdraw_join("a", "g", again)
    b = plane.join("b", 2, 0)
    plane.join("c", 2, 1)
    assert b.result().rank == 0
    # Whose answer was lost asks again, and is told the same.
    assert plane.join("c", 2, 1).result().rank == 1


def test_a_live_member_proves_itself_with_its_next_heartbeat(plane: Plane) -> None:
    plane.form("ab")
    ticket = plane.join("c", 2, 1)
    plane.advance(1, beating="a")
    assert not ticket.done
    plane.state.heartbeat("b", True, 0)
    with pytest.raises(BoundsError, match=r"c cannot join group 'g': rank 1 \(b\) of 2 taken by a live member"):
        ticket.result()


def test_a_full_group_of_live_members(plane: Plane) -> None:
    plane.form("ab")
    ticket = plane.join("c", 2)
    plane.state.heartbeat("a", True, 0)
    assert not ticket.done
    plane.state.heartbeat("b", True, 0)
    with pytest.raises(BoundsError, match="all ranks of 2 taken"):
        ticket.result()


def test_a_restarted_member_waits_for_its_own_ghost_and_for_the_others(plane: Plane) -> None:
    plane.form("ab")
    ticket = plane.join("B", 2, 1)  # b was killed, and its process is back already
    plane.advance(10, beating="a")
    assert plane.state.heartbeat("a", True, 0)[0] == {1}
    assert not ticket.done
    plane.state.leave("a")
    again = plane.join("A", 2, 0)
    assert (again.result().epoch, again.result().rank) == (2, 0)
    assert (ticket.result().epoch, ticket.result().rank) == (2, 1)


def test_joiners_wait_for_old_members_and_name_them(plane: Plane) -> None:
    plane.form("abc")
    plane.state.leave("b")
    ticket = plane.join("B", 3, 1, timeout_s=5)
    plane.advance(5, beating="ac")
    with pytest.raises(DeadlineExceeded, match="2 of its members from epoch 1 are still there: ranks 0, 2"):
        ticket.result()


def test_a_group_may_change_its_size_between_epochs(plane: Plane) -> None:
    plane.form("ab")
    for client in "ab":
        plane.state.leave(client)
    plane.form("cde")
    assert plane.state.members.gone("c") == set()


def test_epochs_grow_under_one_name_only(plane: Plane) -> None:
    for epoch in (1, 2, 3):
        ticket = plane.join("a", 1)
        assert ticket.result().epoch == epoch
        plane.state.leave("a")
    assert plane.join("a", 1, group="other").result().epoch == 1


def test_a_silent_member_is_lost_after_its_lease(plane: Plane) -> None:
    plane.form("abc")
    pending = plane.gather("a", 1)
    plane.advance(9.9, beating="ac")
    assert not pending.done
    plane.advance(0.2, beating="ac")
    with pytest.raises(ConnectionLost, match="rank 1 of 3 gone: rank 1 was lost: no sign of b for 10 s"):
        pending.result()
    with pytest.raises(ConnectionLost, match="rank 1"):
        plane.gather("c", 1).result()
    assert plane.state.heartbeat("a", True, 0)[0] == {1}
    assert plane.state.heartbeat("b", True, 0)[0] == {1}, "it learns that it is out"
    plane.state.leave("c")
    with pytest.raises(ConnectionLost, match=r"ranks 1-2 of 3 gone: rank 1 was lost: .*; rank 2 left"):
        plane.gather("a", 2).result()


def test_the_server_standing_still_loses_nobody(plane: Plane) -> None:
    plane.form("ab")
    plane.now_s += 60
    plane.state.run_due()
    for client in "ab":
        assert plane.state.heartbeat(client, True, 0)[0] == set()
    plane.advance(20, beating="ab")
    assert plane.state.heartbeat("a", True, 0)[0] == set()


def test_an_unknown_member_is_told_so(plane: Plane) -> None:
    for call in (lambda: plane.state.heartbeat("x", True, 0), lambda: plane.gather("x", 1)):
        with pytest.raises(Forgotten):
            call()
    assert plane.state.heartbeat("x", False, 0) == (set(), False)
    plane.state.leave("x")


def test_members_come_back_after_a_restart(plane: Plane) -> None:
    plane.form("abc")
    plane.restart()
    plane.resume("b", 3, 1)
    plane.advance(9, beating="b")
    plane.resume("a", 3, 0)
    plane.resume("c", 3, 2)
    plane.resume("c", 3, 2)
    tickets = [plane.gather(client, 1, client.encode()) for client in "abc"]
    assert {ticket.result() for ticket in tickets} == {(b"a", b"b", b"c")}
    for client in "abc":
        plane.state.leave(client)
    assert plane.join("z", 1).result().epoch == 2, "the epoch counts on"


def test_a_member_that_does_not_come_back_is_lost(plane: Plane) -> None:
    plane.form("ab")
    plane.restart()
    plane.resume("a", 2, 0)
    pending = plane.gather("a", 1)
    plane.advance(19.9, beating="a")
    assert not pending.done
    plane.advance(0.2, beating="a")
    with pytest.raises(ConnectionLost, match="rank 1 was lost: no sign of it for 20 s"):
        pending.result()
    with pytest.raises(ConnectionLost, match="rank 1 of group 'g' is out of epoch 1"):
        plane.resume("b", 2, 1)


def test_nobody_comes_back_into_another_epoch(plane: Plane) -> None:
    plane.form("ab")
    plane.restart()
    plane.form("cd")
    with pytest.raises(ConnectionLost, match="is out of epoch 1: it was taken over"):
        plane.resume("a", 2, 0, epoch=1)
    with pytest.raises(ConnectionLost, match="'g' is at epoch 1; rank 0 of epoch 7 is out of it"):
        plane.resume("a", 2, 0, epoch=7)


def test_all_members_asleep_for_long_come_back(plane: Plane) -> None:
    plane.form("ab")
    plane.advance(60)
    with pytest.raises(Forgotten):
        plane.state.heartbeat("a", True, 0)
    plane.resume("a", 2, 0)
    plane.resume("b", 2, 1)
    a, b = plane.gather("a", 1, b"1"), plane.gather("b", 1, b"2")
    assert a.result() == b.result() == (b"1", b"2")


def test_a_joiner_waits_while_a_restarted_server_gathers_the_old_group(plane: Plane) -> None:
    plane.form("ab")
    plane.restart()
    ticket = plane.join("B", 2, 1)  # b died with the server
    plane.resume("a", 2, 0)
    plane.advance(21, beating="a")
    plane.state.leave("a")
    plane.join("A", 2, 0)
    assert ticket.result().epoch == 2


def test_nothing_is_left_of_groups_that_are_over(plane: Plane) -> None:
    for number in range(100):
        plane.form("ab", group=f"g{number}")
        plane.state.leave("a")
        plane.state.leave("b")
    members = plane.state.members
    assert (members._groups, members._places, members.staying) == ({}, {}, 0)
    assert plane.state.next_s() is None
