"""How a fused convolution is cut: which tiles can do it, and which is quickest by a model."""

import math

import triton

from ...registry.cost import Work, beside_rows, outside_rows, programs_at_a_time
from ...registry.kernel import CLOCKS
from ...registry.spec import ConvSpec
from ...runtime.device import Device
from ..refusals import unfetchable
from .by_tma.tma import Config
from .by_tma.tma_boxes import (
    count_boxes,
    covering_box,
    image_box,
    pixel_box,
    row_box,
    spread_row_box,
)


def serves(
    config: Config,
    itemsize: int,
    r: int,  # rows of the filter
    pixels: tuple[int, int, int],  # N, H, W
    even: bool,  # tiles have to have equally many pixels of their images
    grad: bool,  # an input gradient
) -> bool:
    """Whether a tile can do a convolution."""
    wide = config.block_k * itemsize <= 128  # a row of a box
    rows = config.rows == 1 or r == 3
    box = box_of(config, *pixels, even) if wide and rows else None
    return box is not None and not (grad and _splits_unevenly(config, box, *pixels[1:]))


def box_of(config: Config, n: int, h: int, w: int, even: bool) -> tuple[int, int, int] | None:
    """A tile [images, rows, columns]; `even` ones have equally many pixels of their images, which
    they divide if any can."""
    if config.rows > 1:
        of_rows = row_box if isinstance(config, Config) else spread_row_box
        return of_rows(config.block_m, config.rows, h, w)
    if not even:
        return pixel_box(config.block_m, n, h, w)
    return image_box(config.block_m, n, h, w) or covering_box(config.block_m, n, h, w, even=True)


def summed_box(config: Config, box: tuple[int, int, int]) -> tuple[int, int, int]:
    """The pixels of which a program leaves a sum: rows of a `Config` leave one each, of others all
    leave one together."""
    images, rows, columns = box
    return box if isinstance(config, Config) else (images, rows * config.rows, columns)


def piece_of(config: Config, box: tuple[int, int, int]) -> tuple[int, int, int]:
    """What the epilogue of the input gradient does at a time: a tile, or half of one where a thread
    has 128 accumulators. The half is of images, else of rows, else of columns."""
    if not isinstance(config, Config) or config.rows > 1:  # those of Hopper do it as they can
        return summed_box(config, box)
    if config.block_c * config.block_m < 128 * 32 * config.num_warps:
        return box
    n, h, w = box
    return (n // 2, h, w) if n > 1 else (1, h // 2, w) if h > 1 else (1, 1, w // 2)


def _splits_unevenly(config: Config, box: tuple[int, int, int], h: int, w: int) -> bool:
    """Whether the pieces of a tile have more or fewer pixels of an image than one another."""
    _, rows, columns = piece_of(config, box)
    return (rows < box[1] and h % box[1] > 0) or (columns < box[2] and w % box[2] > 0)


def programs(config: Config, box: tuple[int, int, int], n: int, h: int, w: int, c: int) -> int:
    """How many there are for a result [N, H, W, C]; of a `PointerTile` as well."""
    tall = box[0], box[1] * config.rows, box[2]
    return count_boxes(tall, n, h, w) * triton.cdiv(c, config.block_c)


def fetched(config: Config, itemsize: int) -> tuple[int, int]:
    """Bytes of x and of filters that one step loads; of a `PointerTile` as well."""
    row = config.block_k * itemsize
    if config.rows == 1:
        return config.block_m * row, config.block_c * row
    return (config.rows + 2) * config.block_m * row, 3 * config.block_c * row


def work(spec: ConvSpec, gpu: Device, c: Config) -> Work:
    """What its programs do."""
    box = box_of(c, spec.n, spec.h, spec.w, is_even(spec))
    taps = spec.taps // (3 if c.rows > 1 else 1)
    read = [spec.k] * taps + list(spec.extra)
    steps = sum(triton.cdiv(k, c.block_k) for k in read)
    products = c.block_c * c.block_m * c.block_k * (3 * c.rows if c.rows > 1 else 1)
    of_step = fetched(c, spec.itemsize)
    pixels, filters = (size // (c.block_k * spec.itemsize) for size in of_step)
    beyond = 1 - spec.c / (c.block_c * triton.cdiv(spec.c, c.block_c))
    return Work(
        tiles=programs(c, box, spec.n, spec.h, spec.w, spec.c),
        resident=max(1, resident_of(c, spec, gpu)),
        products=products * steps,
        fetched=sum(of_step) * steps,
        steps=steps,
        written=c.block_c * c.block_m * c.rows,
        memory=spec.bytes,
        grad=spec.activation is not None,
        beside=(pixels + filters) * sum(beside_rows(k, c.block_k, spec.itemsize) for k in read),
        outside=sum(outside_rows(k, c.block_k, pixels, filters, beyond) for k in read),
    )


def resident_of(config: Config, spec: ConvSpec, gpu: Device) -> int:
    """Programs that a multiprocessor holds at a time."""
    shared = _parts(spec) * sum(fetched(config, spec.itemsize)) * config.num_stages
    return programs_at_a_time(shared, config.num_warps, gpu)


def _parts(spec: ConvSpec) -> int:
    """Of each number that are fetched; those of 1x1 filters are made in registers."""
    return 2 if spec.precision == "ieee" and spec.taps > 1 else 1


def is_even(spec: ConvSpec) -> bool:
    """Whether tiles have to have equally many pixels of their images: they leave sums of them."""
    return spec.stats or spec.activation is not None


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why no tile can do it, or None."""
    if spec.stride != 1 or spec.r % 2 == 0 or spec.s % 2 == 0:
        return f"it does filters of odd sides and stride 1, not {spec.moved}"
    return unfetchable(gpu, spec.itemsize, spec.k, spec.c, spec.first or 0, *spec.extra)


def fitting(configs: list[Config], spec: ConvSpec, gpu: Device) -> list[Config]:
    """The tiles that can do it, less those that another serves better anyway."""
    block_k = 64 if spec.itemsize == 2 and spec.k > 32 else 32
    pixels, even = (spec.n, spec.h, spec.w), is_even(spec)
    grad = spec.activation is not None
    fit = [
        c
        for c in configs
        if (c.block_k == block_k or c.rows > 1)
        and serves(c, spec.itemsize, spec.r, pixels, even, grad)
        and resident_of(c, spec, gpu) > 0
    ]
    within = [c for c in fit if spec.border % c.block_c == 0]  # one input a tile
    return within or fit


def cost(spec: ConvSpec, gpu: Device, c: Config) -> float:
    """Microseconds by a crude model in clocks: a multiprocessor's programs multiply (2048
    multiply-adds a clock) or fetch (32 bytes a clock, where filters, which all programs read at
    about the same time, count half) one after the other; filling the pipeline and the epilogue are
    hidden by the other programs that fit beside. Tiles of several rows, whose products into one
    accumulator Triton does not overlap, have to be timed: infinite."""
    if c.rows > 1:
        return math.inf
    box = box_of(c, spec.n, spec.h, spec.w, is_even(spec))
    rounds = max(1, triton.cdiv(programs(c, box, spec.n, spec.h, spec.w, spec.c), gpu.num_sms))
    products = c.block_c * c.block_m * c.block_k
    of_x, of_w = fetched(c, spec.itemsize)
    times = 3 if spec.precision == "ieee" else 1  # see `tf32x3`
    step = max(times * products / 2048, _parts(spec) * (of_x + of_w / 2) / 32)
    steps = spec.taps * triton.cdiv(spec.k, c.block_k)
    alone = 1500 + c.block_c * c.block_m / c.num_warps
    return rounds * (steps * step + alone / min(resident_of(c, spec, gpu), rounds)) / CLOCKS
