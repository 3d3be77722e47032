"""What one program of a convolution computes, and kernels whose sums over pixels are split.

Each kernel has classes of its own made from these, since a configuration says which kernel it is
of.
"""

import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..reductions.long_sums import fewest_parts
from ..registry.cost import Work
from ..registry.kernel import Kernel, configures
from ..registry.spec import ConvSpec
from ..runtime.device import Device


class FwdTile(NamedTuple):
    """What one program of the forward or of the input gradient computes."""

    block_c: int  # output channels
    block_m: int  # pixels
    block_k: int  # input channels a step
    num_warps: int
    num_stages: int


class WgradTile(NamedTuple):
    """What one program of the weight gradient computes."""

    block_co: int
    block_ci: int
    block_m: int  # pixels a step
    num_warps: int
    num_stages: int


class ConvOperands(NamedTuple):
    """Of a forward pass, or of an input gradient, as a kernel is launched with them."""

    x: Tensor  # [N, H, W, CI], or dy [N, P, Q, CO]
    weight: Tensor  # [CO, CI, R, S] in channels_last memory
    bias: Tensor | None  # [CO]
    y: Tensor  # [N, P, Q, CO] to be written, or dx [N, H, W, CI]
    stride: int
    padding: tuple[int, int]  # of the forward pass
    precision: str  # "ieee" | "tf32"
    dgrad: bool  # whether it is an input gradient
    add: Tensor | None = None  # as y
    follows: bool = False  # a launch that has prepared the filters


class WgradOperands(NamedTuple):
    """Of a weight gradient, as a kernel is launched with them."""

    x: Tensor  # [N, H, W, CI or more]
    dy: Tensor  # [N, P, Q, CO or more]
    weight: Tensor  # [CO, CI, R, S], of which only the shape matters
    parts: Tensor  # [splits, CO * R * S * CI], or one part alone, to be written
    stride: int
    padding: tuple[int, int]
    precision: str  # "ieee" | "tf32"
    stride_co: int | None = None  # of one part alone, if its rows are apart
    accumulate: bool = False  # add to what is in one part alone


C = TypeVar("C", bound=tuple)  # a tile of a weight gradient


@dataclass(frozen=True)
class SplitKernel(Kernel):
    """A weight gradient, whose sum over pixels is cut into parts: a configuration is a tile and,
    behind its fields, the number of parts."""

    tile: type | None = None
    splits: Callable[[ConvSpec, Device, tuple], int] | None = None  # the best number for a tile
    pads: bool = False  # x and dy may have more channels than the filters
    in_place: bool = False  # one part alone may have its rows apart, and be added to what is there

    def planned(self, spec: ConvSpec, gpu: Device, tile: tuple) -> tuple:
        """The configuration of a tile with the best number of parts."""
        return self.config(*tile, self.splits(spec, gpu, tile))


def split_kernel(
    tile: type[C],
    refuse: Callable[[ConvSpec, Device], str | None],
    tiles: Callable[[ConvSpec, Device], Iterable[C]],  # that can do it
    splits: Callable[[ConvSpec, Device, C], int],
    launch: Callable[[C, int, WgradOperands], None],  # of a tile and so many parts
    cost: Callable[[ConvSpec, Device, C], float] | None = None,  # microseconds
    alone: Callable[[ConvSpec, C], bool] = lambda spec, tile: False,  # whether one part may do
    around: bool = True,  # whether more and fewer parts than the best number are worth measuring
    pads: bool = False,
    in_place: bool = False,
    work: Callable[[ConvSpec, Device, tuple], Work] | None = None,  # of a configuration
    fitted_by: tuple[str, ...] = (),
    borrows: int | None = None,
) -> SplitKernel:
    """The kernel of such tiles. Its cost is that of a tile with the best number of parts."""
    config = with_splits(tile)
    splits = lru_cache(maxsize=4096)(splits)

    def why_not(spec: ConvSpec, gpu: Device) -> str | None:
        if spec.padded and not pads:
            return "channels that pad the tensors would become part of its result"
        return refuse(spec, gpu)

    def configs(spec: ConvSpec, gpu: Device) -> list[tuple]:
        fewest = fewest_of(spec)
        found = []
        for t in tiles(spec, gpu):
            best = splits(spec, gpu, t)
            near = [max(1, int(best * f)) for f in (1, 2, 0.5, 0.25)] if around else [best]
            found += [config(*t, k if k >= fewest else best) for k in near]
            if alone(spec, t):
                found.append(config(*t, 1))
        return list(dict.fromkeys(found))

    def total(spec: ConvSpec, gpu: Device, c: tuple) -> float:
        best = c.splits == splits(spec, gpu, c.tile)
        return cost(spec, gpu, c.tile) if best else float("inf")

    return SplitKernel(
        tile.kernel,
        config,
        why_not,
        configs,
        cost and total,
        lambda c, operands: launch(c.tile, c.splits, operands),
        work,
        fitted_by,
        borrows,
        tile=tile,
        splits=splits,
        pads=pads,
        in_place=in_place,
    )


@lru_cache
def with_splits(tile: type[C]) -> type:
    """The fields of a tile and, behind them, the number of parts; and its properties."""
    config = namedtuple(f"{tile.__name__}Split", [*tile._fields, "splits"])
    config.tile = property(lambda self: tile(*self[:-1]))
    for name, value in vars(tile).items():
        if isinstance(value, property):
            setattr(config, name, value)
    return configures(tile.kernel)(config)


def fewest_of(spec: ConvSpec, pixels: int | None = None) -> int:
    """What `long_sums` says of a weight gradient's sum over pixels; None: those of its result."""
    rows, columns = spec.size
    dtype = torch.float32 if spec.itemsize == 4 else torch.bfloat16
    return fewest_parts(
        spec.n * rows * columns if pixels is None else pixels, dtype, spec.precision
    )


def wgrad_work(
    spec: ConvSpec,
    c: tuple,  # a configuration
    programs: int,  # of a part
    steps: float,  # of a program
    products: int,  # of a step
    fetched: int,  # bytes of a step
    resident: int,
) -> Work:
    """What the programs of a weight gradient do."""
    co, ci = spec.of_filters
    return Work(
        tiles=programs * c.splits,
        resident=resident,
        products=products * steps,
        fetched=fetched * steps,
        steps=steps,
        written=0,
        memory=math.prod(spec.pixels) * (spec.k + spec.c) * spec.itemsize,
        parts=c.splits * co * ci * spec.taps * 4,
        splits=c.splits,
    )


def kernel_of_tile(kernels: Sequence[SplitKernel], tile: tuple) -> SplitKernel:
    """The one that a tile is of."""
    return next(kernel for kernel in kernels if isinstance(tile, kernel.tile))
