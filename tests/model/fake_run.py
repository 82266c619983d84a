"""Programs on the fake devices of fake_verbs.py: what one queue pair does is in order, what several do is not.

By chance: nothing is done when it is posted. A thread picks a queue pair by chance, and has it do the next that it has.
So with several rails, all that the transport does not put in order itself comes in any order.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fake_verbs import FakeVerbs
from harness import kind_named
from model.runner import Summary, Team, long_run

ATTEMPTS = 64  # of the thread to find a queue pair with something to do, before it looks which there are


@contextmanager
def by_chance(fake: FakeVerbs, seed: int) -> Iterator[None]:
    draw = random.Random(seed)
    ended = threading.Event()

    def deliver() -> None:
        while not ended.is_set():
            pairs = fake.pending_at()
            for _ in range(ATTEMPTS if pairs else 0):
                fake.release(1 + draw.randrange(3), draw.choice(pairs))

    fake.hold()
    thread = threading.Thread(target=deliver, name="deliver", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        fake.release_all()
        fake.deliver_immediately()


def run_on_fake(fake: FakeVerbs, seed: int, steps: int, how: str) -> Summary:
    team = Team(kind_named("rdma"), separate=False)
    try:
        if how == "in a thread":
            fake.deliver_in_thread(delay_us=0)
        if how != "by chance":
            return long_run(team, steps, seed)
        with by_chance(fake, seed):
            return long_run(team, steps, seed)
    finally:
        team.close()
