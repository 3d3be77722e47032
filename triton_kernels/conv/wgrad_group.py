"""The weight gradients of several convolutions over images of one size, in one launch where that
pays.

A weight gradient is a sum over pixels, cut into as many parts as fill the GPU, which a second
launch adds up: at small batches a good deal of the time goes into the beginning and the end of
launches, into writing the parts and adding them up. Several gradients share all of that.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..registry.choose import select
from ..registry.kernel import Kernel, Op
from ..registry.spec import WeightGradsSpec, precision_of
from .hopper.weight_grads import group_wgrad, points_wgrad, rounds_wgrad
from .weight_grad import conv_weight_grad, one_after_one, weight_grad_spec
from .wgrad_parts import Gradient, GroupOperands


def _in_turn(_: tuple, operands: GroupOperands) -> None:
    """Each by `conv_weight_grad`."""
    options = {"accumulate": operands.accumulate, "allow_tf32": operands.spec.dtype != "fp32"}
    for gradient in operands.gradients:
        conv_weight_grad(*gradient, **options)


def conv_weight_grads(
    *gradients: tuple[Tensor, Tensor, Tensor],  # x [N, H, W, CI], dy [N, H, W, CO], `out`, as ...
    accumulate: bool = False,  # add to each `out`
    share: float = 1.0,  # of the multiprocessors, about: the fewer, the fewer parts to add up
    allow_tf32: bool = True,  # of float32
    config: tuple | None = None,  # of `WEIGHT_GRADS`, instead of the one that is chosen
) -> None:
    """... `conv_weight_grad` of each has them, up to 4. All `out` have filters of one size, all
    images are of one size, and all have padding R // 2."""
    group = [Gradient(*g) for g in gradients]
    operands = GroupOperands(group, grads_spec(group, allow_tf32), accumulate, share)
    if config is None:
        config = IN_TURN.config() if len(group) == 1 else _chosen(operands)
    WEIGHT_GRADS.kernel_of(config).launch(config, operands)


def _chosen(operands: GroupOperands) -> tuple:
    def run(config: tuple) -> Tensor:
        return _into_copies(operands, config)

    return select(WEIGHT_GRADS, operands.spec, operands.gpu, run).config


def grads_spec(gradients: Sequence[Gradient], allow_tf32: bool) -> WeightGradsSpec:
    """What is computed of such tensors, each with padding R // 2."""
    convs = []
    for x, dy, out in gradients:
        padding = (out.shape[2] // 2, out.shape[3] // 2)
        precision = precision_of(x.dtype, allow_tf32)
        convs.append(weight_grad_spec(x, dy, out, 1, padding, precision))
    contiguous = all(g.out.permute(0, 2, 3, 1).is_contiguous() for g in gradients)
    return WeightGradsSpec(convs[0].n, convs[0].dtype, tuple(convs), contiguous)


def _key(spec: WeightGradsSpec) -> dict[str, Any]:
    first = spec.convs[0]
    sizes = {"h": first.h, "w": first.w, "r": first.r, "s": first.s}
    for i, conv in enumerate(spec.convs, 1):
        sizes |= {f"ci{i}": conv.k, f"co{i}": conv.c}
    return sizes | {"dtype": spec.dtype}


IN_TURN = Kernel(
    "in_turn",
    launch=_in_turn,
    alike=lambda spec, gpu, _: one_after_one(spec, gpu),
    delegates=True,
)
WEIGHT_GRADS = Op(
    "conv_weight_grads",
    key=_key,
    kernels=(
        IN_TURN,
        group_wgrad.KERNEL,
        rounds_wgrad.KERNEL,
        points_wgrad.KERNEL,
    ),
)


def _into_copies(operands: GroupOperands, config: tuple) -> Tensor:
    """Results of a configuration that is tried."""
    sizes = [out.numel() for out in operands.outs]
    flat = operands.outs[0].new_empty((sum(sizes),))
    copies = []
    for g, place in zip(operands.gradients, flat.split(sizes), strict=True):
        co, ci, r, s = g.out.shape
        copies.append(g._replace(out=place.view(co, r, s, ci).permute(0, 3, 1, 2)))
    tried = GroupOperands(copies, operands.spec)
    WEIGHT_GRADS.kernel_of(config).launch(config, tried)
    return flat
