"""The order of nodes. `streams` has the rules for streams and lifetimes; all others are here:

- Forward nodes run in the order in which the module called them.
- Backward nodes run in the order in which `differentiate` made them, which follows the critical
  path through the network. Nodes that only gradients of parameters depend on (weight gradients, and
  small sums and casts) are not on this path. They form side tasks, which run after their inputs and
  have `GROUP` weight gradients each.
- Nodes that depend only on parameters and constants (casts to 16 bits, concatenated weights) are
  named `fixed`: they would have to run once per update of the parameters. `accelerate` runs them in
  every call, since nothing reports when a parameter changes (for example through `.data`).
- A value is released after its last reader; values that backward reads are kept until then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .graph import Graph, Node, Value
from .moves import Move, nodes_of
from .streams import alive, let_go, on_streams

WEIGHT_GRADS = ("conv_dw", "linear_dw")
GROUP = 4  # gradients of weights that are a piece of work together
SMALL = (  # what makes of gradients of weights those of parameters
    "sum", "cast", "reshape", "slice", "add", "mul", "affine", "cat", "pad", "layout",
    "layout_grad", "embedding_grad", "arith_grad",
)  # fmt: skip


@dataclass
class Schedule:
    """Nodes in their order, and what is decided about each."""

    forward: list[Move]
    backward: list[Move]
    last: dict[Node, tuple[Value, ...]]  # that die with a node, were they run one by one
    fixed: set[Node] = field(default_factory=set)  # forward nodes of parameters alone

    @property
    def moves(self) -> list[Move]:
        return [*self.forward, *self.backward]

    @property
    def nodes(self) -> list[Node]:
        return nodes_of(self.moves)

    @property
    def peak(self) -> int:
        """The most bytes that are alive during a move."""
        return max(alive(self.moves), default=0)


def schedule(graph: Graph, start: int | None = None, grads: Sequence[Value] = ()) -> Schedule:
    """The schedule of a graph whose nodes from `start` on are the backward pass, which makes
    `grads`."""
    start = len(graph.nodes) if start is None else start
    forward = [Move("launch", (node,)) for node in graph.nodes[:start]]
    backward = on_streams(_order(graph.nodes[start:])) if start < len(graph.nodes) else []
    let_go([*forward, *backward], {*graph.outputs, *grads})
    fixed = set(fixed_nodes(graph, graph.nodes[:start]))
    made = Schedule(forward, backward, {}, fixed)
    made.last = last_readers(made.nodes, {*graph.outputs, *grads})
    return made


def _beside(nodes: Sequence[Node]) -> set[Node]:
    """The nodes of backward that nobody on the chain waits for."""
    readers: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in node.inputs.values():
            readers.setdefault(value, []).append(node)
    beside: set[Node] = set()
    for node in reversed(nodes):
        behind = [r for value in node.outputs.values() for r in readers.get(value, ())]
        if node.op in WEIGHT_GRADS + SMALL and all(reader in beside for reader in behind):
            beside.add(node)
    return beside


def _order(nodes: Sequence[Node]) -> list[Move]:
    """Pieces of work beside the chain, each behind the last node that one of it reads."""
    beside, order, waiting = _beside(nodes), [], []
    for node in nodes:
        if node not in beside:
            order.append(Move("launch", (node,)))
            continue
        waiting.append(node)
        if sum(n.op in WEIGHT_GRADS for n in waiting) == GROUP:
            order.append(_piece(waiting))
            waiting = []
    return [*order, _piece(waiting)] if waiting else order


def _piece(nodes: Sequence[Node]) -> Move:
    return Move("beside", (nodes[-1],), before=tuple(nodes[:-1]))


def last_readers(nodes: Iterable[Node], kept: set[Value]) -> dict[Node, tuple[Value, ...]]:
    """The values that die with each node."""
    last: dict[Value, Node] = {}
    for node in nodes:
        for value in (*node.inputs.values(), *node.outputs.values()):
            last[value] = node
    dying: dict[Node, list[Value]] = {}
    for value, node in last.items():
        if value not in kept:
            dying.setdefault(node, []).append(value)
    return {node: tuple(values) for node, values in dying.items()}


def fixed_nodes(graph: Graph, forward: Sequence[Node]) -> dict[Node, None]:
    """Those of parameters and constants alone, in their order."""
    known = {*graph.parameters.values(), *graph.constants}
    found = {}
    for node in forward:
        if all(value in known for value in node.inputs.values()):
            known.update(node.outputs.values())
            found[node] = None
    return found
