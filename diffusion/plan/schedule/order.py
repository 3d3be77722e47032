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

import math
from collections.abc import Sequence

from ..graph import Node, Value, behind_what_they_read, numbered, readers_of
from ..ops import WEIGHT_GRADS
from .moves import Move

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


def weight_grads_together(nodes: Sequence[Node]) -> list[Node]:
    """The nodes of a piece, of whose gradients those over images and with filters of one size are
    one node, behind what the last of them reads, unless that follows from another of them, as where
    filters are made of images. Which of them are one launch the kernels' registry decides. What is
    made of them comes behind them."""
    groups: dict[tuple, list[Node]] = {}
    producers = {value: node for node in nodes for value in node.outputs.values()}
    behind: dict[Node, int] = {}  # how many gradients of weights, one after the other
    for node in nodes:
        makers = [producers[v] for v in node.inputs.values() if v in producers]
        behind[node] = max((behind[m] + (m.op in WEIGHT_GRADS) for m in makers), default=0)
        if node.op in WEIGHT_GRADS and (size := _size(node)) is not None:
            groups.setdefault((size, behind[node]), []).append(node)
    several = [group for group in groups.values() if len(group) > 1]
    last = {group[-1]: _joined(group) for group in several}
    gone = {node for group in several for node in group[:-1]}
    return behind_what_they_read([last.get(node, node) for node in nodes if node not in gone])


def _size(node: Node) -> tuple | None:
    """What gradients have in common that one launch may make; None: it makes no others."""
    if not has_group_kernels(node):
        return None
    x, filters = node.inputs["x"], size_of_filters(node)
    pixels = (math.prod(x.shape[:-1]),) if filters == (1, 1) else x.shape[:-1]
    return pixels, filters, x.dtype, node.inputs["dy"].dtype, node.tf32


def has_group_kernels(node: Node) -> bool:
    """Whether a gradient of weights is of images of one size, and none of their channels is for
    padding alone."""
    channels = tuple(node.inputs[role].shape[-1] for role in ("dy", "x"))
    return node.keeps_size and node.out.shape[:2] == channels


def size_of_filters(node: Node) -> tuple[int, ...]:
    """Of a gradient of weights."""
    return node.out.shape[2:] or (1, 1)


def _joined(nodes: Sequence[Node]) -> Node:
    def all_of(role: str) -> dict[str, Value]:
        return numbered(role, (node.inputs[role] for node in nodes))

    outputs = numbered("y", (node.out for node in nodes))
    source, tf32 = nodes[0].source, nodes[0].tf32
    return Node("weight_grads", all_of("x") | all_of("dy"), outputs, {}, source, tf32)
