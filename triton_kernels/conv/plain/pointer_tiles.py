"""How a convolution through pointers is cut: which tiles can do it, and which is quickest by a
model."""

from typing import NamedTuple

import triton

from ...registry.kernel import CLOCKS, configures
from ...registry.spec import ConvSpec
from ...runtime.device import Device
from .fused_tiles import box_of, fetched, is_even, programs


@configures("pointer")
class PointerTile(NamedTuple):
    """What one program computes."""

    block_c: int  # channels of the result
    block_m: int  # pixels, of each row of tiles
    block_k: int  # channels of x a step
    num_warps: int
    num_stages: int  # of which one is no buffer
    rows: int = 1  # tiles one below the other, which share loads


TILES = [
    PointerTile(64, 64, 32, 4, 4),
    PointerTile(64, 128, 32, 4, 4),
    PointerTile(128, 64, 32, 4, 4),
    PointerTile(128, 128, 32, 4, 4),
    PointerTile(128, 128, 32, 8, 4),
    PointerTile(64, 256, 32, 8, 4),
    PointerTile(64, 64, 64, 4, 3),
    PointerTile(64, 128, 64, 4, 3),
    PointerTile(128, 128, 64, 8, 3),
    PointerTile(64, 64, 16, 4, 4, 4),  # 3x3 filters
    PointerTile(64, 64, 32, 8, 3, 4),
    PointerTile(128, 64, 16, 8, 4, 4),
    PointerTile(16, 128, 32, 4, 4),  # few channels of the result,
    PointerTile(64, 128, 16, 4, 4),  # or of x
    PointerTile(64, 64, 16, 4, 4),
    PointerTile(16, 64, 32, 4, 4),
    PointerTile(16, 64, 16, 4, 4),
]
_FEW = 16  # channels
_UNIT = 8  # channels: 16 bytes, which are fetched at once
# Otherwise numbers are fetched one by one, each with a pointer: larger tiles spill registers
_OF_SINGLE_NUMBERS = [PointerTile(c, 64, k, 4, 4) for c in (16, 64) for k in (16, 32)]
OF_FMAS = _OF_SINGLE_NUMBERS  # of float32 that is not in TF32, whose products are unrolled


def addressable(gpu: Device, itemsize: int, *channels: int) -> bool:
    """Whether there is a TMA unit that can address tensors of so many channels."""
    return gpu.tma and not any(c * itemsize % 16 for c in channels)


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why no tile can do it, or why that is left to others, or None."""
    if spec.stride != 1 or spec.r % 2 == 0 or spec.s % 2 == 0:
        return f"it does filters of odd sides and stride 1, not {spec.r}x{spec.s}, {spec.stride}"
    if spec.mask and spec.c % 4:
        return f"dropout of {spec.c} channels; four of them share a draw"
    first = () if spec.first is None else (spec.first,)
    if addressable(gpu, spec.itemsize, spec.k, spec.c, *spec.extra, *first):
        return "the TMA unit of this GPU fetches such tensors"
    return None


def fitting(spec: ConvSpec, gpu: Device) -> list[PointerTile]:
    """The tiles that can do it, less those that another serves better anyway."""

    def fits(c: PointerTile) -> bool:
        if (spec.k % _UNIT or spec.c % _UNIT) and c not in _OF_SINGLE_NUMBERS:
            return False
        if spec.precision == "ieee" and c not in OF_FMAS:
            return False
        if (c.block_c <= _FEW) != (spec.c <= _FEW) and c.block_c <= _FEW:
            return False
        if c.rows > 1 and ((spec.r, spec.s) != (3, 3) or spec.w % 16 or spec.h % c.rows):
            return False
        shared = (c.num_stages - 1) * sum(fetched(c, spec.itemsize))
        return (
            (c.block_k <= _FEW) == (spec.k <= _FEW or c.rows > 1)
            and shared <= gpu.shared_memory
            and box_of(c, spec.n, spec.h, spec.w, is_even(spec)) is not None
        )

    found = [c for c in TILES if fits(c)]
    border = spec.first if spec.first != spec.c else None
    within = [c for c in found if not border or border % c.block_c == 0]
    return within or found


def cost(spec: ConvSpec, gpu: Device, c: PointerTile) -> float:
    """Microseconds by a crude model in clocks: a multiprocessor's programs multiply (1024
    multiply-adds a clock) or fetch (24 bytes a clock) one after the other; filling the pipeline and
    the epilogue are hidden by the programs that fit beside."""
    box = box_of(c, spec.n, spec.h, spec.w, is_even(spec))
    rounds = max(1, triton.cdiv(programs(c, box, spec.n, spec.h, spec.w, spec.c), gpu.num_sms))
    step = max(
        c.block_c * c.block_m * c.block_k * (3 * c.rows if c.rows > 1 else 1) / 1024,
        sum(fetched(c, spec.itemsize)) / 24,
    )
    taps = spec.taps // (3 if c.rows > 1 else 1)
    steps = taps * triton.cdiv(spec.k, c.block_k)
    shared = (c.num_stages - 1) * sum(fetched(c, spec.itemsize)) + 1024
    resident = max(1, min(gpu.shared_memory // shared, 8 // c.num_warps))
    alone = 1500 + c.block_c * c.block_m * c.rows / c.num_warps
    return rounds * (steps * step + alone / min(resident, rounds)) / CLOCKS


def divide(config: PointerTile, c: int, *k: int) -> bool:
    """Whether blocks divide the channels of the result and of what is convolved."""
    return c % config.block_c == 0 and all(v % config.block_k == 0 for v in k)
