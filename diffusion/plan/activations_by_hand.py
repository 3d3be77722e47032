"""Activations that a module writes itself, as a product, are one node:

    x sigmoid(x)          SiLU, or Swish
    x tanh(softplus(x))   Mish

A norm in front of one then takes it, see `canonical`.
"""

import torch

from .graph import Graph, Node, Value

_ATEN = torch.ops.aten


def find_activations(graph: Graph) -> None:
    """Replace each such product, in place; what is then not read is left."""
    producers = graph.producers()
    for node in graph.nodes:
        if node.op != "mul":
            continue
        for x, gate in (("a", "b"), ("b", "a")):
            name = _gate_of(node.inputs[x], node.inputs[gate], producers)
            if name is not None:
                node.op, node.inputs = "act", {"x": node.inputs[x]}
                node.attrs = {"activation": name}
                break


def _gate_of(x: Value, gate: Value, producers: dict[Value, Node]) -> str | None:
    """Of which activation of x this is the other factor; None: of none."""
    if _called(gate, _ATEN.sigmoid.default, producers) is x:
        return "silu"
    softplus = _called(gate, _ATEN.tanh.default, producers)
    return "mish" if _called(softplus, _ATEN.softplus.default, producers) is x else None


def _called(
    value: Value | None, target: torch._ops.OpOverload, producers: dict[Value, Node]
) -> Value | None:
    """What this op of PyTorch has made the value of, without options."""
    node = producers.get(value)
    plain = {"target": target, "arguments": (0,), "options": {}}
    return node.inputs["x0"] if node is not None and node.attrs == plain else None
