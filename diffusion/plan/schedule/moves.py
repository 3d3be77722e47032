"""Moves: what a runner executes in order, such as launches, each on its stream."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..graph import Node, Value

# streams: the current one, of the critical path; that of pieces of work; and of held ones
MAIN, SECOND, THIRD = range(3)


@dataclass(eq=False)
class Move:
    """One action of the runner.

    what        stream            action
    begin       main              none: waiting for it means waiting for everything before it
    launch      main              launches nodes of the critical path
    beside      second            launches nodes that the critical path does not wait for
    weights     second or third   launches a group of weight gradients
    weight      second or third   launches one, after the nodes in `before`
    sums        third             adds up sums for norms and biases; `all sums`: the last of a pass
    ready       second or third   reports that weights from `start` on have their gradients
    take        main              waits for the embedding
    embedding   main              marks the embedding's gradient as complete
    finish      main              runs the embedding's layers backward on a separate stream
    wait        main              only waits

    Every plan has the first three and the last; only `train.py`'s plan has the others (`step`).
    `later` is from `order`, and `hold`, `keep`, `release` and `sync` are from `step.order`, to
    `streams`, which act on them: no runner gets one.
    """

    what: str
    nodes: tuple[Node, ...] = ()
    pixels: int | None = None  # of images whose launches may overlap
    share: float = 1.0  # of the multiprocessors
    start: int = 0
    before: tuple[Node, ...] = ()  # what belongs to a piece of work, and is launched first
    stream: int = MAIN
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
