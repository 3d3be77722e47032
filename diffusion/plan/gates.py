"""Products of the halves of a tensor, of which one goes through an activation (GEGLU, SwiGLU), are
one node: its kernel reads the halves where they lie, and its gradient writes them side by side."""

from .graph import Graph, Makers, Value


def find_gates(graph: Graph) -> None:
    """Replace each such product, in place; what is then not read is left."""
    producers = graph.producers()
    for node in graph.nodes:
        if node.op != "mul":
            continue
        for x, other in (("a", "b"), ("b", "a")):
            act = producers.of(node.inputs[other], "act")
            if act is None:
                continue
            halves = [_half(value, producers) for value in (node.inputs[x], act.inputs["x"])]
            if None in halves or halves[0][0] is not halves[1][0] or halves[0][1] == halves[1][1]:
                continue
            (whole, _), (_, gate) = halves
            if {act.out.dtype, node.out.dtype, act.inputs["x"].dtype} != {whole.dtype}:
                continue
            node.op, node.inputs = "gated", {"x": whole}
            node.attrs = act.attrs | {"gate": gate}
            break


def _half(value: Value, producers: Makers) -> tuple[Value, int] | None:
    """What it is a half of, along the channels, and which: the first, 0, or the second, 1."""
    node = producers.of(value, "slice")
    if node is None:
        return None
    x, axis, width = node.inputs["x"], node.attrs["axis"], value.shape[-1]
    if axis != len(x.shape) - 1 or x.shape[-1] != 2 * width or x.dtype != value.dtype:
        return None
    return x, int(node.attrs["start"] == width)
