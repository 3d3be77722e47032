"""Which neighbours are one launch where nothing runs beside them: evaluations, as of sampling.

A step at batch 1 is a chain of kernels of two or three microseconds, each of which waits for the
one before, so time goes with their number and with how many multiprocessors each keeps busy.
`join` goes through the nodes of a forward pass in their order and makes of

    a norm                          `norm_whole`, a program with whole groups of an image in its
                                    registers, or `norm_of_sums`: one launch each
    a convolution of few tiles      `conv_split`, its sum in parts on all multiprocessors, which
                                    the norm that reads it adds; else `sum_parts`, `resample_parts`
    conv, norm of few pixels        `conv_norm`; of more images `conv_meeting`, whose programs
                                    wait for one another
    conv to q, k, v; attention      `projected_attention`; of many images with the norm in front
    norm, conv to q, k, v           of more positions `norm_linear`
    norm, conv of large images      `norm_conv`, `norm_conv_of_two`; and 2x2 means behind it
    conv, 2x2 means                 `conv_means`
    upsample, conv                  `conv_of_upsampled`, which multiplies on the small image
    upsample, norm of a concat      `norm_upsampled`; and `conv_upsampled` behind it
    2x2 means, norm of few pixels   `norm_whole`; else means with their sums, `avg_pool_partials`

What can be one launch, and whether several are faster, the ops of the registry say
(`Op.why_apart`); for how many pixels and images a rule is tried is said here.
"""

from types import ModuleType

from torch import Tensor

from triton_kernels.runtime.device import Device

from ..dry_run import nothing_launched
from ..graph import Graph, Value
from ..schedule import fixed_nodes
from . import launches  # noqa: F401  it registers them
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
    meets: bool = True,  # whether programs of a launch may wait for one another
) -> dict[Value, list[str]]:
    """Rewrite a forward pass that `fuse` has been through, in place; why each value is made as it
    is. Its nodes are then for launches one after the other, on one stream; with `meets` no other
    evaluation may be under way on the GPU."""
    first = fixed_nodes(graph, graph.nodes)  # any node may look at its filters,
    for node in graph.nodes:  # and at parts of what there is
        if node.op == "columns" and node.inputs["x"] in graph.inputs:
            first[node] = None
    graph.nodes = [*first, *(node for node in graph.nodes if node not in first)]
    with nothing_launched(gpu):
        joining = Joining(graph, parameters, kernels, gpu, meets)
        for node in graph.nodes:
            if node not in joining.done:
                RULES.get(node.op, Joining.other)(joining, node)
        joining.need(*graph.outputs)
    graph.nodes = joining.nodes
    graph.prune()
    graph.check()
    return joining.why
