"""Weight gradients of up to four convolutions over images of one size, in one launch, for Hopper.

A launch has to begin and to end, and each of its programs writes a sum of 64 x 64 channels or more
that another launch adds up. Four gradients in one launch have a quarter of the parts each.
"""

import math
from typing import NamedTuple

from ....hopper.descriptors import SUPPORTED, missing
from ....reductions.column_sum import num_splits
from ....registry.kernel import Kernel, configures
from ....registry.spec import WeightGradsSpec
from ....runtime.device import Device
from ...configs import fewest_of
from ...wgrad_parts import MOST, GroupOperands, channels_of, filled, sum_group
from ..operands import in_rows
from . import row_wgrad

if SUPPORTED:
    from .group_wgrad_kernels import conv_row_group_wgrad_kernel


@configures("group_wgrad")
class Tile(NamedTuple):
    """How the list of tiles of 64x64 channels and 256 pixels is divided among programs."""

    # 0: a program wherever there is room; 1: as many for each block, so that none has parts of two;
    # 2: half as many for each, which write half as many parts
    even: int


TILES = (Tile(0), Tile(1), Tile(2))


def refuse_group(spec: WeightGradsSpec, gpu: Device) -> str | None:
    """Why no launch does these together, or None."""
    first = spec.convs[0]
    if len(spec.convs) > MOST:
        return f"{len(spec.convs)} gradients; it does up to {MOST}"
    if first.n == 0:
        return "there are no images"
    for conv in spec.convs:
        if reason := missing(gpu, conv.itemsize):
            return reason
        if (conv.pixels, conv.r, conv.s) != (first.pixels, first.r, first.s):
            return "images or filters are not of one size"
        if conv.of_filters != (conv.c, conv.k):
            return "x or dy have more channels than the filters"
    return None


def refuse(spec: WeightGradsSpec, gpu: Device, whole: bool = True) -> str | None:
    """Why no launch does all of them, or None; `whole` as in `row_wgrad.refuse_rows`."""
    each = (row_wgrad.refuse_rows(conv, gpu, whole=whole) for conv in spec.convs)
    return refuse_group(spec, gpu) or next(filter(None, each), None)


def tiles(spec: WeightGradsSpec, gpu: Device) -> tuple[Tile, ...]:
    """Those with which a launch can do all of them."""
    return TILES if count_blocks(spec) <= gpu.num_sms else ()


def programs(spec: WeightGradsSpec, gpu: Device, tile: Tile, share: float = 1.0) -> int:
    """One a multiprocessor, or on a share of them that has one for each block of channels; each of
    them has something to do. More if pieces were too long (`long_sums`)."""
    slots, blocks = gpu.num_sms, count_blocks(spec)
    if blocks <= int(share * slots):
        slots = int(share * slots)
    if tile.even:
        slots = max(1, slots // blocks // tile.even) * blocks
    steps, fewest = count_tiles(spec), fewest_of(spec.convs[0])
    if slots < blocks * fewest:
        slots = blocks * num_splits(blocks, steps, gpu.num_sms, fewest)
    return min(slots, blocks * steps)


def count_blocks(spec: WeightGradsSpec) -> int:
    """Blocks of 64x64 channels, of all gradients."""
    return sum(row_wgrad.blocks_of(conv.c, conv.k) for conv in spec.convs)


def count_tiles(spec: WeightGradsSpec) -> int:
    """Steps in the sum of one of them."""
    first = spec.convs[0]
    return math.prod(row_wgrad.tiles_of(first.n, first.h, first.w))


def launch_rows(
    operands: GroupOperands,
    pieces: int,
    splits: int,  # into which each block is cut; 0: pieces may have parts of two blocks
    whole: int = 0,  # blocks, the first, that are not: a program has one alone
) -> None:
    """Those of 3x3 filters: whole blocks to the gradients, the sums of the others in parts, which
    another launch adds up."""
    gradients, accumulate, outs = operands.gradients, operands.accumulate, operands.outs
    parts = operands.parts(pieces, splits, 64, 9, 64)
    n, h, w, _ = gradients[0].x.shape
    images, width = row_wgrad.images_of_row(w), row_wgrad.piece_of_row(w)
    columns, rows = row_wgrad.pieces_of_row(w), row_wgrad.TILE.block_m // (width * images)
    groups, tiles_h = row_wgrad.tiles_of(n, h, w)
    boxes = []
    for x, dy, _ in gradients:
        boxes += [
            in_rows(x, 1, images, width, 64),
            in_rows(dy, rows, images, width, 64),
            None if columns == 1 else in_rows(x, 1, 1, 8, 64),
        ]
    written = outs if whole else [None]
    conv_row_group_wgrad_kernel[(whole + pieces,)](
        *filled(boxes, 3 * MOST, None),
        *filled(written, MOST, written[0]),
        parts,
        *filled([out.stride(0) for out in outs], MOST),
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
    if pieces:
        sum_group(parts, outs, groups * tiles_h, accumulate, whole)


def _launch(tile: Tile, operands: GroupOperands) -> None:
    count = programs(operands.spec, operands.gpu, tile, operands.share)
    blocks = count_blocks(operands.spec)
    launch_rows(operands, count, count // blocks * (count % blocks == 0))


KERNEL = Kernel("group_wgrad", Tile, refuse, tiles, launch=_launch)
