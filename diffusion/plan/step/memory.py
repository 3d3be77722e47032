"""What a step keeps of its forward pass, and what it recomputes or overwrites.

- An upsampled tensor is four times its source. It is recomputed if it exceeds `MUCH` bytes, or if
  only a weight gradient reads it. If only gradients of 1x1 weights read it, they read its source
  instead, and the gradient summed over 2x2 pixels.
- With `recompute`, outputs of norms are recomputed from their inputs and tables.
- dx overwrites dz, or a summand that nothing else reads.
"""

from collections import Counter
from collections.abc import Sequence

from ..graph import Graph, Node, Value

MUCH = 32 * 2**20  # bytes
_NORMS = ("norm", "norm_of_upsampled")
_SUMMANDS = ("add1_second", "add1", "dz")  # whose memory dx may take


def keep_less(graph: Graph, first: set[Node], recompute: bool) -> None:
    """Put what is made again into the backward pass, whose nodes are not of `first`, in place."""
    forward = [node for node in graph.nodes if node in first]
    backward = [node for node in graph.nodes if node not in first]
    producers = {v: node for node in forward for v in node.outputs.values()}
    backward = _small_weight_grads(graph, backward, producers, recompute)
    again: dict[Value, Value] = {}
    nodes: list[Node] = []

    def remade(value: Value, alone: bool) -> Value:
        """The value, or what takes its place in backward."""
        if value in again:
            return again[value]
        node = producers.get(value)
        if node is None or not _is_made_again(node, value, alone, recompute):
            return value
        if node.op not in _NORMS:
            inputs = {"x": remade(node.inputs["x"], alone)}
            made = _node(graph, node.op, inputs, value, node.source, node.attrs)
        elif value is node.out:
            made = _pass_again(graph, node, lambda v: remade(v, alone))
        else:  # what the pass has upsampled
            inputs = {"x": node.inputs["x0"]}
            made = _node(graph, "upsample", inputs, value, node.source, {"factor": (2, 2)})
        nodes.append(made)
        again[value] = made.out
        return made.out

    for node in backward:
        alone = node.op in ("conv_dw", "linear_dw")
        for role, value in list(node.inputs.items()):
            only = alone and role == "x" and _only_reader(backward, value, node)
            node.inputs[role] = remade(value, only)
        nodes.append(node)
    graph.nodes = [*forward, *nodes]


def _is_made_again(node: Node, value: Value, alone: bool, recompute: bool) -> bool:
    if node.op in _NORMS and value is node.out:
        return recompute
    if node.op == "avg_pool":
        return recompute and alone
    if node.op == "upsample" and alone:
        return True
    upsampled = node.op == "upsample" or node.outputs.get("large") is value
    return upsampled and (recompute or value.bytes > MUCH)


def _only_reader(nodes: Sequence[Node], value: Value, node: Node) -> bool:
    return all(other is node or value not in other.inputs.values() for other in nodes)


def _node(graph: Graph, op: str, inputs: dict, like: Value, source: str, attrs: dict) -> Node:
    return graph.new(op, inputs, {"y": (like.shape, like.dtype)}, source, **attrs)


def _pass_again(graph: Graph, norm: Node, remade) -> Node:
    """The pass of a norm, by the table that it has written."""
    inputs = {role: norm.inputs[role] for role in ("x0", "x1", "rng") if role in norm.inputs}
    inputs["table"] = norm.outputs["table"]
    if "large" in norm.outputs:
        inputs["x0"] = remade(norm.outputs["large"])
    attrs = {k: v for k, v in norm.attrs.items() if k in ("activation", "p", "layer", "first")}
    return _node(graph, "norm_apply", inputs, norm.out, norm.source, attrs)


def _small_weight_grads(
    graph: Graph, backward: list[Node], producers: dict[Value, Node], recompute: bool
) -> list[Node]:
    """Of large images that only gradients of 1x1 weights read, gradients of their sources."""
    nodes: list[Node] = []
    for node in backward:
        x = node.inputs.get("x")
        maker = producers.get(x) if node.op == "linear_dw" else None
        is_large = maker is not None and maker.outputs.get("large") is x
        if is_large and (recompute or x.bytes > MUCH) and _only_reader(backward, x, node):
            dy, small = node.inputs["dy"], maker.inputs["x0"]
            shape = (*small.shape[:3], dy.shape[3])
            like = Value(dy.name, shape, dy.dtype)
            summed = _node(graph, "sum_pool", {"x": dy}, like, node.source, {"window": (2, 2)})
            nodes.append(summed)
            node.inputs = {"x": small, "dy": summed.out}
        nodes.append(node)
    return nodes


def write_over(backward: Sequence[Node], kept: set[Value]) -> None:
    """Say of each launch that writes dx over what, in place."""
    readers = Counter(value for node in backward for value in node.inputs.values())
    made = {value for node in backward for value in node.outputs.values()}
    for node in backward:
        if node.op != "norm_backward":
            continue
        dx = node.outputs["dx1"]
        for role in _SUMMANDS:
            value = node.inputs.get(role)
            alike = value is not None and (value.shape, value.dtype) == (dx.shape, dx.dtype)
            if alike and readers[value] == 1 and value in made and value not in kept:
                node.attrs["over"] = role
                break
