"""The weight gradients of two convolutions over images of one size, in one launch where that pays.

A weight gradient is a sum over pixels, and it is cut into as many parts as fill the GPU, each of
which holds the gradient of 64 x 64 channels: at small batches a good deal of the time goes into
writing the parts and adding them up. Two gradients fill the GPU with half as many parts of each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..column_sum import sum_partials
from ..conv import gluon as conv_gluon
from ..tuning import choose
from .conv import conv_weight_grad

_empty = torch.empty  # tests replace it to poison the memory


class _Plan(NamedTuple):
    splits: int  # parts of either sum, in one launch; 0: one after the other


def conv_two_weight_grads(
    x1: Tensor,  # [N, H, W, CI1]
    dy1: Tensor,  # [N, H, W, CO1]
    out1: Tensor,  # float32 [CO1, CI1, R, S] to be written; a channel of y is a row [R, S, CI1]
    x2: Tensor,  # of another convolution
    dy2: Tensor,
    out2: Tensor,
    *,
    accumulate: bool = False,  # add to `out1` and `out2`
) -> None:
    """`conv_weight_grad` of both."""

    def run(plan: _Plan) -> Tensor:
        flat = _empty((out1.numel() + out2.numel(),), dtype=torch.float32, device=x1.device)
        places = []
        for out, part in zip((out1, out2), flat.split((out1.numel(), out2.numel())), strict=True):
            co, ci, r, s = out.shape
            places.append(part.view(co, r, s, ci).permute(0, 3, 1, 2))
        _run(x1, dy1, places[0], x2, dy2, places[1], False, plan)
        return flat

    shapes = (
        *x1.shape,
        dy1.shape[3],
        *x2.shape[1:],
        dy2.shape[3],
        *out1.shape[2:],
        *out2.shape[2:],
    )
    plan = choose(
        "conv_two_weight_grads",
        (*shapes, x1.dtype),
        lambda: [_Plan(0), *_together(x1, dy1, out1, x2, dy2, out2)],
        lambda: _Plan(0),
        run,
    )
    if plan not in _together(x1, dy1, out1, x2, dy2, out2):
        plan = _Plan(0)
    _run(x1, dy1, out1, x2, dy2, out2, accumulate, plan)


def _run(
    x1: Tensor,
    dy1: Tensor,
    out1: Tensor,
    x2: Tensor,
    dy2: Tensor,
    out2: Tensor,
    accumulate: bool,
    plan: _Plan,
) -> None:
    if plan.splits == 0:
        conv_weight_grad(x1, dy1, out1, accumulate=accumulate)
        conv_weight_grad(x2, dy2, out2, accumulate=accumulate)
        return
    parts1, parts2 = (
        _empty((plan.splits, out.numel()), dtype=torch.float32, device=x1.device)
        for out in (out1, out2)
    )
    conv_gluon.weight_grad(x1, dy1, parts1, x2, dy2, parts2)
    sum_partials(parts1, out1, accumulate=accumulate)
    sum_partials(parts2, out2, accumulate=accumulate)


def _together(
    x1: Tensor, dy1: Tensor, out1: Tensor, x2: Tensor, dy2: Tensor, out2: Tensor
) -> list[_Plan]:
    padding = (out1.shape[2] // 2, out1.shape[3] // 2)
    applies = x1.shape[:3] == x2.shape[:3] and x1.shape[0] > 0
    for x, dy, out in ((x1, dy1, out1), (x2, dy2, out2)):
        applies = applies and conv_gluon.wgrad_applies(x, dy, out, padding)
    splits = conv_gluon.wgrad_splits(x1, out1, out2) if applies else 0
    return [_Plan(splits)] if splits > 1 else []
