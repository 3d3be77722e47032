"""Sums over rows, of many parameters, in one launch at the end of backward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from diffusion.plan.accelerate import Accelerated
from diffusion.plan.build import plan
from diffusion.plan.calls import planned
from diffusion.plan.launch.table import launch_kernels
from diffusion.plan.schedule.moves import nodes_of
from tests.plan.runs import RUNS, interpreted
from triton_kernels.reductions import row_sums


class Net(nn.Module):
    """Norms, an embedding, a layer of which there are several calls, and one over rows."""

    def __init__(self, c=8):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared = (nn.Conv2d(c, c, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(2, c) for _ in range(3))
        self.time, self.rows = nn.Linear(4, c), nn.Linear(c, c)
        for norm in self.norms:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x, t):
        h = self.first(x) + self.time(t)[:, :, None, None]
        for norm in self.norms:
            h = h + self.shared(F.silu(norm(h)))
        n, c, height, width = h.shape
        return self.rows(h.flatten(2).transpose(1, 2)).transpose(1, 2).view(n, c, height, width)


class Rows(nn.Module):
    """Norms over channels, one of which has no bias and one is called twice."""

    def __init__(self, c=8):
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.shared = nn.LayerNorm(c, bias=False), nn.LayerNorm(c)
        self.layers = nn.ModuleList(nn.Linear(c, c) for _ in range(3))
        for p in (self.plain.weight, *self.shared.parameters()):
            nn.init.normal_(p)

    def forward(self, x, t):
        h = x.permute(0, 2, 3, 1)
        for norm, layer in zip((self.plain, self.shared, self.shared), self.layers, strict=True):
            h = h + layer(norm(h))
        return h


class MadeBias(nn.Module):
    """Backward of what makes a norm's bias has sums over rows of its own, which wait for the
    bias's."""

    def __init__(self, c=8):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.conv = nn.GroupNorm(2, c, affine=False), nn.Conv2d(c, c, 1)
        self.inner, self.seed = nn.Conv2d(1, c, 1), nn.Parameter(torch.randn(1, 1, 2, 2))

    def forward(self, x, t):
        bias = F.silu(self.inner(self.seed)).sum((0, 2, 3))
        return self.conv(F.group_norm(x, 2, torch.ones_like(bias), bias))


def given(dtype=torch.float32, device="cpu"):
    torch.manual_seed(1)
    return torch.randn(3, 8, 5, 4).to(device, dtype), torch.randn(3, 4).to(device, dtype)


def exact(net, passes=1):
    """Gradients of the parameters in float64, by autograd."""
    device, net = next(net.parameters()).device, copy.deepcopy(net).double().cpu()
    for _ in range(passes):
        net(*given(torch.float64)).square().sum().backward()
    return [None if p.grad is None else p.grad.to(device) for p in net.parameters()]


def close(net, expected):
    for (name, p), b in zip(net.named_parameters(), expected, strict=True):
        if b is None:
            assert p.grad is None, name
        else:
            assert (p.grad - b).norm() <= 2e-5 * b.norm(), name


def sums_of(net, **options):
    nodes = nodes_of(plan(net, given(), trains=True, **options).schedule.backward)
    return nodes, [node for node in nodes if node.op in ("bias_grads", "bias_grad", "sum")]


def test_one_launch_has_the_sums_of_all_rows():
    nodes, found = sums_of(Net())
    (together,) = (node for node in found if node.op == "bias_grads")
    # three norms' weights and biases, and the biases of three calls of one layer and of the last
    assert len(together.outputs) == 3 * 2 + 3 + 1
    # sums over pixels that the embedding's layer reads as well, and what is made of them
    assert [node.op for node in found if node is not together] == ["sum"] * 3
    after = nodes[nodes.index(together) + 1 :]
    assert {node.op for node in after} == {"add"}, "the shared layer's gradients"


def test_sums_of_norms_over_channels_are_among_them():
    nodes, found = sums_of(Rows())
    (together,) = (node for node in found if node.op == "bias_grads")
    norms = [node for node in nodes if node.op == "channel_norm_grad"]
    assert [set(node.outputs) for node in norms] == [{"x", "sums"}] * 2 + [{"sums"}]
    # weights and biases of two calls of one norm, the weight of the other, and biases of layers
    assert len(together.outputs) == 2 * 2 + 1 + 3


def test_frozen_parameters_have_no_sums():
    net = Net()
    net.norms.requires_grad_(False)
    net.first.requires_grad_(False)
    _, found = sums_of(net)
    (together,) = (node for node in found if node.op == "bias_grads")
    assert len(together.outputs) == 3 + 1
    fast = Accelerated(net)
    fast(*given()).square().sum().backward()
    expected = exact(net)
    close(net, expected)


def test_sums_that_other_rows_wait_for_are_not_among_them():
    net = MadeBias()
    Accelerated(net)(*given()).square().sum().backward()
    close(net, exact(net))


@pytest.fixture(params=RUNS)
def launched(request, monkeypatch):
    """The device, of what runs the plan."""
    if request.param == "interpreter":
        monkeypatch.setattr(planned, "launcher", lambda device: launch_kernels)
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.mark.parametrize("make", [Net, Rows, MadeBias])
def test_gradients_are_added_to_those_of_earlier_passes(make, launched):
    """The first pass learns what there is, later ones launch what it has learnt."""
    net = make().to(launched)
    fast = Accelerated(net)
    for _ in range(3):
        fast(*given(device=launched)).square().sum().backward()
    close(net, exact(net, 3))


def test_two_backward_passes_of_two_calls_have_memory_of_their_own(launched):
    net = Net().to(launched)
    fast, parameters = Accelerated(net), list(net.parameters())
    found = []
    for _ in range(2):  # the first learns
        outputs = [fast(*given(device=launched)).square().sum() for _ in range(2)]
        found += [torch.autograd.grad(y, parameters) for y in reversed(outputs)]
    for grads in found:
        for a, b in zip(grads, exact(net), strict=True):
            assert (a - b).norm() <= 2e-5 * b.norm()
    assert all(torch.equal(a, b) for a, b in zip(found[2], found[3], strict=True))


def test_gradients_of_few_parameters_and_within_a_checkpoint(launched):
    net, inputs = Net().to(launched), given(device=launched)
    fast, expected = Accelerated(net), exact(net)
    few = [net.norms[1].bias, net.shared.bias]
    names = [p for _, p in net.named_parameters()]
    for a, p in zip(torch.autograd.grad(fast(*inputs).square().sum(), few), few, strict=True):
        b = next(g for g, q in zip(expected, names, strict=True) if q is p)
        assert (a - b).norm() <= 2e-5 * b.norm()
    for _ in range(2):
        net.zero_grad()
        checkpoint(fast, *inputs, use_reentrant=False).square().sum().backward()
        close(net, expected)


@interpreted
def test_a_capture_before_any_pass_adds_one_by_one(monkeypatch):
    monkeypatch.setattr(planned, "launcher", lambda device: launch_kernels)
    monkeypatch.setattr(row_sums, "_capturing", lambda x: True)
    net = Net()
    fast = Accelerated(net)
    fast(*given()).square().sum().backward()
    close(net, exact(net))
    (made,) = (p for plans in fast._planned_calls.plans.values() for p in plans)
    assert not made.tables, "a table would be copied to a GPU"


def test_parameters_of_16_bits_have_gradients_of_their_own_type():
    net = Net().to(torch.bfloat16)
    Accelerated(net)(*given(torch.bfloat16)).square().sum().backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.bfloat16}
