"""Tiles of pixels that may reach over the edges of an image, and the sums over those inside."""

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


@triton.jit
def store_partials(
    partial_ptr,  # [N, K, 2, C]
    first,  # [BLOCK_C, TILE_N], or [TILE_N, BLOCK_C]
    second,
    at,  # first image, row, column and channel
    N,
    P,
    Q,
    C,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    RAGGED: tl.constexpr,
    CHANNELS_FIRST: tl.constexpr,
):
    """Both sums of this tile, as entry k of each of its images."""
    n0, h0, w0, c0 = at
    k = tile_number(h0, w0, Q, TILE_H, TILE_W, RAGGED)
    tiles = count_tiles(P, TILE_H, RAGGED) * count_tiles(Q, TILE_W, RAGGED)
    offs_c = c0 + tl.arange(0, BLOCK_C)
    offs_n = n0 + tl.arange(0, TILE_N)
    if CHANNELS_FIRST:
        mask = (offs_c < C)[:, None] & (offs_n < N)[None, :]
    else:
        mask = (offs_n < N)[:, None] & (offs_c < C)[None, :]
    row = (offs_n.to(tl.int64) * tiles + k) * 2
    if CHANNELS_FIRST:
        ptrs = partial_ptr + row[None, :] * C + offs_c[:, None]
    else:
        ptrs = partial_ptr + row[:, None] * C + offs_c[None, :]
    tl.store(ptrs, first, mask=mask)
    tl.store(ptrs + C, second, mask=mask)
