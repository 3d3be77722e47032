"""What a side stream keeps alive, and for how long."""

import weakref

import pytest
import torch

from diffusion.planned.side_stream import SideStream


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
