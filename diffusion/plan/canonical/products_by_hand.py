"""Products that a module writes itself are one node: activations,

    x sigmoid(x)          SiLU, or Swish
    x tanh(softplus(x))   Mish

which a norm in front of one then takes (see `canonical`); and products of the halves of a tensor,
of which one may go through an activation (GEGLU, SwiGLU, the gates of NAFNet): their kernel reads
the halves where they lie, and its gradient writes them side by side.
"""

import torch

from ..graph import Graph, Makers, Value
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


def find_gates(graph: Graph) -> None:
    """Replace each such product, in place; what is then not read is left."""
    makers = graph.producers()
    for node, x, gate in graph.products():
        act = makers.of(gate, "act")
        before = gate if act is None else act.inputs["x"]
        one, other = _half(x, makers), _half(before, makers)
        if one is None or other is None or one[0] is not other[0] or one[1] == other[1]:
            continue
        whole, which = other
        types = {v.dtype for v in (whole, before, gate, node.out)}
        if len(types) > 1 or not whole.dtype.is_floating_point:
            continue
        activation = {"activation": "identity"} if act is None else act.attrs
        node.op, node.inputs, node.attrs = "gated", {"x": whole}, {**activation, "gate": which}


def _half(value: Value, makers: Makers) -> tuple[Value, int] | None:
    """What it is a half of, along the channels, and which: the first, 0, or the second, 1."""
    node = makers.of(value, "slice")
    if node is None:
        return None
    x, axis, width = node.inputs["x"], node.attrs["axis"], value.shape[-1]
    if axis != len(x.shape) - 1 or x.shape[-1] != 2 * width or x.dtype != value.dtype:
        return None
    return x, int(node.attrs["start"] == width)
