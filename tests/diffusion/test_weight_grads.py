"""Which gradients of filters wait for each other, and for how long."""

import pytest
import torch

from diffusion.plan import weight_grads
from diffusion.plan.side_stream import SideStream
from diffusion.plan.weight_grads import WeightGrads
from triton_kernels.reference import fused as reference


class Plan:
    """Notes the calls, by the numbers of output channels."""

    def __init__(self) -> None:
        self.kernels, self.accumulates = self, False
        self.aside = SideStream(torch.device("cpu"))
        self.calls: list[list[int]] = []
        self.shares: list[float] = []

    def conv_weight_grads(self, *gradients, accumulate, share):
        self.shares.append(share)
        self.calls.append([out.shape[0] for _, _, out in gradients])
        reference.conv_weight_grads(*gradients, accumulate=accumulate)


def gradient(co: int, kernel: int = 3, size: int = 4) -> tuple[torch.Tensor, ...]:
    x, dy = torch.randn(2, size, size, 3), torch.randn(2, size, size, co)
    return x, dy, torch.full((co, 3, kernel, kernel), torch.nan)


@pytest.fixture
def plan() -> Plan:
    return Plan()


@pytest.fixture
def grads(plan: Plan) -> WeightGrads:
    return WeightGrads(plan)


def test_four_at_a_time(plan, grads):
    made = [gradient(co) for co in range(1, 8)]
    for g in made[:3]:
        grads.add(g)
    assert plan.calls == []
    grads.add(made[3])
    assert plan.calls == [[1, 2, 3, 4]]
    for g in made[4:]:
        grads.add(g)
    grads.flush()
    assert plan.calls == [[1, 2, 3, 4], [5, 6, 7]]
    for x, dy, out in made:
        exact = torch.empty_like(out)
        reference.conv_weight_grad(x, dy, exact)
        assert torch.equal(out, exact)


def test_all_multiprocessors_for_those_that_nothing_runs_beside(plan, grads):
    grads.add(gradient(1))
    grads.flush()
    grads.alone = True
    grads.add(gradient(2))
    grads.flush()
    assert plan.shares == [weight_grads.SHARE, 1.0]


def test_filters_of_one_size(plan, grads):
    for co, kernel in ((1, 3), (2, 1), (3, 3), (4, 1)):
        grads.add(gradient(co, kernel))
    grads.flush()
    assert plan.calls == [[1, 3], [2, 4]]


def test_images_of_one_size(plan, grads):
    grads.add(gradient(1, size=4))
    grads.add(gradient(2, 1, size=4))
    grads.add(gradient(3, size=2))
    assert plan.calls == [[1], [2]]


def test_those_of_one_block_stay_together(plan, grads):
    for pair in ((1, 2), (3,), (4, 5)):
        grads.add(*(gradient(co) for co in pair))
    assert plan.calls == [[1, 2, 3]]


def test_large_ones_do_not_wait(plan, grads, monkeypatch):
    monkeypatch.setattr(weight_grads, "_BUDGET", 4 * 2 * 16 * (3 + 3 + 5 + 6))
    grads.add(gradient(5))
    assert plan.calls == []
    grads.add(gradient(6))
    assert plan.calls == [[5, 6]]


def test_without_waiting(plan, grads):
    grads.waits = False
    for pair in ((1, 2), (3,)):
        grads.add(*(gradient(co) for co in pair))
    assert plan.calls == [[1, 2], [3]]


def test_accumulates_as_the_plan_does(plan, grads):
    x, dy, out = gradient(2)
    expected = torch.empty_like(out)
    reference.conv_weight_grad(x, dy, expected)
    grads.add((x, dy, out))
    grads.flush()
    plan.accumulates = True
    grads.add((x, dy, out))
    grads.flush()
    assert torch.allclose(out, 2 * expected)
