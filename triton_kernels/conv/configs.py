"""Configurations and operands of convolutions, and kernels that split their sum over pixels.

Each kernel derives a class of its own from these tiles, since the class of a configuration tells
which kernel it belongs to.
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
    """The tile of a program of a forward pass or an input gradient."""

    block_c: int  # output channels
    block_m: int  # pixels
    block_k: int  # input channels per step
    num_warps: int
    num_stages: int


class WgradTile(NamedTuple):
    """The tile of a program of a weight gradient."""

    block_co: int
    block_ci: int
    block_m: int  # pixels per step
    num_warps: int
    num_stages: int


class ConvOperands(NamedTuple):
    """The operands of a forward pass or an input gradient."""

    x: Tensor  # [N, H, W, CI], or dy [N, P, Q, CO]
    weight: Tensor  # [CO, CI, R, S] in channels_last memory
    bias: Tensor | None  # [CO]
    y: Tensor  # [N, P, Q, CO] to be written, or dx [N, H, W, CI]
    stride: int
    padding: tuple[int, int]  # of the forward pass
    precision: str  # "ieee" | "tf32"
    dgrad: bool  # an input gradient
    add: Tensor | None = None  # as y: added to it
    follows: bool = False  # the previous kernel prepares the filters


class WgradOperands(NamedTuple):
    """The operands of a weight gradient."""

    x: Tensor  # [N, H, W, CI or more]
    dy: Tensor  # [N, P, Q, CO or more]
    weight: Tensor  # [CO, CI, R, S], of which shape and dtype matter
    stride: int
    padding: tuple[int, int]
    precision: str  # of float32: "ieee" | "tf32"
    # [splits, CO * R * S * CI] to be written; or the gradient, if there is one part
    parts: Tensor | None = None
    stride_co: int | None = None  # of the rows of the gradient, if they are not contiguous
    accumulate: bool = False  # add to the gradient in memory; with one part only


C = TypeVar("C", bound=tuple)  # a tile of a weight gradient


@dataclass(frozen=True)
class SplitKernel(Kernel):
    """A weight gradient whose sum over pixels is cut into parts. A configuration has the fields of
    a tile, then the number of parts."""

    tile: type | None = None
    splits: Callable[[ConvSpec, Device, tuple], int] | None = None  # the best number for a tile
    pads: bool = False  # x and dy may have more channels than the filters
    in_place: bool = False  # with one part, `stride_co` and `accumulate` are supported

    def planned(self, spec: ConvSpec, gpu: Device, tile: tuple) -> tuple:
        """The configuration of a tile with the best number of parts."""
        return self.config(*tile, self.splits(spec, gpu, tile))


def split_kernel(
    tile: type[C],
    refuse: Callable[[ConvSpec, Device], str | None],
    tiles: Callable[[ConvSpec, Device], Iterable[C]],  # the tiles that can compute it
    splits: Callable[[ConvSpec, Device, C], int],  # the best number of parts
    launch: Callable[[C, int, WgradOperands], None],  # called with a tile and a number of parts
    cost: Callable[[ConvSpec, Device, C], float] | None = None,  # microseconds
    alone: Callable[[ConvSpec, C], bool] = lambda spec, tile: False,  # whether to list one part
    around: bool = True,  # also list more and fewer parts than the best number
    pads: bool = False,
    in_place: bool = False,
    work: Callable[[ConvSpec, Device, tuple], Work] | None = None,  # of a configuration
    fitted_by: tuple[str, ...] = (),
    borrows: int | None = None,
) -> SplitKernel:
    """The kernel with these tiles. `cost` is the cost of a tile with the best number of parts."""
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
    """A class with the fields and properties of a tile, and the number of parts."""
    config = namedtuple(f"{tile.__name__}Split", [*tile._fields, "splits"])
    config.tile = property(lambda self: tile(*self[:-1]))
    for name, value in vars(tile).items():
        if isinstance(value, property):
            setattr(config, name, value)
    return configures(tile.kernel)(config)


def fewest_of(spec: ConvSpec, pixels: int | None = None) -> int:
    """The fewest parts of a weight gradient's sum over pixels (`long_sums`); None: its pixels."""
    pixels = math.prod(spec.pixels) if pixels is None else pixels
    dtype = torch.float32 if spec.itemsize == 4 else torch.bfloat16
    return fewest_parts(pixels, dtype, spec.precision)


def programs_of(co: int, ci: int, taps: int, tile: tuple) -> tuple[int, int]:
    """Those of a part of a weight gradient: by blocks of channels, and by groups of taps."""
    assert taps % tile.taps == 0, "taps of one program are neighbours in the filter"
    return -(-co // tile.block_co) * -(-ci // tile.block_ci), taps // tile.taps


def wgrad_work(
    spec: ConvSpec,
    c: tuple,  # a configuration
    programs: int,  # per part
    steps: float,  # per program
    products: int,  # per step
    fetched: int,  # bytes per step
    resident: int,
) -> Work:
    """The work of the programs of a weight gradient."""
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
    """The kernel that a tile belongs to."""
    return next(kernel for kernel in kernels if isinstance(tile, kernel.tile))
