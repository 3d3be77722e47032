"""Networks over short rows of positions, bound by reading weights: one launch per layer.

A stage is a convolution together with the operations that produce its input,

    film(mish(norm(sums of the previous layer))) + residual        beside a skip connection

from the partial sums of other stages (`triton_kernels.conv1d`). `stages` visits the nodes of a
traced network in order, defers every node that is not a convolution, and gives it to the
convolution that reads it. A 1x1 convolution of the same tensor becomes one more tile. The trace is
in float32, like the sums: a stage rounds only the operands of its products.

Values that depend only on parameters, only on the tabulated input (diffusion steps), or only on the
other input (observations) have separate nodes: see `film`.
"""

from types import ModuleType

import torch
from torch import Tensor

from triton_kernels.runtime.device import Device

from ..dry_run import DryRun, nothing_launched
from ..graph import Graph, PlanError
from ..launch.table import launcher_of
from .film import films
from .stage_rules import RULES
from .stage_state import Stages

MAX_LENGTH = 64  # positions
_BATCHED_FROM = 4  # samples; below, an activation is made by each of its readers,
_LARGE = 2**21  # unless a convolution has so many bytes of weights on average, and a copy by taps


def stages(
    graph: Graph,  # traced, with inputs (image [N, 1, T, C], tabulated [N, E], ...)
    parameters: dict[str, Tensor],
    kernels: ModuleType,  # `triton_kernels.fused_ops` or its reference
    gpu: Device,
    *,
    dtype: torch.dtype,  # of what is multiplied
    tf32: bool,
) -> None:
    """Rewrite the graph in place. Its last input is new: which row of the table all samples take,
    int64 [1], or None where each has its own. The nodes do for any number of samples and positions.
    PlanError: the kernels have no place for something, and which line of the module it is."""
    fixed = graph.fixed(graph.nodes)
    found = films(graph, graph.inputs[1:], dtype, tf32)
    work = Stages(graph, found, parameters, gpu, dtype, tf32)
    for node in list(graph.nodes):
        if node not in fixed and node not in work.done:
            RULES.get(node.op, Stages.refuse)(work, node)
    if graph.outputs[0] not in work.made:
        raise PlanError("the network does not end in a 1x1 convolution of a norm")
    graph.nodes = [*fixed, *([] if found is None else found.nodes), *work.nodes]
    graph.inputs.append(work.row)
    graph.prune()
    with nothing_launched(gpu):
        _dry_run(graph, parameters, launcher_of(kernels))
    graph.check()


def _dry_run(graph: Graph, parameters: dict, launch) -> None:
    """Drop what is not made, and decide from how many samples on a layer is two launches."""
    dry = DryRun(graph, parameters, launch)
    weights = [node for node in graph.nodes if node.op == "stage_weights"]
    before = graph.fixed(graph.nodes)
    for node in before:
        dry(node)
    copies = [node.outputs["by_tap"] for node in weights]
    sizes = [value.bytes if value in dry else 0 for value in copies]
    missing = {value for value in copies if value not in dry}
    large = bool(sizes) and min(sizes) > 0 and sum(sizes) >= _LARGE * len(sizes)
    batched_from = 1 if large else _BATCHED_FROM
    for node in graph.nodes:
        node.outputs = {role: v for role, v in node.outputs.items() if v not in missing}
        node.inputs = {role: v for role, v in node.inputs.items() if v not in missing}
        if node.op == "stage":
            node.attrs["batched_from"] = batched_from
        if node not in before:
            dry(node)
