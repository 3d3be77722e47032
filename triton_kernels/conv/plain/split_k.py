"""Split-K: a convolution whose sum over taps and channels is cut into parts, for small images.

One image of 8x8 pixels and 256 channels is four tiles, each a chain of 36 products, on a GPU with
room for hundreds of programs. Cut into S parts, the chains are S times shorter, and there are S
times as many programs. This launch does not add the parts. The norm that follows
(`norm_single_cta`) reads the whole image anyway, adds the parts, the bias, the embedding and the
residual, and multiplies by the factor.

    parts[s, n, co, p]   float32; their sum over s is conv(x) + the 1x1 convolutions of `extra`

With stride 2, x is read by parity (`conv.plain.products`), and there is no `extra`. In float32 each
product is three of TF32; the kernel splits the numbers in registers, since copies would need two
more launches.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...registry.choose import select
from ...registry.cost import HOPPER, Work, microseconds, name, parameters
from ...registry.kernel import Kernel, Op, configures
from ...registry.spec import FEW_IMAGES, ConvSpec, precision_of
from ...runtime.dependent_launch import overlapping
from ...runtime.device import Device, describe
from ..fused_spec import forward_spec
from ..hopper import one_row, tile_mma
from . import pointer_split
from .fused_kernels import conv_forward_kernel
from .fused_launch import columns_in_boxes
from .parts import LEAST_STEPS, PartsTile, count_steps, cut, part_bytes
from .pointer_split import PointerParts
from .small_batch import refuse_split, split_early, split_work, untimed_split
from .tma_boxes import (
    by_parity,
    count_boxes,
    pixel_box,
    pixels_in_boxes,
    tile_sizes,
    weight_in_boxes,
)


@configures("one_row")
class RowParts(NamedTuple):
    """Of `one_row`: rows of pixels."""

    parts: int


@configures("early_parts")
class EarlyParts(NamedTuple):
    """Of `small_batch`, whose `split_config` chooses the tile."""


@configures("split_k")
class SplitConfig(PartsTile):
    """Of `conv_forward_kernel`."""

    __slots__ = ()


# Tiles with both operands of wgmma in shared memory, and few pixels, since the images are small.
# The third number is the bytes of a box's row, not channels.
_TILES = [
    (64, 64, 128, 4, 4),
    (128, 64, 128, 4, 4),
    (64, 64, 256, 4, 3),
    (64, 128, 128, 4, 4),
    (64, 32, 128, 4, 5),
    (128, 16, 128, 4, 5),
    (64, 16, 128, 4, 6),
    (64, 64, 64, 4, 4),  # few input channels
]
_SUMS = 4096  # accumulators of a tile in "ieee", of each of which a thread has three
_TIMES = {"tf32": 2, "fp32": 6}  # time of a product relative to one of 16 bits
_MAX_PIXELS = 1024  # of an image, since the norm that follows holds a group of all its pixels
_FITTED_BY = ("block_c", "block_m", "block_k")


def conv_split(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of x
    *,
    extra: Sequence[tuple[Tensor, Tensor]] = (),  # up to two: [N, H, W, C], [CO, C]
    stride: int = 1,  # 2: of even H and W, of which P and Q are half; without `extra`
    padding: int | None = None,  # above and left of the image; None: R // 2; below as P and Q need
    allow_tf32: bool = True,  # of float32
    config: RowParts | EarlyParts | SplitConfig | PointerParts | None = None,
) -> Tensor:  # float32 [S, N, CO, P * Q]
    """The parts of conv(x), with square filters, and of 1x1 convolutions of other tensors."""
    n, h, w, ci = x.shape
    co, _, r, s = weight.shape
    assert x.is_contiguous() and x.dtype == weight.dtype and len(extra) <= 2
    assert weight.permute(0, 2, 3, 1).is_contiguous() and r == s and r % 2 == 1
    assert stride == 1 or (h % 2 == w % 2 == 0 and not extra)
    channels = [other.shape[3] for other, _ in extra]
    spec, gpu = split_spec(x, weight, extra, stride, padding, allow_tf32), describe(x.device)
    if config is None:
        given = {"extra": extra, "stride": stride, "padding": padding, "allow_tf32": allow_tf32}

        def run(c: tuple) -> Tensor:
            return conv_split(x, weight, **given, config=c).sum(0)

        config = select(CONV_SPLIT, spec, gpu, run).config
    if isinstance(config, EarlyParts):
        return split_early(x, weight, extra=extra)
    p, q = spec.size
    parts = x.new_empty((config.parts, n, co, p * q), dtype=torch.float32)
    if n == 0:
        return parts
    if isinstance(config, RowParts):
        one_row.launch_parts(x, weight, parts)
        return parts
    if isinstance(config, PointerParts):
        pointer_split.split(config, x, weight, extra, spec, parts)
        return parts
    box, precision = pixel_box(config.block_m, n, p, q), precision_of(x.dtype, allow_tf32)
    pairs = []
    for other, w1x1 in extra:
        assert other.is_contiguous() and w1x1.shape == (co, other.shape[3])
        filters = columns_in_boxes(w1x1, [config.block_c, config.block_k], precision == "ieee")
        pairs += [pixels_in_boxes(other, box, config.block_k), filters]
    steps = triton.cdiv(count_steps(config.block_k, spec), config.parts)
    grid = (count_boxes(box, n, p, q) * triton.cdiv(co, config.block_c), config.parts)
    conv_forward_kernel[grid](
        pixels_in_boxes(by_parity(x) if stride == 2 else x, box, config.block_k),
        weight_in_boxes(weight, config.block_c, config.block_k), *[None] * 5, parts,
        *pairs, *[None] * (4 - len(pairs)), None, None, None,
        *channels, *[0] * (2 - len(extra)), 0, steps, None, n, ci, p, q, co,
        R=r, S=s, PAD_H=spec.pads[0], PAD_W=spec.pads[1], STRIDE=stride, DGRAD=False, TURNED=False,
        PRECISION=precision, ROWS=1, RAGGED=False, TF32=False,
        **tile_sizes(box, config), **overlapping(x.device, n * p * q),
    )  # fmt: skip
    return parts


def split_spec(
    x: Tensor,
    weight: Tensor,
    extra: Sequence[tuple[Tensor, Tensor]] = (),
    stride: int = 1,
    padding: int | None = None,
    allow_tf32: bool = True,
) -> ConvSpec:
    """The spec of `conv_split` with these arguments."""
    halved = {}
    if stride == 2:
        n, h, w, _ = x.shape
        halved = {"p": h // 2, "q": w // 2, "stride": 2}
        halved["padding"] = None if padding is None else (padding, padding)
    others = [other for other, _ in extra]
    return forward_spec(x, weight, extra=others, allow_tf32=allow_tf32, **halved)


def _tiles(spec: ConvSpec, gpu: Device) -> list[tuple[int, ...]]:
    """The tiles that fit. A tile of more than 64 pixels has pixels of one image only: with pixels
    of two images the largest tile takes four times as long."""
    rows = (128, 256) if spec.k * spec.itemsize > 64 else (64,)

    def fits(block_c: int, block_m: int, row: int, _: int, stages: int) -> bool:
        whole = block_m <= max(math.prod(spec.size), 64)
        if spec.stride == 2 and spec.k % (row // spec.itemsize):
            return False  # a block of channels would include channels of the other parity
        if spec.precision == "ieee" and (block_c * block_m > _SUMS or row > 128):
            return False
        fetched = stages * (block_c + block_m) * row
        return row in rows and whole and gpu.holds(fetched) > 0

    return [
        (block_c, block_m, row // spec.itemsize, *rest)
        for block_c, block_m, row, *rest in _TILES
        if fits(block_c, block_m, row, *rest)
    ]


def _configs(spec: ConvSpec, gpu: Device) -> list[SplitConfig]:
    found = cut(_tiles(spec, gpu), spec, gpu, lambda tile: _programs(spec, *tile[:2]))
    return list(dict.fromkeys(SplitConfig(*c) for c in found))


def _programs(spec: ConvSpec, block_c: int, block_m: int) -> int:
    """Programs per part."""
    images = spec.n, *spec.size
    return count_boxes(pixel_box(block_m, *images), *images) * triton.cdiv(spec.c, block_c)


def _work(spec: ConvSpec, gpu: Device, c: SplitConfig) -> Work:
    """The work of its programs, and the reading of the parts by the launch that follows."""
    steps = triton.cdiv(count_steps(c.block_k, spec), c.parts)
    fetched = (c.block_c + c.block_m) * c.block_k * spec.itemsize  # in a step
    return Work(
        tiles=_programs(spec, c.block_c, c.block_m) * c.parts,
        resident=max(min(gpu.holds(c.num_stages * fetched), 4), 1),
        products=c.block_c * c.block_m * c.block_k * steps,
        fetched=fetched * steps,
        steps=steps,
        written=c.block_c * c.block_m,
        memory=spec.bytes,
        parts=part_bytes(c.parts, spec),
        splits=c.parts,
    )


def _cost(spec: ConvSpec, gpu: Device, c: SplitConfig) -> float | None:
    """Microseconds for types without fitted parameters: by those of 16 bits, with boxes of as many
    bytes, and products that take longer."""
    like, scale = replace(spec, dtype="bf16"), spec.itemsize // 2
    tile = c._replace(block_k=scale * c.block_k)
    fitted = parameters(HOPPER).get(name("split_k", _FITTED_BY, like, tile))
    if fitted is None or spec.itemsize == 2:
        return None
    work = _work(spec, gpu, c)
    return microseconds(fitted, work._replace(products=_TIMES[spec.dtype] * work.products), gpu)


def _refuse_row(spec: ConvSpec, gpu: Device) -> str | None:
    if reason := one_row.refuse(spec, gpu):
        return reason
    return None if one_row.count_parts(spec, gpu) > 1 else "a program holds its whole sum"


def _refuse_early(spec: ConvSpec, gpu: Device) -> str | None:
    if spec.stride != 1:
        return f"it does stride 1, not {spec.stride}"
    return _refuse_boxes(spec, gpu) or refuse_split(spec)


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    if reason := _refuse_boxes(spec, gpu):
        return reason
    return None if _tiles(spec, gpu) else "no tile fits into shared memory, or a parity"


def _refuse_boxes(spec: ConvSpec, gpu: Device) -> str | None:
    """Why TMA does not fetch it."""
    if not gpu.tma:
        return "the GPU has no TMA"
    if odd := [c for c in (spec.k, spec.c, *spec.extra) if c % 8]:
        return f"{odd[0]} channels are no multiple of 8"
    return None


def _apart(spec: ConvSpec, gpu: Device) -> str | None:
    """Parts are faster where whole tiles would leave multiprocessors idle, and each tile is a long
    chain of products."""
    if one_row.refuse(spec, gpu) is None:
        more = one_row.count_parts(spec, gpu) > 1
        return None if more else "rows of pixels keep enough multiprocessors busy"
    block_c, block_m, block_k, *_ = _tiles(spec, gpu)[0]
    programs = _programs(spec, block_c, block_m)
    # kernels of `conv.hopper`, in TF32 `tile_mma` alone, take less than half as long per product
    quick = gpu.hopper and spec.itemsize == 2 and spec.stride == 1
    quick = quick or tile_mma.refuse(spec, gpu) is None
    quick = quick and spec.n > FEW_IMAGES and _refuse_boxes(spec, gpu) is None
    if programs > gpu.num_sms // (4 if quick else 1):
        return f"{programs} whole tiles keep {gpu.num_sms} multiprocessors busy"
    if (pixels := math.prod(spec.size)) > _MAX_PIXELS:
        return f"the norm behind it reads {pixels} pixels; at most {_MAX_PIXELS}"
    steps = spec.taps * triton.cdiv(spec.k, block_k)
    return f"{steps} products are no long chain" if steps < 2 * LEAST_STEPS else None


CONV_SPLIT = Op(
    "conv_split",
    ("h", "w", "k", "c", "r", "s", "dtype", "extra"),
    (
        Kernel(
            "one_row",
            RowParts,
            _refuse_row,
            lambda spec, gpu: [RowParts(one_row.count_parts(spec, gpu))],
            work=lambda spec, gpu, c: one_row.work(spec, c.parts),
        ),
        Kernel(
            "early_parts",
            EarlyParts,
            _refuse_early,
            adds=("extra",),
            work=lambda spec, gpu, _: split_work(spec, gpu),
            untimed=untimed_split,
            borrows=HOPPER,
        ),
        Kernel(
            "split_k",
            SplitConfig,
            _refuse,
            _configs,
            adds=("extra",),
            cost=_cost,
            work=_work,
            fitted_by=_FITTED_BY,
            borrows=HOPPER,
        ),
        pointer_split.KERNEL,
    ),
    similar=False,
    apart=_apart,
)
