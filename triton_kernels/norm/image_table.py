"""`norm_table` where a convolution waits for it: all sums are asked for at once, in one trip to
memory, by programs of many groups.

A program of one warp, which `norm_table` prefers, has its sums tile after tile and one tensor after
the other. Here a launch is a few large programs: as dependent launches (`dependent_launch`) small
ones would crowd on the first multiprocessors that are free.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.layout import row_stride
from .multi_pass_kernels import modulate
from .single_cta_kernels import parameters
from .statistics import group_moments
from .tables import check_partials_of, norm_table

_empty = torch.empty  # tests put a function here that returns NaNs

_LOADED = 2**13  # of either sum, that a program may load
_PARTS, _NUM_WARPS = 4, 8  # programs of an image, and warps of each


@triton.jit
def _norm_image_table_kernel(
    partial1_ptr,  # float32 [N, K1, 2, C1]
    partial2_ptr,  # float32 [N, K2, 2, C2] or None
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    table_ptr,  # float32 [N, 4, C]
    stride_scale,
    stride_shift,
    pixels1,
    pixels2,
    C1,
    C2,
    GB,
    eps,
    K1: tl.constexpr,
    K2: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid = tl.program_id(0)
    n = (pid // GB).to(tl.int64)
    g0 = pid % GB * BLOCK_G
    C = C1 + C2
    offs_j = tl.arange(0, BLOCK_J)[None, :]
    offs_c = (g0 + tl.arange(0, BLOCK_G)[:, None]) * CG + offs_j
    mask_c = (offs_j < CG) & (offs_c < C)
    g, b = parameters(weight_ptr, bias_ptr, offs_c, mask_c)
    await_inputs()
    g, b = modulate(g, b, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c)
    tl.debug_barrier()  # or ptxas asks for all this when the sums have come
    mean, var = group_moments(
        partial1_ptr, partial2_ptr, pixels1, pixels2, n, g0, C1, C2,
        K1, K2, CG, BLOCK_G, BLOCK_J, BLOCK_K,
    )  # fmt: skip
    rstd = 1.0 / tl.sqrt(var + eps)
    out_ptr = table_ptr + n * 4 * C + offs_c
    tl.store(out_ptr, mean[:, None] + tl.zeros_like(g), mask=mask_c)
    tl.store(out_ptr + C, rstd[:, None] + tl.zeros_like(g), mask=mask_c)
    tl.store(out_ptr + 2 * C, g, mask=mask_c)
    tl.store(out_ptr + 3 * C, b, mask=mask_c)


def norm_image_table(
    partials: tuple[Tensor, ...],  # of one or two tensors: float32 [N, K, 2, C1], [N, K2, 2, C2]
    pixels: tuple[int, ...],  # H W of the image that each describes
    num_groups: int,
    weight: Tensor | None,  # [C1 + C2]
    bias: Tensor | None,  # [C1 + C2]
    eps: float,
    scale: Tensor | None = None,  # [N, C1 + C2], rows may be strided
    shift: Tensor | None = None,  # [N, C1 + C2]
) -> Tensor:  # float32 [N, 4, C1 + C2]
    """`norm_table`, which does it where sums are too many."""
    first, second = partials[0], partials[1] if len(partials) == 2 else None
    n, k1, _, c1 = first.shape
    k2, c2 = (1, 0) if second is None else (second.shape[1], second.shape[3])
    cg = (c1 + c2) // num_groups
    block_g = triton.next_power_of_2(triton.cdiv(num_groups, _PARTS))
    block_j, block_k = triton.next_power_of_2(cg), triton.next_power_of_2(max(k1, k2))
    if n == 0 or block_g * block_j * block_k > _LOADED:
        return norm_table(partials, pixels, num_groups, weight, bias, eps, scale, shift)
    for part, count in zip(partials, pixels, strict=True):
        check_partials_of(part, count, n, part.shape[3])
    programs = triton.cdiv(num_groups, block_g)
    table = _empty((n, 4, c1 + c2), dtype=torch.float32, device=first.device)
    film = (scale, shift)
    _norm_image_table_kernel[(n * programs,)](
        first, second, weight, bias, *film, table, *map(row_stride, film), pixels[0], pixels[-1],
        c1, c2, programs, eps, k1, k2, cg, block_g, block_j, block_k,
        num_warps=_NUM_WARPS, **overlapping(first.device, 0),  # of any size: programs are few
    )  # fmt: skip
    return table
