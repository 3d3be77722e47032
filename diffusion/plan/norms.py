"""Splits a group norm into three nodes, each of which can be fused with its neighbours.

    partials = moments(x)                     sums over pixels, for the producer of x to compute
    table = norm_table(partials, ...)         mean, rstd, g, b for each image and channel
    y = norm_apply(x, table)                  one pass over memory, for the consumer of y to compute

Statistics are float32 (float64 for float64), for every dtype of x.
"""

import math

import torch

from .graph import Graph, Node


def split_norms(graph: Graph) -> None:
    """Replace every group norm by its three steps, in place."""
    nodes, graph.nodes = graph.nodes, []
    replaced = {}
    for node in nodes:
        if node.op == "group_norm":
            replaced[node.out] = _split(graph, node)
        else:
            graph.nodes.append(node)
    graph.source = ""
    graph.substitute(replaced)


def _split(graph: Graph, node: Node):
    x, a = node.inputs["x"], node.attrs
    n, c = x.shape[0], x.shape[-1]
    pixels = math.prod(x.shape[1:-1])
    exact = x.exact
    graph.source = node.source
    weight, bias = (node.inputs.get(role) for role in ("weight", "bias"))
    if weight is None:
        weight = graph.constant(torch.ones(c, dtype=exact), "ones")
    if bias is None:
        bias = graph.constant(torch.zeros(c, dtype=exact), "zeros")
    partials = graph.make("moments", {"x": x}, (n, 1, 2, c), exact)
    film = {role: node.inputs.get(role) for role in ("scale", "shift")}
    table = graph.make(
        "norm_table",
        {"partials0": partials, "weight": weight, "bias": bias, **film},
        (n, 4, c),
        exact,
        groups=a["groups"],
        eps=a["eps"],
        pixels=(pixels,),
    )
    return graph.make(
        "norm_apply",
        {"x0": x, "table": table},
        node.out.shape,
        node.out.dtype,
        activation=a["activation"],
    )
