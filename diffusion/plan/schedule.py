"""The schedule of a plan: its nodes in their order (`order`), on streams, with the lives of values
(`streams`), and the peak memory that follows."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .graph import Graph, Node, Value
from .moves import Move, nodes_of
from .order import backward_moves, forward_moves
from .step import order as of_step
from .streams import alive, let_go, on_streams


@dataclass
class Schedule:
    """Nodes in their order, and what is decided about each."""

    forward: list[Move]
    backward: list[Move]
    # forward nodes of parameters and constants alone, such as casts to 16 bits: they have to run
    # once per update of these; `accelerate` runs them in every call, for nothing reports updates
    fixed: set[Node]
    placed: Collection[Value] = ()  # whose memory is there before

    @property
    def moves(self) -> list[Move]:
        return [*self.forward, *self.backward]

    @property
    def nodes(self) -> list[Node]:
        return nodes_of(self.moves)

    def alive(self) -> list[int]:
        """Bytes of activations, and of gradients of them, during each move."""
        return alive(self.moves, self.placed)

    @property
    def peak(self) -> int:
        """The most of these."""
        return max(self.alive(), default=0)


def schedule(
    graph: Graph,
    start: int | None = None,
    kept: Collection[Value] = (),  # beside the graph's results
    step: of_step.InStep | None = None,  # None: gradients are tensors of their own
    listens: bool = False,  # somebody wants to know how far backward is
) -> Schedule:
    """The schedule of a graph whose nodes from `start` on are the backward pass."""
    start = len(graph.nodes) if start is None else start
    ahead, behind = graph.nodes[:start], graph.nodes[start:]
    if step is None:
        forward, order = forward_moves(ahead), backward_moves(behind)
    else:
        forward = of_step.forward_moves(ahead, step)
        order = of_step.backward_moves(behind, step)
    backward = on_streams(order, listens) if behind else []
    kept = {*graph.outputs, *kept}
    let_go([*forward, *backward], kept)
    placed = () if step is None else set(step.placed)
    return Schedule(forward, backward, set(fixed_nodes(graph, ahead)), placed)


def fixed_nodes(graph: Graph, forward: Sequence[Node]) -> dict[Node, None]:
    """Those of parameters and constants alone, in their order."""
    known = {*graph.parameters.values(), *graph.constants}
    found = {}
    for node in forward:
        if all(value in known for value in node.inputs.values()):
            known.update(node.outputs.values())
            found[node] = None
    return found
