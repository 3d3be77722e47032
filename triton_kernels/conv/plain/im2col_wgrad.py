"""Weight gradient in float32 of filters over few channels, as the stem's: x in columns.

    dweight[co, (r, s, ci)] = sum_m dy[m, co] columns[m, (r, s, ci)]

The nine taps of three channels are 27 numbers a pixel, which lie scattered in x. Gathered in the
product's loop they go through registers and shared memory before they are split for three products
in TF32. A copy of x in columns, 28 numbers a pixel, is half as large as dy, and to
`conv.hopper.mma_wgrad` it is the x of a 1x1 filter.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..hopper import mma_wgrad
from .tma_boxes import aligned

_MOST_COLUMNS = 64  # a block of `mma_wgrad`
_FEWEST_PIXELS = 2**14  # which pay for a copy
_TILE = mma_wgrad.TILES[0]


@triton.jit(do_not_specialize=["H", "W", "P", "Q", "num_pixels"])
def _columns_kernel(
    x_ptr,  # [N, H, W, CI]
    out_ptr,  # [N * P * Q, WIDTH]
    H,
    W,
    P,
    Q,
    num_pixels,
    CI: tl.constexpr,
    S: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    WIDTH: tl.constexpr,  # TAPS * CI, and zeros up to 16 bytes
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_W)
    tap = column // CI
    n = offs_m // (P * Q)
    row = (offs_m // Q % P * STRIDE - PAD_H)[:, None] + (tap // S)[None, :]
    col = (offs_m % Q * STRIDE - PAD_W)[:, None] + (tap % S)[None, :]
    inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & (tap < TAPS)[None, :]
    inside &= (offs_m < num_pixels)[:, None]
    pixel = (n.to(tl.int64) * H * W)[:, None] + row * W + col
    x = tl.load(x_ptr + pixel * CI + (column % CI)[None, :], mask=inside, other=0.0)
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out_ptrs, x, mask=(offs_m < num_pixels)[:, None] & (column < WIDTH)[None, :])


def serves_wgrad(x: Tensor, dy: Tensor, weight: Tensor, precision: str) -> bool:
    """Whether `launch_wgrad` can do this weight gradient, and a copy pays."""
    co, ci, r, s = weight.shape
    few = ci < 16 and r * s * ci <= _MOST_COLUMNS
    fits = co % 4 == 0 and co >= 32 and aligned(dy)
    many = _FEWEST_PIXELS <= dy.numel() // co < 2**31 // _MOST_COLUMNS
    return precision == "ieee" and few and fits and many and mma_wgrad.serves(x)


def plan_wgrad(x, dy, weight, stride, padding, precision, config) -> tuple[mma_wgrad.Tile, int]:
    """The tile, and the number of parts that the sum over pixels is split into."""
    assert config is None
    return _TILE, mma_wgrad.mma_splits(dy, dy, _as_pointwise(weight), (0, 0), precision, _TILE)


def launch_wgrad(
    x: Tensor,  # float32 [N, H, W, CI]
    dy: Tensor,  # float32 [N, P, Q, CO]
    weight: Tensor,  # [CO, CI, R, S], of which only the shape matters
    partial: Tensor,  # [splits, CO * R * S * CI], or one part alone, to be written
    stride: int,
    padding: tuple[int, int],
    precision: str,
    tile: mma_wgrad.Tile,
    splits: int,
) -> None:
    """The gradient of the filters, as `splits` parts that have to be added up."""
    columns = to_columns(x, dy, weight, stride, padding)
    mma_wgrad.launch_mma(columns, dy, _as_pointwise(weight), partial, (0, 0), 3, tile, splits)


def to_columns(
    x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: tuple[int, int]
) -> Tensor:  # [N, P, Q, R * S * CI in multiples of 16 bytes]
    """What the filter sees of x at each pixel of dy."""
    _, h, w, ci = x.shape
    n, p, q, _ = dy.shape
    _, _, r, s = weight.shape
    width = triton.cdiv(r * s * ci, 4) * 4
    columns = x.new_empty((n, p, q, width))
    block_w = triton.next_power_of_2(width)
    block_m = 4096 // block_w
    _columns_kernel[(triton.cdiv(n * p * q, block_m),)](
        x, columns, h, w, p, q, n * p * q, CI=ci, S=s, TAPS=r * s, STRIDE=stride,
        PAD_H=padding[0], PAD_W=padding[1], WIDTH=width, BLOCK_W=block_w, BLOCK_M=block_m,
        num_warps=4,
    )  # fmt: skip
    return columns


def _as_pointwise(weight: Tensor) -> Tensor:
    """Filters of as many numbers, of which the sum has the shape."""
    co, ci, r, s = weight.shape
    return weight.new_empty((1,)).expand(co, r * s * ci, 1, 1)
