"""The tiles of `tma` with their sums shared by several programs (`shared_sums`): layers with few
pixels and long sums, of which whole tiles keep few multiprocessors busy."""

from collections.abc import Callable
from typing import NamedTuple

import triton

from ...registry.cost import HOPPER, Work
from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.device import Device
from ..refusals import ROUNDED
from .fused_tiles import box_of, fetched, is_even, programs, resident_of
from .shared_sums import steps_of

_MOST = 16  # parts, which the last program adds one after the other
_LEAST_STEPS = 4  # of a part; with fewer, adding the parts takes longer


@configures("split_tiles")
class Config(NamedTuple):
    """The tile of a program, and the programs that share its sum."""

    block_c: int  # output channels
    block_m: int  # pixels
    block_k: int  # input channels a step
    num_warps: int
    num_stages: int
    splits: int

    rows = 1  # every tile is one box of pixels


# The third number is the bytes of a box's row, not channels: a step of rows of 256 bytes takes less
# than two of 128, since each waits for its loads
TILES = [
    (64, 64, 128, 4, 6),
    (64, 32, 128, 4, 6),
    (64, 64, 256, 4, 4),
    (64, 32, 256, 4, 4),
    (64, 128, 256, 4, 3),
    (128, 64, 256, 4, 3),
]


def row(
    refuse: Callable[[ConvSpec, Device], str | None],
    launch: Callable,
    adds: tuple[str, ...] = (),
) -> Kernel:
    """The kernel for an operation whose whole tiles have these."""

    def why_not(spec: ConvSpec, gpu: Device) -> str | None:
        if spec.dtype not in ROUNDED:
            return f"numbers are {spec.dtype}; it multiplies {', '.join(ROUNDED)}"
        return refuse(spec, gpu) or _busy(spec, gpu)

    return Kernel(
        "split_tiles",
        Config,
        why_not,
        _configs,
        launch=launch,
        work=_work,
        fitted_by=("block_c", "block_m", "block_k"),
        borrows=HOPPER,
        adds=adds,
    )


def _busy(spec: ConvSpec, gpu: Device) -> str | None:
    """Why whole tiles do as well, or None."""
    tile = Config(*TILES[0], 1)
    tiles = programs(tile, box_of(tile, spec.n, *spec.size, False), spec.n, *spec.size, spec.c)
    if tiles >= 2 * gpu.num_sms:
        return f"{tiles} whole tiles keep {gpu.num_sms} multiprocessors busy"
    steps = _steps(64, spec)
    return f"{steps} steps are no long sum" if steps < 2 * _LEAST_STEPS else None


def _steps(block_k: int, spec: ConvSpec) -> int:
    """Those of a whole sum."""
    return steps_of(block_k, spec.taps, (spec.k, *spec.extra))


def _cut(spec: ConvSpec, gpu: Device, c: Config) -> int:
    """Tiles."""
    n, size = spec.n, spec.size
    return programs(c, box_of(c, n, *size, is_even(spec)), n, *size, spec.c)


def _configs(spec: ConvSpec, gpu: Device) -> list[Config]:
    """Every tile that can do it, with as many parts as give each multiprocessor one program, two,
    and four."""
    found = []
    for block_c, block_m, row, *rest in TILES:
        block_k = row // spec.itemsize
        c = Config(block_c, block_m, block_k, *rest, 1)
        box = box_of(c, spec.n, *spec.size, is_even(spec))
        if box is None or block_k > spec.k or not resident_of(c, spec, gpu):
            continue
        steps, tiles = _steps(block_k, spec), _cut(spec, gpu, c)
        for each in (1, 2, 4):
            wanted = min(each * gpu.num_sms // tiles, steps // _LEAST_STEPS, _MOST)
            if wanted > 0:
                found.append(c._replace(splits=triton.cdiv(steps, triton.cdiv(steps, wanted))))
    return list(dict.fromkeys(found))


def _work(spec: ConvSpec, gpu: Device, c: Config) -> Work:
    tiles = _cut(spec, gpu, c)
    steps = triton.cdiv(_steps(c.block_k, spec), c.splits)
    of_step, numbers = sum(fetched(c, spec.itemsize)), c.block_c * c.block_m
    return Work(
        tiles=tiles * c.splits,
        resident=max(1, resident_of(c, spec, gpu)),
        products=numbers * c.block_k * steps,
        fetched=of_step * steps,
        steps=steps,
        written=numbers,
        memory=spec.bytes,
        parts=4 * tiles * c.splits * numbers if c.splits > 1 else 0,
        splits=c.splits,
        grad=spec.activation is not None,
    )
