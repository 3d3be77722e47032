"""Places of gradients: each is written by the launch that computes it, into memory that exists
already. Casts, reshapes and concatenations between the two in the trace become views of the place.
"""

from dataclasses import dataclass

from torch import Tensor

from ..graph import Graph, Node, Value

EMB = "emb"  # the name of the gradient of the blocks' parts of the embedding, side by side
_WRITERS = {  # of ops that write to a place: the results that they can write
    "conv_dw": ("y",),
    "linear_dw": ("y",),
    "bias_grad": ("y",),
    "norm_grad_table": ("weight", "bias", "input_bias", "emb", "scale", "shift"),
    "norm_backward": ("weight", "bias", "input_bias", "emb", "scale", "shift"),
    "skip_backward": ("weight", "bias"),
}


@dataclass(frozen=True)
class Place:
    """Part of a gradient's memory."""

    name: str  # of the gradient
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int, int], ...] = ()  # axis, start, stop of each narrowing

    def of(self, whole: Tensor) -> Tensor:
        """The view of the gradient."""
        for axis, start, stop in self.parts:
            whole = whole.narrow(axis, start, stop - start)
        return whole if whole.shape == self.shape else whole.view(self.shape)


def place(graph: Graph, grads: dict[Value, Place]) -> dict[Value, Place]:
    """Let the nodes that make these gradients write them in place; the place of each value that is
    one. The graph's backward nodes lose what stands in between."""
    producers, readers = graph.producers(), graph.consumers()
    placed: dict[Value, Place] = {}
    gone: set[Node] = set()
    added: dict[Node | None, list[Node]] = {}

    def follow(value: Value, at: Place) -> None:
        node = producers.get(value)
        if node is None or value in placed:
            return copy(value, at)
        read = [r for r in readers.get(value, ()) if r is not None and r not in gone]
        if node.op in ("cast", "reshape", "cat") and read:
            return copy(value, at)
        if node.op in ("cast", "reshape"):
            gone.add(node)
            x = node.inputs["x"]
            return follow(x, Place(at.name, x.shape, at.parts))
        if node.op == "cat" and not at.parts:
            gone.add(node)
            start, axis = 0, node.attrs["axis"]
            for part in node.many("x"):
                stop = start + part.shape[axis]
                follow(part, Place(at.name, part.shape, ((axis, start, stop),)))
                start = stop
            return None
        role = next(r for r, v in node.outputs.items() if v is value)
        if role not in _WRITERS.get(node.op, ()):
            return copy(value, at)
        placed[value] = at
        return None

    def copy(value: Value, at: Place) -> None:
        made = graph.new("accumulate", {"x": value}, {"y": (value.shape, value.dtype)})
        made.attrs["writes"] = at.name == EMB  # whose memory is new
        placed[made.out] = at
        added.setdefault(producers.get(value), []).append(made)

    for value, at in grads.items():
        follow(value, at)
    nodes = [*added.pop(None, ())]
    for node in graph.nodes:
        if node not in gone:
            nodes.append(node)
        nodes += added.pop(node, ())
    graph.nodes = nodes
    return placed
