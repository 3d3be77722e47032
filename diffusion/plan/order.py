"""The order in which the nodes of a plan are issued to the streams, see `streams`.

The forward pass and the critical path of backward run on the main stream: forward nodes in the
order in which the module called them, backward nodes in that of `differentiate`, which follows the
path through the network. Weight gradients, and what is computed for them alone, are not on this
path and run beside it. How they are put together depends on where gradients go: here they are
tensors, as in `accelerate`, and `step.order` has those with places in one flat buffer.

- Small sums and casts that only gradients of parameters need are off the path, too. The sum of
  rows that many of these are (`together`) is in the last piece.
- A piece of work has `GROUP` weight gradients. Those of one size are one node (`weight_grads`), so
  that the kernels' registry may choose one launch for them.
"""

from collections.abc import Sequence

from .graph import Node, readers_of
from .moves import Move
from .ops import WEIGHT_GRADS
from .weight_grads import weight_grads_together

SMALL = (  # what makes of gradients of weights those of parameters
    "sum", "cast", "reshape", "slice", "columns", "add", "mul", "affine", "cat", "pad", "layout",
    "layout_grad", "embedding_grad", "arith_grad", "elementwise", "row_sums", "bias_grad",
    "bias_grads",
)  # fmt: skip
GROUP = 4  # gradients of weights in a launch, or a piece of work


def forward_moves(nodes: Sequence[Node]) -> list[Move]:
    """The forward pass."""
    return [Move("launch", (node,)) for node in nodes]


def backward_moves(nodes: Sequence[Node]) -> list[Move]:
    """The path, and pieces of work beside it, each behind the last node that one of it reads; and
    what is kept for a later piece."""
    beside, moves, waiting = not_awaited(nodes), [], []
    for node in nodes:
        if node not in beside:
            moves.append(Move("launch", (node,)))
            continue
        waiting.append(node)
        moves.append(Move("later", (node,)))
        if sum(n.op in WEIGHT_GRADS for n in waiting) == GROUP:
            moves.append(_piece(waiting))
            waiting = []
    return [*moves, _piece(waiting)] if waiting else moves


def _piece(nodes: Sequence[Node]) -> Move:
    nodes = weight_grads_together(nodes)
    return Move("beside", (nodes[-1],), before=tuple(nodes[:-1]))


def not_awaited(nodes: Sequence[Node]) -> set[Node]:
    """The nodes of backward that nobody on the path waits for."""
    readers, beside = readers_of(nodes), set()
    for node in reversed(nodes):
        behind = [r for value in node.outputs.values() for r in readers.get(value, ())]
        if node.op in WEIGHT_GRADS + SMALL and all(reader in beside for reader in behind):
            beside.add(node)
    return beside
