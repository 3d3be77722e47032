"""The kernels of `stream.conv1d`, and the jit functions that they are made of.

Legend: C, T channels and positions of the input; CO, TO of the output; CG channels of a K-slice,
whole groups of the norm; CPG channels of a group; BM output channels of a program; BT, BTO powers
of two that hold T, TO; CX, TAPS_X channels and taps of the network's first convolution.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..activations import activate


@triton.jit
def _add_sums(v, sums_ptr, n, N, offs_c, offs_t, mask, C, T, SPLITS: tl.constexpr):
    """v + the partial sums of a convolution, in their order: [CG, BT]."""
    sums_ptr += n * C * T + offs_c[:, None] * T + offs_t[None, :]
    for s in tl.static_range(SPLITS):
        v += tl.load(sums_ptr + s * N * C * T, mask=mask, other=0.0, cache_modifier=".cg")
    return v


@triton.jit
def _stem_weights(weight_ptr, k, C: tl.constexpr, CG: tl.constexpr, TERMS: tl.constexpr):
    """Of channels k CG and up: [CG, terms], from [terms, C]; without a stem just a zero."""
    if weight_ptr is None:
        return 0.0
    else:
        offs_c = k * CG + tl.arange(0, CG)
        offs_k = tl.arange(0, _power_of_2(TERMS))
        mask = (offs_k < TERMS)[None, :]
        return tl.load(weight_ptr + offs_k[None, :] * C + offs_c[:, None], mask, 0.0)


@triton.jit
def _stem(weight, x_ptr, n, T, BT: tl.constexpr, CX: tl.constexpr, TAPS: tl.constexpr):
    """The network's first convolution, or its 1x1 skip, made here of its few terms: [CG, BT]."""
    offs_k, offs_t = tl.arange(0, _power_of_2(CX * TAPS)), tl.arange(0, BT)
    t = offs_t[None, :] + (offs_k % TAPS - TAPS // 2)[:, None]
    mask = (t >= 0) & (t < T) & (offs_k < CX * TAPS)[:, None]
    x_ptr += (n * T + t) * CX + (offs_k // TAPS)[:, None]
    x = tl.load(x_ptr, mask, 0.0, cache_modifier=".cg")
    return tl.dot(weight, x, input_precision="ieee")


@triton.jit
def round_to_tf32(v):
    """v to the nearest float32 of 10 bits of mantissa: tensor cores ignore the 13 bits behind
    them, which makes every product too small, and errors that all have one sign add up."""
    bits = (v.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(v == v, bits.to(tl.float32, bitcast=True), v)  # a NaN's bits may carry over


@triton.jit
def _operand(v, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """What is to be multiplied, rounded once."""
    if dtype == tl.float32 and PRECISION == "tf32":
        return round_to_tf32(v)
    else:
        return v.to(dtype)


@triton.constexpr_function
def _power_of_2(terms):
    """The depth of a product that holds so many terms."""
    return max(16, triton.next_power_of_2(terms))


@triton.jit
def _normalise(
    v, mask, eps, T: tl.constexpr, CPG: tl.constexpr, CG: tl.constexpr, BT: tl.constexpr
):
    """(v - mean) rstd per group of the slice; two passes over registers."""
    count: tl.constexpr = CPG * T
    if CG == CPG:
        d = tl.where(mask, v - tl.sum(tl.where(mask, v, 0.0)) / count, 0.0)
        return d * tl.rsqrt(tl.sum(d * d) / count + eps)
    else:
        g = tl.reshape(tl.where(mask, v, 0.0), (CG // CPG, CPG * BT))
        inside = tl.reshape(tl.broadcast_to(mask, (CG, BT)), (CG // CPG, CPG * BT))
        d = tl.where(inside, g - (tl.sum(g, axis=1) / count)[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(d * d, axis=1) / count + eps)
        return tl.reshape(d * rstd[:, None], (CG, BT))


@triton.jit
def _constants(
    bias_ptr,  # float32 [C], of what the activation is made of
    gamma_ptr,  # float32 [C], or None: neither norm nor activation
    beta_ptr,
    film_ptr,  # float32 [rows, F] from this block's columns on: scale [C] and shift [C], or
    cond_ptr,  # shift [C]; and float32 [N, F], what the condition adds to it; None: none
    row_ptr,  # int64 [1], the row of film; None: row n
    residual_bias_ptr,  # float32 [C], or None
    stem_ptr,  # float32 [CX, TAPS_X, C], or None
    residual_stem_ptr,  # float32 [CX, 1, C], or None
    n,
    k,
    film_stride,
    cond_stride,
    C: tl.constexpr,
    CG: tl.constexpr,
    SCALE: tl.constexpr,
    CX: tl.constexpr,
    TAPS_X: tl.constexpr,
):
    """What an activation needs besides the results of other launches: bias, gamma, beta, scale and
    shift of channels k CG and up, float32 [CG] each, and the weights of stems. Nothing of it is
    written by a launch that overlaps with its successor, so it can be loaded before the wait."""
    offs_c = tl.minimum(k, C // CG - 1) * CG + tl.arange(0, CG)  # behind C is the skip connection
    bias, shift = tl.load(bias_ptr + offs_c), tl.zeros([CG], tl.float32)
    gamma, beta, scale = shift, shift, shift
    if gamma_ptr is not None:
        gamma, beta = tl.load(gamma_ptr + offs_c), tl.load(beta_ptr + offs_c)
    if film_ptr is not None:
        row = n.to(tl.int64) if row_ptr is None else tl.load(row_ptr)
        film_ptr += row * film_stride + offs_c
        shift = tl.load(film_ptr + (C if SCALE else 0))
        if SCALE:
            scale = tl.load(film_ptr)
        if cond_ptr is not None:
            cond_ptr += n * cond_stride + offs_c
            shift += tl.load(cond_ptr + (C if SCALE else 0))
            if SCALE:
                scale += tl.load(cond_ptr)
    if residual_bias_ptr is not None:
        shift += tl.load(residual_bias_ptr + offs_c)
    stem = _stem_weights(stem_ptr, k, C, CG, CX * TAPS_X)
    side_stem = _stem_weights(residual_stem_ptr, k, C, CG, CX)
    return bias, gamma, beta, scale, shift, stem, side_stem


@triton.jit
def _activation(
    sums_ptr,  # float32 [SPLITS, N, C, T], or None
    x_ptr,  # float32 [N, T, CX], or None
    stem_ptr,  # float32 [CX, TAPS_X, C]: the first convolution in the place of sums, or None
    residual_ptr,  # float32 [N, C, T]; with RES_SPLITS, [RES_SPLITS, N, C, T]; None: none
    residual_stem_ptr,  # float32 [CX, 1, C], or None
    constants,
    n,
    N,
    k,  # the slice
    eps,
    C: tl.constexpr,
    T: tl.constexpr,
    CG: tl.constexpr,
    CPG: tl.constexpr,
    BT: tl.constexpr,
    NORM: tl.constexpr,
    SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    RES_SPLITS: tl.constexpr,
    CX: tl.constexpr,
    TAPS_X: tl.constexpr,
):
    """film(mish(norm(v))) + residual of channels k CG and up of sample n: float32 [CG, BT]."""
    bias, gamma, beta, scale, shift, stem, side_stem = constants
    offs_c = k * CG + tl.arange(0, CG)
    offs_t = tl.arange(0, BT)
    mask = tl.broadcast_to((offs_t < T)[None, :], (CG, BT))
    # Everything is loaded before the statistics, whose barriers no load passes
    v, r = tl.zeros([CG, BT], tl.float32), tl.zeros([CG, BT], tl.float32)
    if stem_ptr is not None:
        v = _stem(stem, x_ptr, n, T, BT, CX, TAPS_X)
    else:
        v = _add_sums(v, sums_ptr, n, N, offs_c, offs_t, mask, C, T, SPLITS)
    if residual_stem_ptr is not None:
        r = _stem(side_stem, x_ptr, n, T, BT, CX, 1)
    elif residual_ptr is not None:
        if RES_SPLITS > 0:
            r = _add_sums(r, residual_ptr, n, N, offs_c, offs_t, mask, C, T, RES_SPLITS)
        else:
            residual_ptr += n * C * T + offs_c[:, None] * T + offs_t[None, :]
            r = tl.load(residual_ptr, mask=mask, other=0.0, cache_modifier=".cg")
    v += bias[:, None]
    if NORM:
        v = _normalise(v, mask, eps, T, CPG, CG, BT) * gamma[:, None] + beta[:, None]
        v = activate(v, "mish")
    if SCALE:
        v *= scale[:, None]
    return tl.where(mask, v + shift[:, None] + r, 0.0)


@triton.jit
def _input_slice(
    sums_ptr,
    x_ptr,
    stem_ptr,
    residual_ptr,
    residual_stem_ptr,
    keep_ptr,  # float32 [N, C, T], out: the activation, or None
    skip_ptr,  # float32 [N, C2, T]: the channels behind the first C, or None
    constants,
    n,
    N,
    k,
    eps,
    keeps,  # whether this program is the one to write the activation
    C: tl.constexpr,
    C2: tl.constexpr,
    T: tl.constexpr,
    CG: tl.constexpr,
    CPG: tl.constexpr,
    BT: tl.constexpr,
    NORM: tl.constexpr,
    SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    RES_SPLITS: tl.constexpr,
    CX: tl.constexpr,
    TAPS_X: tl.constexpr,
):
    """Slice k of the activation beside the skip connection, for sample n: float32 [CG, BT]."""
    offs_c, offs_t = tl.arange(0, CG), tl.arange(0, BT)
    if C2 == 0 or k < C // CG:
        a = _activation(
            sums_ptr, x_ptr, stem_ptr, residual_ptr, residual_stem_ptr, constants, n, N, k, eps,
            C, T, CG, CPG, BT, NORM, SCALE, SPLITS, RES_SPLITS, CX, TAPS_X,
        )  # fmt: skip
        if keep_ptr is not None and keeps:
            kept = keep_ptr + n * C * T + (k * CG + offs_c)[:, None] * T + offs_t[None, :]
            tl.store(kept, a, mask=(offs_t < T)[None, :])
    else:
        skip = skip_ptr + n * C2 * T + (k * CG - C + offs_c)[:, None] * T + offs_t[None, :]
        a = tl.load(skip, mask=(offs_t < T)[None, :], other=0.0, cache_modifier=".cg")
    return a


@triton.constexpr_function
def tile_widths(taps: int, tiles: int, widest: int) -> list[int]:
    """How many of `tiles` taps lie side by side in each tile: powers of two, since tiles are; 5 is
    4 and 1. A wide tile is asked for at once, and multiplied without a wait in between. What is
    behind the taps, the 1x1 skip, is on its own."""
    rest = taps % widest
    powers = [1 << i for i in reversed(range(rest.bit_length())) if rest >> i & 1]
    return [widest] * (taps // widest) + powers + [1] * (tiles - taps)


@triton.constexpr_function
def _num_tiles(taps, tiles, widest):
    return len(tile_widths(taps, tiles, widest))


@triton.constexpr_function
def _width(taps, tiles, widest, i):
    return tile_widths(taps, tiles, widest)[i]


@triton.constexpr_function
def _start(taps, tiles, widest, i):
    return sum(tile_widths(taps, tiles, widest)[:i])


@triton.jit
def _tile(
    ptr,  # of this program's weights
    INDEX: tl.constexpr,
    TAPS: tl.constexpr,
    TILES: tl.constexpr,
    WIDEST: tl.constexpr,
    BM: tl.constexpr,
    CG: tl.constexpr,
):
    """Tile INDEX: [BM, width CG]."""
    COLUMNS: tl.constexpr = _width(TAPS, TILES, WIDEST, INDEX) * CG
    offs = tl.arange(0, BM)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tl.load(ptr + _start(TAPS, TILES, WIDEST, INDEX) * BM * CG + offs)


@triton.jit
def _shifted(
    a,  # [CG, BT]
    start,
    step,
    T: tl.constexpr,
    CG: tl.constexpr,
    BTO: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """What WIDTH taps see of a at each output position, one below the other: [WIDTH CG, BTO].
    Tap i of position p sees a[:, p STRIDE + start + i step], or zeros outside of T."""
    offs = tl.arange(0, WIDTH * BTO)
    t = offs % BTO * STRIDE + start + offs // BTO * step
    inside = (t >= 0) & (t < T)
    index = tl.broadcast_to(tl.where(inside, t, 0)[None, :], (CG, WIDTH * BTO))
    columns = tl.where(inside[None, :], tl.gather(a, index, axis=1), 0.0).to(a.dtype)
    columns = tl.permute(tl.reshape(columns, (CG, WIDTH, BTO)), (1, 0, 2))
    return tl.reshape(columns, (WIDTH * CG, BTO))


@triton.jit
def _stage_kernel(
    bias_ptr,
    gamma_ptr,
    beta_ptr,
    film_ptr,
    cond_ptr,
    row_ptr,
    residual_bias_ptr,
    sums_ptr,
    x_ptr,
    stem_ptr,
    residual_ptr,
    residual_stem_ptr,
    keep_ptr,
    skip_ptr,
    weight_ptr,  # [SLICES, MB, TILES, BM, CG], see `pack_conv`
    out_ptr,  # float32 [SLICES, N, CO, TO], out: partial sums, without bias
    side_ptr,  # float32 [SLICES, N, CO, T], out: those of the 1x1 skip, or None
    film_stride,
    cond_stride,
    eps,
    C: tl.constexpr,
    C2: tl.constexpr,
    T: tl.constexpr,
    TO: tl.constexpr,
    CO: tl.constexpr,
    CG: tl.constexpr,
    CPG: tl.constexpr,
    BT: tl.constexpr,
    BTO: tl.constexpr,
    BM: tl.constexpr,
    TAPS: tl.constexpr,
    WIDEST: tl.constexpr,
    STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    RES_SPLITS: tl.constexpr,
    CX: tl.constexpr,
    TAPS_X: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A K-slice of a convolution whose input is made here, of what the launches before left."""
    MB: tl.constexpr = (2 * CO if TRANSPOSED else CO) // BM
    TILES: tl.constexpr = TAPS + (side_ptr is not None)
    pid, n, N = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    k, m = pid // MB, pid % MB
    if PDL:
        gdc_launch_dependents()
    # The weights depend on nothing: they are on their way before the launch in front has ended
    weight_ptr += pid.to(tl.int64) * (TILES * BM * CG)
    EARLY: tl.constexpr = PRECISION == "tf32"  # else each tile is split in registers
    tiles = ()
    if EARLY:
        for i in tl.static_range(_num_tiles(TAPS, TILES, WIDEST)):
            tiles = tiles + (_tile(weight_ptr, i, TAPS, TILES, WIDEST, BM, CG),)
    constants = _constants(
        bias_ptr, gamma_ptr, beta_ptr, film_ptr, cond_ptr, row_ptr, residual_bias_ptr,
        stem_ptr, residual_stem_ptr, n, k, film_stride, cond_stride, C, CG, SCALE, CX, TAPS_X,
    )  # fmt: skip
    if PDL:
        gdc_wait()
    a = _input_slice(
        sums_ptr, x_ptr, stem_ptr, residual_ptr, residual_stem_ptr, keep_ptr, skip_ptr, constants,
        n, N, k, eps, m == 0,
        C, C2, T, CG, CPG, BT, gamma_ptr is not None, SCALE, SPLITS, RES_SPLITS, CX, TAPS_X,
    )  # fmt: skip
    a = _operand(a, weight_ptr.dtype.element_ty, PRECISION)

    offs_p = tl.arange(0, BTO)
    row_0, first, step, odd = _row_geometry(m * BM, CO, TAPS, TRANSPOSED)
    # All shifted copies of the input first: one barrier before the products instead of one a tap
    columns = ()
    for i in tl.static_range(_num_tiles(TAPS, TAPS, WIDEST)):
        start = first + _start(TAPS, TAPS, WIDEST, i) * step
        columns = columns + (
            _shifted(a, start, step, T, CG, BTO, STRIDE, _width(TAPS, TAPS, WIDEST, i)),
        )
    acc = tl.zeros([BM, BTO], tl.float32)
    SIDE: tl.constexpr = _num_tiles(TAPS, TAPS, WIDEST)
    for i in tl.static_range(SIDE):
        tile = tiles[i] if EARLY else _tile(weight_ptr, i, TAPS, TILES, WIDEST, BM, CG)
        acc = tl.dot(tile, columns[i], acc, input_precision=PRECISION)
    offs_m = row_0 + tl.arange(0, BM)
    if side_ptr is not None:
        tile = tiles[SIDE] if EARLY else _tile(weight_ptr, SIDE, TAPS, TILES, WIDEST, BM, CG)
        index = tl.broadcast_to(tl.minimum(offs_p, T - 1)[None, :], (CG, BTO))
        side = tl.dot(tile, tl.gather(a, index, axis=1), input_precision=PRECISION)
        side_ptr += (k * N + n) * CO * T + offs_m[:, None] * T + offs_p[None, :]
        tl.store(side_ptr, side, mask=(offs_p < T)[None, :])
    if TRANSPOSED:
        offs_p = 2 * offs_p + odd
    out_ptr += (k * N + n) * CO * TO + offs_m[:, None] * TO + offs_p[None, :]
    tl.store(out_ptr, acc, mask=(offs_p < TO)[None, :])


@triton.jit
def _row_geometry(row_0, CO: tl.constexpr, TAPS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The first output channel of a block of rows, the offsets first + i step of its taps, and
    which of two output positions it is for."""
    if TRANSPOSED:  # y[2i + q] is a sum over x[i] and x[i - 1] for q = 0, x[i + 1] for q = 1
        odd = row_0 // CO
        return row_0 % CO, 0, 2 * odd - 1, odd
    else:
        return row_0, -(TAPS // 2), 1, 0


@triton.jit
def _apply_kernel(
    bias_ptr,
    gamma_ptr,
    beta_ptr,
    film_ptr,
    cond_ptr,
    row_ptr,
    residual_bias_ptr,
    sums_ptr,
    x_ptr,
    stem_ptr,
    residual_ptr,
    residual_stem_ptr,
    keep_ptr,
    skip_ptr,
    a_ptr,  # [N, T, C + C2], out: the activation beside the skip connection
    film_stride,
    cond_stride,
    eps,
    C: tl.constexpr,
    C2: tl.constexpr,
    T: tl.constexpr,
    CG: tl.constexpr,
    CPG: tl.constexpr,
    BT: tl.constexpr,
    SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    RES_SPLITS: tl.constexpr,
    CX: tl.constexpr,
    TAPS_X: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """The input of a convolution, written once for all programs that read it."""
    k, n, N = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if PDL:
        gdc_launch_dependents()
    constants = _constants(
        bias_ptr, gamma_ptr, beta_ptr, film_ptr, cond_ptr, row_ptr, residual_bias_ptr,
        stem_ptr, residual_stem_ptr, n, k, film_stride, cond_stride, C, CG, SCALE, CX, TAPS_X,
    )  # fmt: skip
    if PDL:
        gdc_wait()
    a = _input_slice(
        sums_ptr, x_ptr, stem_ptr, residual_ptr, residual_stem_ptr, keep_ptr, skip_ptr, constants,
        n, N, k, eps, True,
        C, C2, T, CG, CPG, BT, gamma_ptr is not None, SCALE, SPLITS, RES_SPLITS, CX, TAPS_X,
    )  # fmt: skip
    offs_c, offs_t = k * CG + tl.arange(0, CG), tl.arange(0, BT)
    a_ptr += (n * T + offs_t)[None, :] * (C + C2) + offs_c[:, None]
    a = _operand(a, a_ptr.dtype.element_ty, PRECISION)
    tl.store(a_ptr, a, mask=(offs_t < T)[None, :])


@triton.jit
def _multiply_kernel(
    a_ptr,  # [N, T, C]
    weight_ptr,  # [SLICES, MB, TILES, BM, CG], see `pack_conv`
    out_ptr,  # float32 [splits, N, CO, TO], out
    side_ptr,  # float32 [splits, N, CO, T], out: the 1x1 skip, or None
    N,
    C: tl.constexpr,
    T: tl.constexpr,
    TO: tl.constexpr,
    CO: tl.constexpr,
    CG: tl.constexpr,
    BM: tl.constexpr,
    ROWS: tl.constexpr,  # output channels of a program: BM, or several times that
    BN: tl.constexpr,  # its positions
    BK: tl.constexpr,  # channels of a product; a divisor or a multiple of CG
    TAPS: tl.constexpr,
    WIDEST: tl.constexpr,
    STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    CHANNELS: tl.constexpr,  # of a program
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A convolution over [N, T, C], cut into tiles and along its input channels. Programs of a
    second plane of the grid make the 1x1 skip, which is one tap more."""
    TILES: tl.constexpr = TAPS + (side_ptr is not None)
    R: tl.constexpr = 2 * CO if TRANSPOSED else CO
    TP: tl.constexpr = T if TRANSPOSED else TO
    pid, split, is_side = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = pid % (R // ROWS)
    offs_p = pid // (R // ROWS) * BN + tl.arange(0, BN)
    n, p = offs_p // TP, offs_p % TP
    row_0, first, step, odd = _row_geometry(m * ROWS, CO, TAPS, TRANSPOSED)
    tap_0, taps = tl.where(is_side > 0, TAPS, 0), tl.where(is_side > 0, 1, TAPS)
    first = tl.where(is_side > 0, -TAPS, first)
    offs_m, offs_k = tl.arange(0, ROWS), tl.arange(0, BK)
    # of a tile of `width` taps side by side
    block = (m * ROWS // BM + offs_m // BM) * (TILES * BM * CG)
    pieces = block[:, None] + (offs_k // CG * (R // BM * TILES * BM * CG) + offs_k % CG)[None, :]
    within = (offs_m % BM * CG)[:, None]
    a_ptr += (n * T)[None, :] * C + offs_k[:, None]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([ROWS, BN], tl.float32)
    for i in tl.range(0, CHANNELS // BK * taps):
        c, r = split * CHANNELS + i // taps * BK, tap_0 + i % taps
        t = p * STRIDE + first + r * step
        inside = (n < N) & (t >= 0) & (t < T)
        # the tap's place: side by side with others, in a tile that begins with the first of them
        start, width = 0, 1
        for w in tl.static_range(_num_tiles(TAPS, TILES, WIDEST)):
            within_w = r >= _start(TAPS, TILES, WIDEST, w)
            start = tl.where(within_w, _start(TAPS, TILES, WIDEST, w), start)
            width = tl.where(within_w, _width(TAPS, TILES, WIDEST, w), width)
        place = c // CG * (R // BM * TILES * BM * CG) + c % CG + (start * BM + r - start) * CG
        # the compiler does not see that it is a multiple of CG, and would load number by number
        tile = tl.load(weight_ptr + tl.multiple_of(place, 16) + (pieces + within * width))
        columns = tl.load(a_ptr + (t * C)[None, :] + c, mask=inside[None, :], other=0.0)
        acc = tl.dot(tile, columns, acc, input_precision=PRECISION)
    offs_m += row_0
    if TRANSPOSED:
        p = 2 * p + odd
    if side_ptr is not None:
        if is_side:
            out_ptr = side_ptr
    out_ptr += (split * N + n)[None, :] * (CO * TO) + offs_m[:, None] * TO + p[None, :]
    tl.store(out_ptr, acc, mask=(n < N)[None, :])


@triton.jit
def _head_kernel(
    sums_ptr,  # float32 [SPLITS, N, C, T]
    bias_ptr,
    gamma_ptr,
    beta_ptr,
    weight_ptr,  # [CX, C]
    head_bias_ptr,  # float32 [CX]
    out_ptr,  # float32 [N, T, CX]
    eps,
    C: tl.constexpr,
    T: tl.constexpr,
    CPG: tl.constexpr,
    BT: tl.constexpr,
    SPLITS: tl.constexpr,
    CX: tl.constexpr,
    PDL: tl.constexpr,
):
    """The end of the network: the last norm and activation, and a 1x1 convolution, of a sample."""
    n, N = tl.program_id(0), tl.num_programs(0)
    offs_c, offs_t = tl.arange(0, C), tl.arange(0, BT)
    if PDL:
        gdc_launch_dependents()
    constants = _constants(
        bias_ptr, gamma_ptr, beta_ptr, None, None, None, None, None, None,
        n, 0, 0, 0, C, C, False, CX, 1,
    )  # fmt: skip
    if PDL:
        gdc_wait()
    a = _activation(
        sums_ptr, None, None, None, None, constants, n, N, 0, eps,
        C, T, C, CPG, BT, True, False, SPLITS, 0, CX, 1,
    )  # fmt: skip
    a = a.to(weight_ptr.dtype.element_ty).to(tl.float32)
    for x in tl.static_range(CX):
        weight = tl.load(weight_ptr + x * C + offs_c).to(tl.float32)
        y = tl.sum(weight[:, None] * a, axis=0) + tl.load(head_bias_ptr + x)
        tl.store(out_ptr + (n * T + offs_t) * CX + x, y, mask=offs_t < T)


@triton.jit
def _project_kernel(
    z_ptr,  # float32 [R, E]
    weight_ptr,  # [F, EP], zeros behind E
    bias_ptr,  # float32 [F], or None
    out_ptr,  # float32 [R, F]
    R,
    E,
    F,
    EP: tl.constexpr,
    BF: tl.constexpr,
    BE: tl.constexpr,
    BR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """mish(z) weight^T + bias."""
    offs_f = tl.program_id(0) * BF + tl.arange(0, BF)
    offs_r = tl.program_id(1) * BR + tl.arange(0, BR)
    inside_f, inside_r = offs_f < F, offs_r < R
    acc = tl.zeros([BF, BR], tl.float32)
    for e in tl.range(0, EP, BE):
        offs_e = e + tl.arange(0, BE)
        weight = tl.load(
            weight_ptr + offs_f[:, None].to(tl.int64) * EP + offs_e[None, :], inside_f[:, None], 0.0
        )
        z = tl.load(
            z_ptr + offs_r[None, :] * E + offs_e[:, None],
            inside_r[None, :] & (offs_e < E)[:, None],
            0.0,
        )
        z = _operand(activate(z, "mish"), weight.dtype, PRECISION)
        acc = tl.dot(weight, z, acc, input_precision=PRECISION)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_f, inside_f, 0.0)[:, None]
    out_ptr += offs_r[None, :].to(tl.int64) * F + offs_f[:, None]
    tl.store(out_ptr, acc, mask=inside_f[:, None] & inside_r[None, :])
