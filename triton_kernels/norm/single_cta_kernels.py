"""The kernel of `norm_single_cta`, where the formulas are.

A program has BLOCK_G groups of CG channels of one image, all its pixels, in registers:
BLOCK_G * BLOCK_J lanes of channels by BLOCK_P pixels.

In which order its loads stand says `reductions.conv_parts`.
"""

import triton
import triton.language as tl

from ..activations import activate
from ..reductions.conv_parts import load_parts, sum_of_parts, terms_of_parts
from ..runtime.dependent_launch import await_inputs, begin_next
from ..tf32 import as_operand
from .coefficients import modulate, parameters
from .statistics import add_pairs, each_lane


@triton.jit
def sum_of_lanes(v, G: tl.constexpr, J: tl.constexpr):
    """The sums over groups of J lanes of v [G * J], for every lane."""
    return each_lane(tl.sum(tl.reshape(v, [G, J]), 1), G, J)


@triton.jit
def _over_groups(v, G: tl.constexpr, J: tl.constexpr):
    """The sum of v [G * J, P] over each group's lanes and pixels, for every lane."""
    if G == 1:  # threads meet once
        return tl.sum(v) + tl.zeros([J], tl.float32)
    else:
        # not a sum over [G, J * P]: of such a reshaped tensor Triton 3.6 adds the wrong lanes
        return sum_of_lanes(tl.sum(v, 1), G, J)


@triton.jit
def _two_over_groups(v, w, G: tl.constexpr, J: tl.constexpr):
    """`_over_groups` of both, in which threads meet once."""
    if G == 1:
        v, w = tl.ravel(v, can_reorder=True), tl.ravel(w, can_reorder=True)
        v, w = tl.reduce((v, w), 0, add_pairs)
        return v + tl.zeros([J], tl.float32), w + tl.zeros([J], tl.float32)
    else:
        v, w = tl.reduce((v, w), 1, add_pairs)
        return sum_of_lanes(v, G, J), sum_of_lanes(w, G, J)


@triton.jit(do_not_specialize=["N"])
def norm_single_cta_kernel(
    x1_ptr,  # [N, HW, C1]; with SPLITS > 0 it is written, if it is not None
    pooled_ptr,  # [N, HW, C1], out, or None: x1 is [N, 4 HW, C1], of which these are 2x2 means
    parts_ptr,  # float32 [SPLITS, N, C1, HW], or None: x1 is read
    conv_bias_ptr,  # of the convolution, as the next four
    extra_bias_ptr,
    emb_ptr,
    residual_ptr,
    factor,  # or None
    x2_ptr,  # [N, HW, C - C1] or None
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    a_ptr,  # [N, HW, C], out
    stride_emb,
    stride_scale,
    stride_shift,
    N,
    HW,
    C1,
    C,
    GB,
    eps,
    ACT: tl.constexpr,
    SPLITS: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_P: tl.constexpr,
    W: tl.constexpr,  # with a pooled_ptr
    LATE: tl.constexpr,  # the convolution's terms are read when the previous kernel has ended;
    # else they are older than that launch
    TF32: tl.constexpr,  # products in TF32 read what is written to a, and the means
):
    begin_next()
    pid = tl.program_id(0)
    n = (pid // GB).to(tl.int64)
    lanes = tl.arange(0, BLOCK_G * BLOCK_J)
    j = lanes % BLOCK_J
    offs_c = (pid % GB * BLOCK_G + lanes // BLOCK_J) * CG + j
    offs_p = tl.arange(0, BLOCK_P)
    mask_c = (j < CG) & (offs_c < C)
    mask_p = offs_p < HW
    mask = mask_c[:, None] & mask_p[None, :]
    first = mask_c & (offs_c < C1)
    g, b = parameters(weight_ptr, bias_ptr, offs_c, mask_c)
    if LATE:
        await_inputs()
    if SPLITS > 0:
        terms = terms_of_parts(conv_bias_ptr, extra_bias_ptr, emb_ptr, stride_emb, n, offs_c, first)
    if not LATE:
        await_inputs()
    here = first[:, None] & mask_p[None, :]
    offs1 = (n * HW + offs_p)[None, :] * C1 + offs_c[:, None]
    if SPLITS > 0:
        parts = load_parts(
            parts_ptr, residual_ptr, N, HW, C1, n, offs_c, offs_p, first, mask_p, SPLITS
        )
    elif pooled_ptr is not None:
        corner = n * 4 * HW + offs_p // W * (4 * W) + offs_p % W * 2
        ptrs = x1_ptr + corner[None, :] * C1 + offs_c[:, None]
        four = ()
        for i in tl.static_range(4):
            pixel = i // 2 * (2 * W) + i % 2
            four = four + (tl.load(ptrs + pixel * C1, mask=here, other=0.0),)
    else:
        x = tl.load(x1_ptr + offs1, mask=here, other=0.0).to(tl.float32)
    if x2_ptr is not None:
        second = mask_c & (offs_c >= C1)
        offs = (n * HW + offs_p)[None, :] * (C - C1) + (offs_c - C1)[:, None]
        x2 = tl.load(x2_ptr + offs, mask=second[:, None] & mask_p[None, :], other=0.0)
    g, b = modulate(g, b, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c)
    if SPLITS > 0:  # rounded, as its other readers see it
        x = sum_of_parts(terms, parts, factor)
        y = x.to(a_ptr.dtype.element_ty)
        if x1_ptr is not None:
            tl.store(x1_ptr + offs1, y, mask=here)
        x = y.to(tl.float32)
    elif pooled_ptr is not None:
        x = tl.zeros(here.shape, tl.float32)
        for i in tl.static_range(4):
            x += four[i].to(tl.float32)
        y = as_operand(x * 0.25, a_ptr.dtype.element_ty, TF32)
        tl.store(pooled_ptr + offs1, y, mask=here)
        x = y.to(tl.float32)
    if x2_ptr is not None:
        x = tl.where(second[:, None], x2.to(tl.float32), x)

    count = HW * CG * 1.0
    x = tl.where(mask, x, 0.0)
    mean = _over_groups(x, BLOCK_G, BLOCK_J) / count
    x = tl.where(mask, x - mean[:, None], 0.0)
    rest, var = _two_over_groups(x, x * x, BLOCK_G, BLOCK_J)
    rest /= count  # what the sum has rounded off the mean
    var = var / count - rest * rest
    rstd = 1.0 / tl.sqrt(var + eps)
    a = activate((x - rest[:, None]) * (rstd * g)[:, None] + b[:, None], ACT)
    offs = (n * HW + offs_p)[None, :] * C + offs_c[:, None]
    tl.store(a_ptr + offs, as_operand(a, a_ptr.dtype.element_ty, TF32), mask=mask)
