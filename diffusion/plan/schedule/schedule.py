"""The schedule of a plan: its nodes in an order that is given (`order`, or `step.order`), on
streams, with the lives of values (`streams`), and the peak memory that follows."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..graph import Graph, Node, Value
from .moves import Move, nodes_of
from .streams import alive, on_streams, set_lifetimes


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
    forward: list[Move],
    backward: Sequence[Move] = (),
    kept: Collection[Value] = (),  # beside the graph's results
    placed: Collection[Value] = (),  # as `Schedule` has them
    listens: bool = False,  # somebody wants to know how far backward is
) -> Schedule:
    """The schedule of a graph whose nodes these moves launch, in this order."""
    backward = on_streams(backward, listens) if backward else []
    set_lifetimes([*forward, *backward], {*graph.outputs, *kept})
    return Schedule(forward, backward, set(graph.fixed(nodes_of(forward))), placed)
