"""Convolutions of each channel by its own filter are one op, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion.plan.trace import trace
from tests.plan.test_transposed import BUDGET, difference


class Depthwise(nn.Module):
    """A convolution of single channels between others, as in ConvNeXt's blocks."""

    def __init__(self, window, channels=6, dims=2, **how) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d)[dims - 1]
        self.dims, self.first = dims, nn.Conv2d(4, channels, 1)
        self.of_each = conv(channels, channels, window, **{"groups": channels} | how)
        self.last = nn.Conv2d(channels, 4, 1)

    def forward(self, x):
        y = self.first(x)
        y = self.of_each(y if self.dims == 2 else y.flatten(2))
        return self.last(F.gelu(y if self.dims == 2 else y[:, :, None]))


OF_EACH = {
    "ConvNeXt's": Depthwise(7, padding=3),
    "without bias": Depthwise(3, padding=1, bias=False),
    "fewer pixels": Depthwise((3, 2)),
    "more pixels, dilated": Depthwise((2, 3), padding=4, dilation=(1, 2)),
    "of rows": Depthwise(5, dims=1, padding=4, dilation=2),
    "one group for each channel, as `same`": Depthwise(3, padding="same"),
}
OTHERS = {
    "a stride": Depthwise(3, stride=2),
    "several channels in a group": Depthwise(3, groups=2),
    "too many taps": Depthwise((5, 13), padding=(2, 6)),
}


@pytest.mark.parametrize("name", OF_EACH)
def test_of_each_channel(name):
    module, x = OF_EACH[name], torch.randn(2, 4, 8, 7)
    ops = trace(module, (x,)).graph.count()
    assert ops["depthwise"] == 1 and "arith" not in ops
    assert difference(module, x) < BUDGET


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_pytorchs(name):
    module, x = OTHERS[name], torch.randn(2, 4, 8, 15)
    ops = trace(module, (x,)).graph.count()
    assert "depthwise" not in ops and ops["arith"] == 1
    assert difference(module, x) < BUDGET
