"""What a side stream keeps alive, and for how long."""

import weakref

import pytest
import torch

from diffusion.plan import side_stream
from diffusion.plan.side_stream import SideStream


def test_tensors_are_kept_up_to_a_budget_of_bytes(device):
    stream = SideStream(device, budget=100)
    done, kept = [], []

    def run(elements: int) -> None:
        x = torch.zeros(elements, dtype=torch.int8, device=device)
        kept.append(weakref.ref(x))
        stream.run(lambda x: done.append(x.numel()), x)

    def alive() -> list[bool]:
        return [x() is not None for x in kept]

    for elements in (60, 40):
        run(elements)
    assert alive() == [True, True]
    run(30)  # 130 bytes
    assert alive() == [False, True, True]
    run(500)  # the last one is kept however large it is
    assert alive() == [False, False, False, True]
    stream.join()
    assert alive() == [False] * 4 and done == [60, 40, 30, 500]


def test_pieces_that_are_launched_behind_others(device):
    stream = SideStream(device, behind=2)
    done = []
    for i in range(4):
        stream.run(lambda i=i: done.append(i))
    assert done == [0, 1]
    stream.join()
    assert done == [0, 1, 2, 3]


def test_held_pieces_come_when_they_are_released(device, monkeypatch):
    for name, size in (("_LARGE", 50), ("_HELD_BUDGET", 250)):
        monkeypatch.setattr(side_stream, name, size)
    stream = SideStream(device)
    done, kept = [], []

    def run(elements: int) -> None:
        x = torch.zeros(elements, dtype=torch.int8, device=device)
        kept.append(weakref.ref(x))
        stream.run(lambda x: done.append(x.numel()), x)

    stream.holding = True
    for elements in (100, 40, 120, 60):  # the second is small, the last is over the budget
        run(elements)
    assert done == [40, 60]
    stream.release()
    assert done == [40, 60, 100, 120] and not stream.holding
    run(110)
    assert done[-1] == 110
    assert all(x() is not None for x in (kept[0], kept[2]))
    stream.join()
    assert all(x() is None for x in kept)
    stream.holding = True
    run(70)
    stream.join()  # releases
    assert done[-1] == 70 and not stream.holding


def test_pieces_apart_come_at_once(device):
    stream = SideStream(device, behind=1)
    done = []

    def run(where, name: str) -> weakref.ref:
        x = torch.zeros(4, device=device)
        where(lambda x: done.append(name), x)
        return weakref.ref(x)

    first = run(stream.run, "aside")
    second = run(stream.apart, "apart")
    assert done == ["apart"]
    stream.meet()  # launches what was given
    assert done == ["apart", "aside"]
    assert first() is not None and second() is not None
    stream.join()
    assert first() is None and second() is None


@pytest.mark.gpu
def test_the_two_streams_see_each_other_where_they_meet(device):
    stream = SideStream(device)
    n = 2**20
    x, y = torch.zeros(n, device=device), torch.zeros(n, device=device)
    seen = []

    def slow(target: torch.Tensor) -> None:
        torch.cuda._sleep(10**7)
        target.fill_(1)

    stream.run(slow, x)
    stream.apart(slow, y)
    stream.meet()
    stream.run(lambda y: seen.append(y.clone()), y)
    stream.apart(lambda x: seen.append(x.clone()), x)
    stream.join()
    assert all((z == 1).all() for z in seen) and len(seen) == 2


@pytest.mark.gpu
def test_a_piece_launched_late_sees_what_was_there_when_it_was_given(device):
    stream = SideStream(device, behind=1)
    x, seen = torch.zeros(2**20, device=device), []
    for _ in range(3):
        x = x + 1
        stream.run(lambda x: seen.append(x.clone()), x)
    stream.join()
    assert [int(y.max()) for y in seen] == [1, 2, 3] and all(y.min() == y.max() for y in seen)


@pytest.mark.gpu
def test_memory_is_not_given_away_while_it_is_read(device):
    """The allocator would hand the memory of x to y, which is written before x is read."""
    stream = SideStream(device, budget=2**30)
    n = 2**22
    warm = torch.zeros(n, device=device)
    del warm
    x, out = torch.ones(n, device=device), torch.empty(n, device=device)

    def work(x: torch.Tensor) -> None:
        torch.cuda._sleep(10**7)
        out.copy_(x)

    stream.run(work, x)
    del x
    y = torch.full((n,), 2.0, device=device)
    stream.join()
    assert (out == 1).all() and (y == 2).all()
