"""q, k and v are rounded by the product that makes them if attention alone reads them."""

from types import SimpleNamespace

import pytest
import torch

from diffusion.plan.graph import Graph
from diffusion.plan.rounding import round_where_made

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
    return linear.attrs.get("rounds", False), attention.attrs.get("is_rounded", False)


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
