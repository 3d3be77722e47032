"""What kernels of a convolution in parts (`conv.split`) share: operands, tiles, and how many parts
there are."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...registry.spec import ConvSpec
from ...runtime.device import Device
from ..refusals import odd_channels

MOST_PARTS = 16  # which the norm that follows adds
LEAST_STEPS = 4  # products of a part; with fewer, adding the parts costs more


class SplitOperands(NamedTuple):
    """Those of `conv_split`, which has checked them."""

    x: Tensor  # [N, H, W, CI]
    weight: Tensor  # [CO, CI, R, S] in channels_last memory
    extra: Sequence[tuple[Tensor, Tensor]]  # up to two: [N, H, W, C], [CO, C]
    spec: ConvSpec

    def parts(self, count: int) -> Tensor:
        """Room for so many, float32 [count, N, CO, P * Q]."""
        shape = count, self.spec.n, self.spec.c, math.prod(self.spec.size)
        return self.x.new_empty(shape, dtype=torch.float32)


class PartsTile(NamedTuple):
    """The tile of a program, and the number of parts. Each kernel derives its configuration."""

    block_c: int  # output channels
    block_m: int  # pixels
    block_k: int  # input channels per step
    num_warps: int
    num_stages: int
    parts: int


def refuse_boxes(spec: ConvSpec, gpu: Device) -> str | None:
    """Why TMA does not fetch it, or None."""
    if not gpu.tma:
        return "the GPU has no TMA"
    return odd_channels(8, (spec.k, spec.c, *spec.extra))


def count_steps(block_k: int, spec: ConvSpec) -> int:
    """Products of the whole sum, with block_k channels each."""
    main, *extra = (triton.cdiv(c, block_k) for c in (spec.k, *spec.extra))
    return spec.taps * main + sum(extra)


def part_bytes(parts: int, spec: ConvSpec) -> int:
    """Bytes of all parts, which are float32."""
    return 4 * parts * math.prod(spec.pixels) * spec.c


def cut(
    tiles: Sequence[tuple[int, ...]],  # `PartsTile` without the number of parts
    spec: ConvSpec,
    gpu: Device,
    programs: Callable[[tuple[int, ...]], int],  # per part, with this tile
) -> Iterator[tuple[int, ...]]:
    """Every tile with three numbers of parts: as many as give every multiprocessor two programs,
    twice as many, and half as many."""
    first, *_ = tiles
    steps = count_steps(first[2], spec)
    most = min(steps // LEAST_STEPS, MOST_PARTS)
    wanted = _busy(steps, max(min(2 * gpu.num_sms // max(programs(first), 1), most), 1))
    for tile in tiles:
        steps = count_steps(tile[2], spec)
        for factor in (1, 2, 0.5):
            parts = min(max(int(wanted * factor), 1), MOST_PARTS, steps)
            yield (*tile, _busy(steps, parts))


def _busy(steps: int, parts: int) -> int:
    """The number of parts that have any steps, if each but the last has equally many."""
    return triton.cdiv(steps, triton.cdiv(steps, parts))
