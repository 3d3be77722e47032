"""Weight gradients of up to four convolutions over images of one size, in one launch, for Hopper.

A launch has to begin and to end, and each of its programs writes a sum of 64 x 64 channels or more
that another launch adds up. Four gradients in one launch have a quarter of the parts each.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...hopper.descriptors import SUPPORTED, missing
from ...reductions.column_sum import num_splits
from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec, WeightGradsSpec
from ...runtime.device import Device
from ..configs import fewest_of
from ..wgrad_parts import MOST, channels_of, filled
from . import row_wgrad
from .operands import in_rows

if SUPPORTED:
    from .group_wgrad_kernels import conv_row_group_wgrad_kernel


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


ROWS = tuple(Tile(1, 1, 4, row_wgrad.STAGES, 1, even) for even in (0, 1, 2))


def refuse_group(spec: WeightGradsSpec, gpu: Device) -> str | None:
    """Why no launch does these together, or None."""
    first = spec.convs[0]
    if not 1 < len(spec.convs) <= MOST:
        return f"{len(spec.convs)} gradients; it does 2 to {MOST}"
    if first.n == 0:
        return "there are no images"
    for conv in spec.convs:
        if reason := missing(gpu, conv.itemsize):
            return reason
        if (conv.n, conv.h, conv.w, conv.r, conv.s) != (
            first.n, first.h, first.w, first.r, first.s,
        ):  # fmt: skip
            return "images or filters are not of one size"
        if conv.of_filters != (conv.c, conv.k):
            return "x or dy have more channels than the filters"
    return None


def refuse(spec: WeightGradsSpec, gpu: Device) -> str | None:
    """Why no launch does all of them, or None."""
    first = spec.convs[0]
    if (first.r, first.s) != (3, 3):
        return f"it does 3x3 filters, not {first.r}x{first.s}"
    if reason := refuse_group(spec, gpu):
        return reason
    for conv in spec.convs:
        if odd := [c for c in (conv.c, conv.k) if c % 64]:
            return f"{odd[0]} channels are no multiple of 64"
        if reason := row_wgrad.refuse_rows(conv, gpu):
            return reason
    return None


def tiles(spec: WeightGradsSpec, gpu: Device) -> list[Tile]:
    """Those with which a launch can do all of them."""
    return [t for t in ROWS if count_blocks(spec, t) <= _slots(gpu, t) and _filled(spec, t)]


def programs(spec: WeightGradsSpec, gpu: Device, tile: Tile, share: float = 1.0) -> int:
    """As many as fit on the GPU at a time, or on a share of it that has one for each block of
    channels; each of them has something to do. More if pieces were too long (`long_sums`)."""
    first = spec.convs[0]
    slots, blocks = _slots(gpu, tile), count_blocks(spec, tile)
    if blocks <= int(share * slots):
        slots = int(share * slots)
    if tile.even:
        slots = max(1, slots // blocks // tile.even) * blocks
    steps = pixel_tiles(first, tile)
    fewest = fewest_of(first)
    if slots < blocks * fewest:
        slots = blocks * num_splits(blocks, steps, _slots(gpu, tile), fewest)
    return min(slots, blocks * steps)


def pixel_tiles(conv: ConvSpec, tile: Tile) -> int:
    """Steps in the sum of one block of channels."""
    return math.prod(row_wgrad.tiles_of(conv.n, conv.h, conv.w))


def launch_rows(
    gradients: Sequence[Gradient],
    parts: Tensor,  # float32 [pieces, 2, 64, 9, 64] to be written; with splits [., 1, ...]
    whole: int = 0,  # blocks that a program has alone, and writes to the gradient itself
    splits: int = 0,  # into which each other block is cut; 0: pieces may have parts of two blocks
    accumulate: bool = False,  # add to what is whole
) -> None:
    """Those of 3x3 filters: whole blocks to the gradients, the sums of the others in parts."""
    n, h, w, _ = gradients[0].x.shape
    images, width = row_wgrad.images_of_row(w), row_wgrad.piece_of_row(w)
    columns, rows = row_wgrad.pieces_of_row(w), row_wgrad.TILE.block_m // (width * images)
    groups, tiles_h = row_wgrad.tiles_of(n, h, w)
    operands = []
    for x, dy, _ in gradients:
        operands += [
            in_rows(x, 1, images, width, 64),
            in_rows(dy, rows, images, width, 64),
            None if columns == 1 else in_rows(x, 1, 1, 8, 64),
        ]
    outs = [g.out if whole else None for g in gradients]
    conv_row_group_wgrad_kernel[(whole + len(parts),)](
        *filled(operands, 3 * MOST, None),
        *filled(outs, MOST, outs[0]),
        parts,
        *filled([g.out.stride(0) for g in gradients], MOST),
        *channels_of([g.x.shape[3] for g in gradients], [g.dy.shape[3] for g in gradients]),
        groups * tiles_h,
        tiles_h,
        whole,
        splits or 1,
        COUNT=len(gradients),
        ALONE=splits > 0,
        ADD=accumulate and whole > 0,
        W=width * images,
        IMAGES=images,
        STAGES=row_wgrad.STAGES,
        COLUMNS=columns,
        RAGGED=whole > 0 and any(c % 64 for g in gradients for c in (g.x.shape[3], g.dy.shape[3])),
        num_warps=4,
        maxnreg=128,
    )


def _slots(gpu: Device, tile: Tile) -> int:
    return gpu.num_sms * tile.programs


def count_blocks(spec: WeightGradsSpec, tile: Tile) -> int:
    """Of as many channels as a program has."""
    co, ci = 64 * tile.co_blocks, 64 * tile.ci_blocks
    return sum(-(-conv.c // co) * -(-conv.k // ci) for conv in spec.convs)


def _filled(spec: WeightGradsSpec, tile: Tile) -> bool:
    """Whether at least half of the channels of these blocks are there."""
    used = sum(conv.c * conv.k for conv in spec.convs) // 64**2
    return 2 * used >= count_blocks(spec, tile) * tile.co_blocks * tile.ci_blocks


KERNEL = Kernel("group_wgrad", Tile, refuse, tiles)
