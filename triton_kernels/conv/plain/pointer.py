"""The functions of `conv.fused` without a TMA unit, or where it cannot address the tensors.

Tiles are fetched by cp.async through pointers, see `conv.plain.pointer_kernels`. Any number of
channels will do, and any image; what is no multiple of 8 channels is fetched number by number.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...activations import check_activation, rounded_grad
from ...noise.dropout import Mask, mask_arguments
from ...registry.choose import choose
from ...registry.kernel import of_kernel
from ...registry.spec import dtype_name
from ...runtime.device import describe
from .pointer_kernels import conv_pointer_forward_kernel, conv_pointer_input_grad_kernel
from .tma_boxes import (
    boxes_of_image,
    count_boxes,
    covering_box,
    image_box,
    is_ragged,
    pixel_box,
    row_box,
)


@of_kernel("pointer")
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

_empty = torch.empty  # every output is allocated here; tests replace it to poison the memory


def serves(config: tuple | None, x: Tensor, *channels: int) -> bool:
    """Whether a convolution of x belongs here: the tile says so, or there is no TMA unit, or none
    that could address tensors of so many channels."""
    if config is not None:
        return isinstance(config, PointerTile)
    return not describe(x.device).tma or any(c * x.itemsize % 16 for c in channels)


# --- forward --------------------------------------------------------------------------------------


def conv_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    emb: Tensor | None = None,
    residual: Tensor | None = None,
    extra: Sequence[tuple[Tensor, Tensor]] = (),
    extra_bias: Tensor | None = None,
    stats: bool = False,
    width: int | None = None,
    config: PointerTile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `conv.fused.conv_forward`, which has checked all of it."""
    n, h, w, ci = x.shape
    co, _, r, s = weight.shape
    terms = {"emb": emb, "residual": residual, "extra": extra, "extra_bias": extra_bias}
    terms |= {"stats": stats, "width": width}
    width = co if width is None else width
    if config is None:
        case = x, width, (r, s), stats, len(extra)
        config = choose(
            "conv_forward_pointer",
            n,
            {
                "h": h,
                "w": w,
                "k": ci,
                "c": width,
                "r": r,
                "s": s,
                "dtype": dtype_name(x.dtype, allow_tf32=True),
                "residual": residual is not None,
                "extras": len(extra),
                "stats": stats,
            },
            lambda: candidates(*case),
            lambda: pick(*case),
            lambda c: conv_forward(x, weight, bias, **terms, config=c)[0],
            describe(weight.device),
            similar=True,
        )
    y = _empty((n, h, w, width), dtype=x.dtype, device=x.device)
    channels = (ci, ci), (co, width)
    terms = {"bias": bias, "emb": emb, "residual": residual, "extra": extra}
    strides = {"extra_bias": extra_bias, "stride_w": r * s * ci}
    return y, _launch_forward(x, weight, y, channels, config, stats, **terms, **strides)


def conv_plain_input_grad(
    dy: Tensor,  # [N, H, W, CO]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of dy
    config: PointerTile | None = None,
) -> Tensor:  # [N, H, W, CI]
    """As `conv.fused.conv_plain_input_grad`."""
    n, h, w, kx = dy.shape
    co, ci, r, s = weight.shape
    if config is None:
        case = dy, ci, (r, s), False, 0
        config = choose(
            "conv_plain_input_grad_pointer",
            n,
            {
                "h": h,
                "w": w,
                "k": co,
                "c": ci,
                "r": r,
                "s": s,
                "dtype": dtype_name(dy.dtype, allow_tf32=True),
            },
            lambda: candidates(*case),
            lambda: pick(*case),
            lambda c: conv_plain_input_grad(dy, weight, config=c),
            describe(weight.device),
            similar=True,
        )
    dx = _empty((n, h, w, ci), dtype=dy.dtype, device=dy.device)
    channels = (co, kx), (ci, ci)
    _launch_forward(dy, weight, dx, channels, config, False, transposed=True, stride_w=r * s * ci)
    return dx


def _launch_forward(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    channels: tuple[tuple[int, int], tuple[int, int]],  # of x, and of y: that count, and all
    config: PointerTile,
    stats: bool,
    *,
    bias: Tensor | None = None,
    emb: Tensor | None = None,
    residual: Tensor | None = None,
    extra: Sequence[tuple[Tensor, Tensor]] = (),
    extra_bias: Tensor | None = None,
    transposed: bool = False,
    stride_w: int,
) -> Tensor | None:
    """Partials, if `stats`."""
    n, h, w, _ = x.shape
    (k, kx), (c, cy) = channels
    r, s = weight.shape[2:]
    box = box_of(config, n, h, w, even=stats)
    partials = _partials(box, y) if stats else None
    if y.numel() == 0:
        return partials
    pairs = [t for pair in extra for t in pair] + [None] * (4 - 2 * len(extra))
    beside = [other.shape[3] for other, _ in extra]
    rows = [filters.stride(0) for _, filters in extra]
    for other, filters in extra:
        assert filters.shape == (c, other.shape[3]) and filters.stride(1) == 1
    unit = math.gcd(8, kx, cy, stride_w, *beside, *rows)
    conv_pointer_forward_kernel[(count_programs(config, box, y),)](
        x,
        weight,
        y,
        bias,
        extra_bias,
        emb,
        residual,
        *pairs,
        partials,
        n,
        h,
        w,
        k,
        kx // unit,
        c,
        cy // unit,
        *[v // unit for v in beside],
        *[0] * (2 - len(extra)),
        stride_w // unit,
        *[v // unit for v in rows],
        *[0] * (2 - len(extra)),
        0 if emb is None else emb.stride(0),
        R=r,
        S=s,
        TRANSPOSED=transposed,
        PADDED=(k, c) != (kx, cy),
        EXACT=(k, c) == (kx, cy) and _divide(config, cy, kx, *beside),
        RAGGED=stats and is_ragged(box, h, w),
        UNIT=unit,
        **_constants(config, box),
    )
    return partials


# --- input gradient -------------------------------------------------------------------------------


def conv_input_grad(
    dy: Tensor,
    weight: Tensor,
    *,
    inputs: tuple[Tensor, ...],
    table: Tensor,
    activation: str,
    mask: Mask | None = None,
    config: PointerTile | None = None,
) -> tuple[Tensor, Tensor]:
    """As `conv.fused.conv_input_grad`, which has checked all of it."""
    check_activation(activation)
    n, h, w, kx = dy.shape
    co, ci, r, s = weight.shape
    c1 = inputs[0].shape[3]
    assert mask is None or ci % 4 == 0, "dropout of channels in multiples of 4"
    if config is None:
        case = dy, ci, (r, s), True, 0, len(inputs) == 2 and c1
        rest = {"inputs": inputs, "table": table, "activation": activation, "mask": mask}
        config = choose(
            "conv_input_grad_pointer",
            n,
            {
                "h": h,
                "w": w,
                "k": co,
                "c": ci,
                "first": c1,
                "r": r,
                "s": s,
                "dtype": dtype_name(dy.dtype, allow_tf32=True),
                "activation": activation,
            },
            lambda: candidates(*case),
            lambda: pick(*case),
            lambda c: conv_input_grad(dy, weight, **rest, config=c)[0],
            describe(weight.device),
            similar=True,
        )
    dz = _empty((n, h, w, ci), dtype=dy.dtype, device=dy.device)
    box = box_of(config, n, h, w, even=True)
    partials = _partials(box, dz)
    if dz.numel() == 0:
        return dz, partials
    unit = math.gcd(8, kx, ci, c1)
    conv_pointer_input_grad_kernel[(count_programs(config, box, dz),)](
        dy,
        weight,
        dz,
        inputs[0],
        inputs[1] if len(inputs) == 2 else None,
        table,
        partials,
        n,
        h,
        w,
        co,
        kx // unit,
        ci // unit,
        c1 // unit,
        *mask_arguments(mask),
        R=r,
        S=s,
        ACT=rounded_grad(activation, dy.dtype),
        PADDED=co != kx,
        EXACT=co == kx and _divide(config, ci, kx),
        RAGGED=is_ragged(box, h, w),
        STRADDLING=len(inputs) == 2 and c1 % config.block_c > 0,
        UNIT=unit,
        **_constants(config, box),
    )
    return dz, partials


# --- tiles ----------------------------------------------------------------------------------------


def box_of(config: PointerTile, n: int, h: int, w: int, even: bool) -> tuple[int, int, int] | None:
    """A tile [images, rows, columns]; `even` ones have equally many pixels of their images."""
    if config.rows > 1:
        return row_box(config.block_m, config.rows, h, w)
    if not even:
        return pixel_box(config.block_m, n, h, w)
    return image_box(config.block_m, n, h, w) or covering_box(config.block_m, n, h, w, even=True)


def count_programs(config: PointerTile, box: tuple[int, int, int], y: Tensor) -> int:
    """How many there are for a result [N, H, W, C]."""
    n, h, w, c = y.shape
    tall = box[0], box[1] * config.rows, box[2]
    return count_boxes(tall, n, h, w) * triton.cdiv(c, config.block_c)


def candidates(
    x: Tensor,  # what is convolved
    channels: int,  # of the result
    filter_size: tuple[int, int],
    even: bool,
    extra: int = 0,  # 1x1 convolutions that are added
    border: int | bool = False,  # channels of the first of two inputs of an input gradient
) -> list[PointerTile]:
    """The tiles that can do it, less those that another serves better anyway."""
    n, h, w, k = x.shape

    def fits(c: PointerTile) -> bool:
        if (k % _UNIT or channels % _UNIT) and c not in _OF_SINGLE_NUMBERS:
            return False
        if (c.block_c <= _FEW) != (channels <= _FEW) and c.block_c <= _FEW:
            return False
        if c.rows > 1 and (filter_size != (3, 3) or w % 16 or h % c.rows):
            return False
        shared = (c.num_stages - 1) * sum(fetched(c, x.itemsize))
        return (
            (c.block_k <= _FEW) == (k <= _FEW or c.rows > 1)
            and shared <= describe(x.device).shared_memory
            and box_of(c, n, h, w, even) is not None
        )

    found = [c for c in TILES if fits(c)]
    within = [c for c in found if not border or border % c.block_c == 0]
    return within or found


def fetched(c: PointerTile, itemsize: int) -> tuple[int, int]:
    """Bytes of x and of filters that one step loads."""
    row = c.block_k * itemsize
    if c.rows == 1:
        return c.block_m * row, c.block_c * row
    return (c.rows + 2) * c.block_m * row, 3 * c.block_c * row


def pick(
    x: Tensor,
    channels: int,
    filter_size: tuple[int, int],
    even: bool,
    extra: int = 0,
    border: int | bool = False,
) -> PointerTile:
    """The tile with the shortest time by a crude model in clocks: a multiprocessor's programs
    multiply (1024 multiply-adds a clock) or fetch (24 bytes a clock) one after the other; filling
    the pipeline and the epilogue are hidden by the programs that fit beside."""
    n, h, w, k = x.shape
    gpu = describe(x.device)
    y = x.new_empty((n, h, w, channels), device="meta")

    def time(c: PointerTile) -> float:
        count = count_programs(c, box_of(c, n, h, w, even), y)
        rounds = max(1, triton.cdiv(count, gpu.num_sms))
        step = max(
            c.block_c * c.block_m * c.block_k * (3 * c.rows if c.rows > 1 else 1) / 1024,
            sum(fetched(c, x.itemsize)) / 24,
        )
        taps = math.prod(filter_size) // (3 if c.rows > 1 else 1)
        steps = taps * triton.cdiv(k, c.block_k)
        shared = (c.num_stages - 1) * sum(fetched(c, x.itemsize)) + 1024
        resident = max(1, min(gpu.shared_memory // shared, 8 // c.num_warps))
        alone = 1500 + c.block_c * c.block_m * c.rows / c.num_warps
        return rounds * (steps * step + alone / min(resident, rounds))

    return min(candidates(x, channels, filter_size, even, extra, border), key=time)


def _divide(config: PointerTile, c: int, *k: int) -> bool:
    """Whether blocks divide the channels of the result and of what is convolved."""
    return c % config.block_c == 0 and all(v % config.block_k == 0 for v in k)


def _partials(box: tuple[int, int, int], y: Tensor) -> Tensor:
    n, h, w, c = y.shape
    k = boxes_of_image(box, h, w)
    return _empty((n, k, 2, c), dtype=torch.float32, device=y.device)


def _constants(config: PointerTile, box: tuple[int, int, int]) -> dict[str, int | str]:
    return {
        "ROWS": config.rows,
        "PRECISION": "tf32",
        "TILE_N": box[0],
        "TILE_H": box[1],
        "TILE_W": box[2],
        "BLOCK_C": config.block_c,
        "BLOCK_K": config.block_k,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
