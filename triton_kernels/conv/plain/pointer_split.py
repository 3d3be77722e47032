"""`conv_split` without a TMA unit, or where it cannot address the tensors: the tiles and products
of `conv.plain.pointer`, each program a part of the sum."""

import math
from collections.abc import Sequence

import triton
from torch import Tensor

from ...registry.cost import of_passes
from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec, precision_of
from ...runtime.device import Device
from . import pointer_tiles
from .fused_tiles import box_of, programs
from .parts import PartsTile, count_steps, cut, part_bytes
from .pointer_kernels import conv_pointer_forward_kernel
from .pointer_tiles import PointerTile, divide, fitting
from .tma_boxes import tile_sizes


@configures("pointer_parts")
class PointerParts(PartsTile):
    """A `PointerTile` of one row, and the number of parts."""

    __slots__ = ()

    @property
    def tile(self) -> PointerTile:
        return PointerTile(*self[:-1])


def split(
    config: PointerParts,
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory
    extra: Sequence[tuple[Tensor, Tensor]],  # up to two: [N, H, W, C], [CO, C]
    spec: ConvSpec,
    parts: Tensor,  # float32 [S, N, CO, H * W], which is written
) -> None:
    n, h, w, k = x.shape
    for other, filters in extra:
        assert other.is_contiguous() and filters.shape == (spec.c, other.shape[3])
        assert filters.stride(1) == 1
    tile, stride = config.tile, spec.taps * k
    box = box_of(tile, n, h, w, even=False)
    beside, rows = [o.shape[3] for o, _ in extra], [f.stride(0) for _, f in extra]
    unit = math.gcd(8, k, spec.c, *beside, *rows)
    pairs, absent = [t for pair in extra for t in pair], 2 - len(extra)
    conv_pointer_forward_kernel[(programs(tile, box, n, h, w, spec.c), config.parts)](
        x, weight, parts, *[None] * 4, *pairs, *[None] * (2 * absent), None, n, h, w, k, k // unit,
        spec.c, spec.c // unit, *[v // unit for v in beside], *[0] * absent, stride // unit,
        *[v // unit for v in rows], *[0] * absent, 0,
        triton.cdiv(count_steps(config.block_k, spec), config.parts), None,
        R=spec.r, S=spec.s, TRANSPOSED=False, ROWS=1, EXACT=divide(tile, spec.c, k, *beside),
        RAGGED=False, PADDED=False, UNIT=unit, TF32=False,
        PRECISION=precision_of(x.dtype, spec.dtype != "fp32"), **tile_sizes(box, tile),
    )  # fmt: skip


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    if spec.precision == "ieee":
        return "float32 that is not rounded to TF32"
    return pointer_tiles.refuse(spec, gpu)


def _configs(spec: ConvSpec, gpu: Device) -> list[PointerParts]:
    tiles = [tuple(tile[:-1]) for tile in fitting(spec, gpu) if tile.rows == 1]
    size = spec.n, *spec.size

    def count(tile: tuple[int, ...]) -> int:
        of = PointerTile(*tile)
        return programs(of, box_of(of, *size, even=False), *size, spec.c)

    found = [PointerParts(*c) for c in cut(tiles, spec, gpu, count)]
    return list(dict.fromkeys(found))


def _cost(spec: ConvSpec, gpu: Device, c: PointerParts) -> float:
    """As of the whole sums' programs, each with its share of the steps. The launch behind reads the
    parts again."""
    whole = pointer_tiles.work(spec, gpu, c.tile)
    share = triton.cdiv(count_steps(c.block_k, spec), c.parts) / whole.steps
    todo = whole._replace(
        tiles=whole.tiles * c.parts,
        products=whole.products * share,
        fetched=whole.fetched * share,
        steps=whole.steps * share,
    )
    us = pointer_tiles.predicted(todo, spec, gpu, c.tile)
    return us + of_passes(2 * part_bytes(c.parts, spec), launches=0)


KERNEL = Kernel("pointer_parts", PointerParts, _refuse, _configs, _cost, adds=("extra",))
