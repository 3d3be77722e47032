"""How a convolution through pointers is cut: which tiles can do it, and which is quickest by a
model."""

from typing import NamedTuple

import triton

from ....registry.cost import AMPERE, Work, microseconds, name, parameters, resident
from ....registry.kernel import CLOCKS, configures
from ....registry.spec import ConvSpec
from ....runtime.device import Device
from ....runtime.hardware import VECTOR
from ...refusals import unfetchable
from ..fused_tiles import box_of, fetched, is_even, programs


@configures("pointer")
class PointerTile(NamedTuple):
    """What one program computes."""

    block_c: int  # channels of the result
    block_m: int  # pixels, of each row of tiles
    block_k: int  # channels of x a step
    num_warps: int
    num_stages: int  # of which one is no buffer
    rows: int = 1  # accumulators, each of the rows below another's, which share loads

    @property
    def sums(self) -> int:
        """What a thread accumulates; those of few channels count as the smallest others."""
        numbers = self.block_c * self.block_m * self.rows // (32 * self.num_warps)
        return max(64 if self.rows > 1 else 32, numbers)

    @property
    def step(self) -> int:
        """Channels of x a step, likewise."""
        return self.block_k if self.rows > 1 else max(32, self.block_k)


TILES = [
    PointerTile(64, 64, 32, 4, 4),
    PointerTile(64, 64, 64, 4, 3),
    PointerTile(64, 128, 32, 4, 4),
    PointerTile(64, 128, 64, 4, 3),
    PointerTile(64, 256, 32, 4, 4),
    PointerTile(128, 64, 32, 4, 4),
    PointerTile(128, 128, 32, 4, 4),
    PointerTile(128, 128, 64, 4, 3),
    PointerTile(128, 128, 32, 8, 4),
    PointerTile(64, 64, 32, 4, 3, 4),  # 3x3 filters
    PointerTile(64, 64, 16, 4, 3, 4),  # with half of the shared memory
    PointerTile(64, 128, 32, 4, 3, 2),
    PointerTile(16, 128, 32, 4, 4),  # few channels of the result,
    PointerTile(16, 64, 32, 4, 3, 4),
    PointerTile(16, 128, 32, 4, 3, 4),
    PointerTile(64, 128, 16, 4, 4),  # or of x
    PointerTile(64, 64, 16, 4, 4),
    PointerTile(16, 64, 32, 4, 4),
    PointerTile(16, 64, 16, 4, 4),
]
FITTED_BY = ("rows", "sums", "step")  # what parameters of costs belong to
FEW = 16  # channels
_UNIT = VECTOR // 2  # channels of 16 bits, fetched at once
# Otherwise numbers are fetched one by one, each with a pointer: larger tiles spill registers
_OF_SINGLE_NUMBERS = [PointerTile(c, 64, k, 4, 4) for c in (16, 64) for k in (16, 32)]
OF_FMAS = _OF_SINGLE_NUMBERS  # of float32 that is not in TF32, whose products are unrolled


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why no tile can do it, or why that is left to others, or None."""
    if spec.stride != 1 or spec.r % 2 == 0 or spec.s % 2 == 0:
        return f"it does filters of odd sides and stride 1, not {spec.moved}"
    if spec.mask and spec.c % 4:
        return f"dropout of {spec.c} channels; four of them share a draw"
    first = () if spec.first is None else (spec.first,)
    if unfetchable(gpu, spec.itemsize, spec.k, spec.c, *spec.extra, *first) is None:
        return "the TMA unit of this GPU fetches such tensors"
    return None


def fitting(spec: ConvSpec, gpu: Device) -> list[PointerTile]:
    """The tiles that can do it, less those that another serves better anyway."""

    def fits(c: PointerTile) -> bool:
        if (spec.k % _UNIT or spec.c % _UNIT) and c not in _OF_SINGLE_NUMBERS:
            return False
        if spec.precision == "ieee" and c not in OF_FMAS:
            return False
        if (c.block_c <= FEW) != (spec.c <= FEW) and c.block_c <= FEW:
            return False
        if c.rows > 1 and ((spec.r, spec.s) != (3, 3) or spec.w % 16 or spec.h % c.rows):
            return False
        return (
            (c.rows > 1 or (c.block_k <= FEW) == (spec.k <= FEW))
            and _shared(c, spec) <= gpu.shared_memory
            and box_of(c, spec.n, spec.h, spec.w, is_even(spec)) is not None
        )

    found = [c for c in TILES if fits(c)]
    return [c for c in found if is_shared(c.num_warps, _shared(c, spec), gpu)] or found


def _shared(c: PointerTile, spec: ConvSpec) -> int:
    """Bytes of a program."""
    return (c.num_stages - 1) * sum(fetched(c, spec.itemsize))


def work(
    spec: ConvSpec,
    gpu: Device,
    c: PointerTile,
    box: tuple[int, int, int] | None = None,  # of pixels; None: as `box_of` cuts the images
) -> Work:
    """What its programs do."""
    box = box or box_of(c, spec.n, spec.h, spec.w, is_even(spec))
    taps = spec.taps // (3 if c.rows > 1 else 1)
    steps = taps * triton.cdiv(spec.k, c.block_k)
    products = c.block_c * c.block_m * c.block_k * (3 * c.rows if c.rows > 1 else 1)
    beside = sum(triton.cdiv(k, c.block_k) for k in spec.extra)
    numbers = c.block_c * c.block_m * c.rows
    share = 3 if c.rows > 1 else 1  # a 1x1 filter is one of three rows of taps
    return Work(
        tiles=programs(c, box, spec.n, spec.h, spec.w, spec.c),
        resident=resident(numbers // (32 * c.num_warps), _shared(c, spec), c.num_warps, gpu),
        products=products * (steps + beside / share),
        fetched=sum(fetched(c, spec.itemsize)) * (steps + beside / share),
        steps=steps + beside,
        written=numbers,
        memory=spec.bytes,
        grad=spec.activation is not None,
    )


def is_shared(num_warps: int, shared: int, gpu: Device) -> bool:
    """Whether a multiprocessor has room for eight warps of programs with so many bytes of shared
    memory, as in all the times that costs are fitted to: four alone wait for every step."""
    return num_warps * gpu.holds(shared) >= 8


def cost(spec: ConvSpec, gpu: Device, c: PointerTile) -> float:
    """Microseconds, of numbers of 32 bits, whose times nobody has fitted."""
    return _in_clocks(work(spec, gpu, c), gpu, c)


def predicted(todo: Work, spec: ConvSpec, gpu: Device, c: PointerTile) -> float:
    """Microseconds of programs that do other work than `work` says, as the kernel `pointer` has
    them: by what was fitted on this architecture, or to the code of sm_80."""
    key = name("pointer", FITTED_BY, spec, c)
    fitted = parameters(gpu.arch).get(key) or parameters(AMPERE).get(key)
    return _in_clocks(todo, gpu, c) if fitted is None else microseconds(fitted, todo, gpu)


def _in_clocks(todo: Work, gpu: Device, c: PointerTile) -> float:
    """Microseconds by a crude model in clocks: a multiprocessor's programs multiply (1024
    multiply-adds a clock) or fetch (24 bytes a clock) one after the other; filling the pipeline and
    the epilogue are hidden by the programs that fit beside."""
    rounds = max(1, triton.cdiv(todo.tiles, gpu.num_sms))
    alone = 1500 + todo.written / c.num_warps
    step = max(todo.products / 1024, todo.fetched / 24)
    return rounds * (step + alone / min(todo.resident, rounds)) / CLOCKS


def divide(config: PointerTile, c: int, *k: int) -> bool:
    """Whether blocks divide the channels of the result and of what is convolved."""
    return c % config.block_c == 0 and all(v % config.block_k == 0 for v in k)
