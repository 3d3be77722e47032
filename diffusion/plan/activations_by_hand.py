"""Activations that a module writes itself, as a product, are one node:

    x sigmoid(x)          SiLU, or Swish
    x tanh(softplus(x))   Mish

A norm in front of one then takes it, see `canonical`.
"""

import torch

from .graph import Graph, Makers, Value
from .norms_by_hand import calls

_ATEN = torch.ops.aten
_GATES = {  # the last op first
    "silu": (_ATEN.sigmoid.default,),
    "mish": (_ATEN.tanh.default, _ATEN.softplus.default),
}


def find_activations(graph: Graph) -> None:
    """Replace each such product, in place; what is then not read is left."""
    makers = graph.producers()
    for node, x, gate in graph.products():
        name = _gate_of(x, gate, makers)
        if name is not None:
            node.op, node.inputs, node.attrs = "act", {"x": x}, {"activation": name}


def _gate_of(x: Value, gate: Value, makers: Makers) -> str | None:
    """Of which activation of x this is the other factor; None: of none."""
    for name, ops in _GATES.items():
        value = gate
        for op in ops:
            node = makers.of(value, "arith")
            value = node.inputs["x0"] if node is not None and calls(node, op) else None
        if value is x:
            return name
    return None
