"""The backward nodes compute autograd's gradients, in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

from diffusion.plan.gradients import GRADIENTS
from diffusion.plan.ops import FORWARD
from tests.plan.compare import compare, in_float64
from tests.plan.networks import NAMES, network
from tests.plan.random_networks import networks
from triton_kernels import reference

BUDGET = 1e-9


class Op(nn.Module):
    """A function of an image, with some parameters for it."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 6, 3, 3))
        self.columns = nn.Parameter(torch.randn(5, 6))
        self.gain, self.offset = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.bias = nn.Parameter(torch.randn(4))
        self.table = nn.Parameter(torch.randn(7, 6))

    def forward(self, x):
        return self.function(self, x)


def rows(x):
    return x.flatten(2).transpose(1, 2)  # [N, T, C]


def heads(x, count=2):
    return rows(x).unflatten(2, (count, -1)).transpose(1, 2)


def keys_and_values(m):
    """Of three tokens, for two images of two heads: [2, N, heads, L, d]"""
    kv = m.table[:6].reshape(2, 3, 6) @ torch.cat((m.columns, m.columns, m.columns[:2])).t()
    return kv.unflatten(2, (2, 2, 3)).permute(2, 0, 3, 1, 4)


OPS = {
    "conv": lambda m, x: F.conv2d(x, m.weight, m.bias, padding=1),
    "conv, stride 2": lambda m, x: F.conv2d(x, m.weight, m.bias, stride=2, padding=1),
    "conv, zeros behind": lambda m, x: F.conv2d(F.pad(x, (0, 1, 0, 1)), m.weight, stride=2),
    "conv of one row": lambda m, x: F.conv1d(x[:, :, 0], m.weight[:, :, 1], m.bias, padding=1),
    "linear": lambda m, x: F.linear(rows(x), m.columns, m.bias.repeat(2)[:5]),
    "linear of rows": lambda m, x: F.linear(x[:, :, 0, 0], m.columns),
    "matmul": lambda m, x: rows(x) @ m.columns.t(),
    "addmm": lambda m, x: torch.addmm(m.gain[:5], x[:, :, 0, 0], m.columns.t()),
    "pointwise": lambda m, x: F.conv2d(x, m.columns[:, :, None, None]),
    "group_norm": lambda m, x: F.group_norm(x, 3, m.gain, m.offset),
    "group_norm, no weights": lambda m, x: F.group_norm(x, 2),
    "group_norm of tokens": lambda m, x: F.group_norm(x.flatten(2), 6, m.gain, m.offset, 1e-2),
    "group_norm, film": lambda m, x: (
        F.silu(F.group_norm(x, 3, m.gain, m.offset) * (1 + m.table[:2, :, None, None])
        + m.table[2:4, :, None, None])
    ),
    "group_norm, shift": lambda m, x: F.group_norm(x, 3, m.gain) + m.table[2:4, :, None, None],
    "group_norm, gain": lambda m, x: F.group_norm(x, 3) * m.table[2:4, :, None, None],
    "act silu": lambda m, x: F.silu(x),
    "act relu": lambda m, x: F.relu(x),
    "act mish": lambda m, x: F.mish(x),
    "act gelu": lambda m, x: F.gelu(x) + F.gelu(x, approximate="tanh"),
    "attention, packed": lambda m, x: F.scaled_dot_product_attention(
        *rows(x).unflatten(2, (3, 1, 2)).permute(2, 0, 3, 1, 4).unbind(0)
    ),
    "attention, heads outside": lambda m, x: F.scaled_dot_product_attention(
        *torch.cat((rows(x), rows(x) * 2), 2).unflatten(2, (2, 3, 2)).permute(3, 0, 2, 1, 4)
    ),
    "attention, apart": lambda m, x: F.scaled_dot_product_attention(
        heads(x), heads(x * 2), heads(x + 1), scale=0.7
    ),
    "attention of a context": lambda m, x: F.scaled_dot_product_attention(
        heads(x), *keys_and_values(m).unbind(0)
    ),
    "attention of a context, masked": lambda m, x: F.scaled_dot_product_attention(
        heads(x), *keys_and_values(m).unbind(0), attn_mask=(x[:, 0, 0] > 0)[:, None, None, :3]
    ),
    "attention of a context, apart": lambda m, x: F.scaled_dot_product_attention(
        heads(x), heads(x[:, :, 1:]), heads(x[:, :, :3] * 2), scale=0.7
    ),
    "attention, masked": lambda m, x: F.scaled_dot_product_attention(
        heads(x), heads(x), heads(x), torch.arange(20).view(1, 1, 1, 20) % 3 > 0
    ),
    "cat": lambda m, x: torch.cat((x, x * 2, x[:, :1]), dim=1),
    "cat of rows": lambda m, x: torch.cat((x[0], x[1]), dim=2),
    "stack": lambda m, x: torch.stack((x, 2 * x), dim=2),
    "add": lambda m, x: x + m.gain[:, None, None] + x.transpose(2, 3).transpose(2, 3),
    "add, transposed": lambda m, x: x[..., :4] + x[..., :4].transpose(2, 3),
    "mul": lambda m, x: x * m.table[:2, :, None, None] * x,
    "sub, div": lambda m, x: (1 - x) / (2 + torch.sigmoid(x)) - x / 3 - (4 - m.gain)[:, None, None],
    "div of a number": lambda m, x: 2 / (3 + torch.tanh(x)),
    "affine": lambda m, x: -(2 * x - 3) / 4,
    "upsample": lambda m, x: F.interpolate(x, scale_factor=2.0),
    "upsample to a size": lambda m, x: F.interpolate(x, size=(8, 15)),
    "avg_pool": lambda m, x: F.avg_pool2d(x, 2),
    "slice": lambda m, x: x[:, 1:3, :, 2:] * 2,
    "chunks": lambda m, x: torch.sin(x.chunk(3, 1)[0]) * x.chunk(3, 1)[2] + x.chunk(3, 1)[1],
    "some chunks": lambda m, x: x.chunk(3, 1)[0] * x.chunk(3, 1)[2],
    "select": lambda m, x: x[:, 3] * x[:, 1],
    "every second": lambda m, x: x[:, ::2] + x[:, 1::2],
    "pad": lambda m, x: F.pad(x, (1, 2, 0, 3)),
    "expand": lambda m, x: m.gain[None, :, None, None].expand(2, 6, 4, 5) * x,
    "repeat": lambda m, x: x.repeat(1, 2, 1, 1) * m.gain.repeat(2)[:, None, None],
    "permute": lambda m, x: x.permute(3, 1, 0, 2).reshape(5, -1),
    "embedding": lambda m, x: F.embedding(torch.tensor([3, 3]), m.table)[:, :, None, None] * x,
    "cast": lambda m, x: x.to(torch.float64) * 2,
    "dropout": lambda m, x: _dropout(x),
    "arith": lambda m, x: torch.exp(x) + torch.cos(x) * torch.where(x > 0, x, x * x),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_each_op(name):
    torch.manual_seed(1)
    module = Op(OPS[name]).double()
    compared = compare(module, (torch.randn(2, 6, 4, 5).double(),))
    assert compared.error() < BUDGET
    assert compared.gradient_error() < BUDGET


def _dropout(x):
    if torch.compiler.is_compiling():
        return torch.ops.triton_kernels.dropout(x, 0.4, torch.tensor([1, 2]), 3, 0)
    return reference.dropout(x, 0.4, torch.tensor([1, 2]), layer=3)


def test_every_op_of_the_table_has_a_gradient_or_is_part_of_a_norm():
    assert set(FORWARD) - {"group_norm"} <= set(GRADIENTS)
    assert "norm_apply" in GRADIENTS  # which sends the gradients of all of a norm


FEW = [n for n in NAMES if any(s in n for s in ("padding 0", "google", "bias alone"))]
# others, fused: test_fuse.py


@pytest.mark.parametrize("name", FEW)
def test_networks(name):
    module, args, kwargs = network(name)
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    compared = compare(in_float64(module), args, kwargs)
    assert compared.error() < BUDGET
    assert compared.gradient_error() < BUDGET
    unused = [
        k for k, (ours, theirs) in compared.grads.items() if (ours is None) != (theirs is None)
    ]
    assert not unused


@pytest.mark.long
@settings(max_examples=25, deadline=None, derandomize=True)
@given(networks())
def test_random_networks(drawn):
    module, args = drawn
    compared = compare(module, args)
    assert compared.error() < BUDGET
    assert compared.gradient_error() < BUDGET


def test_what_leads_to_no_result_has_no_gradient():
    module = Op(lambda m, x: F.conv2d(x, m.weight, padding=1)).double()
    compared = compare(module, (torch.randn(2, 6, 4, 5).double(),))
    assert compared.grads["bias"] == (None, None)
    assert compared.grads["weight"][0] is not None


def test_slices_that_cover_a_value_are_put_side_by_side():
    module = Op(OPS["chunks"]).double()
    graph = compare(module, (torch.randn(2, 6, 4, 5).double(),)).graph
    assert "pad" not in graph.count() and graph.count()["cat"] == 1
