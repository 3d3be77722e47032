"""`conv_split` without a TMA unit, or where it cannot address the tensors: the tiles and products
of `conv.plain.pointer`, each program a part of the sum."""

import triton
from torch import Tensor

from ....registry.cost import of_passes
from ....registry.kernel import Kernel, configures
from ....registry.spec import ConvSpec
from ....runtime.device import Device
from ...hopper.operands import Operands
from ..fused_tiles import box_of, programs
from ..parts import PartsTile, SplitOperands, count_steps, cut, part_bytes
from . import pointer, pointer_tiles
from .pointer_tiles import PointerTile, fitting


@configures("pointer_parts")
class PointerParts(PartsTile):
    """A `PointerTile` of one row, and the number of parts."""

    __slots__ = ()

    @property
    def tile(self) -> PointerTile:
        return PointerTile(*self[:-1])


def _launch(config: PointerParts, operands: SplitOperands) -> Tensor:
    """The parts."""
    x, weight, extra, spec = operands
    parts = operands.parts(config.parts)
    given = Operands(x, weight, parts, None, None, extra=extra, precision=spec.precision)
    steps = triton.cdiv(count_steps(config.block_k, spec), config.parts)
    pointer.forward(config.tile, given, steps=steps)
    return parts


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


KERNEL = Kernel("pointer_parts", PointerParts, _refuse, _configs, _cost, _launch, adds=("extra",))
