"""3x3 convolutions of few images for Hopper, written in Gluon: a program has 64 channels of a row
of pixels, or of a part of it, and its whole sum.

At batch 1 what counts is how long a program waits. Here it asks for its filters before the launch
in front has ended, and for its pixels all at once behind it, by TMA, so that no thread moves what
it multiplies. Since no sum is in parts, nobody has to add them. How, stands in `one_row_kernels`.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from ...hopper.descriptors import SUPPORTED, in_boxes, takes
from ...runtime.dependent_launch import overlapping
from ...runtime.device import describe
from .operands import Operands, filters_in_boxes

if SUPPORTED:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .one_row_kernels import conv_one_row_kernel

_WIDTHS = (16, 32, 64)  # pixels of a row
_MOST_PIXELS = 64  # of a tile
_MAX_IMAGES = 4  # of more nothing was measured
_PARTS_PIXELS = 256  # of an image
_ENDLESS = 1024  # blocks of channels
_FILTERS = 3 * 64 * 128  # bytes of a unit
_RESERVED = 1024  # bytes of shared memory for barriers


def serves(
    x_shape: Sequence[int],  # N, H, W, CI
    weight: Tensor,
    extra: Sequence[int] = (),  # channels of which 1x1 convolutions are added
) -> bool:
    """Whether it can do this convolution, every program finds a multiprocessor, and at least half
    of what a program multiplies finds room at once."""
    n, _, w, ci = x_shape
    co, _, *size = weight.shape
    if (
        n > _MAX_IMAGES
        or not takes(weight)
        or size != [3, 3]
        or any(c % 64 for c in (ci, co, *extra))
    ):
        return False
    if w not in _WIDTHS or not 0 < _programs(x_shape, weight) <= describe(weight.device).num_sms:
        return False
    units = -(-3 * ci // 64 // count_parts(x_shape, weight)) + sum(extra) // 64
    return units <= 2 * _held(x_shape, weight)


def count_parts(x_shape: Sequence[int], weight: Tensor) -> int:
    """Into how many parts the sum should be cut: two if a program holds half of its units at once
    but hardly more, and twice as many programs find room; of images that the norm behind it reads
    whole."""
    held, units = _held(x_shape, weight), 3 * x_shape[3] // 64
    small = x_shape[1] * x_shape[2] <= _PARTS_PIXELS
    room = 2 * _programs(x_shape, weight) <= describe(weight.device).num_sms
    return 2 if small and room and held + 2 < units <= 2 * held else 1


def _held(x_shape: Sequence[int], weight: Tensor) -> int:
    """Units of a sum of any length that a program holds at once."""
    return slots([_ENDLESS], tile_pixels(x_shape[2]), 1, describe(weight.device).shared_memory)


def _programs(x_shape: Sequence[int], weight: Tensor) -> int:
    n, h, w, _ = x_shape
    return n * h * w // tile_pixels(w) * (weight.shape[0] // 64)


def tile_pixels(w: int) -> int:
    """Pixels of a tile in rows of w."""
    return min(w, _MOST_PIXELS)


def launch(operands: Operands) -> None:
    """The convolution, of operands that it serves; partials are of each tile."""
    h, w = operands.x.shape[1:3]
    pixels = tile_pixels(w)
    assert operands.partials is None or operands.partials.shape[1] == h * w // pixels
    read, written = (partial(_in_rows, pixels=p) for p in (2 * pixels, pixels))
    x, filters, residual, second, *rest = operands.tensors(read, written)
    assert second is None
    terms = (x, filters, residual, *rest, None, operands.numbers[1])
    _launch(operands.x, operands.weight, terms, operands.extra_channels, 1)


def launch_parts(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """The parts of the convolution, float32 [parts, N, CO, H * W]."""
    wide = _in_rows(x, 2 * tile_pixels(x.shape[2]))
    terms = (wide, filters_in_boxes(weight), *[None] * 10, out, 0)
    _launch(x, weight, terms, [0, 0], len(out))


def _launch(
    x: Tensor, weight: Tensor, terms: Sequence[object], extra: Sequence[int], count: int
) -> None:
    n, h, w, ci = x.shape
    co, pixels = weight.shape[0], tile_pixels(w)
    blocks = [c // 64 for c in (ci, *extra)]
    conv_one_row_kernel[(n * h * w // pixels * (co // 64), count)](
        *terms,
        n,
        co,
        H=h,
        W=w,
        PIXELS=pixels,
        BLOCKS=blocks[0],
        BLOCKS1=blocks[1],
        BLOCKS2=blocks[2],
        PARTS=count,
        SLOTS=slots(blocks, pixels, count, describe(x.device).shared_memory),
        num_warps=4,
        **overlapping(x.device, n * h * w),
    )


def slots(blocks: Sequence[int], pixels: int, count: int, shared_memory: int) -> int:
    """Units that find room beside the result, of a convolution of so many blocks in so many
    parts."""
    room = shared_memory - _RESERVED - pixels * 128
    return min(room // (_FILTERS + 2 * pixels * 128), -(-3 * blocks[0] // count) + sum(blocks[1:]))


def _in_rows(x: Tensor, pixels: int) -> "TensorDescriptor":
    n, h, w, c = x.shape
    return in_boxes(x, [n, h, w, c], [h * w * c, w * c, c, 1], [1, 1, pixels, 64])
