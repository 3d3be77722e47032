"""How tiles cut the result of a convolution, and the sums over the pixels of a tile."""

from typing import NamedTuple

import triton
import triton.language as tl


class OutputTiles(NamedTuple):
    """A result [N, P, Q, C] and the tiles that cover it. A kernel makes it among the arguments of a
    call: the compiler would turn the constants of a tuple that is assigned into numbers."""

    N: tl.tensor
    P: tl.tensor
    Q: tl.tensor
    C: tl.tensor
    TILE_N: tl.constexpr
    TILE_H: tl.constexpr
    TILE_W: tl.constexpr
    BLOCK_C: tl.constexpr
    RAGGED: tl.constexpr  # some tiles reach over the edges of images


@triton.jit
def box_origin(
    tile,
    tiles_h,  # down and across an image
    tiles_w,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
):
    """First image, row and column of a tile of pixels."""
    w0 = tile % tiles_w * TILE_W
    h0 = tile // tiles_w % tiles_h * TILE_H
    n0 = tile // (tiles_w * tiles_h) * TILE_N
    return n0, h0, w0


@triton.jit
def tile_origin(
    P,
    Q,
    C,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """First image, row, column and channel of this program's tile. Programs that share pixels are
    neighbours, so x comes from memory once and then from L2."""
    num_c = tl.cdiv(C, BLOCK_C)
    tiles_h = tl.cdiv(P, TILE_H)
    tiles_w = tl.cdiv(Q, TILE_W)
    tile = tl.program_id(0) // num_c
    c0 = tl.program_id(0) % num_c * BLOCK_C
    n0, h0, w0 = box_origin(tile, tiles_h, tiles_w, TILE_N, TILE_H, TILE_W)
    return n0, h0, w0, c0


@triton.jit
def _count_tiles(side, TILE: tl.constexpr, RAGGED: tl.constexpr):
    """Tiles along a side of an image."""
    return tl.cdiv(side, TILE) if RAGGED else side // TILE


@triton.jit
def tile_number(h0, w0, tiles):
    """The number of this tile among the tiles of its image, and how many there are."""
    across = _count_tiles(tiles.Q, tiles.TILE_W, tiles.RAGGED)
    k = h0 // tiles.TILE_H * across + w0 // tiles.TILE_W
    return k, _count_tiles(tiles.P, tiles.TILE_H, tiles.RAGGED) * across


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
    """The values of a tile at row h0 and column w0 of images [P, Q]; zero outside of them."""
    pixel = tl.arange(0, TILE_H * TILE_W)
    inside = (h0 + pixel // TILE_W < P) & (w0 + pixel % TILE_W < Q)
    return tl.where(inside[None, None, :], values, 0.0)


@triton.jit
def store_partials(
    partial_ptr,  # [N, K, 2, C]
    first,  # [BLOCK_C, TILE_N], or [TILE_N, BLOCK_C]
    second,
    at,  # first image, row, column and channel
    tiles,  # OutputTiles
    CHANNELS_FIRST: tl.constexpr,
):
    """Write both sums of this tile, as entry k of each of its images."""
    n0, h0, w0, c0 = at
    k, count = tile_number(h0, w0, tiles)
    offs_c = c0 + tl.arange(0, tiles.BLOCK_C)
    offs_n = n0 + tl.arange(0, tiles.TILE_N)
    if CHANNELS_FIRST:
        mask = (offs_c < tiles.C)[:, None] & (offs_n < tiles.N)[None, :]
    else:
        mask = (offs_n < tiles.N)[:, None] & (offs_c < tiles.C)[None, :]
    row = (offs_n.to(tl.int64) * count + k) * 2
    if CHANNELS_FIRST:
        ptrs = partial_ptr + row[None, :] * tiles.C + offs_c[:, None]
    else:
        ptrs = partial_ptr + row[:, None] * tiles.C + offs_c[None, :]
    tl.store(ptrs, first, mask=mask)
    tl.store(ptrs + tiles.C, second, mask=mask)
