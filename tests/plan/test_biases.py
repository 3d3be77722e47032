"""Biases and weights that a module casts, or adds itself: what they are where kernels add them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion.plan.trace import trace
from tests.plan.compare import compare


class Added(nn.Module):
    """Adds its bias as EDM's layers do under a GPU's autocast: in float32 to a result of 16 bits,
    which keeps its type. The norm's weights were rounded, and are float32 again."""

    def __init__(self, low, in_place=True):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4, 3, 3)), nn.Parameter(torch.randn(6))
        self.norm, self.low, self.in_place = nn.GroupNorm(2, 6), low, in_place

    def forward(self, x):
        y = F.conv2d(x.to(self.low), self.weight.to(self.low), padding=1)
        row = self.bias.reshape(1, -1, 1, 1)
        y = y.add_(row) if self.in_place else y + row
        params = [p.to(self.low).float() for p in (self.norm.weight, self.norm.bias)]
        return F.group_norm(y.float(), 2, *params).to(self.low)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_wider_bias_is_added_by_the_product(low):
    torch.manual_seed(0)
    module, x = Added(low), torch.randn(2, 4, 5, 5)
    graph = trace(module, (x,)).graph
    (conv,) = (n for n in graph.nodes if n.op == "conv")
    (norm,) = (n for n in graph.nodes if n.op == "group_norm")
    assert conv.inputs["bias"] is graph.parameters["bias"] and norm.inputs["x"] is conv.out
    assert norm.inputs["weight"] is graph.parameters["norm.weight"]
    compared = compare(module, (x,))
    assert compared.error() < 3e-2 and compared.gradient_error() < 6e-2


def test_a_sum_that_is_read_in_float32_keeps_its_bias():
    torch.manual_seed(0)
    module, x = Added(torch.bfloat16, in_place=False), torch.randn(2, 4, 5, 5)
    graph = trace(module, (x,)).graph
    assert graph.count()["add"] == 1
    assert compare(module, (x,)).error() < 3e-2
