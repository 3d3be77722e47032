"""Into how many parts the sum of a convolution is cut (`conv.plain.split_k`)."""

import math
from collections.abc import Callable, Iterator, Sequence

import triton

from ...registry.spec import ConvSpec
from ...runtime.device import Device

MOST_PARTS = 16  # that the norm behind adds up
LEAST_STEPS = 4  # products of a part: fewer are not worth the adding


def count_steps(block_k: int, spec: ConvSpec) -> int:
    """Products of the whole sum, of so many channels each."""
    main, *extra = (triton.cdiv(c, block_k) for c in (spec.k, *spec.extra))
    return spec.taps * main + sum(extra)


def part_bytes(parts: int, spec: ConvSpec) -> int:
    """Of all parts, which are float32."""
    return 4 * parts * spec.n * math.prod(spec.size) * spec.c


def cut(
    tiles: Sequence[tuple[int, ...]],  # output channels, pixels, channels of x a step, ...
    spec: ConvSpec,
    gpu: Device,
    programs: Callable[[tuple[int, ...]], int],  # of a part, in such tiles
) -> Iterator[tuple[int, ...]]:
    """Every tile, and behind it a number of parts: as many as keep two of a multiprocessor's three
    programs busy, more, and fewer."""
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
    """As many of the parts as have anything to do."""
    return triton.cdiv(steps, triton.cdiv(steps, parts))
