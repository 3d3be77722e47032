"""Activations, biases and products of parameters that a module writes itself are what its layers
would be."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion.plan.trace import trace
from tests.plan.compare import compare


class Written(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.conv, self.norm = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.GroupNorm(2, 6)
        self.w, self.b = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(6))
        self.c = nn.Parameter(torch.randn(5))

    def forward(self, x, t):
        return self.function(self, self.conv(x), t)


def _halves(y):
    return y.chunk(2, dim=1)


def _row(b):
    return b.reshape(1, -1, 1, 1)


def _swish(y):
    return y * torch.sigmoid(y)


# name -> (what is done with the convolution's result and a vector for each image, ops of nodes)
FORMS = {
    "Swish of a norm": (lambda m, y, t: _swish(m.norm(y)), ["conv", "group_norm"]),
    "Swish": (lambda m, y, t: torch.sigmoid(y) * y, ["conv", "act"]),
    "Mish of a norm": (
        lambda m, y, t: torch.tanh(F.softplus(z := m.norm(y))) * z,
        ["conv", "group_norm"],
    ),
    "a bias": (lambda m, y, t: y.add_(_row(m.b)), ["conv"]),
    "a bias of every pixel": (lambda m, y, t: _row(m.b) + y, ["conv"]),
    "of rows": (lambda m, y, t: y.mean((2, 3)) @ m.w.t() + m.c, ["conv", "arith", "linear"]),
    "channels by einsum": (
        lambda m, y, t: torch.einsum("nchw,oc->nohw", y, m.w) + m.c[:, None, None],
        ["conv", "linear"],
    ),
    "parameters in front": (
        lambda m, y, t: torch.matmul(m.w, y.flatten(2)) + m.c[:, None],
        ["conv", "linear"],
    ),
    "GEGLU": (lambda m, y, t: _halves(y)[0] * F.gelu(_halves(y)[1]), ["conv", "gated"]),
    "SwiGLU": (lambda m, y, t: _swish(_halves(y)[0]) * _halves(y)[1], ["conv", "gated"]),
    "a gate alone": (lambda m, y, t: y[:, :3] * y[:, 3:], ["conv", "gated"]),
    "a gate in front": (
        lambda m, y, t: F.gelu(y[:, :3], approximate="tanh") * y[:, 3:],
        ["conv", "gated"],
    ),
    "of a batch": (
        lambda m, y, t: torch.bmm((m.w * 2).expand(len(y), 5, 6), y.flatten(2)),
        ["affine", "conv", "linear"],
    ),
}
OTHERS = {
    "a gate": (lambda m, y, t: y * torch.sigmoid(m.norm(y)), "arith"),
    "a steeper one": (lambda m, y, t: y * torch.sigmoid(2 * y), "arith"),
    "a softer plus": (lambda m, y, t: y * torch.tanh(F.softplus(y, beta=2)), "arith"),
    "a vector of each image": (lambda m, y, t: y + t[:, :, None, None], "add"),
    "read before the bias, too": (lambda m, y, t: (y + _row(m.b)) * y.sum(), "add"),
    "a second bias": (lambda m, y, t: F.conv2d(y, m.w[:, :, None, None], m.c) + _row(m.c), "add"),
    "a gate of columns": (lambda m, y, t: F.gelu(y[..., 2:4]) * y[..., :2], "mul"),
    "a gate of a third": (lambda m, y, t: F.gelu(y[:, 2:4]) * y[:, :2], "mul"),
    "a gate of whole numbers": (
        lambda m, y, t: _halves(y)[0] + torch.mul(*_halves(y.detach().mul(3).long())),
        "arith",
    ),
    "a half by itself": (lambda m, y, t: F.gelu(y[:, :3]) * y[:, :3], "mul"),
    "a row twice": (lambda m, y, t: (r := y[:1].mean((2, 3)) @ m.w.t()) + r, "add"),
    "of two batches": (lambda m, y, t: y.flatten(2) @ y.flatten(2).mT, "arith"),
}


def made(function):
    torch.manual_seed(0)
    args = torch.randn(2, 4, 3, 5).double(), torch.randn(2, 6).double()
    return Written(function).double(), args


def right(function):
    compared = compare(*made(function))
    return compared.error() < 1e-9 and compared.gradient_error() < 1e-9


@pytest.mark.parametrize("name", FORMS)
def test_is_a_layer(name):
    function, expected = FORMS[name]
    assert right(function)
    graph = trace(*made(function)).graph
    assert sorted(n.op for n in graph.nodes if n.op not in ("reshape", "layout")) == sorted(
        expected
    )


@pytest.mark.parametrize("name", OTHERS)
def test_is_none(name):
    function, op = OTHERS[name]
    assert right(function)
    assert trace(*made(function)).graph.count().get(op)


def test_a_bias_in_16_bits_is_the_parameter():
    """As EDM's layers cast theirs: it is added in float32, before the sum is rounded."""
    net, args = made(lambda m, y, t: y.add_(_row(m.b.to(y.dtype))))
    with torch.autocast("cpu", torch.bfloat16):
        graph = trace(net.float(), tuple(x.float() for x in args)).graph
    (conv,) = (node for node in graph.nodes if node.op == "conv")
    assert conv.inputs["bias"] is graph.parameters["b"] and conv.out.dtype == torch.bfloat16
