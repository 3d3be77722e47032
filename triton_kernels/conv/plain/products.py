"""The products of convolutions whose tiles TMA fetches, added to accumulators [channels, pixels].

x is a four-dimensional tensor to the TMA unit, and one box [TILE_N, TILE_H, TILE_W, BLOCK_K] of it,
moved by (r - pad, s - pad), is exactly what the tile of pixels needs for tap (r, s): coordinates
outside the tensor, negative ones included, come back as zeros, and that is the padding. There is no
index arithmetic and no mask. A small image simply takes several images a tile.

With stride 2, rows and columns are seen by their parity: [N, H, W, C] is [N, H / 2, 2, W / 2, 2 C]
in the same memory (`tma_boxes.by_parity`). A tap reads one parity of rows and one of columns, and
in this view that is a box again.

PRECISION "ieee" is of float32 that is not rounded to TF32: three products of TF32 for one, of
numbers that are split into two (`triton_kernels.tf32`):

    y = sum big x big  +  sum (small x big + big x small)

The products of a step are added up by themselves and then, with the rounding of float32, to the
sum: tensor cores round every addition towards zero, which over the 576 additions of 512 channels
and 9 taps would be 4e-5 of the result, thirty times the error of a sum of FMAs. The second sum is
small, so it can stay there. It is left out where it is no number: an infinity times zero, of a
filter whose second part is zero, is not in the float32 product.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...tf32 import as_operand, split_to_tf32


class Taps(NamedTuple):
    """A filter, and how a convolution reads x through its taps; made as `OutputTiles` are."""

    R: tl.constexpr
    S: tl.constexpr
    PAD_H: tl.constexpr
    PAD_W: tl.constexpr
    STRIDE: tl.constexpr
    DGRAD: tl.constexpr  # an input gradient of stride 1, of filters that have not been transposed


@triton.jit
def steps_of_part(
    steps,  # of each part
    first,  # steps of the convolution, and of two 1x1 convolutions that are added after it
    second,
    third,
):
    """For each of the three, the first step of this program's part and the step after its last."""
    start = tl.program_id(1) * steps
    end = start + steps
    before = first + second
    return (
        start,
        tl.minimum(end, first),
        tl.maximum(start - first, 0),
        tl.minimum(end - first, second),
        tl.maximum(start - before, 0),
        tl.minimum(end - before, third),
    )


@triton.jit
def _load_pixels(
    x_desc,  # [N, H, W, C] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_K]; STRIDE 2: by parity
    n0,
    h0,
    w0,
    k0,
    C,
    tap,
    taps,  # Taps
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The pixels that one tap reads, [BLOCK_M, BLOCK_K]."""
    if taps.STRIDE == 2:
        row = tap // taps.S - taps.PAD_H
        col = tap % taps.S - taps.PAD_W
        x = x_desc.load([n0, h0 + (row >> 1), row & 1, w0 + (col >> 1), (col & 1) * C + k0])
    elif taps.DGRAD:
        x = x_desc.load([n0, h0 - tap // taps.S + taps.PAD_H, w0 - tap % taps.S + taps.PAD_W, k0])
    else:
        x = x_desc.load([n0, h0 + tap // taps.S - taps.PAD_H, w0 + tap % taps.S - taps.PAD_W, k0])
    return x.reshape(BLOCK_M, BLOCK_K)


@triton.jit
def _load_filters(
    w_desc, tap, c0, k0, TRANSPOSED: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The filters of one tap, [BLOCK_C, BLOCK_K]; TRANSPOSED: memory has [BLOCK_K, BLOCK_C]."""
    if TRANSPOSED:
        return tl.trans(w_desc.load([tap, k0, c0]).reshape(BLOCK_K, BLOCK_C))
    else:
        return w_desc.load([tap, c0, k0]).reshape(BLOCK_C, BLOCK_K)


@triton.jit
def add_split_product(acc, small, w, x):
    """Add the product of float32 w [channels, k] and x [pixels, k] to the two sums."""
    x, x_small = split_to_tf32(x)
    w, w_small = split_to_tf32(w)
    x = tl.trans(x)
    x_small = tl.trans(x_small)
    small = tl.dot(w_small, x, small, input_precision="tf32")
    small = tl.dot(w, x_small, small, input_precision="tf32")
    # with the last argument the compiler does not make the sum an operand of the product
    acc += tl.dot(w, x, input_precision="tf32", max_num_imprecise_acc=w.shape[1])
    return acc, small


@triton.jit
def whole_sum(acc, small):
    """Add the second sum to the first where the second is finite."""
    return acc + tl.where(tl.abs(small) < float("inf"), small, 0.0)


@triton.jit
def multiply(
    acc,  # float32 [BLOCK_C, BLOCK_M],
    small,  # likewise: the second sum of "ieee", which no other precision changes
    x_desc,  # [N, H, W, CI] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_K]: x, or dy
    x_small_desc,  # second parts of x, or None: neither x nor the filters have been split
    w_desc,  # [R * S, CO, CI] in boxes [1, BLOCK_C, BLOCK_K]; DGRAD: CO and CI change places
    w_small_desc,  # second parts of the filters
    at,  # first image, row, column and channel of the tile
    CI,
    start,  # first step over taps and blocks of channels
    end,  # the step after the last; None: all steps
    taps,  # Taps
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add one tile of a convolution, or of its input gradient, to the two sums."""
    BLOCK_C: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    n0, h0, w0, c0 = at
    k_blocks = CI // BLOCK_K if taps.STRIDE == 2 else tl.cdiv(CI, BLOCK_K)  # of one parity
    if end is None:
        end = taps.R * taps.S * k_blocks
    for step in range(start, end):
        tap = step // k_blocks
        k0 = (step - tap * k_blocks) * BLOCK_K
        if x_small_desc is None:
            x = _load_pixels(x_desc, n0, h0, w0, k0, CI, tap, taps, BLOCK_M, BLOCK_K)
            w = _load_filters(w_desc, tap, c0, k0, taps.DGRAD, BLOCK_C, BLOCK_K)
            if PRECISION == "ieee":
                acc, small = add_split_product(acc, small, w, x)
            else:
                acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
        else:
            w_small = _load_filters(w_small_desc, tap, c0, k0, taps.DGRAD, BLOCK_C, BLOCK_K)
            x = tl.trans(_load_pixels(x_desc, n0, h0, w0, k0, CI, tap, taps, BLOCK_M, BLOCK_K))
            small = tl.dot(w_small, x, small, input_precision="tf32")
            w = _load_filters(w_desc, tap, c0, k0, taps.DGRAD, BLOCK_C, BLOCK_K)
            x_small = _load_pixels(x_small_desc, n0, h0, w0, k0, CI, tap, taps, BLOCK_M, BLOCK_K)
            small = tl.dot(w, tl.trans(x_small), small, input_precision="tf32")
            acc += tl.dot(w, x, input_precision="tf32", max_num_imprecise_acc=BLOCK_K)
    return acc, small


@triton.jit
def multiply_parity(
    acc,  # float32 [BLOCK_C, BLOCK_M]
    dy_desc,  # [N, P, Q, CO] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_K]
    w_desc,  # [R * S, CO, CI] in boxes [1, BLOCK_K, BLOCK_C]; TURNED: transposed, taps backwards
    at,  # first image, row, column and channel of the tile
    CO,
    odd_row,  # the parities of the pixels
    odd_col,
    taps,  # Taps
    TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add one tile of the input gradient of stride 2. Pixels are of four kinds, by the parities of
    row and column, and each kind sees the taps of one parity. So there are four products, each of a
    quarter of the pixels, and the four have nine taps together."""
    BLOCK_C: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    n0, h0, w0, c0 = at
    r0 = (odd_row + taps.PAD_H) % 2  # pixels of this kind see taps r0, r0 + 2, ...
    s0 = (odd_col + taps.PAD_W) % 2
    taps_h = (taps.R + 1 - r0) // 2
    taps_w = (taps.S + 1 - s0) // 2
    row = (odd_row + taps.PAD_H - r0) // 2  # of dy at tap r0; each further tap reads one row above
    col = (odd_col + taps.PAD_W - s0) // 2
    k_blocks = tl.cdiv(CO, BLOCK_K)
    for step in range(taps_h * taps_w * k_blocks):
        tap = step // k_blocks
        k0 = (step - tap * k_blocks) * BLOCK_K
        i = tap // taps_w
        j = tap - i * taps_w
        dy = dy_desc.load([n0, h0 + row - i, w0 + col - j, k0]).reshape(BLOCK_M, BLOCK_K)
        tap = (r0 + 2 * i) * taps.S + s0 + 2 * j
        if TURNED:
            tap = taps.R * taps.S - 1 - tap
        w = _load_filters(w_desc, tap, c0, k0, not TURNED, BLOCK_C, BLOCK_K)
        acc = tl.dot(w, tl.trans(dy), acc, input_precision=PRECISION)
    return acc


@triton.jit
def zero_sums(ROWS: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr):
    """ROWS accumulators."""
    accs = ()
    for _ in tl.static_range(ROWS):
        accs = accs + (tl.zeros([BLOCK_A, BLOCK_B], dtype=tl.float32),)
    return accs


@triton.jit
def multiply_rows(
    accs,  # ROWS of float32 [BLOCK_C, BLOCK_M]
    x_desc,  # [N, H, W, CI] in boxes [TILE_N, 1, TILE_W, BLOCK_K]: x, or dy
    w_desc,  # as in `multiply`
    at,  # first image, row, column and channel of the first tile
    CI,
    taps,  # 3 rows, padding 1
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,  # 2 or 4
    BLOCK_K: tl.constexpr,
):
    """Add tiles at rows h0, h0 + 1, ... of a convolution, or of its input gradient.

    A row of x is loaded once for the three rows of y around it. With few output channels, most of
    the time goes into fetching x from L2: 9 times with `multiply`, 4.5 times with four rows.
    """
    BLOCK_C: tl.constexpr = accs[0].shape[0]
    BLOCK_M: tl.constexpr = accs[0].shape[1]
    n0, h0, w0, c0 = at
    k_blocks = tl.cdiv(CI, BLOCK_K)
    for step in range(taps.S * k_blocks):
        s = step // k_blocks
        k0 = (step - s * k_blocks) * BLOCK_K
        col = w0 - s + taps.PAD_W if taps.DGRAD else w0 + s - taps.PAD_W
        ws = ()  # DGRAD: upside down, so that y at h0 + j reads x_j, x_j+1, x_j+2 as well
        for r in tl.static_range(3):
            tap = (2 - r if taps.DGRAD else r) * taps.S + s
            ws = ws + (_load_filters(w_desc, tap, c0, k0, taps.DGRAD, BLOCK_C, BLOCK_K),)
        xs = ()
        sums = ()
        for row in tl.static_range(ROWS):
            if row % 2 == 0:  # load what two rows need
                for i in tl.static_range(row + 2 if row else 0, row + 4):
                    x = x_desc.load([n0, h0 - 1 + i, col, k0]).reshape(BLOCK_M, BLOCK_K)
                    xs = xs + (tl.trans(x),)
            acc = accs[row]
            for r in tl.static_range(3):
                acc = tl.dot(ws[r], xs[row + r], acc, input_precision=PRECISION)
            sums = sums + (acc,)
        accs = sums
    return accs


@triton.jit
def multiply_pointwise(
    accs,  # ROWS of float32 [BLOCK_C, BLOCK_M]
    x_desc,  # [N, P, Q, C] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_K], not rounded to TF32 yet
    w_desc,  # [CO, C] in boxes [BLOCK_C, BLOCK_K]
    at,  # first image, row, column and channel of the first tile
    first,  # channel of x
    end,  # the channel after the last
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add tiles at rows h0, h0 + 1, ... of a 1x1 convolution."""
    BLOCK_M: tl.constexpr = accs[0].shape[1]
    n0, h0, w0, c0 = at
    for k0 in range(first, end, BLOCK_K):
        w = w_desc.load([c0, k0])
        sums = ()
        for row in tl.static_range(ROWS):
            x = x_desc.load([n0, h0 + row, w0, k0]).reshape(BLOCK_M, BLOCK_K)
            x = tl.trans(as_operand(x, x.dtype, True))
            sums = sums + (tl.dot(w, x, accs[row], input_precision=PRECISION),)
        accs = sums
    return accs
