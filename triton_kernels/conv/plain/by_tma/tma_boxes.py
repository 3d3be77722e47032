"""How a convolution is cut into boxes that the TMA unit fetches, and tensors as it is told of them.

A box is [images, rows, columns] of pixels. A tile of a small image takes several images.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_MOST_IMAGES = 16  # of a `covering_box`, since each image has sums of its own
_BLOCKS = ("block_c", "block_k", "block_co", "block_ci")  # of channels, of a tile
_WHOLE_ROW = 128  # pixels of a row: every list of tiles has one that takes such a row whole


def _boxes(block_m: int) -> list[tuple[int, int, int]]:
    """[images, rows, columns], powers of two with product `block_m`."""
    sizes = [2**i for i in range(block_m.bit_length())]
    return [(block_m // (h * w), h, w) for w in sizes for h in sizes if h * w <= block_m]


@lru_cache
def pixel_box(block_m: int, n: int, p: int, q: int) -> tuple[int, int, int]:
    """The box [images, rows, columns], powers of two with product `block_m`, of which the fewest
    cover [n, p, q]; of equal ones that with the longest rows."""
    return min(_boxes(block_m), key=lambda b: (count_boxes(b, n, p, q), -b[2], -b[1]))


@lru_cache
def image_box(block_m: int, n: int, p: int, q: int) -> tuple[int, int, int] | None:
    """The best such box whose rows and columns divide those of an image, so that every box has
    equally many pixels, 16 or more, of each of its images; None if there is none."""
    boxes = [b for b in _boxes(block_m) if b[1] * b[2] >= 16 and p % b[1] == q % b[2] == 0]
    return min(boxes, key=lambda b: (count_boxes(b, n, p, q), -b[2], -b[1]), default=None)


@lru_cache
def covering_box(
    block_m: int,
    n: int,
    p: int,
    q: int,
    even: bool,  # every box has equally many pixels of each of its images
) -> tuple[int, int, int] | None:
    """The best such box for images of any size, for kernels that sum over the pixels of each image.
    A box may reach over the edges of an image. The sides of an even box divide those of an image,
    or cover it. None if there is no such box; a larger `block_m` may have one.

    Pixels outside of an image are multiplied in vain, and each image of a box costs its sums: as
    much as 8 pixels, which is a guess.
    """
    # if no tile takes a whole row, a small tile may have as many images as pixels
    most = block_m if q > _WHOLE_ROW and block_m <= 64 else _MOST_IMAGES
    boxes = [
        (images, h, w)
        for images, h, w in _boxes(block_m)
        if images <= most and (not even or ((p % h == 0 or h >= p) and (q % w == 0 or w >= q)))
    ]

    def cost(b: tuple[int, int, int]) -> tuple[int, int, int]:
        return count_boxes(b, n, p, q) * (block_m + 8 * b[0]), -b[2], -b[1]

    return min(boxes, key=cost, default=None)


def is_ragged(box: tuple[int, int, int], p: int, q: int) -> bool:
    """Whether boxes reach over the edges of images of these rows and columns."""
    return p % box[1] > 0 or q % box[2] > 0


def boxes_of_image(box: tuple[int, int, int], p: int, q: int) -> int:
    """How many boxes cover an image."""
    return count_boxes((1, *box[1:]), 1, p, q)


def row_box(block_m: int, rows: int, p: int, q: int) -> tuple[int, int, int] | None:
    """A box of one row, whose width divides an image's, for programs with `rows` rows; or None."""
    width = min(q & -q, block_m)
    return (block_m // width, 1, width) if width >= 16 and p % rows == 0 else None


def spread_row_box(block_m: int, rows: int, p: int, q: int) -> tuple[int, int, int] | None:
    """A box of every `rows`-th row of an image, whose columns divide the image's: `rows` such
    boxes, each one row below the other, leave no gaps. If an image has too few rows, one row of
    each of several images; or None."""
    box = row_box(block_m, rows, p, q)
    if box is not None and p % (rows * box[0]) == 0:
        return 1, box[0], box[2]
    return box


@lru_cache
def wgrad_box(block_m: int, n: int, p: int, q: int) -> tuple[tuple[int, int, int], bool]:
    """A box of at most `block_m` pixels for a weight gradient, and whether its pixels are
    successive.

    wgmma reads its left operand from shared memory only if the box is a matrix. So dy is read as
    [pixels, CO] if boxes are whole rows or images, and as a single row otherwise.
    """
    rows = block_m // q
    if q % block_m == 0 or n * p == 1:
        return (1, 1, block_m), True
    if rows * q == block_m and p % rows == 0:
        return (1, rows, q), True
    if rows * q == block_m and rows % p == 0:
        return (rows // p, p, q), True
    widths = [w for w in (16, 32, 64, 128) if w <= block_m]
    return (1, 1, min(widths, key=lambda w: triton.cdiv(q, w) * (w + 16))), False


def count_boxes(box: tuple[int, int, int], n: int, p: int, q: int) -> int:
    """How many boxes cover [n, p, q]."""
    return triton.cdiv(n, box[0]) * triton.cdiv(p, box[1]) * triton.cdiv(q, box[2])


def is_pointwise(weight: Tensor, padding: tuple[int, int]) -> bool:
    """Whether a convolution of stride 1 is a matrix product over pixels."""
    return weight.shape[2:] == (1, 1) and padding == (0, 0)


def as_one_row(x: Tensor) -> Tensor:
    """[1, 1, N * H * W, C]: a pointwise convolution treats all pixels alike."""
    return x.view(1, 1, x.numel() // x.shape[3], x.shape[3])


def by_parity(x: Tensor) -> Tensor:
    """[N, H / 2, 2, W / 2, 2 C]: rows and columns by their parity. A single row, as of 1-D data,
    stays one: [N, 1, 1, W / 2, 2 C]."""
    n, h, w, c = x.shape
    rows = (h // 2, 2) if h > 1 else (1, 1)
    return x.view(n, *rows, w // 2, 2 * c)


def in_boxes(x: Tensor, block_shape: list[int]) -> TensorDescriptor:
    """Descriptor of a contiguous tensor of any rank, with such boxes."""
    # not x.stride(), which may be anything where the size is 1
    strides = [math.prod(x.shape[i + 1 :]) for i in range(x.ndim)]
    return TensorDescriptor(x, list(x.shape), strides, block_shape)


def pixels_in_boxes(x: Tensor, box: tuple[int, int, int], channels: int) -> TensorDescriptor:
    """Descriptor of [N, H, W, C], in boxes of images, rows and columns; of a tensor of `by_parity`,
    in boxes of one parity."""
    pixels = [*box[:2], 1, box[2]] if x.ndim == 5 else box
    return in_boxes(x, [*pixels, channels])


def weight_in_boxes(weight: Tensor, block_co: int, block_ci: int) -> TensorDescriptor:
    """Filters [CO, CI, R, S] in channels_last memory, as [R * S, CO, CI]."""
    co, ci, r, s = weight.shape
    shape, strides = [r * s, co, ci], [ci, r * s * ci, 1]
    return TensorDescriptor(weight, shape, strides, [1, block_co, block_ci])


def tile_sizes(box: tuple[int, int, int], config: NamedTuple) -> dict[str, int]:
    """Constants and options of a kernel whose programs have such a box of pixels, and the blocks of
    channels of a configuration."""
    sizes = dict(zip(("TILE_N", "TILE_H", "TILE_W"), box, strict=True))
    blocks = {name.upper(): size for name, size in config._asdict().items() if name in _BLOCKS}
    return sizes | blocks | {"num_warps": config.num_warps, "num_stages": config.num_stages}
