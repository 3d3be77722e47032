"""The kernel of `apply` and of `norm_of_sums`: act(norm(x)), where mean, rstd, gain and offset come
from a table, or mean and variance from partial sums.

A program has one block of channels of one image and of one of the two halves. It asks for its
first tile of pixels and for the table, or for all sums, at once, and for each further tile before
it works on the one in front.
"""

import triton
import triton.language as tl

from ..activations import activate_affine
from ..noise.dropout import bytes_of_words, kept, kept_bits, spread_bits
from ..runtime.dependent_launch import await_inputs
from ..tf32 import as_operand
from .coefficients import load_table, modulate, parameters, store_table
from .statistics import group_moments


@triton.jit(do_not_specialize=["PB1", "PB2", "CB1", "CB2", "first", "stream"])
def norm_apply_kernel(
    x1_ptr,  # [N, HW, C1]; with a small W [N, HW / 4, C1], to be upsampled
    x2_ptr,  # [N, HW, C2] or None
    partial1_ptr,  # float32 [N, K1, 2, C1]; or None: the table is read, not made
    partial2_ptr,  # float32 [N, K2, 2, C2] or None
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    a_ptr,  # [N, HW, C1 + C2], out
    large_ptr,  # [N, HW, C1], out: x1, upsampled; or None
    table_ptr,  # float32 [N, 4, C1 + C2], or None: nobody wants it
    stride_scale,
    stride_shift,
    pixels1,  # that the partials describe
    pixels2,
    HW,
    C1,
    C2,
    PB1,  # blocks of pixels of the first half
    PB2,
    CB1,  # blocks of its channels
    CB2,
    eps,
    rng_ptr,  # int64 [2] or None: no dropout
    first,
    stream,
    drop,  # probability
    bytes_ptr,  # uint8 [N, HW, bytes of words] or None: which elements are kept, a bit each
    after_scale_ptr,  # [N, C1 + C2], or None: nothing comes behind the activation
    after_shift_ptr,  # likewise
    add_ptr,  # [N, HW, C1 + C2], or None: nothing is added to the result
    stride_after_scale,
    stride_after_shift,
    ACT: tl.constexpr,
    SMALL_W: tl.constexpr,  # of x1, if it is upsampled; or None
    CORNERS: tl.constexpr,  # then only one pixel of 2x2 is written to a
    EARLY: tl.constexpr,  # x1 and x2 are older than the launch in front, which makes the table
    K1: tl.constexpr,
    K2: tl.constexpr,
    CG: tl.constexpr,
    MASKED: tl.constexpr,  # some tiles reach over an edge
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,  # at least as many groups as BLOCK_C channels belong to
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TF32: tl.constexpr,  # products in TF32 read what is written to a
    LARGE: tl.constexpr,  # an image has 2^31 elements or more
):
    # last pixels first: L2 has those of x1 from its maker
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    blocks = PB1 * CB1 + PB2 * CB2
    n = (pid // blocks).to(tl.int64)
    pid = pid % blocks
    second = pid >= PB1 * CB1
    pid -= tl.where(second, PB1 * CB1, 0)
    CB = tl.where(second, CB2, CB1)
    CH = tl.where(second, C2, C1)
    border = tl.where(second, C1, 0)
    pixels = tl.where(second, HW, HW // 4 if SMALL_W is not None else HW)
    x_ptr = x1_ptr
    if x2_ptr is not None:
        x_ptr = tl.where(second, x2_ptr, x1_ptr)
    C = C1 + C2
    offs_h = pid % CB * BLOCK_C + tl.arange(0, BLOCK_C)  # in the half
    mask_c = offs_h < CH
    offs_c = border + offs_h
    p0 = pid // CB * (TILES * BLOCK_P)
    x_ptrs = x_ptr + n * pixels * CH + offs_h
    if partial1_ptr is None:
        if EARLY:
            x = _load_tile(x_ptrs, p0, pixels, CH, mask_c, MASKED, BLOCK_P, LARGE)
        await_inputs()
        if not EARLY:
            x = _load_tile(x_ptrs, p0, pixels, CH, mask_c, MASKED, BLOCK_P, LARGE)
        mean, rstd, g, b = load_table(table_ptr + n * 4 * C + offs_c, C, mask_c)
        slope = rstd * g
    else:
        g, b = parameters(weight_ptr, bias_ptr, offs_c, mask_c)
        await_inputs()
        x = _load_tile(x_ptrs, p0, pixels, CH, mask_c, MASKED, BLOCK_P, LARGE)
        g, b = modulate(g, b, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c)
        # or ptxas, which spares registers, asks for all this when the sums have come
        tl.debug_barrier()

        first_group = (border + pid % CB * BLOCK_C) // CG
        mean, var = group_moments(
            partial1_ptr, partial2_ptr, pixels1, pixels2, n, first_group, C1, C2,
            K1, K2, CG, BLOCK_G, BLOCK_J, BLOCK_K,
        )  # fmt: skip
        group = offs_c // CG - first_group
        mean = tl.gather(mean, group, 0)
        rstd = tl.gather(1.0 / tl.sqrt(var + eps), group, 0)
        slope = g * rstd
        if table_ptr is not None:
            if p0 == 0:
                store_table(table_ptr + n * 4 * C + offs_c, C, mean, rstd, g, b, mask_c)

    after_scale, after_shift = None, None
    if after_scale_ptr is not None:
        rows = after_scale_ptr + n * stride_after_scale, after_shift_ptr + n * stride_after_shift
        after_scale = tl.load(rows[0] + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        after_shift = tl.load(rows[1] + offs_c, mask=mask_c, other=0.0).to(tl.float32)

    c0 = border + pid % CB * BLOCK_C
    a_ptrs = a_ptr + n * HW * C + offs_c
    add_ptrs = None
    if add_ptr is not None:
        add_ptrs = add_ptr + n * HW * C + offs_c
    bytes_ptrs, mask_b = None, None
    if bytes_ptr is not None:
        offs_b = tl.arange(0, BLOCK_C // 8)
        bytes_ptrs = bytes_ptr + n * HW * bytes_of_words(C) + c0 // 8 + offs_b
        mask_b = c0 + 8 * offs_b < border + CH
    large_ptrs = None
    if large_ptr is not None:
        large_ptrs = large_ptr + n * HW * C1 + offs_h
    if TILES > 1:
        for _ in range(1, tl.minimum(tl.cdiv(pixels - p0, BLOCK_P), TILES)):
            following = _load_tile(x_ptrs, p0 + BLOCK_P, pixels, CH, mask_c, MASKED, BLOCK_P, LARGE)
            _store_tile(
                x, a_ptrs, large_ptrs, p0, pixels, C1, C, mean, slope, b, mask_c, second,
                rng_ptr, first + n, c0, stream, drop, bytes_ptrs, mask_b,
                after_scale, after_shift, add_ptrs,
                ACT, SMALL_W, CORNERS, MASKED, BLOCK_P, BLOCK_C, TF32, LARGE,
            )  # fmt: skip
            x = following
            p0 += BLOCK_P
    _store_tile(
        x, a_ptrs, large_ptrs, p0, pixels, C1, C, mean, slope, b, mask_c, second,
        rng_ptr, first + n, c0, stream, drop, bytes_ptrs, mask_b, after_scale, after_shift,
        add_ptrs, ACT, SMALL_W, CORNERS, MASKED, BLOCK_P, BLOCK_C, TF32, LARGE,
    )  # fmt: skip


@triton.jit
def _load_tile(
    x_ptrs,  # [BLOCK_C]: of the channels in pixel 0
    p0,
    pixels,
    stride,  # of a pixel
    mask_c,
    MASKED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    LARGE: tl.constexpr,
):
    """The tile of an image that begins with pixel p0, past the cache of the multiprocessor: nobody
    reads it again."""
    offs_p = p0 + tl.arange(0, BLOCK_P)
    if LARGE:
        offs_p = offs_p.to(tl.int64)
    mask = (offs_p < pixels)[:, None] & mask_c[None, :] if MASKED else None
    return tl.load(x_ptrs[None, :] + offs_p[:, None] * stride, mask=mask, cache_modifier=".cg")


@triton.jit
def _store_tile(
    x,
    a_ptrs,  # [BLOCK_C]: of the channels in pixel 0
    large_ptrs,  # likewise, or None
    p0,
    pixels,
    C1,
    C,
    mean,
    slope,
    b,
    mask_c,
    second,
    rng_ptr,  # or None
    sample,
    c0,
    stream,
    drop,
    bytes_ptrs,  # [BLOCK_C / 8]: of the channels in pixel 0, or None
    mask_b,  # likewise
    after_scale,  # [BLOCK_C] or None
    after_shift,  # likewise
    add_ptrs,  # as a_ptrs, or None
    ACT: tl.constexpr,
    SMALL_W: tl.constexpr,
    CORNERS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TF32: tl.constexpr,
    LARGE: tl.constexpr,
):
    """act(norm(x)) of the tile, what comes behind it, and dropout."""
    offs_p = p0 + tl.arange(0, BLOCK_P)
    if LARGE:
        offs_p = offs_p.to(tl.int64)
    mask = (offs_p < pixels)[:, None] & mask_c[None, :] if MASKED else None
    # x - mean first: x slope + (b - mean slope) would cancel when the mean is large
    a = x.to(tl.float32) - mean[None, :]
    a = activate_affine(a, slope[None, :], b[None, :], ACT)
    if after_scale is not None:
        a = a * after_scale[None, :] + after_shift[None, :]
    if rng_ptr is not None:
        quad = (offs_p[:, None] * C + c0) // 4 + tl.arange(0, BLOCK_C // 4)[None, :]
        if bytes_ptrs is None:
            keep = kept(rng_ptr, sample, quad, stream, drop)
        else:
            four = kept_bits(rng_ptr, sample, quad, stream, drop)
            keep = spread_bits(four)
            low, high = tl.split(tl.reshape(four, (BLOCK_P, BLOCK_C // 8, 2)))
            eight = (low | high << 4).to(tl.uint8)
            inside = (offs_p < pixels)[:, None] & mask_b[None, :] if MASKED else None
            tl.store(bytes_ptrs[None, :] + offs_p[:, None] * bytes_of_words(C), eight, mask=inside)
        a = tl.where(keep, a * (1.0 / (1.0 - drop)), 0.0)
    if add_ptrs is not None:
        a += tl.load(add_ptrs[None, :] + offs_p[:, None] * C, mask=mask).to(tl.float32)
    a = as_operand(a, a_ptrs.dtype.element_ty, TF32)
    if SMALL_W is None:
        tl.store(a_ptrs[None, :] + offs_p[:, None] * C, a, mask=mask)
    else:
        corner = offs_p // SMALL_W * (4 * SMALL_W) + offs_p % SMALL_W * 2
        place = tl.where(second, offs_p, corner)
        tl.store(a_ptrs[None, :] + place[:, None] * C, a, mask=mask)
        if not second:
            if not CORNERS:
                _store_three(a_ptrs, corner, C, SMALL_W, a, mask)
            if large_ptrs is not None:
                tl.store(large_ptrs[None, :] + corner[:, None] * C1, x, mask=mask)
                _store_three(large_ptrs, corner, C1, SMALL_W, x, mask)


@triton.jit
def _store_three(ptrs, corner, C, SMALL_W: tl.constexpr, value, mask):
    """To the other three of the 2x2 pixels whose first one is `corner`."""
    ptrs = ptrs[None, :] + corner[:, None] * C
    tl.store(ptrs + C, value, mask=mask)
    tl.store(ptrs + 2 * SMALL_W * C, value, mask=mask)
    tl.store(ptrs + (2 * SMALL_W + 1) * C, value, mask=mask)
