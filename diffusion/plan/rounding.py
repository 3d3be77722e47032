"""Who rounds what products in TF32 multiply. Tensor cores cut off the bits that TF32 lacks
(`triton_kernels.fused_tf32`), so operands are rounded before, where they are written if possible.

In a training step and in sampling kernels round whatever products may read, and the optimizer
rounds parameters. There only q, k and v are decided here: the product that makes them rounds them
if nothing else reads them, which spares attention, forward and backward, a pass of its own.

In a plan of any module some products may be in TF32 and others not, and parameters are the user's.
There `round_operands` decides for each value.
"""

from typing import Any

import torch

from .graph import Graph, Node, Value
from .launch.products import is_of_kernels
from .ops import WEIGHT_GRADS

_MAKERS = ("linear", "conv_few")
_READERS = ("attention", "attention_grad")
# What products, and input gradients, multiply without rounding it. Weight gradients round in
# registers, as do 1x1 convolutions that are added to another; attention in a pass before, see
# `fused_tf32`.
_MULTIPLIED = ("x", "weight", "columns")
_MULTIPLIED_BACKWARD = ("dy", "weight")
# whose kernels can round what they write
_CAN_ROUND = {
    *("norm", "norm_apply", "norm_single_cta", "norm_of_sums", "norm_upsampled", "channel_norm"),
    *("norm_dx", "norm_backward", "channel_norm_grad", "pad_channels"),
    *("upsample", "avg_pool", "avg_pool_grad", "sum_pool", "resample_parts"),
}
_MOVES = {"reshape", "slice", "columns", "cat", "layout", "pad"}
_ALWAYS_ROUND = {*_READERS, "skip_dx", "skip_backward"}  # in TF32


def round_where_made(graph: Graph, kernels: Any) -> None:
    """Mark these products and their readers, if the kernels round what products read."""
    if getattr(kernels, "ROUNDS_OPERANDS", False):
        _round_packed(graph)


def _round_packed(graph: Graph) -> None:
    consumers = graph.consumers()
    for node in graph.nodes:
        readers = consumers.get(node.out, ())
        images = node.op in _MAKERS and len(node.out.shape) == 4 and _is_float32(node.out)
        if (
            images
            and node.tf32
            and readers
            and all(_reads_packed(reader, node) for reader in readers)
        ):
            node.rounds = True
            for reader in readers:
                reader.attrs["is_rounded"] = True


def _reads_packed(reader: Node | None, maker: Node) -> bool:
    """Whether it is attention by a kernel of ours, whose q, k and v this is."""
    if reader is None or reader.op not in _READERS or not is_of_kernels(reader):
        return False
    return reader.inputs.get("qkv") is maker.out and reader.tf32


def round_operands(graph: Graph, start: int) -> int:
    """Have rounded what products in TF32 read, in place: by the node that makes it, or by a new one
    beside it; parameters by one node. Backward begins with node `start`; where it begins then."""
    _round_packed(graph)
    for node in graph.nodes:
        if node.op in _READERS and node.tf32 and _is_float32(node.out):
            node.rounds = True
    makers, kept = graph.producers(), _read_exactly(graph)
    parameters, behind = set(graph.parameters.values()), {}
    together = Node("rounded", {}, {}, source="parameters", rounds=True)
    for value, reads in _multiplied(graph).items():
        maker = makers.get(value)
        if maker is not None and _rounds(maker, kept):
            continue
        spec, source = {"y": (value.shape, value.dtype)}, reads[0][0].source
        copy = graph.new("pad_channels", {"x": value}, spec, source, width=value.shape[-1])
        copy.rounds = True
        for node, role in reads:
            node.inputs[role] = copy.out
        if value in parameters:
            i = len(together.inputs)
            together.inputs[f"x{i}"], together.outputs[f"y{i}"] = value, copy.out
        else:
            behind.setdefault(maker, []).append(copy)
    start = _insert(graph, start, behind)
    if not together.inputs:
        return start
    graph.nodes.insert(0, together)
    return start + 1


def _multiplied(graph: Graph) -> dict[Value, list[tuple[Node, str]]]:
    """The float32 numbers that products in TF32 multiply as they are, and which of them do."""
    found: dict[Value, list[tuple[Node, str]]] = {}
    for node in graph.nodes:
        if not _is_product(node) or not node.tf32 or node.op in (*WEIGHT_GRADS, *_READERS):
            continue
        roles = _MULTIPLIED_BACKWARD if "dy" in node.inputs else _MULTIPLIED
        for role, value in node.inputs.items():
            if role.rstrip("0123456789") in roles and _is_float32(value):
                found.setdefault(value, []).append((node, role))
    return _before_moves(graph, found)


def _before_moves(graph: Graph, reads: dict[Value, list[tuple[Node, str]]]) -> dict:
    """The same, of what moves only move: so parameters are rounded in one launch, and an image by
    the kernel that makes it."""
    consumers = graph.consumers()
    for node in reversed(graph.nodes):
        if node.op not in _MOVES or node.out not in reads:
            continue
        others = set(consumers[node.out]) - {reader for reader, _ in reads[node.out]}
        if not others and all(map(_is_float32, node.values)):
            del reads[node.out]
            for role, value in node.inputs.items():
                reads.setdefault(value, []).append((node, role))
    return reads


def _read_exactly(graph: Graph) -> set[Value]:
    """The results, and what products in float32 multiply, before it is moved, too."""
    found = set(graph.outputs)
    for node in reversed(graph.nodes):
        exact = _is_product(node) and not node.tf32
        if exact or node.op in _MOVES and node.out in found:
            found.update(node.inputs.values())
    return found


def _rounds(maker: Node, kept: set[Value]) -> bool:
    """Whether a node rounds what it makes, or can, and now will: nothing that is to be kept."""
    if maker.op in _ALWAYS_ROUND and maker.tf32:
        return True
    if maker.op not in _CAN_ROUND or not kept.isdisjoint(maker.outputs.values()):
        return False
    maker.rounds = True
    return True


def _insert(graph: Graph, start: int, behind: dict[Node | None, list[Node]]) -> int:
    """Put new nodes behind those that make what they read; of what nobody makes, in front."""
    given = {*graph.inputs, *graph.parameters.values(), *graph.constants}
    first = behind.get(None, [])
    early = [node for node in first if node.inputs["x"] in given]
    late = [node for node in first if node.inputs["x"] not in given]  # of gradients that are given
    nodes, begin = list(early), 0
    for i, node in enumerate([*graph.nodes, None]):
        if i == start:
            begin = len(nodes)
            nodes += late
        if node is not None:
            nodes += [node, *behind.get(node, ())]
    graph.nodes = nodes
    return begin


def _is_product(node: Node) -> bool:
    return node.op.startswith(("conv", "linear", "attention", "skip"))


def _is_float32(value: Value) -> bool:
    return value.dtype == torch.float32
