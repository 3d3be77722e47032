"""Filters of 2x2 taps on the small image, of a convolution behind nearest upsampling: sums of those
of 3x3, in float32, rounded once."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_C = 64  # channels of a program


class UpsampledFilters(NamedTuple):
    """Filters of a convolution whose first input channels are upsampled."""

    summed: Tensor  # [16, CO, C1]: of 2x2 taps, by parity of rows, of columns, tap of rows, ...
    others: Tensor  # [CO, C2, 3, 3] in channels_last memory


@triton.jit
def _sum_taps_kernel(
    w_ptr,  # [CO, 9, CI]
    summed_ptr,  # [16, CO, C1]
    others_ptr,  # [CO, 9, CI - C1]
    CO,
    CI,
    C1,
    BLOCK: tl.constexpr,
):
    co = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w_ptr += co * 9 * CI + c
    others_ptr += co * 9 * (CI - C1) + c - C1
    w = ()
    for tap in tl.static_range(9):
        w = w + (tl.load(w_ptr + tap * CI, mask=c < CI, other=0.0),)
    for tap in tl.static_range(9):
        tl.store(others_ptr + tap * (CI - C1), w[tap], mask=(c >= C1) & (c < CI))
    for p in tl.static_range(2):
        for q in tl.static_range(2):
            for a in tl.static_range(2):
                for b in tl.static_range(2):
                    total = tl.zeros([BLOCK], tl.float32)
                    for r in tl.static_range(3):
                        for s in tl.static_range(3):
                            # the small row that tap r of a row of parity p reads, likewise columns
                            if (r + 1 + p) // 2 - p == a and (s + 1 + q) // 2 - q == b:
                                total += w[3 * r + s]
                    tap = ((2 * p + q) * 2 + a) * 2 + b
                    tl.store(summed_ptr + (tap * CO + co) * C1 + c, total, mask=c < C1)


def upsampled_filters(
    weight: Tensor,  # [CO, C1 + C2, 3, 3] in channels_last memory: float32, or what a user rounded
    channels: int,  # C1
    dtype: torch.dtype,
) -> UpsampledFilters:
    """Those of a convolution whose first channels are upsampled, rounded to `dtype`."""
    co, ci, _, _ = weight.shape
    assert weight.permute(0, 2, 3, 1).is_contiguous(), weight.stride()
    summed = weight.new_empty((16, co, channels), dtype=dtype)
    others = weight.new_empty((co, 3, 3, ci - channels), dtype=dtype)
    _sum_taps_kernel[(co, triton.cdiv(ci, BLOCK_C))](
        weight, summed, others, co, ci, channels, BLOCK=BLOCK_C
    )
    return UpsampledFilters(summed, others.permute(0, 3, 1, 2))
