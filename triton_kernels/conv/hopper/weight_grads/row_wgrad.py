"""The weight gradient of 3x3 convolutions over rows of pixels for Hopper, in 16 bits (kernel:
`row_wgrad_kernel`).

Three warpgroups take a row of the filter each: they share dy and x, and the nine taps need x once.
A row of other widths than `WIDTHS` is cut into pieces.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ....hopper.descriptors import SUPPORTED
from ....registry.cost import Work
from ....registry.kernel import configures
from ....registry.spec import ConvSpec
from ....runtime.device import Device
from ...configs import WgradOperands, fewest_of, split_kernel, wgrad_work
from ...refusals import BITS_16, Only, odd_channels, odd_rows
from ..operands import in_rows

if SUPPORTED:
    from .row_wgrad_kernel import conv_row_wgrad_kernel

_PIXELS = 256  # of a tile
STAGES = 2  # of pixels
_STAGES_OF_16 = 4  # of pixels of 64 channels and of 16
WIDTHS = (64, 32, 16, 8)  # of whole rows
_PIECES = (64, 32, 16)  # pixels of other rows that are multiplied together
PART = 6  # tiles that take as long as a part of a sum does to begin, to write and to add up


@configures("row_wgrad")
class RowWgrad(NamedTuple):
    """A block of 64x64 channels and all nine taps a program, or of 64x16."""

    block_ci: int
    block_m = _PIXELS  # a step


TILE, NARROW_TILE = RowWgrad(64), RowWgrad(16)


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why `weight_grad` cannot do one convolution, or None."""
    co, ci = spec.of_filters
    narrow = _is_narrow(spec)
    if not narrow and (co, ci) != (spec.c, spec.k):
        return f"x and dy have {spec.k} and {spec.c} channels, the filters {ci} and {co}"
    if reason := refuse_rows(spec, gpu, whole=False):
        return reason
    splits = splits_of(spec, gpu)
    if splits < 1 + narrow:
        return "there are too few tiles to share"
    if spec.rounded and splits == 1:
        return "a sum in one part is stored as it is, not rounded"
    return None


def refuse_rows(spec: ConvSpec, gpu: Device, whole: bool = True) -> str | None:
    """Why there are no tiles of rows for a weight gradient, or None. Unless blocks have to be
    `whole`, images are of any size, and blocks of channels too, with zeros beyond their edges."""
    if reason := Only(hopper=True, dtypes=BITS_16, filters=(3, 3))(spec, gpu):
        return reason
    if spec.size != (spec.h, spec.w):
        return f"{spec.size} pixels of the result, and {spec.h} x {spec.w} of x"
    if not whole:
        return odd_channels(8, (spec.c, spec.k))
    rows = _PIXELS // (piece_of_row(spec.w) * images_of_row(spec.w))
    return Only(multiple=64, widths=WIDTHS)(spec, gpu) or odd_rows(spec, rows)


def _is_narrow(spec: ConvSpec) -> bool:
    """Whether one of x and dy has 16 channels, of which the filters may have fewer, and the other
    those of the filters."""
    co, ci = spec.of_filters
    of_x, of_dy = (ci, spec.k), (co, spec.c)
    few, many = (of_x, of_dy) if spec.k == 16 else (of_dy, of_x)
    return few[0] <= 16 == few[1] and many[0] == many[1]


def splits_of(spec: ConvSpec, gpu: Device) -> int:
    """Into how many parts to cut the sum over pixels: the fewest rounds of programs, which have a
    multiprocessor each, times their length. One part if there are blocks of channels for most
    multiprocessors; 0 if there are too few tiles to share."""
    blocks = blocks_of(*spec.of_filters)
    tiles = math.prod(tiles_of(spec.n, spec.h, spec.w))

    def time(splits: int) -> int:
        rounds = triton.cdiv(blocks * splits, gpu.num_sms)
        return rounds * (triton.cdiv(tiles, splits) + (PART if splits > 1 else 0))

    fewest = max(1 if 2 * blocks > gpu.num_sms else 2, fewest_splits(spec))
    most = min(tiles, max(4 * gpu.num_sms // blocks, fewest + gpu.num_sms // blocks))
    return min(range(most, fewest - 1, -1), key=time, default=0)


def blocks_of(co: int, ci: int) -> int:
    """Blocks of 64x64 channels, or of 64x16 where there are fewer."""
    return -(-co // 64) * -(-ci // 64)


def fewest_splits(spec: ConvSpec) -> int:
    """What `long_sums` says of the sum over pixels."""
    return fewest_of(spec, math.prod(tiles_of(spec.n, spec.h, spec.w)) * _PIXELS)


def _tile(spec: ConvSpec, gpu: Device) -> list[RowWgrad]:
    return [NARROW_TILE if _is_narrow(spec) else TILE]


def _launch(tile: RowWgrad, splits: int, operands: WgradOperands) -> None:
    assert operands.parts.dtype == torch.float32
    weight_grad(operands.x, operands.dy, operands.parts.view(splits, -1))


def _work(spec: ConvSpec, gpu: Device, c: tuple) -> Work:
    width = piece_of_row(spec.w) * images_of_row(spec.w)
    beside = 16 if pieces_of_row(spec.w) > 1 else 0
    blocks = blocks_of(*spec.of_filters)
    steps = math.prod(tiles_of(spec.n, spec.h, spec.w)) / c.splits
    fetched = (_PIXELS // width + 2) * (width + beside) * 2 * c.block_ci + _PIXELS * 128
    products = 64 * c.block_ci * 9 * _PIXELS
    return wgrad_work(spec, c, blocks, steps, products, fetched, resident=1)


WEIGHT_GRAD = split_kernel(
    RowWgrad,
    refuse,
    _tile,
    lambda spec, gpu, tile: splits_of(spec, gpu),
    _launch,
    around=False,
    pads=True,
    work=_work,
    fitted_by=("block_ci",),
)


def weight_grad(
    x: Tensor,  # [N, H, W, CI], or 16 channels of which CI count
    dy: Tensor,  # [N, H, W, CO], or 16
    parts: Tensor,  # float32 [splits, CO * 9 * CI], or its like, to be written; one may be the sum
) -> None:
    """The gradient of the filters, in parts that have to be added up."""
    swap = dy.shape[3] == 16 != x.shape[3]  # then the kernel takes it for x
    few, many = (dy, x) if swap else (x, dy)
    n, h, w, ci = few.shape
    co = many.shape[3]
    if ci == 16:
        ci = parts.shape[1] // (9 * co)
    narrow = few.shape[3] == 16
    block_ci = 16 if narrow else 64
    images, width = images_of_row(w), piece_of_row(w)
    groups, tiles_h = tiles_of(n, h, w)
    rows = _PIXELS // (width * images)
    columns = pieces_of_row(w)
    ragged = not narrow and (ci % 64 > 0 or co % 64 > 0)
    conv_row_wgrad_kernel[(blocks_of(co, ci) * parts.shape[0],)](
        in_rows(few, 1, images, width, block_ci), in_rows(many, rows, images, width, 64),
        None if columns == 1 else in_rows(few, 1, 1, 8, block_ci),
        parts, parts.stride(0), ci, co, groups * tiles_h, tiles_h,
        W=width * images, IMAGES=images, COLUMNS=columns,
        STAGES=_STAGES_OF_16 if narrow else STAGES, SWAP=swap, RAGGED=ragged, num_warps=4,
        maxnreg=128,
    )  # fmt: skip


def images_of_row(w: int) -> int:
    """Of how many images a row is, so that it has 16 pixels and more."""
    return 1 if w >= 16 else 64 // piece_of_row(w)


def piece_of_row(w: int) -> int:
    """Pixels of a row that a weight gradient multiplies together: the whole row, or a piece of it,
    with the fewest pixels beyond its end."""
    if w < 16:
        return 8 if w <= 8 else 16
    return min(_PIECES, key=lambda piece: -(-w // piece) * piece)


def pieces_of_row(w: int) -> int:
    """How many there are."""
    return -(-w // piece_of_row(w))


def tiles_of(n: int, h: int, w: int) -> tuple[int, int]:
    """Groups of images, and tiles of one."""
    images = images_of_row(w)
    rows = _PIXELS // (piece_of_row(w) * images)
    return -(-n // images), -(-h // rows) * pieces_of_row(w)
