"""Weight gradients of one to four 1x1 convolutions or linear layers of as many pixels, on Hopper.

Blocks of channels that are whole rounds of programs are written to the gradients as they are; only
those of the last round are cut into parts, which a second launch adds up.
"""

import math
from typing import NamedTuple

from ....hopper.descriptors import LOADER_REGISTERS, SUPPORTED, in_boxes
from ....registry.cost import CACHE, Work
from ....registry.kernel import Kernel, configures
from ....registry.spec import WeightGradsSpec
from ....runtime.device import Device
from ....runtime.hardware import REGISTERS, WARP, thread_registers
from ...configs import fewest_of
from ...refusals import Only
from ...wgrad_parts import LISTED, MOST, GroupOperands, channels_of, filled, sum_group
from .group_wgrad import refuse_group

if SUPPORTED:
    from .points_wgrad_kernel import conv_points_wgrad_kernel


@configures("points_wgrad")
class Points(NamedTuple):
    """What one program adds up, and how the blocks of the last round are cut."""

    groups: int  # warpgroups
    rows: int  # times 64 channels of dy, of a warpgroup
    width: int  # channels of x, of a product
    across: int  # of these products
    steps: int  # of 64 pixels
    stages: int
    programs: int  # a multiprocessor
    swapped: int = 0  # whether "dy" above is x, and "x" dy
    splits: int = 1  # parts of a block; 1: none is cut; 0: pieces of equal length

    @property
    def co(self) -> int:
        """Channels of dy of a block."""
        return self._sizes[self.swapped]

    @property
    def ci(self) -> int:
        """Channels of x of a block."""
        return self._sizes[1 - self.swapped]

    @property
    def _sizes(self) -> tuple[int, int]:
        return 64 * self.groups * self.rows, self.width * self.across

    @property
    def area(self) -> int:
        """Channels by channels of a block."""
        return self.co * self.ci


TILES = (
    Points(2, 1, 64, 5, 1, 3, 1),
    Points(2, 1, 64, 5, 1, 3, 1, swapped=1),
    Points(2, 1, 64, 3, 1, 4, 1),
    Points(2, 1, 64, 3, 1, 4, 1, swapped=1),
    Points(3, 1, 64, 3, 1, 4, 1),
    Points(2, 1, 256, 1, 1, 4, 1),
    Points(2, 2, 128, 1, 1, 4, 1),
    Points(1, 2, 128, 1, 1, 3, 2),
    Points(1, 1, 128, 1, 1, 4, 2),
    Points(1, 1, 128, 1, 1, 4, 2, swapped=1),
    Points(1, 1, 64, 1, 2, 3, 2),
)
_PART = 8  # steps of 64 pixels that writing a part and adding it up takes about


def refuse(spec: WeightGradsSpec, gpu: Device) -> str | None:
    """Why no launch does all of them, or None."""
    if reason := refuse_group(spec, gpu):
        return reason
    for conv in spec.convs:
        if reason := Only(tma=True, filters=(1, 1))(conv, gpu):
            return reason
        if conv.rounded:
            return "it writes float32"
    return None


def configs(spec: WeightGradsSpec, gpu: Device) -> list[Points]:
    """Of each tile the numbers of parts with the fewest steps."""
    found = []
    fewest = fewest_of(spec.convs[0])
    for tile in TILES:
        tiles = pixel_tiles(spec, tile)
        numbers = [tile._replace(splits=s) for s in range(fewest, min(tiles, 64) + 1)]
        numbers.append(tile._replace(splits=0))
        found += sorted(numbers, key=lambda t: _steps(spec, gpu, t))[:LISTED]
    return found


def pixel_tiles(spec: WeightGradsSpec, tile: Points) -> int:
    """Steps in the sum of a block of channels."""
    return -(-math.prod(spec.convs[0].pixels) // (64 * tile.steps))


def count_blocks(spec: WeightGradsSpec, tile: Points) -> int:
    """Of as many channels as a program has."""
    return sum(-(-conv.c // tile.co) * -(-conv.k // tile.ci) for conv in spec.convs)


class Cut(NamedTuple):
    """How the list of blocks is divided."""

    whole: int  # blocks, the first
    pieces: int  # of the others
    programs: int


def cut(spec: WeightGradsSpec, gpu: Device, tile: Points, share: float = 1.0) -> Cut:
    """As many programs as fit on the GPU at a time, or on a share of it that has one for each
    block. Whole rounds of blocks are not cut, unless their sums were too long (`long_sums`)."""
    blocks, slots, splits = count_blocks(spec, tile), gpu.num_sms * tile.programs, tile.splits
    fewest = fewest_of(spec.convs[0])
    if blocks <= int(share * slots):
        slots, splits = int(share * slots), max(fewest, int(share * splits)) if splits else 0
    if splits == 1:
        return Cut(blocks, 0, min(blocks, slots))
    whole = 0 if fewest > 1 else blocks // slots * slots
    pieces = (blocks - whole) * splits
    if not splits:
        least = (blocks - whole) * fewest
        most = (blocks - whole) * pixel_tiles(spec, tile)
        pieces = min(most, -(-max(least, 1) // slots) * slots)
    return Cut(whole, pieces, min(whole + pieces, slots))


def _steps(spec: WeightGradsSpec, gpu: Device, tile: Points) -> float:
    """Tiles of pixels one after the other, of whole rounds and of parts."""
    (whole, pieces, _), slots = cut(spec, gpu, tile), gpu.num_sms * tile.programs
    tiles = pixel_tiles(spec, tile)
    rest = count_blocks(spec, tile) - whole
    steps = -(-whole // slots) * tiles
    if pieces:
        part = _PART / tile.steps * (1.5 if tile.splits == 0 else 1)
        steps += -(-pieces // slots) * (-(-rest * tiles // pieces) + part)
    return steps


def _launch(tile: Points, operands: GroupOperands) -> None:
    """Whole blocks to the gradients, and parts of the others, which another launch adds up."""
    gradients, spec, accumulate, share = operands
    whole, pieces, programs = cut(spec, operands.gpu, tile, share)
    parts = operands.parts(pieces, tile.splits, tile.co, 1, tile.ci)
    outs = operands.outs
    pixels = gradients[0][0].numel() // gradients[0][0].shape[3]
    registers = _registers(tile)
    boxes = []
    of_x, of_dy = (64, tile.width) if tile.swapped else (tile.width, 64)
    for x, dy, _ in gradients:
        boxes += [
            in_boxes(t, [pixels, t.shape[3]], [64, width]) for t, width in ((x, of_x), (dy, of_dy))
        ]
    warps = 8 if tile.groups == 1 else 4 * (tile.groups + 1)
    conv_points_wgrad_kernel[(programs,)](
        *filled(boxes, 2 * MOST, None),
        *filled(outs, MOST, outs[0]),
        parts,
        *filled([out.stride(0) for out in outs], MOST),
        *channels_of([x.shape[3] for x, *_ in gradients], [dy.shape[3] for _, dy, _ in gradients]),
        -(-pixels // (64 * tile.steps)),
        whole,
        pieces,
        COUNT=len(gradients),
        PARTS=parts.shape[1],
        ADD=accumulate and whole > 0,
        GROUPS=tile.groups,
        ROWS=tile.rows,
        WIDTH=tile.width,
        ACROSS=tile.across,
        STEPS=tile.steps,
        STAGES=tile.stages,
        SWAPPED=bool(tile.swapped),
        REGISTERS=registers,
        num_warps=4,
        maxnreg=thread_registers(tile.programs * WARP * warps),
    )
    if pieces:
        sum_group(parts, outs, pixel_tiles(spec, tile), accumulate, whole)


def _registers(tile: Points) -> int:
    """Of a thread that multiplies, so that all programs have room."""
    given = REGISTERS // (4 * WARP * tile.programs)
    return min(240, (given - LOADER_REGISTERS) // tile.groups // 8 * 8)


def _work(spec: WeightGradsSpec, gpu: Device, tile: Points) -> Work:
    """As of tiles of equal length, of which a multiprocessor has as many pixels one after the other
    as in the rounds of whole blocks and of pieces."""
    (whole, pieces, _), slots = cut(spec, gpu, tile), gpu.num_sms * tile.programs
    tiles, rest = pixel_tiles(spec, tile), count_blocks(spec, tile) - whole
    steps = -(-whole // slots) * tiles
    if pieces:
        steps += -(-pieces // slots) * -(-rest * tiles // pieces)
    rounds = -(-(whole + pieces) // slots)
    pixels = 64 * tile.steps * steps / rounds  # of a program of each round, on average
    numbers = tile.area
    fetched = (tile.co + tile.ci) * 2 * pixels
    memory = sum(conv.n * conv.h * conv.w * (conv.k + conv.c) * 2 for conv in spec.convs)
    # Parts of blocks begin at the same pixels, and the L2 cache has for one what another has read.
    # Pieces of equal length begin anywhere, and find what it has if it has everything.
    alone = tile.splits == 0 and memory > CACHE
    return Work(
        tiles=whole + pieces,
        resident=tile.programs,
        products=numbers * pixels,
        fetched=fetched,
        steps=steps / rounds,
        written=numbers,
        memory=memory + sum(conv.k * conv.c * 4 for conv in spec.convs),
        parts=(pieces + (rest if tile.splits == 0 else 0)) * numbers * 4,
        splits=2 if pieces else 1,
        beside=fetched if alone else 0.0,
    )


KERNEL = Kernel(
    "points_wgrad",
    Points,
    refuse,
    configs,
    launch=_launch,
    work=_work,
    fitted_by=("area", "width"),
)
