"""The sum over the pixels of a tile, with few and wide accesses to shared memory.

A thread of a pass over [pixels, channels] has eight channels side by side, 16 bytes. `tl.sum` over
the pixels hands the eight sums from warp to warp one by one, and the lanes' numbers are then 32
bytes times the number of warps apart: with four warps all on one bank. Here every warp first sums
up its own pixels, by shuffles. What is left, [warps, channels], changes its layout as a whole.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import num_warps

from ..activations import compiled


@triton.constexpr_function
def _rows_of_warps(pixels, channels, warps, bits):
    """Of a tile: how many of its rows lie side by side in a warp, 16 bytes of numbers of so many
    bits a thread; 0 if that is not how it is."""
    rows = 32 * 128 // (bits * channels)
    return rows if warps > 1 and rows > 0 and pixels % (warps * rows) == 0 else 0


@triton.jit
def _sum_of_halves(v):
    """[C, W / 2] of [C, W]. `tl.split` wants both halves in one thread, so that the compiler moves
    the tensor in one go."""
    a, b = tl.split(tl.reshape(v, [v.shape[0], v.shape[1] // 2, 2]))
    return a + b


@triton.jit
def _sum_by_warps(v, WARPS: tl.constexpr, ROWS: tl.constexpr):
    v = tl.reshape(v, [v.shape[0] // (WARPS * ROWS), WARPS, ROWS, v.shape[1]])
    v = tl.trans(tl.sum(tl.sum(v, 0), 1))  # [C, warps]
    for i in tl.static_range(5):
        if WARPS >> i > 1:
            v = _sum_of_halves(v)
    return tl.reshape(v, [v.shape[0]])


@triton.jit
def sum_over_pixels(v, DTYPE: tl.constexpr):
    """[C] of [P, C]: the sums of a tile of numbers that were loaded as DTYPE."""
    if compiled():
        WARPS: tl.constexpr = num_warps()
        ROWS: tl.constexpr = _rows_of_warps(v.shape[0], v.shape[1], WARPS, DTYPE.primitive_bitwidth)
        if ROWS > 0:
            return _sum_by_warps(v, WARPS, ROWS)
        else:
            return tl.sum(v, 0)
    else:
        return tl.sum(v, 0)
