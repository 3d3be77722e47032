"""Gradients of weights, of one piece of work, that may share a launch."""

import math
from collections.abc import Sequence

from .graph import Node, Value, behind_what_they_read, numbered
from .ops import WEIGHT_GRADS


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
    x, dy, shape = node.inputs["x"], node.inputs["dy"], node.out.shape
    if not node.keeps_size or (shape[1], shape[0]) != (x.shape[-1], dy.shape[-1]):
        return None
    filters = tuple(shape[2:]) or (1, 1)
    pixels = (math.prod(x.shape[:-1]),) if filters == (1, 1) else x.shape[:-1]
    return pixels, filters, x.dtype, dy.dtype, node.tf32


def _joined(nodes: Sequence[Node]) -> Node:
    def all_of(role: str) -> dict[str, Value]:
        return numbered(role, (node.inputs[role] for node in nodes))

    outputs = numbered("y", (node.out for node in nodes))
    source, tf32 = nodes[0].source, nodes[0].tf32
    return Node("weight_grads", all_of("x") | all_of("dy"), outputs, {}, source, tf32)
