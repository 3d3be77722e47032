"""Queries, keys and values that a module picks of one product's channels in an order that no kernel
reads, such as every third, are products of their own, with the filters of these channels.

So filters are copied, not images; `fuse.preparing` makes one product of the three again.
"""

from ..graph import Graph, Node, Value
from ..views import View, whole


def pick_filters(graph: Graph) -> None:
    makers, consumers = graph.producers(), graph.consumers()
    for node in [n for n in graph.nodes if n.op == "attention" and {*"qkv"} <= {*n.inputs}]:
        picks = [makers.of(node.inputs[role], "layout") for role in "qkv"]
        if None in picks or any(consumers[pick.out] != [node] for pick in picks):
            continue
        product = makers.of(picks[0].inputs["x"], "linear")
        if product is None or consumers[product.out] != picks:
            continue
        channels = [_channels(pick) for pick in picks]
        if None not in channels:
            for pick, view in zip(picks, channels, strict=True):
                _pick(graph, product, pick, view)


def _channels(pick: Node) -> View | None:
    """Which channels a copy takes of every row of its input, one after the other; None: it does
    something else."""
    x, y = pick.inputs["x"], pick.out
    c, rows = x.shape[-1], y.numel // y.shape[-1]
    pieces = tuple((piece,) for piece in pick.attrs["pieces"])
    view = View(x, pieces, pick.attrs["offset"]).reshape((rows, y.shape[-1]))
    if view is None or view.dims[0] != whole(x, (x.numel // c, c)).dims[0]:
        return None
    last = view.offset + sum((n - 1) * step for n, step in view.dims[1])
    return View(x, view.dims[1:], view.offset) if last < c else None


def _pick(graph: Graph, product: Node, pick: Node, channels: View) -> None:
    """Compute the channels alone, in the place of the copy."""
    weight, bias = product.inputs["weight"], product.inputs.get("bias")
    ci = weight.shape[1]
    rows = tuple((n, step * ci) for n, step in channels.dims[0])
    filters = View(weight, (rows, ((ci, 1),)), channels.offset * ci)
    inputs = {"x": product.inputs["x"], "weight": _copy(graph, pick, filters)}
    if bias is not None:
        inputs["bias"] = _copy(graph, pick, View(bias, channels.dims, channels.offset))
    made = Node("linear", inputs, {}, {}, product.source, product.tf32)
    made.of_matrices = product.of_matrices
    graph.replace(pick, made)


def _copy(graph: Graph, before: Node, view: View) -> Value:
    how = {"pieces": view.pieces, "offset": view.offset}
    return graph.insert(before, "layout", view.value, view.shape, **how)
