"""Which neighbours share a launch where nothing runs beside them: in evaluations, as in sampling.

A step at batch 1 is a chain of kernels of two or three microseconds, each of which waits for its
predecessor, so its time depends on the number of kernels and on how many multiprocessors each
keeps busy. `join` visits the nodes of a forward pass in order and turns

    a norm                          into `norm_single_cta`, in which a program holds whole groups of
                                    an image in registers, or `norm_of_sums`: one launch each
    a convolution of few tiles,     into `conv_split`, split-K over all multiprocessors; the norm
    of stride 2 too                 that reads it adds the parts, else `sum_parts`, `resample_parts`
    conv, norm of few pixels        into `conv_norm`
    conv to q, k, v; attention      into `projected_attention`; for many images with the norm before
    norm, conv of large images      into `norm_conv`
    upsample, conv                  into `conv_of_upsampled`, which computes on the small image
    upsample, norm of a concat      into `norm_upsampled`, followed by `conv_upsampled`
    2x2 means, norm of few pixels   into `norm_single_cta`

The ops of the registry decide whether one launch can compute this, and whether several are faster
(`Op.why_apart`); in 32 bits there are kernels for the first two, and for what is resampled beside a
norm. This module decides for how many pixels and images a rule is tried.
"""

from types import ModuleType

from torch import Tensor

from triton_kernels.runtime.device import Device

from ..dry_run import nothing_launched
from ..graph import Graph
from .attention import attention
from .conv import conv, linear
from .norm import norm
from .resample import avg_pool, moments, upsample
from .state import Joining

RULES = {
    "conv_fused": conv,
    "conv": conv,
    "linear": linear,
    "norm": norm,
    "attention": attention,
    "upsample": upsample,
    "avg_pool": avg_pool,
    "moments": moments,
}


def join(
    graph: Graph,
    parameters: dict[str, Tensor],
    kernels: ModuleType,  # `triton_kernels.fused_ops` or its reference
    gpu: Device,
    tf32: bool = True,  # whether float32 is multiplied in TF32
) -> None:
    """Rewrite a forward pass in place, after `fuse`. The nodes are then launches on one stream."""
    first = graph.fixed(graph.nodes)  # any node may look at its filters,
    for node in graph.nodes:  # and at parts of what there is
        if node.op == "columns" and node.inputs["x"] in graph.inputs:
            first[node] = None
    graph.nodes = [*first, *(node for node in graph.nodes if node not in first)]
    with nothing_launched(gpu):
        joining = Joining(graph, parameters, kernels, gpu, tf32)
        for node in graph.nodes:
            if node not in joining.done:
                RULES.get(node.op, Joining.other)(joining, node)
        joining.need(*graph.outputs)
    graph.nodes = joining.nodes
    graph.prune()
    graph.check()
