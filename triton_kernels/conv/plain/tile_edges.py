"""Tiles of pixels that reach over the edges of an image, for kernels that sum over those inside."""

import triton
import triton.language as tl


@triton.jit
def count_tiles(side, TILE: tl.constexpr, RAGGED: tl.constexpr):
    """Tiles along a side of an image, which they divide unless they are RAGGED."""
    return tl.cdiv(side, TILE) if RAGGED else side // TILE


@triton.jit
def tile_number(h0, w0, Q, TILE_H: tl.constexpr, TILE_W: tl.constexpr, RAGGED: tl.constexpr):
    """Which of its image's tiles the one at row h0 and column w0 is."""
    return h0 // TILE_H * count_tiles(Q, TILE_W, RAGGED) + w0 // TILE_W


@triton.jit
def zero_outside(
    values,  # [channels, images, TILE_H * TILE_W]
    h0,
    w0,
    P,
    Q,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
):
    """The values of a tile at row h0 and column w0 that are inside of images [P, Q], else 0."""
    pixel = tl.arange(0, TILE_H * TILE_W)
    inside = (h0 + pixel // TILE_W < P) & (w0 + pixel % TILE_W < Q)
    return tl.where(inside[None, None, :], values, 0.0)
