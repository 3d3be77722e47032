"""Gradients of weights that are one node of a plan."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion.plan.accelerate import Accelerated
from diffusion.plan.build import plan
from diffusion.plan.calls import planned
from diffusion.plan.launch.table import launch_kernels
from diffusion.plan.ops import WEIGHT_GRADS
from diffusion.plan.schedule.moves import nodes_of
from diffusion.plan.schedule.order import GROUP
from tests.plan.runs import RUNS


class Net(nn.Module):
    """Layers over one image: 3x3 and 1x1 filters, others of stride 2, and linear layers over its
    pixels and over rows of another number."""

    def __init__(self, c=8):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Conv2d(c, c, 3, padding=1) for _ in range(2))
        self.point, self.down = nn.Conv2d(c, 2 * c, 1), nn.Conv2d(2 * c, c, 3, stride=2, padding=1)
        self.rows = nn.ModuleList(nn.Linear(2 * c, 2 * c, bias=False) for _ in range(5))
        self.beside = nn.Linear(4, 2 * c)

    def forward(self, x, t):
        h = self.point(F.silu(self.second(F.silu(self.first(x)))))
        n, c, height, width = h.shape
        rows = h.permute(0, 2, 3, 1).reshape(n, height * width, c) + self.beside(t)[:, None]
        for layer in self.rows:
            rows = F.silu(layer(rows))
        return self.down(rows.transpose(1, 2).reshape(n, c, height, width))


def given(dtype=torch.float32, device="cpu"):
    torch.manual_seed(1)
    return torch.randn(3, 8, 4, 6).to(device, dtype), torch.randn(3, 4).to(device, dtype)


def sizes(net):
    """Of each node that makes gradients of weights its op and their shapes, in order."""
    nodes = nodes_of(plan(net, given(), trains=True).schedule.backward)
    found = [node for node in nodes if node.op in WEIGHT_GRADS]
    return [(node.op, *(tuple(y.shape) for y in node.outputs.values())) for node in found]


def test_a_piece_has_one_node_for_gradients_of_one_size():
    assert GROUP == 4
    point, rows = (16, 8), (16, 16)
    assert sizes(Net()) == [
        ("conv_dw", (8, 16, 3, 3)),  # of stride 2
        ("weight_grads", rows, rows, rows),
        ("linear_dw", (16, 4)),  # over other rows
        ("weight_grads", rows, rows, point),
        ("weight_grads", (8, 8, 3, 3), (8, 8, 3, 3)),
    ]


@pytest.fixture(params=RUNS)
def launched(request, monkeypatch):
    """The device, of what runs the plan."""
    if request.param == "interpreter":
        monkeypatch.setattr(planned, "launcher", lambda device: launch_kernels)
    return torch.device("cuda" if request.param == "cuda" else "cpu")


def test_its_gradients(launched):
    net = Net().to(launched)
    exact = copy.deepcopy(net).double()
    exact(*given(torch.float64, launched)).square().sum().backward()
    fast = Accelerated(net)
    for _ in range(2):
        net.zero_grad()
        fast(*given(device=launched)).square().sum().backward()
        for (name, p), q in zip(net.named_parameters(), exact.parameters(), strict=True):
            assert (p.grad - q.grad).norm() <= 2e-5 * q.grad.norm(), name
