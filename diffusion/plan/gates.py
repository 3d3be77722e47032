"""Products of the halves of a tensor, of which one may go through an activation (GEGLU, SwiGLU, the
gates of NAFNet), are one node: its kernel reads the halves where they lie, and its gradient writes
them side by side."""

from .graph import Graph, Makers, Value


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
