"""Weight gradients of up to four 3x3 convolutions over images of one size, in one launch, in rounds
of whole blocks.

A program has 64x64 channels, and as many as there are multiprocessors are a round. Blocks of one
convolution are seldom whole rounds of them: 576 channels to 576 are 81 for 132 multiprocessors.
Cut into parts they would be, but each part has to be written and added up, and takes as long as six
tiles of pixels. Together the blocks of several convolutions are whole rounds and a rest, and only
the rest is cut.
"""

import math
from functools import partial
from typing import NamedTuple

from ....registry import cost
from ....registry.cost import Work
from ....registry.kernel import Kernel, configures
from ....registry.spec import WeightGradsSpec
from ....runtime.device import Device
from ...wgrad_parts import LISTED, GroupOperands
from . import row_wgrad
from .group_wgrad import count_blocks, count_tiles, launch_rows, refuse

NUMBERS = 9 * 64 * 64  # of a block


@configures("rounds_wgrad")
class Rounds(NamedTuple):
    """Into how many parts each block of the last round is cut; 1: none is, and the last round has
    fewer programs."""

    splits: int


def configs(spec: WeightGradsSpec, gpu: Device) -> list[Rounds]:
    """Those with the fewest steps one after the other."""
    tiles, fewest = count_tiles(spec), row_wgrad.fewest_splits(spec.convs[0])
    numbers = range(fewest, tiles + 1)
    best = sorted(numbers, key=lambda splits: _steps(spec, gpu, Rounds(splits)))
    return [Rounds(splits) for splits in best[:LISTED]]


def whole_blocks(spec: WeightGradsSpec, gpu: Device, config: Rounds) -> int:
    """How many are not cut: all, whole rounds, or none if a sum is too long for one part."""
    blocks = count_blocks(spec)
    if config.splits == 1:
        return blocks
    if row_wgrad.fewest_splits(spec.convs[0]) > 1:
        return 0
    return blocks // gpu.num_sms * gpu.num_sms


def cut_blocks(spec: WeightGradsSpec, gpu: Device, config: Rounds) -> int:
    """How many are."""
    return count_blocks(spec) - whole_blocks(spec, gpu, config)


def model(spec: WeightGradsSpec, gpu: Device, config: Rounds) -> float | None:
    """Microseconds, by what was fitted to `row_wgrad`, whose programs these are."""
    fitted = cost.parameters(gpu.arch).get("row_wgrad block_ci=64")
    if fitted is None or spec.itemsize != 2:
        return None
    whole, cut = whole_blocks(spec, gpu, config), cut_blocks(spec, gpu, config)
    us = 0.0
    if whole:
        us += cost.microseconds(fitted, _work(spec, whole, 1), gpu)
    if cut:
        work = _work(spec, cut, config.splits)
        us += cost.microseconds(fitted, work._replace(memory=0 if whole else work.memory), gpu)
    return us


def _work(spec: WeightGradsSpec, blocks: int, splits: int) -> Work:
    kernel = row_wgrad.WEIGHT_GRAD
    alone = kernel.work(spec.convs[0], None, kernel.config(64, splits))
    return alone._replace(
        tiles=blocks * splits,
        memory=sum(conv.n * conv.h * conv.w * (conv.k + conv.c) * 2 for conv in spec.convs),
        parts=blocks * splits * NUMBERS * 4 if splits > 1 else 0,
    )


def _steps(spec: WeightGradsSpec, gpu: Device, config: Rounds) -> float:
    """Tiles of pixels one after the other, of whole rounds and of parts."""
    tiles, splits = count_tiles(spec), config.splits
    rounds = math.ceil(whole_blocks(spec, gpu, config) / gpu.num_sms)
    parts = math.ceil(cut_blocks(spec, gpu, config) * splits / gpu.num_sms)
    return rounds * tiles + parts * (math.ceil(tiles / splits) + row_wgrad.PART * (splits > 1))


def _launch(config: Rounds, operands: GroupOperands) -> None:
    spec, gpu = operands.spec, operands.gpu
    pieces = cut_blocks(spec, gpu, config) * config.splits
    launch_rows(operands, pieces, config.splits, whole_blocks(spec, gpu, config))


KERNEL = Kernel(
    "rounds_wgrad", Rounds, partial(refuse, whole=False), configs, launch=_launch, alike=model
)
