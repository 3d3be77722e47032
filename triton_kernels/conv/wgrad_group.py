"""The weight gradients of several convolutions over images of one size, in one launch where that
pays.

A weight gradient is a sum over pixels, cut into as many parts as fill the GPU, which a second
launch adds up: at small batches a good deal of the time goes into the beginning and the end of
launches, into writing the parts and adding them up. Several gradients share all of that.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..registry.choose import select
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import WeightGradsSpec, precision_of
from ..runtime.device import describe
from .hopper import group_wgrad, points_wgrad, rounds_wgrad, row_wgrad
from .hopper.group_wgrad import Gradient, Tile
from .hopper.points_wgrad import Points
from .hopper.rounds_wgrad import Rounds
from .weight_grad import conv_weight_grad, one_after_one, weight_grad_spec
from .wgrad_parts import sum_group


@configures("in_turn")
class _InTurn(NamedTuple):
    """Each by `conv_weight_grad`."""


_Plan = Tile | Rounds | Points | _InTurn


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

    def run(plan: _Plan) -> Tensor:
        return _into_copies(group, plan, allow_tf32)

    plan: _Plan = config or _InTurn()
    if len(group) > 1 and config is None:
        spec, gpu = grads_spec(group, allow_tf32), describe(group[0].x.device)
        plan = select(WEIGHT_GRADS, spec, gpu, run).config
    _run(group, accumulate, plan, allow_tf32, share)


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


WEIGHT_GRADS = Op(
    "conv_weight_grads",
    key=_key,
    kernels=(
        Kernel(
            "in_turn",
            _InTurn,
            alike=lambda spec, gpu, _: one_after_one(spec, gpu),
            delegates=True,
        ),
        group_wgrad.KERNEL,
        rounds_wgrad.KERNEL,
        points_wgrad.KERNEL,
    ),
)


def _run(
    group: Sequence[Gradient],
    accumulate: bool,
    plan: _Plan,
    allow_tf32: bool,
    share: float = 1.0,
) -> None:
    spec, gpu = grads_spec(group, allow_tf32), describe(group[0].x.device)
    if isinstance(plan, _InTurn):
        for g in group:
            conv_weight_grad(*g, accumulate=accumulate, allow_tf32=allow_tf32)
    elif isinstance(plan, Points):
        whole, pieces, programs = points_wgrad.cut(spec, gpu, plan, share)
        shape = (pieces, 1 if plan.splits else 2, plan.co, 1, plan.ci)
        parts = group[0].x.new_empty(shape, dtype=torch.float32)
        points_wgrad.launch(group, parts, plan, whole, programs, accumulate)
        if pieces:
            tiles = points_wgrad.pixel_tiles(spec, plan)
            sum_group(parts, [g.out for g in group], tiles, accumulate, whole)
    elif isinstance(plan, Rounds):
        whole = rounds_wgrad.whole_blocks(spec, gpu, plan)
        pieces = rounds_wgrad.cut_blocks(spec, gpu, plan) * plan.splits
        _run_rows(group, accumulate, pieces, plan.splits, whole)
    else:
        programs = group_wgrad.programs(spec, gpu, plan, share)
        blocks = group_wgrad.count_blocks(spec)
        _run_rows(group, accumulate, programs, programs // blocks * (programs % blocks == 0))


def _run_rows(
    group: Sequence[Gradient], accumulate: bool, pieces: int, splits: int, whole: int = 0
) -> None:
    """Those of 3x3 filters in one launch: of all blocks but those that are whole so many pieces, or
    in so many parts each."""
    shape = (pieces, 1 if splits else 2, 64, 9, 64)
    parts = group[0].x.new_empty(shape, dtype=torch.float32)
    group_wgrad.launch_rows(group, parts, whole, splits, accumulate)
    if pieces:
        tiles = math.prod(row_wgrad.tiles_of(*group[0].x.shape[:3]))
        sum_group(parts, [g.out for g in group], tiles, accumulate, whole)


def _into_copies(group: Sequence[Gradient], plan: _Plan, allow_tf32: bool) -> Tensor:
    """Results of a configuration that is tried."""
    sizes = [g.out.numel() for g in group]
    flat = group[0].x.new_empty((sum(sizes),), dtype=torch.float32)
    copies = []
    for g, place in zip(group, flat.split(sizes), strict=True):
        co, ci, r, s = g.out.shape
        copies.append(g._replace(out=place.view(co, r, s, ci).permute(0, 3, 1, 2)))
    _run(copies, False, plan, allow_tf32)
    return flat
