"""Passes over memory that take a norm's sums over pixels, of tensors whose makers have not:

    norm_partials        x             -> sum of x,  sum of (x - mean)^2
    norm_grad_partials   dy, x, table  -> sum of dz, sum of dz xhat;  and dz = dy act'(z)

Sums are of chunks of pixels, K to an image and all of one size: float32 [N, K, 2, C], which
`norm.tables` reads. They are written by plain stores, without atomics: the same input gives the
same bits. Sums of squares cancel when the mean is large. Here every lane of a tile runs Welford's
recurrence over its pixels, and lanes are merged as tiles are, by the formula in `norm.tables`.

A program has one chunk of BLOCK_C channels, TILES tiles of BLOCK_P pixels. x may be x1 beside x2
along the channels, a concatenation that is never in memory: the first CB1 of CB blocks of channels
are of x1. MASKED: some tiles reach over an edge.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import activate_affine, check_activation
from ..reductions.tile_sum import sum_over_pixels
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.device import describe
from ..runtime.layout import check_nhwc, check_second, check_shape, row_stride
from .coefficients import coefficients, load_table, normalised_and_dz, store_table
from .pass_grid import PassGrid, channel_block, cut_evenly, divisor_near

_TILE = 4096  # elements
SUM_PROGRAMS = 128  # that take the sums of a tensor, at least
_PIXELS = 256  # of a chunk, about, in a large batch
_MIN_PIXELS, _MIN_GRAD_PIXELS = 32, 16  # in a small one
_FEW_CHUNKS = 8  # of an image, up to which the readers of dz add up its sums themselves


@triton.jit
def _half(x1_ptr, x2_ptr, pid_c, C1, C, CB1, BLOCK_C: tl.constexpr):
    """The tensor that a block of channels is of: where it is, how many channels it has, and the
    first of the block among them; and where its channel 0 is in the whole."""
    if x2_ptr is None:
        return x1_ptr, C, pid_c * BLOCK_C, 0
    else:
        second = pid_c >= CB1
        first_block = tl.where(second, CB1, 0)
        return (
            tl.where(second, x2_ptr, x1_ptr),
            tl.where(second, C - C1, C1),
            (pid_c - first_block) * BLOCK_C,
            tl.where(second, C1, 0),
        )


@triton.jit
def _chunk(pid, x1_ptr, x2_ptr, K, C1, C, CB1, CB, BLOCK_C: tl.constexpr):
    """Where a program of a pass works: its sample (int64) and chunk of pixels; the tensor that has
    its channels, the number of channels there, and which its own are in that and in the whole, with
    their mask."""
    x_ptr, CH, c0, border = _half(x1_ptr, x2_ptr, pid % CB, C1, C, CB1, BLOCK_C)
    offs_h = c0 + tl.arange(0, BLOCK_C)
    n = (pid // CB // K).to(tl.int64)
    return n, pid // CB % K, x_ptr, CH, offs_h, border + offs_h, offs_h < CH


@triton.jit
def moments(
    x_ptr,  # [pixels, C]
    pixels,
    C,
    offs_p,
    offs_c,
    mask_c,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MASKED: tl.constexpr,
):
    """mean and M2 over the first TILES tiles of pixels, those that there are."""
    UNROLL: tl.constexpr = TILES if TILES < 4 else 4
    offs = offs_p[:, None] * C + offs_c[None, :]  # within a tile: 32 bits
    mean = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)  # of this lane's pixels so far
    m2 = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in range(0, TILES, UNROLL):
        for j in tl.static_range(UNROLL):
            i = first + j
            p0 = i * BLOCK_P
            weight = 1.0 / (i + 1)
            if MASKED:
                # only the last tile of an image has dead lanes, and no live tile follows it
                mask = (offs_p < pixels - p0)[:, None] & mask_c[None, :]
                x = tl.load(x_ptr + p0 * C + offs, mask=mask, other=0.0).to(tl.float32)
                delta = tl.where(mask, x - mean, 0.0)
            else:
                delta = tl.load(x_ptr + p0 * C + offs).to(tl.float32) - mean
            mean += delta * weight  # Welford
            m2 += delta * (delta * (1.0 - weight))

    # Chan: merge the lanes. The second sum also returns what the first has rounded off the mean.
    count = tl.minimum(tl.maximum((pixels - offs_p + BLOCK_P - 1) // BLOCK_P, 0), TILES) * 1.0
    total = tl.minimum(pixels, TILES * BLOCK_P) * 1.0
    chunk_mean = tl.sum(mean * count[:, None], 0) / total
    delta = mean - chunk_mean[None, :]
    weighted = delta * count[:, None]
    chunk_m2 = tl.sum(m2 + weighted * delta, 0)
    chunk_mean += tl.sum(weighted, 0) / total
    return chunk_mean, chunk_m2


@triton.jit
def _norm_partials_kernel(
    x1_ptr,  # [N, K * pixels, C1]
    x2_ptr,  # [N, K * pixels, C - C1] or None
    partial_ptr,  # float32 [N, K, 2, C], as in `norm.tables`
    pixels,  # of a chunk
    C1,
    C,
    K,
    CB1,
    CB,
    MASKED: tl.constexpr,  # some tiles reach over an edge
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    n, k, x_ptr, CH, offs_h, offs_c, mask_c = _chunk(
        tl.program_id(0), x1_ptr, x2_ptr, K, C1, C, CB1, CB, BLOCK_C
    )
    offs_p = tl.arange(0, BLOCK_P)
    chunk = n * K + k
    mean, m2 = moments(
        x_ptr + chunk * pixels * CH, pixels, CH, offs_p, offs_h, mask_c,
        TILES, BLOCK_P, BLOCK_C, MASKED,
    )  # fmt: skip
    out_ptr = partial_ptr + chunk * 2 * C + offs_c
    tl.store(out_ptr, mean * pixels, mask=mask_c)
    tl.store(out_ptr + C, m2, mask=mask_c)


@triton.jit
def _norm_grad_partials_kernel(
    dy_ptr,  # [N, K * pixels, C]
    x1_ptr,  # [N, K * pixels, C1]
    x2_ptr,  # [N, K * pixels, C - C1] or None
    table_ptr,  # float32 [N, 4, C]; made of what follows, and written, if there is a mean_ptr
    mean_ptr,  # float32 [N, G] or None
    rstd_ptr,  # likewise
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    dz_ptr,  # [N, K * pixels, C], out; or None
    partial_ptr,  # float32 [N, K, 2, C]: D and E of a chunk
    after_scale_ptr,  # [N, C], or None: nothing comes behind the activation
    after_ptr,  # float32 [N, K, 2, C], out: then the sums of dy act(z) and of dy
    stride_scale,
    stride_shift,
    stride_after,
    pixels,  # of a chunk
    C1,
    C,
    G,
    K,
    CB1,
    CB,
    CG: tl.constexpr,
    ACT: tl.constexpr,
    MASKED: tl.constexpr,  # some tiles reach over an edge
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    n, k, x_ptr, CH, offs_h, offs_c, mask_c = _chunk(
        tl.program_id(0), x1_ptr, x2_ptr, K, C1, C, CB1, CB, BLOCK_C
    )
    row_ptrs = table_ptr + n * 4 * C + offs_c
    if mean_ptr is None:
        mean, rstd, gain, offset = load_table(row_ptrs, C, mask_c)
    else:
        mean, rstd, gain, offset = coefficients(
            mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
            stride_scale, stride_shift, n, offs_c, mask_c, G, CG,
        )  # fmt: skip
        if k == 0:
            store_table(row_ptrs, C, mean, rstd, gain, offset, mask_c)
    chunk = n * K + k
    offs_p = tl.arange(0, BLOCK_P)
    x_ptrs = x_ptr + chunk * pixels * CH + (offs_p[:, None] * CH + offs_h[None, :])
    offs_y = chunk * pixels * C + (offs_p[:, None] * C + offs_c[None, :])
    acc_d = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    acc_e = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    acc_scale = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    acc_shift = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    if after_scale_ptr is not None:
        after_ptrs = after_scale_ptr + n * stride_after + offs_c
        after_scale = tl.load(after_ptrs, mask=mask_c, other=0.0).to(tl.float32)
    # with stores between the loads, more tiles at a time would only take registers
    UNROLL: tl.constexpr = 1 if dz_ptr is not None else (TILES if TILES < 4 else 4)
    zero = 0.0 if MASKED else None
    for i in range(0, TILES, UNROLL):
        for j in tl.static_range(UNROLL):
            p0 = (i + j) * BLOCK_P
            mask = (offs_p < pixels - p0)[:, None] & mask_c[None, :] if MASKED else None
            x = tl.load(x_ptrs + p0 * CH, mask=mask, other=zero).to(tl.float32)
            dy = tl.load(dy_ptr + offs_y + p0 * C, mask=mask, other=zero).to(tl.float32)
            if after_scale_ptr is not None:
                a = activate_affine(x - mean[None, :], (rstd * gain)[None, :], offset[None, :], ACT)
                acc_scale += dy * a
                acc_shift += dy
                dy *= after_scale[None, :]
            xhat, dz = normalised_and_dz(x, dy, mean, rstd, gain, offset, ACT)
            if dz_ptr is not None:
                tl.store(dz_ptr + offs_y + p0 * C, dz.to(dz_ptr.dtype.element_ty), mask=mask)
            acc_d += dz  # zero outside, as dy is
            acc_e += dz * xhat
    out_ptr = partial_ptr + chunk * 2 * C + offs_c
    tl.store(out_ptr, sum_over_pixels(acc_d, dy_ptr.dtype.element_ty), mask=mask_c)
    tl.store(out_ptr + C, sum_over_pixels(acc_e, dy_ptr.dtype.element_ty), mask=mask_c)
    if after_scale_ptr is not None:
        out_ptr = after_ptr + chunk * 2 * C + offs_c
        tl.store(out_ptr, sum_over_pixels(acc_scale, dy_ptr.dtype.element_ty), mask=mask_c)
        tl.store(out_ptr + C, sum_over_pixels(acc_shift, dy_ptr.dtype.element_ty), mask=mask_c)


def chunks_of_image(n: int, pixels: int, c: int, programs: int = 1) -> int:
    """K, where at least so many programs take the sums, if chunks of 32 pixels make them."""
    few = triton.cdiv(programs, max(n, 1) * triton.cdiv(c, channel_block(c)))
    wanted = max(triton.cdiv(pixels, _PIXELS), min(few, pixels // _MIN_PIXELS), 1)
    return divisor_near(pixels, wanted)


def tensor_partials(
    x: Tensor,  # [N, H, W, C]
    programs: int = 1,  # at least, as `chunks_of_image` says
) -> Tensor:  # float32 [N, K, 2, C]
    """The sum of x and of (x - mean)^2 over each chunk."""
    check_nhwc("x", x)
    n, h, w, c = x.shape
    block_c, k = channel_block(c), chunks_of_image(n, h * w, c, programs)
    grid = cut_evenly(n, h * w, c, 0, k, _TILE // block_c, block_c)
    return partials_of((x, None), grid, 4)


def partials_of(
    xs: tuple[Tensor, Tensor | None],  # [N, H, W, C1] and, beside it, [N, H, W, C - C1]
    grid: PassGrid,  # of `cut_evenly`
    num_warps: int,
) -> Tensor:  # float32 [N, K, 2, C]
    """The sum of x and of (x - mean)^2 over each chunk."""
    x, x2 = xs
    n, h, w, c1 = x.shape
    c = c1 if x2 is None else c1 + x2.shape[3]
    partials = x.new_empty((n, grid.k, 2, c), dtype=torch.float32)
    _norm_partials_kernel[(grid.programs,)](
        x, x2, partials, h * w // grid.k, c1, c, grid.k, grid.cb1, grid.cb, *grid.tile,
        num_warps=num_warps, **overlapping(x.device, n * h * w),
    )  # fmt: skip
    return partials


def grad_partials_of(
    dy: Tensor,  # [N, H, W, C]
    xs: tuple[Tensor, Tensor | None],  # [N, H, W, C1] and, beside it, [N, H, W, C - C1]
    table: Tensor,  # float32 [N, 4, C]: mean, rstd, g, b of every channel
    activation: str,
    grid: PassGrid,  # of `cut_evenly`
    num_warps: int,
    *,
    stats: Tensor | None = None,  # float32 [2, N, G]: mean and rstd; then the table is written,
    params: tuple[Tensor | None, ...] = (None,) * 4,  # from these, weight, bias, scale and shift
    dz_out: Tensor | None = None,  # [N, H, W, C]
    after: tuple[Tensor | None, Tensor | None] = (None, None),  # [N, C]; float32 [N, K, 2, C], out
) -> Tensor:  # float32 [N, K, 2, C]
    """The sum of dz = dy act'(z) and of dz xhat over each chunk, and dz itself if it is wanted.
    With a scale behind the activation dz is that times the scale, and the sums of dy act(z) and of
    dy are written."""
    x, x2 = xs
    n, h, w, c = dy.shape
    groups = 1 if stats is None else stats.shape[2]
    stats = (None, None) if stats is None else stats
    partials = dy.new_empty((n, grid.k, 2, c), dtype=torch.float32)
    _norm_grad_partials_kernel[(grid.programs,)](
        dy, x, x2, table, *stats, *params, dz_out, partials, *after,
        *map(row_stride, (*params[2:], after[0])), h * w // grid.k, x.shape[3], c, groups, grid.k,
        grid.cb1, grid.cb, c // groups, activation, *grid.tile,
        num_warps=num_warps, **overlapping(dy.device),
    )  # fmt: skip
    return partials


def activation_grad(
    da: Tensor,  # [N, H, W, C1 + C2]
    x1: Tensor,  # [N, H, W, C1], of any type
    x2: Tensor | None,  # [N, H, W, C2], of that of x1
    table: Tensor,  # float32 [N, 4, C1 + C2]: mean, rstd, g, b
    activation: str,
    after_scale: Tensor | None = None,  # [N, C1 + C2], rows may be strided
) -> tuple[Tensor, Tensor, Tensor | None]:  # as da; two float32 [N, K, 2, C1 + C2]
    """dz of a = act(z) from the gradient da, and the sums of dz and of dz xhat over each chunk,
    before dz is rounded. `conv.fused.conv_input_grad` has this in its epilogue; here da comes from
    something else, such as the resampling between activation and convolution of a block. With a
    scale behind the activation, da is of scale act(z) + shift, whose gradients are sums over the
    chunks of the last result."""
    check_activation(activation)
    check_nhwc("da", da)
    n, h, w, c = da.shape
    check_nhwc("x1", x1)
    c1, c2 = x1.shape[3], check_second(x2, n, h, w)
    check_shape("x1", x1, n, h, w, c - c2)
    check_shape("table", table, n, 4, c)
    block_c = channel_block(c1, c2)
    # a program waits for its tiles one after the other; those of eight warps are half as many
    programs = describe(da.device).busy // 2
    wanted = triton.next_power_of_2(triton.cdiv(programs, max(n * triton.cdiv(c, block_c), 1)))
    few = min(wanted, _FEW_CHUNKS, h * w // _MIN_GRAD_PIXELS)
    wanted = max(triton.cdiv(h * w, _PIXELS), few)
    grid = cut_evenly(n, h * w, c1, c2, wanted, _TILE // block_c, block_c)
    dz = da.new_empty(da.shape)
    after = (None, None)
    if after_scale is not None:
        check_shape("after_scale", after_scale, n, c)
        after = after_scale, da.new_empty((n, grid.k, 2, c), dtype=torch.float32)
    partials = grad_partials_of(da, (x1, x2), table, activation, grid, 8, dz_out=dz, after=after)
    return dz, partials, after[1]
