"""What many nodes of a plan do in one launch: casts of parameters, and sums over rows."""

from collections.abc import Collection

from ..graph import Graph, Node, Value, readers_of
from ..ops import SUMS_OF_CHANNEL_NORM, SUMS_OF_NORM
from .order import not_awaited


def casts_together(graph: Graph) -> int:
    """Casts of parameters to one dtype as one node, in front of all, which writes those side by
    side that a concatenation alone reads, such as q, k and v's, and filters of one row as those of
    images; how many nodes less there are."""
    parameters, found = set(graph.parameters.values()), {}
    before = len(graph.nodes)
    _images_of_rows(graph, parameters)
    for node in graph.nodes:
        if node.op == "cast" and node.inputs["x"] in parameters:
            found.setdefault(node.out.dtype, []).append(node)
    for nodes in found.values():
        if len(nodes) == 1 and nodes[0].out.shape == nodes[0].inputs["x"].shape:
            continue
        numbers = {node.out: i for i, node in enumerate(nodes)}
        cats = _side_by_side(graph, numbers)
        parts = {cat.out: [numbers[value] for value in cat.many("x")] for cat in cats}
        joined = {i for together in parts.values() for i in together}
        parts = {y: [i] for y, i in numbers.items() if i not in joined} | parts
        inputs = {f"x{i}": node.inputs["x"] for i, node in enumerate(nodes)}
        outputs = {f"y{i}": value for i, value in enumerate(parts)}
        gone, how = {*nodes, *cats}, {"parts": list(parts.values())}
        rest = [node for node in graph.nodes if node not in gone]
        graph.nodes = [Node("casts", inputs, outputs, how, nodes[0].source), *rest]
    return before - len(graph.nodes)


def _images_of_rows(graph: Graph, parameters: Collection[Value]) -> None:
    """Casts give the shape with an axis of one that a reshape alone makes of them."""
    readers, gone = graph.consumers(), set()
    for node in graph.nodes:
        x = node.inputs.get("x")
        if node.op != "cast" or x not in parameters or len(readers[node.out]) != 1:
            continue
        (reshape,) = readers[node.out]
        if reshape is None or reshape.op != "reshape" or len(reshape.out.shape) != 4:
            continue
        if [n for n in reshape.out.shape if n != 1] == [n for n in x.shape if n != 1]:
            node.outputs = reshape.outputs
            gone.add(reshape)
    graph.nodes = [node for node in graph.nodes if node not in gone]


def _side_by_side(graph: Graph, casts: Collection[Value]) -> list[Node]:
    """The concatenations of rows of these that nobody else reads."""
    readers = graph.consumers()
    return [
        node
        for node in graph.nodes
        if node.op == "cat"
        and node.attrs["axis"] == 0
        and len(set(node.many("x"))) == len(node.inputs)
        and all(x in casts and readers[x] == [node] for x in node.inputs.values())
    ]


def _sums(node: Node) -> tuple[str, ...]:
    """The roles of sums over rows that a node makes, as they are side by side in its rows."""
    if node.op in ("norm_grad_table", "norm_backward", "skip_backward"):
        return SUMS_OF_NORM if "input_partials" in node.inputs else SUMS_OF_NORM[:2]
    if node.op == "channel_norm_grad" and node.inputs.keys().isdisjoint(("scale", "shift")):
        return SUMS_OF_CHANNEL_NORM
    return ("y",) if node.op == "bias_grad" else ()


def sums_together(graph: Graph, start: int, results: Collection[Value]) -> None:
    """Sums over rows that make gradients of biases and norms as one node, behind all others of
    backward, which begins with node `start`, but those that read what it makes. Sums that other
    rows depend on stay where they are; those that are no result and nobody reads go."""
    forward, backward = graph.nodes[:start], graph.nodes[start:]
    readers, beside = readers_of(backward), not_awaited(backward)

    def behind(value: Value) -> set[Node]:
        """The nodes that depend on it."""
        direct = readers.get(value, ())
        return set(direct).union(*(behind(y) for node in direct for y in node.outputs.values()))

    rows: dict[str, Value] = {}
    made: dict[str, Value] = {}
    parts, gone, late = [], set(), set()
    for node in backward:
        roles = _sums(node)
        for role in roles:
            if (y := node.outputs.get(role)) and y not in results and not readers.get(y):
                del node.outputs[role]
        found = {role: node.outputs[role] for role in roles if role in node.outputs}
        after = set().union(*map(behind, found.values()))
        if not found or any(n not in beside or n.op in ("row_sums", "bias_grad") for n in after):
            continue
        late.update(after)
        if node.op == "bias_grad":
            x = node.inputs["rows"]
            gone.add(node)
        else:
            table, x = node.inputs.get("table"), next(iter(found.values()))
            n = 1 if table is None else table.shape[0]
            x = graph.value("rows", (n, len(roles) * x.numel), x.exact)
            for role in found:
                del node.outputs[role]
            node.outputs["sums"] = x
        x.dtype = x.exact  # as kernels give them
        at = {value: i for i, value in enumerate(rows.values())}.get(x, len(rows))
        rows[f"rows{at}"] = x
        for role, value in found.items():
            parts.append((at, roles.index(role) * value.numel))
            made[f"y{len(made)}"] = value
    if not made:
        return
    together = Node("bias_grads", rows, made, {"parts": parts}, "all sums")
    rest = [node for node in backward if node not in gone and node not in late]
    graph.nodes = [*forward, *rest, together, *(node for node in backward if node in late)]
