"""Filters that input gradients in TF32 read transposed: one launch in front of a backward pass
makes all copies, where each input gradient would make its own on the critical path.

Which kernels read a copy, their rows of the registry say (`Kernel.transposes`).
"""

from collections.abc import Sequence

import torch

from triton_kernels.registry.choose import transposes
from triton_kernels.runtime.device import Device

from .graph import Graph, Node, Value, numbered
from .launch.products import asked

# bytes of filters. Copying larger ones takes longer than a launch, which is what is spared (not
# timed), and all of them, kept for a whole pass, would be a third of the parameters' bytes or more
MOST = 8 * 2**20


def transposed_together(graph: Graph, backward: Sequence[Node], gpu: Device) -> list[Node]:
    """The nodes of a backward pass, behind the one that makes the copies that they read."""
    made = {value for node in backward for value in node.outputs.values()}
    copies: dict[Value, Value] = {}
    for node in backward:
        weight = node.inputs.get("weight")
        if weight in made or not _reads_copy(node, gpu):
            continue
        if weight not in copies:
            co, ci, r, s = *weight.shape, *(1, 1)[: 4 - len(weight.shape)]
            copies[weight] = graph.value("transposed", (ci, co, r, s), weight.dtype)
        node.inputs["transposed"] = copies[weight]
    if not copies:
        return list(backward)
    inputs, outputs = numbered("x", copies), numbered("y", copies.values())
    return [Node("transposed_filters", inputs, outputs, source="parameters"), *backward]


def _reads_copy(node: Node, gpu: Device) -> bool:
    weight = node.inputs.get("weight")
    if weight is None or weight.dtype != torch.float32 or weight.bytes > MOST or not node.tf32:
        return False
    what = asked(node)
    return what is not None and transposes(*what, gpu)
