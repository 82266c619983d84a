"""Bytes exchanged over a torch store."""

import threading

import pytest
import torch.distributed as dist
from harness import in_threads, raises

from onesided import BoundsError, DeadlineExceeded, StaleHandle
from onesided.store_exchange import StoreExchange

SIZE = 3


def test_everybody_has_all_payloads_and_keys_do_not_pile_up() -> None:
    store = dist.HashStore()
    exchanges = [StoreExchange(store, rank, SIZE, "g") for rank in range(SIZE)]
    rounds = 20

    def take_part(exchange: StoreExchange) -> None:
        for turn in range(rounds):
            payloads = exchange.all_gather(b"%d of %d" % (turn, exchange.rank), timeout_s=30)
            assert payloads == [b"%d of %d" % (turn, rank) for rank in range(SIZE)]

    in_threads([lambda e=e: take_part(e) for e in exchanges])  # type: ignore[misc]
    assert store.num_keys() == SIZE  # of the last exchange


def test_the_absent_are_named() -> None:
    store = dist.HashStore()
    exchange = StoreExchange(store, 1, SIZE, "g")
    other = threading.Thread(target=lambda: raises_late(StoreExchange(store, 0, SIZE, "g")))
    other.start()
    raises_late(exchange)
    other.join()


def raises_late(exchange: StoreExchange) -> None:
    with raises(DeadlineExceeded, "rank 2 has not come"):
        exchange.all_gather(b"", timeout_s=0.5)


def test_a_closed_one_says_so_and_runs_all_callbacks() -> None:
    exchange = StoreExchange(dist.HashStore(), 0, 1, "g")
    assert exchange.all_gather(b"alone") == [b"alone"]
    told: list[str] = []

    def broken() -> None:
        told.append("broken")
        raise ValueError("it was broken")

    exchange.add_close_callback(lambda: told.append("first"))
    exchange.add_close_callback(broken)
    with pytest.raises(ValueError, match="it was broken"):
        exchange.close()
    exchange.close()
    assert told == ["broken", "first"]
    with raises(StaleHandle, "closed"):
        exchange.all_gather(b"")
    with raises(BoundsError, "rank 3"):
        StoreExchange(dist.HashStore(), 3, 3, "g")
