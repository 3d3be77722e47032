"""What products in TF32 read is rounded, where it is written if possible; q, k and v by the product
that makes them if attention alone reads them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from diffusion import accelerate
from diffusion.plan.build import plan
from diffusion.plan.graph import Graph
from diffusion.plan.launch.table import launch_kernels
from diffusion.plan.rounding import round_where_made
from triton_kernels.tf32 import rounded_to_tf32

IN_TF32, OTHERS = SimpleNamespace(ROUNDS_OPERANDS=True), SimpleNamespace()
FLOAT = torch.float32


def attending(scale: float = 8**-0.5, also: bool = False, result: bool = False) -> Graph:
    """Attention of one head of 8 channels over 4x4 pixels; whether something else reads q, k, v."""
    graph, shape = Graph(), (1, 4, 4, 8)
    x, weight = graph.value("x", shape, FLOAT), graph.value("weight", (24, 8), FLOAT)
    qkv = graph.value("qkv", (1, 4, 4, 24), FLOAT)
    graph.inputs, graph.parameters = [x], {"weight": weight}
    linear = graph.new("linear", {"x": x, "weight": weight}, {"y": (qkv.shape, FLOAT)})
    how = {"heads": 1, "scale": scale}
    o = graph.new("attention", {"qkv": linear.out}, {"y": (shape, FLOAT)}, **how)
    graph.nodes, graph.outputs = [linear, o], [o.out]
    if also:
        graph.nodes.append(graph.new("act", {"x": linear.out}, {"y": (qkv.shape, FLOAT)}))
    if result:
        graph.outputs.append(linear.out)
    return graph


def marks(graph: Graph, kernels: SimpleNamespace) -> tuple[bool, bool]:
    round_where_made(graph, kernels)
    linear, attention = graph.nodes[:2]
    return linear.rounds, attention.attrs.get("is_rounded", False)


@pytest.mark.parametrize(
    ("options", "kernels", "expected"),
    [
        ({}, IN_TF32, True),
        ({}, OTHERS, False),
        ({"also": True}, IN_TF32, False),
        ({"result": True}, IN_TF32, False),
        ({"scale": 1.0}, IN_TF32, False),  # which is attention by PyTorch
    ],
    ids=["tf32", "other precision", "another reader", "a result", "another scale"],
)
def test_who_rounds(options, kernels, expected):
    assert marks(attending(**options), kernels) == (expected, expected)


class Mixed(nn.Module):
    """A convolution and a linear layer, which read the same norm of another convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norm, self.linear = nn.GroupNorm(2, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.norm(self.first(x))
        rows = self.linear(y.flatten(2).transpose(1, 2))
        return self.second(y) + rows.transpose(1, 2).view(y.shape)


def rounding_of(made):
    """The ops of nodes that round, and what new ones round."""
    parameters = {value: name for name, value in made.graph.parameters.items()}
    names = {
        parameters.get(value, "image")
        for node in made.graph.nodes
        if node.rounds and node.op in ("pad_channels", "rounded")
        for value in node.inputs.values()
    }
    return {node.op for node in made.graph.nodes if node.rounds} - {
        "pad_channels",
        "rounded",
    }, names


@pytest.mark.parametrize("tf32", [(True, True), (True, False), (False, False)])
def test_what_products_in_tf32_read_is_rounded(tf32):
    """By the kernel that makes it, or else by a copy; nothing that float32 products read."""
    module, x = Mixed(), torch.randn(2, 8, 4, 4)
    made = plan(module, (x,), {}, trains=True, of_inputs=(0,), tf32=tf32, rounds=True)
    ops, names = rounding_of(made)
    filters = {"first.weight", "second.weight"}
    if tf32[0]:
        assert ops == ({"norm", "norm_backward"} if tf32[1] else {"norm_backward"})
        assert names == filters | {"image"} | ({"linear.weight"} if tf32[1] else set())
    else:
        assert not ops and not names
    assert rounding_of(plan(module, (x,), {}, trains=True, tf32=tf32)) == (set(), set())


def test_parameters_are_rounded_together_and_where_they_lie(device):
    """Those that are cut or put side by side, too, in filters' order, bit by bit."""
    module, x = Mixed().to(device), torch.randn(2, 8, 4, 4, device=device)
    made = plan(module, (x,), {}, trains=True, rounds=True)
    [node] = [node for node in made.graph.nodes if node.op == "rounded"]
    values = {
        value: module.get_parameter(name) for name, value in made.graph.parameters.items()
    } | {node.inputs["x0"]: torch.full(node.inputs["x0"].shape, float("nan"), device=device)}
    with torch.no_grad():
        found = launch_kernels(node, values)
    for role, value in node.inputs.items():
        y = found[node.outputs[role.replace("x", "y")]]
        torch.testing.assert_close(
            y, rounded_to_tf32(values[value]), rtol=0, atol=0, equal_nan=True
        )
        filters = y.ndim != 4 or y.is_contiguous(memory_format=torch.channels_last)
        assert filters and y.data_ptr() % 16 == 0


def test_a_cpu_rounds_nothing():
    module, x = Mixed(), torch.randn(2, 8, 4, 4)
    torch.testing.assert_close(accelerate(module)(x), module(x), rtol=1e-6, atol=1e-6)
