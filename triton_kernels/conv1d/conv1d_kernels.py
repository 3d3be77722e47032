"""The kernels of `conv1d.conv1d`.

Legend: C, T channels and positions of the input; CO, TO of the output; CG channels of a K-slice,
whole groups of the norm; CPG channels of a group; BM output channels of a program; BT, BTO powers
of two that hold T, TO; CX, TAPS_X channels and taps of the network's first convolution; LAST:
sums, residuals and skip connections are [T, C] in memory, as in batches, and not [C, T].
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..activations import activate
from ..tf32 import split_to_tf32
from .activation import Given, as_operand, make_input_slice
from .taps import load_tile, num_tiles, row_geometry, shifted, tile_start, tile_width


@triton.jit
def conv1d_stage_kernel(
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
    LAST: tl.constexpr,
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
    # The weights depend on nothing: they are on their way before the previous kernel has ended
    weight_ptr += pid.to(tl.int64) * (TILES * BM * CG)
    EARLY: tl.constexpr = PRECISION == "tf32"  # else each tile is split in registers
    tiles = ()
    if EARLY:
        for i in tl.static_range(num_tiles(TAPS, TILES, WIDEST)):
            tiles = tiles + (load_tile(weight_ptr, i, TAPS, TILES, WIDEST, BM, CG),)
    a = make_input_slice(
        Given(
            bias_ptr, gamma_ptr, beta_ptr, film_ptr, cond_ptr, row_ptr, residual_bias_ptr, stem_ptr,
            residual_stem_ptr, sums_ptr, x_ptr, residual_ptr, keep_ptr, skip_ptr, film_stride,
            cond_stride, eps, C, C2, T, CG, CPG, BT, SCALE, SPLITS, RES_SPLITS, CX, TAPS_X, LAST,
        ),
        n, N, k, m == 0, PDL,
    )  # fmt: skip
    a = as_operand(a, weight_ptr.dtype.element_ty, PRECISION)

    offs_p = tl.arange(0, BTO)
    row_0, first, step, odd = row_geometry(m * BM, CO, TAPS, TRANSPOSED)
    # All shifted copies of the input first: one barrier before the products instead of one a tap
    columns = ()
    for i in tl.static_range(num_tiles(TAPS, TAPS, WIDEST)):
        start = first + tile_start(TAPS, TAPS, WIDEST, i) * step
        columns = columns + (
            shifted(a, start, step, T, CG, BTO, STRIDE, tile_width(TAPS, TAPS, WIDEST, i)),
        )
    acc = tl.zeros([BM, BTO], tl.float32)
    SIDE: tl.constexpr = num_tiles(TAPS, TAPS, WIDEST)
    for i in tl.static_range(SIDE):
        tile = tiles[i] if EARLY else load_tile(weight_ptr, i, TAPS, TILES, WIDEST, BM, CG)
        acc = tl.dot(tile, columns[i], acc, input_precision=PRECISION)
    offs_m = row_0 + tl.arange(0, BM)
    if side_ptr is not None:
        tile = tiles[SIDE] if EARLY else load_tile(weight_ptr, SIDE, TAPS, TILES, WIDEST, BM, CG)
        index = tl.broadcast_to(tl.minimum(offs_p, T - 1)[None, :], (CG, BTO))
        side = tl.dot(tile, tl.gather(a, index, axis=1), input_precision=PRECISION)
        side_ptr += (k * N + n) * CO * T + offs_m[:, None] * T + offs_p[None, :]
        tl.store(side_ptr, side, mask=(offs_p < T)[None, :])
    if TRANSPOSED:
        offs_p = 2 * offs_p + odd
    out_ptr += (k * N + n) * CO * TO + offs_m[:, None] * TO + offs_p[None, :]
    tl.store(out_ptr, acc, mask=(offs_p < TO)[None, :])


@triton.jit
def conv1d_apply_kernel(
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
    a_ptr,  # [N, T, C + C2], out: the activation beside the skip connection; SPLIT: all of that,
    # and behind it what is left of each number, see `tf32`
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
    LAST: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """The input of a convolution, written once for all programs that read it."""
    k, n, N = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if PDL:
        gdc_launch_dependents()
    a = make_input_slice(
        Given(
            bias_ptr, gamma_ptr, beta_ptr, film_ptr, cond_ptr, row_ptr, residual_bias_ptr, stem_ptr,
            residual_stem_ptr, sums_ptr, x_ptr, residual_ptr, keep_ptr, skip_ptr, film_stride,
            cond_stride, eps, C, C2, T, CG, CPG, BT, SCALE, SPLITS, RES_SPLITS, CX, TAPS_X, LAST,
        ),
        n, N, k, True, PDL,
    )  # fmt: skip
    offs_c, offs_t = k * CG + tl.arange(0, CG), tl.arange(0, BT)
    mask = (offs_t < T)[None, :]
    if SPLIT:
        a_ptr += (n * T + offs_t)[None, :] * (2 * (C + C2)) + offs_c[:, None]
        a, rest = split_to_tf32(a)
        tl.store(a_ptr + C + C2, rest, mask=mask)
    else:
        a_ptr += (n * T + offs_t)[None, :] * (C + C2) + offs_c[:, None]
        a = as_operand(a, a_ptr.dtype.element_ty, PRECISION)
    tl.store(a_ptr, a, mask=mask)


@triton.jit
def conv1d_multiply_kernel(
    a_ptr,  # [N, T, C]
    weight_ptr,  # [SLICES, MB, TILES, BM, CG], see `pack_conv`
    out_ptr,  # float32 [splits, N, TO, CO], out
    side_ptr,  # float32 [splits, N, T, CO], out: the 1x1 skip, or None
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
    row_0, first, step, odd = row_geometry(m * ROWS, CO, TAPS, TRANSPOSED)
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
        for w in tl.static_range(num_tiles(TAPS, TILES, WIDEST)):
            within_w = r >= tile_start(TAPS, TILES, WIDEST, w)
            start = tl.where(within_w, tile_start(TAPS, TILES, WIDEST, w), start)
            width = tl.where(within_w, tile_width(TAPS, TILES, WIDEST, w), width)
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
    out_ptr += ((split * N + n) * (CO * TO) + p * CO)[:, None] + offs_m[None, :]
    tl.store(out_ptr, tl.trans(acc), mask=(n < N)[:, None])


@triton.jit
def conv1d_head_kernel(
    sums_ptr,  # float32 [SPLITS, N, C, T], or [SPLITS, N, T, C] if LAST
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
    LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The end of the network: the last norm and activation, and a 1x1 convolution, of a sample."""
    n, N = tl.program_id(0), tl.num_programs(0)
    offs_c, offs_t = tl.arange(0, C), tl.arange(0, BT)
    if PDL:
        gdc_launch_dependents()
    a = make_input_slice(
        Given(
            bias_ptr, gamma_ptr, beta_ptr, None, None, None, None, None, None, sums_ptr, None, None,
            None, None, 0, 0, eps, C, 0, T, C, CPG, BT, False, SPLITS, 0, CX, 1, LAST,
        ),
        n, N, 0, False, PDL,
    )  # fmt: skip
    a = a.to(weight_ptr.dtype.element_ty).to(tl.float32)
    for x in tl.static_range(CX):
        weight = tl.load(weight_ptr + x * C + offs_c).to(tl.float32)
        y = tl.sum(weight[:, None] * a, axis=0) + tl.load(head_bias_ptr + x)
        tl.store(out_ptr + (n * T + offs_t) * CX + x, y, mask=offs_t < T)


@triton.jit
def conv1d_project_kernel(
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
        z = as_operand(activate(z, "mish"), weight.dtype, PRECISION)
        acc = tl.dot(weight, z, acc, input_precision=PRECISION)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_f, inside_f, 0.0)[:, None]
    out_ptr += offs_r[None, :].to(tl.int64) * F + offs_f[:, None]
    tl.store(out_ptr, acc, mask=inside_f[:, None] & inside_r[None, :])
