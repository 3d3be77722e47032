"""Transposed convolutions, and those of one row: what they are lowered to, and their gradients."""

import copy

import pytest
import torch
from torch import nn

from diffusion.plan.accelerate import Accelerated
from diffusion.plan.build import plan
from diffusion.plan.schedule.moves import nodes_of
from diffusion.plan.trace import trace

BUDGET = 1e-11  # of float64
TAPS = [(4, 2, 1, 0), (3, 2, 1, 1), (3, 2, 0, 0), (5, 3, 2, 1), (3, 1, 1, 0), (2, 1, 0, 0)]


def difference(module: nn.Module, x: torch.Tensor) -> float:
    """Of outputs and all gradients, relative to the largest number of each."""
    module, made = module.double(), []
    for around in (lambda m: m, lambda m: Accelerated(copy.deepcopy(m))):
        network, given = around(module), x.double().requires_grad_()
        y = network(given)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
        made.append([y.detach(), *torch.autograd.grad(y, [given, *network.parameters()], dy)])
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("taps", TAPS)
@pytest.mark.parametrize(
    ("layer", "size"), [(nn.ConvTranspose1d, (7,)), (nn.ConvTranspose2d, (5, 6))]
)
def test_transposed(layer, size, taps, bias):
    module, x = layer(3, 5, *taps, bias=bias), torch.randn(2, 3, *size)
    assert "conv_dx" in trace(module, (x,)).graph.count()
    assert difference(module, x) < BUDGET


def test_strides_that_differ():
    module = nn.ConvTranspose2d(3, 5, (3, 4), (1, 2), (1, 1))
    assert difference(module, torch.randn(2, 3, 5, 6)) < BUDGET


def test_one_row_has_one_stride():
    """The kernels' strides are those of squares."""
    module, x = nn.Conv1d(4, 8, 3, 2, 1), torch.randn(2, 4, 9)
    (conv,) = (n for n in trace(module, (x,)).graph.nodes if n.op == "conv")
    assert conv.attrs["stride"] == (2, 2) and conv.out.shape == (2, 1, 5, 8)
    assert difference(module, x) < BUDGET


@pytest.mark.parametrize("layers", [1, 2])
def test_filters_of_one_row_are_cast_as_those_of_images(layers):
    """Into the order in which both passes read them, in the launch that casts them."""
    module = nn.Sequential(*(nn.Conv1d(8, 8, 5, padding=2) for _ in range(layers)))
    with torch.autocast("cpu", torch.bfloat16):
        made = plan(module, (torch.randn(2, 8, 16),), trains=True)
    (casts,) = (n for n in nodes_of(made.schedule.forward) if n.op == "casts")
    filters = [y for y in casts.outputs.values() if len(y.shape) > 1]
    assert [y.shape for y in filters] == [(8, 8, 1, 5)] * layers
    for schedule in (made.schedule.forward, made.schedule.backward):
        assert not any(
            value.shape == (8, 8, 5) and value.dtype == torch.bfloat16
            for node in nodes_of(schedule)
            for value in node.inputs.values()
        )


class Turned(nn.Module):
    """Filters of one row that are multiplied as those of one column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, 1, 5))

    def forward(self, x):
        return torch.conv2d(x, self.weight[:, :, 0, :, None])


def test_an_axis_of_one_may_be_another_one():
    module, x = Turned(), torch.randn(2, 4, 9, 3)
    with torch.autocast("cpu", torch.bfloat16):
        y, z = Accelerated(copy.deepcopy(module))(x), module(x)
    torch.testing.assert_close(y, z, rtol=2e-2, atol=2e-2)
