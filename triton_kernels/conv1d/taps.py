"""The taps of a filter: how their weights lie in tiles, and what each of them sees of the input.

Used by `conv1d_kernels`, where the legend of dimensions is, and by `weights.pack_conv`.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def tile_widths(taps: int, tiles: int, widest: int) -> list[int]:
    """How many of `tiles` taps lie side by side in each tile: powers of two, since tiles are; 5 is
    4 and 1. A wide tile is asked for at once, and multiplied without a wait in between. What is
    behind the taps, the 1x1 skip, is on its own."""
    rest = taps % widest
    powers = [1 << i for i in reversed(range(rest.bit_length())) if rest >> i & 1]
    return [widest] * (taps // widest) + powers + [1] * (tiles - taps)


@triton.constexpr_function
def num_tiles(taps, tiles, widest):
    """Of one block of output channels in one K-slice."""
    return len(tile_widths(taps, tiles, widest))


@triton.constexpr_function
def tile_width(taps, tiles, widest, i):
    """Taps in tile i."""
    return tile_widths(taps, tiles, widest)[i]


@triton.constexpr_function
def tile_start(taps, tiles, widest, i):
    """The first tap of tile i."""
    return sum(tile_widths(taps, tiles, widest)[:i])


@triton.jit
def load_tile(
    ptr,  # of this program's weights
    INDEX: tl.constexpr,
    TAPS: tl.constexpr,
    TILES: tl.constexpr,
    WIDEST: tl.constexpr,
    BM: tl.constexpr,
    CG: tl.constexpr,
):
    """Tile INDEX: [BM, width CG]."""
    COLUMNS: tl.constexpr = tile_width(TAPS, TILES, WIDEST, INDEX) * CG
    offs = tl.arange(0, BM)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tl.load(ptr + tile_start(TAPS, TILES, WIDEST, INDEX) * BM * CG + offs)


@triton.jit
def shifted(
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
def row_geometry(row_0, CO: tl.constexpr, TAPS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The first output channel of a block of rows, the offsets first + i step of its taps, and
    which of two output positions it is for."""
    if TRANSPOSED:  # y[2i + q] is a sum over x[i] and x[i - 1] for q = 0, x[i + 1] for q = 1
        odd = row_0 // CO
        return row_0 % CO, 0, 2 * odd - 1, odd
    else:
        return row_0, -(TAPS // 2), 1, 0
