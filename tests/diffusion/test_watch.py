"""Who is seen to hang: not who draws or whose steps are slow, but who stands still."""

import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from diffusion.runtime import watch

SECONDS = 25.0  # of a clock that does not wait
BEAT = SECONDS / watch._BEATS


class Once:
    """A watch's round in the place of its event: it is waited for once, then it is over."""

    def __init__(self):
        self.over = False

    def wait(self, _seconds: float) -> bool:
        over, self.over = self.over, True
        return over

    def is_set(self) -> bool:
        return False


class Pair:
    """Two watches over one store without threads of their own, and what they said at their end."""

    def __init__(self, monkeypatch):
        self.now, self.ended = 1000.0, []
        idle = SimpleNamespace(start=lambda: None, join=lambda: None)
        monkeypatch.setattr(watch, "_end", self.ended.append)
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now))
        with monkeypatch.context() as here:
            here.setattr(watch.threading, "Thread", lambda **_: idle)
            store = dist.HashStore()
            self.both = [watch.Watch(store, rank, 2, SECONDS) for rank in range(2)]
        self.watching = list(self.both)

    def step(self) -> None:
        for one in self.both:
            one.step()

    def lasts(self, seconds: float) -> None:
        """Time passes, in which those that are watching count and look."""
        for _ in range(round(seconds / BEAT)):
            self.now += BEAT
            for one in self.watching:
                one._closed = Once()
                one._run()


@pytest.fixture
def pair(monkeypatch):
    return Pair(monkeypatch)


def test_work_between_steps_may_take_long(pair):
    for _ in range(4):
        pair.step()
    first, second = pair.both
    with first.pause(), second.pause():
        pair.lasts(3 * SECONDS)
    assert not pair.ended


def test_a_step_that_does_not_end_is_seen(pair):
    for _ in range(3):
        pair.step()
    with pair.both[0].pause():
        pair.lasts(1.5 * SECONDS)
        assert not pair.ended  # it may take that long
        pair.lasts(SECONDS)
    assert pair.ended[0].startswith("process 1 has not been heard of for 25 s")


def test_slow_steps_are_no_hang(pair):
    for _ in range(3):
        pair.step()
        pair.lasts(1.5 * SECONDS)
    pair.step()
    pair.lasts(4 * SECONDS)
    assert not pair.ended
    pair.lasts(4 * SECONDS)  # more than four times as long as the slowest one
    assert pair.ended


@pytest.mark.parametrize("well", [True, False])
def test_who_ends_well_is_not_missed(pair, well):
    second = pair.both[1]
    pair.lasts(SECONDS)
    pair.watching.remove(second)
    second._closed = SimpleNamespace(set=lambda: None)
    second.close(well=well)
    pair.lasts(3 * SECONDS)
    assert bool(pair.ended) is not well


def test_a_watch_has_a_thread_of_its_own(monkeypatch):
    """Which sees one that does not count, however long that takes here."""
    ended = []
    monkeypatch.setattr(watch, "_end", ended.append)
    first = watch.Watch(dist.HashStore(), 0, 2, 0.05)
    until = time.monotonic() + 60
    while not ended and time.monotonic() < until:
        time.sleep(0.01)
    first.close(well=True)
    assert ended and ended[0].startswith("process 1 has not been heard of")
    assert not first._thread.is_alive()
