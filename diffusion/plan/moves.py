"""Moves: what a runner executes in order, such as launches, each on its stream."""

from collections.abc import Iterable
from dataclasses import dataclass

from .graph import Node, Value

# streams: the current one, that of pieces of work, and of held ones
CHAIN, BESIDE, THIRD = range(3)


@dataclass(eq=False)
class Move:
    """One thing that the runner does.

    what        on                it
    begin       chain             nothing: what waits for it waits for all before
    launch      chain             launches nodes
    beside      beside            launches what nobody on the chain waits for
    weights     beside or third   gradients of weights in one launch, `weight`: of any kind, behind
                                  what is `before` it
    sums        third             adds up sums for norms and biases, `all sums` the last of a pass
    ready       beside            says that filters from `start` on have their gradients
    take        chain             waits for the embedding
    embedding   chain             the embedding's gradient is complete
    finish      chain             the embedding's layers go back, on a stream of their own
    wait        chain             nothing but to wait

    The first three and the last are of any plan, the others of `train.py`'s (`step`).
    """

    what: str
    nodes: tuple[Node, ...] = ()
    pixels: int | None = None  # of images whose launches may overlap
    share: float = 1.0  # of the multiprocessors
    start: int = 0
    before: tuple[Node, ...] = ()  # what belongs to a piece of work, and is launched first
    stream: int = CHAIN
    waits: tuple["Move", ...] = ()  # of other streams, which have to be done
    is_awaited: bool = False  # by a move of another stream, or its last
    dying: tuple[Value, ...] = ()  # that nobody reads behind it

    @property
    def all_nodes(self) -> tuple[Node, ...]:
        return *self.before, *self.nodes

    @property
    def made(self) -> set[Value]:
        return {v for node in self.all_nodes for v in node.outputs.values()}

    @property
    def reads(self) -> dict[Value, None]:
        """What it does not make itself, in order."""
        made = {v for node in self.before for v in node.outputs.values()}
        read = (v for node in self.all_nodes for v in node.inputs.values())
        return dict.fromkeys(v for v in read if v not in made)


def nodes_of(moves: Iterable[Move]) -> list[Node]:
    """All that these launch, in order."""
    return [node for move in moves for node in move.all_nodes]
