"""Who is seen to hang: not who draws or whose steps are slow, but who stands still."""

import time

import pytest
import torch.distributed as dist

from diffusion.runtime import watch

SECONDS = 0.8


@pytest.fixture
def pair(monkeypatch):
    """Two watches over one store, and what they said at their end."""
    ended = []
    monkeypatch.setattr(watch, "_end", ended.append)
    store = dist.HashStore()
    both = [watch.Watch(store, rank, 2, SECONDS) for rank in range(2)]
    yield both, ended
    for one in both:
        one._closed.set()


def test_work_between_steps_may_take_long(pair):
    (first, second), ended = pair
    for _ in range(4):
        first.step()
        second.step()
    with first.pause(), second.pause():
        time.sleep(3 * SECONDS)
    assert not ended


def test_a_step_that_does_not_end_is_seen(pair):
    (first, second), ended = pair
    for _ in range(3):
        first.step()
        second.step()
    with first.pause():
        time.sleep(3 * SECONDS)
    assert ended and ended[0].startswith("process 1 has not been heard of")


def test_slow_steps_are_no_hang(pair):
    (first, second), ended = pair
    for _ in range(3):
        first.step()
        second.step()
        time.sleep(1.5 * SECONDS)
    assert not ended


@pytest.mark.parametrize("well", [True, False])
def test_who_ends_well_is_not_missed(pair, well):
    (_, second), ended = pair
    second.close(well=well)
    time.sleep(3 * SECONDS)
    assert bool(ended) is not well
