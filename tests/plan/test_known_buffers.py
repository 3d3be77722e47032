"""Buffers whose numbers a plan depends on: others need another plan."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion import accelerate
from diffusion.plan.trace import trace
from tests.plan.compare import compare


class Resampled(nn.Module):
    """As EDM's layers: by a filter in a buffer, down and up again."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("resample", torch.full((1, 1, 2, 2), 0.25))

    def forward(self, x):
        y, c = self.conv(x), self.conv.out_channels
        f = self.resample.to(x.dtype)
        z = F.conv2d(y, f.tile([c, 1, 1, 1]), groups=c, stride=2)
        return y + F.conv_transpose2d(z, f.mul(4).tile([c, 1, 1, 1]), groups=c, stride=2)


@pytest.fixture
def nets():
    torch.manual_seed(0)
    module = Resampled()
    return module, accelerate(copy.deepcopy(module)), torch.randn(2, 3, 4, 6)


def plans(fast):
    return [made for found in fast._planned_calls.plans.values() for made in found]


def test_a_filter_of_one_number_is_means_and_repeated_pixels(nets):
    module, _, x = nets
    assert compare(module.double(), (x.double(),)).gradient_error() < 1e-9
    nodes = trace(module, (x.double(),)).graph.count()
    assert nodes["avg_pool"] == nodes["upsample"] == 1 and "arith" not in nodes


@pytest.mark.parametrize("number", [0.5, None])
def test_other_numbers_have_another_plan(nets, number):
    module, fast, x = nets
    fast(x)
    for net in (module, fast.module):
        net.resample.copy_(torch.arange(4.0).view(1, 1, 2, 2) if number is None else number)
    torch.testing.assert_close(fast(x), module(x))
    assert len(plans(fast)) == 2


def test_other_data_has_another_plan(nets):
    """Which PyTorch does not count as written to."""
    module, fast, x = nets
    fast(x)
    for net in (module, fast.module):
        net.resample.data = torch.arange(4.0).view(1, 1, 2, 2)
    torch.testing.assert_close(fast(x), module(x))


def test_the_same_numbers_have_the_same_plan(nets):
    module, fast, x = nets
    fast(x)
    fast.load_state_dict(module.state_dict())
    fast.module.register_buffer("resample", fast.resample.clone())
    torch.testing.assert_close(fast(x), module(x))
    assert len(plans(fast)) == 1


def test_a_buffer_that_the_forward_writes_to_is_not_known():
    class Counted(Resampled):
        def forward(self, x):
            y = super().forward(x)
            self.resample.add_(0.25)
            return y

    module = Counted()
    fast, x = accelerate(copy.deepcopy(module)), torch.randn(2, 3, 4, 6)
    for _ in range(2):
        torch.testing.assert_close(fast(x), module(x))
    assert "avg_pool" not in plans(fast)[0].graph.count()
