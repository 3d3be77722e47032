"""Weight gradients of up to four convolutions over images of one size, in one launch, for Hopper.

A launch has to begin and to end, and each of its programs writes a sum of 64 x 64 channels or more
that another launch adds up. Four gradients in one launch have a quarter of the parts each.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...hopper.descriptors import SUPPORTED, in_boxes, takes
from ...reductions.column_sum import num_splits
from ...reductions.long_sums import fewest_parts
from ...registry.kernel import configures
from ...runtime.device import describe
from . import row_mma as gluon_rows

if SUPPORTED:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .group_wgrad_kernels import conv_points_group_wgrad_kernel, conv_rows_group_wgrad_kernel

MOST = 4  # gradients in one launch
_PIXELS_OF_ROWS = 256  # of a tile
_STAGES_OF_ROWS = 2


class Gradient(NamedTuple):
    """One to be computed; of `out` only the shape matters."""

    x: Tensor  # [N, H, W, CI]
    dy: Tensor  # [N, H, W, CO]
    out: Tensor  # [CO, CI, R, S]


@configures("group_wgrad")
class Tile(NamedTuple):
    """What one program adds up: channels of dy and of x, in blocks of 64, and pixels a step, too.
    Of 3x3 filters a block each and 256 pixels."""

    co_blocks: int
    ci_blocks: int
    steps: int
    stages: int
    programs: int  # a multiprocessor
    even: int  # 0: a program wherever there is room; 1: as many for each block, so that none has
    # parts of two; 2: half as many for each, which write half as many parts


ROWS = tuple(Tile(1, 1, 4, _STAGES_OF_ROWS, 1, even) for even in (0, 1, 2))
POINTS = tuple(
    Tile(*numbers, even)
    for even in (1, 2)
    for numbers in ((1, 1, 2, 3, 2), (2, 2, 2, 3, 1), (3, 3, 1, 4, 1))
)


def tiles(gradients: Sequence[Gradient]) -> list[Tile]:
    """Those with which `launch` can do all of them."""
    x, _, out = gradients[0]
    size = tuple(out.shape[2:])
    applies = 1 < len(gradients) <= MOST and x.shape[0] > 0 and size in ((1, 1), (3, 3))
    for g in gradients:
        applies = applies and g.x.shape[:3] == g.dy.shape[:3] == x.shape[:3] and takes(g.x)
        applies = applies and g.out.shape == (g.dy.shape[3], g.x.shape[3], *size)
        applies = applies and g.dy.shape[3] % 64 == g.x.shape[3] % 64 == 0
        if size == (3, 3):
            applies = applies and gluon_rows.wgrad_fits_rows(g.x, g.dy, g.out)
    if not applies:
        return []
    found = ROWS if size == (3, 3) else POINTS
    return [t for t in found if _blocks(gradients, t) <= _slots(x, t) and _filled(gradients, t)]


def programs(gradients: Sequence[Gradient], tile: Tile, share: float = 1.0) -> int:
    """As many as fit on the GPU at a time, or on a share of it that has one for each block of
    channels; each of them has something to do. More if pieces were too long (`long_sums`)."""
    x, _, out = gradients[0]
    slots, blocks = _slots(x, tile), _blocks(gradients, tile)
    if blocks <= int(share * slots):
        slots = int(share * slots)
    if tile.even:
        slots = max(1, slots // blocks // tile.even) * blocks
    tiles = pixel_tiles(x, out, tile)
    fewest = fewest_parts(math.prod(x.shape[:3]), x.dtype)
    if slots < blocks * fewest:
        slots = blocks * num_splits(blocks, tiles, _slots(x, tile), fewest)
    return min(slots, blocks * tiles)


def pixel_tiles(x: Tensor, out: Tensor, tile: Tile) -> int:
    """Steps in the sum of one block of channels."""
    if out.shape[2] == 3:
        return math.prod(gluon_rows.wgrad_tiles(x))
    return -(-math.prod(x.shape[:3]) // (64 * tile.steps))


def launch(gradients: Sequence[Gradient], tile: Tile, parts: Tensor) -> None:
    """All of them, in `parts` float32 [programs, 2, CO, R * S, CI] of a tile's channels."""
    x, _, out = gradients[0]
    rows = out.shape[2] == 3
    n, h, w, _ = x.shape
    images = gluon_rows.images_of_row(w)
    operands: list[TensorDescriptor | None] = []
    for g in gradients:
        if rows:
            height = _PIXELS_OF_ROWS // (w * images)
            operands += gluon_rows.in_rows(g.x, 1, images), gluon_rows.in_rows(g.dy, height, images)
        else:
            operands += _in_points(g.x), _in_points(g.dy)
    absent = MOST - len(gradients)
    operands += [None] * (2 * absent)
    channels = [g.x.shape[3] for g in gradients] + [0] * absent
    channels += [g.dy.shape[3] for g in gradients] + [0] * absent
    steps = pixel_tiles(x, out, tile)
    if rows:
        conv_rows_group_wgrad_kernel[(parts.shape[0],)](
            *operands,
            parts,
            *channels,
            steps,
            gluon_rows.wgrad_tiles(x)[1],
            COUNT=len(gradients),
            W=w * images,
            IMAGES=images,
            STAGES=tile.stages,
            num_warps=4,
            maxnreg=128,
        )
        return
    conv_points_group_wgrad_kernel[(parts.shape[0],)](
        *operands,
        parts,
        *channels,
        steps,
        COUNT=len(gradients),
        GROUPS=tile.co_blocks,
        BLOCKS=tile.ci_blocks,
        STEPS=tile.steps,
        STAGES=tile.stages,
        num_warps=4,
        maxnreg=168 if tile.co_blocks == 2 else 128,
    )


def _slots(x: Tensor, tile: Tile) -> int:
    return describe(x.device).num_sms * tile.programs


def _blocks(gradients: Sequence[Gradient], tile: Tile) -> int:
    """Of as many channels as a program has."""
    co, ci = 64 * tile.co_blocks, 64 * tile.ci_blocks
    return sum(-(-g.out.shape[0] // co) * -(-g.out.shape[1] // ci) for g in gradients)


def _filled(gradients: Sequence[Gradient], tile: Tile) -> bool:
    """Whether at least half of the channels of these blocks are there."""
    used = sum(g.out.shape[0] * g.out.shape[1] for g in gradients) // 64**2
    return 2 * used >= _blocks(gradients, tile) * tile.co_blocks * tile.ci_blocks


def _in_points(x: Tensor) -> "TensorDescriptor":
    n, h, w, c = x.shape
    return in_boxes(x, [n * h * w, c], [c, 1], [64, 64])
