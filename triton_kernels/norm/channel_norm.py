"""The norm over the channels of each pixel, with the affine map, FiLM's scale and shift, and the
activation in the same pass: RMSNorm (Zhang and Sennrich 2019), LayerNorm (Ba et al. 2016) over
channels, and PyTorch's `normalize`. `channel_norm_kernels` has the formulas.

A program keeps whole rows in registers. Forward reads x once and writes y; backward reads x and dy
once, makes the statistics again, and writes dx. It leaves sums over its pixels, of which the
gradients of the parameters follow as in a GroupNorm.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..activations import check_activation, rounded_grad
from ..reductions.row_sums import RowSums, row_place
from ..registry.choose import select
from ..registry.cost import HOPPER, Work, of_passes, programs_at_a_time
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import MOST_CHANNELS, ChannelNormSpec, dtype_name
from ..runtime.dependent_launch import overlapping
from ..runtime.device import Device, describe
from ..runtime.hardware import SECTOR, THREAD_REGISTERS, VECTOR, WARP
from ..runtime.layout import check_affine, check_nhwc
from ..runtime.library import derivative, once_differentiable, op
from .channel_norm_kernels import channel_norm_bwd_kernel, channel_norm_fwd_kernel
from .multi_pass import Params, params_grad, row_strides

EPS_IN = ("root", "max", "sum")


# --- the registry ---------------------------------------------------------------------------------


@configures("whole_rows")
class WholeRows(NamedTuple):
    """What a program reads at once."""

    block_c: int  # channels, of which a row is some blocks
    block_p: int  # rows
    num_warps: int

    @property
    def of_lane(self) -> int:
        """Numbers of a block that a lane has."""
        return self.block_p * self.block_c // (WARP * self.num_warps)

    @property
    def in_row(self) -> int:
        """Those in one row, of 16 bits: a lane reads 16 bytes at once, if it has as many."""
        return min(self.of_lane, VECTOR // 2)

    @property
    def across(self) -> bool:
        """Whether a row of a block is in several warps, which meet at each sum over it."""
        return self.block_c > WARP * self.in_row


_LANE = VECTOR // 4  # numbers of a block, of float32: so tensors of any type are read in one way
_MOST_WARPS = 16
_OTHER_REGISTERS = 20  # of a thread, about, beside those of its numbers


def _refuse(spec: ChannelNormSpec, gpu: Device) -> str | None:
    wide = spec.c > MOST_CHANNELS
    return f"a pixel of {spec.c} channels; at most {MOST_CHANNELS}" if wide else None


def _configs(spec: ChannelNormSpec, gpu: Device) -> list[WholeRows]:
    """Backward, a lane has 20 numbers of x at most, up to three sums of each, and what comes in and
    is multiplied: its registers are enough."""
    ways = ((5, 4), (3, 4)) if spec.grad else ((6, 4), (6, 8), (10, 4))
    found = dict.fromkeys(_in_blocks(spec, *way) for way in ways)
    return [config for config in found if config.num_warps <= _MOST_WARPS]


def _in_blocks(spec: ChannelNormSpec, most: int, num_warps: int) -> WholeRows:
    """Rows in so many blocks at most, each in one warp if it fits there. Blocks are as wide as the
    fewest columns that are not there allow, and at least a sector of memory."""
    in_warps = WARP * _LANE
    while triton.cdiv(spec.c, in_warps) > most:
        in_warps *= 2
    least = min(SECTOR // spec.itemsize, triton.next_power_of_2(max(spec.c, 1)))
    widths = [in_warps >> i for i in range(in_warps.bit_length()) if in_warps >> i >= least]
    widths = [width for width in widths if triton.cdiv(spec.c, width) <= most]
    block_c = min(widths, key=lambda width: triton.cdiv(spec.c, width) * width)
    num_warps = max(num_warps, block_c // (WARP * _LANE))
    again = most // max(triton.cdiv(spec.c, block_c), 1)  # a lane has room for so many rows
    block_p = WARP * _LANE * num_warps // block_c << again.bit_length() - 1
    return WholeRows(block_c, block_p, num_warps)


def _cost(spec: ChannelNormSpec, gpu: Device, config: WholeRows) -> float:
    return of_passes(spec.bytes, 1)


def _work(spec: ChannelNormSpec, gpu: Device, config: WholeRows) -> Work:
    """Backward. A step is a tile of a program. At its start gain and offset, at its end the sums
    over its rows pass between threads that have the same channels: none do if it has one row at a
    time."""
    grid = _cut(spec, config, gpu)
    columns = triton.cdiv(spec.c, config.block_c) * config.block_c
    numbers = grid.block_p * columns
    return Work(
        tiles=spec.n * grid.k,
        resident=max(1, programs_at_a_time(0, config.num_warps, gpu, _registers(spec, config))),
        products=grid.tiles * numbers,
        fetched=grid.tiles * grid.block_p * spec.c * spec.moved,
        steps=grid.tiles,
        written=columns if grid.block_p > 1 else 0,
        memory=spec.bytes,
    )


def _registers(spec: ChannelNormSpec, config: WholeRows) -> int:
    """Of a thread, about: x, dz and two sums in float32, x and dy of the next tile in 16 bits; gain
    and offset of each channel."""
    blocks = triton.cdiv(spec.c, config.block_c)
    of_numbers = 5 * config.of_lane + 2 * config.in_row
    return min(THREAD_REGISTERS, _OTHER_REGISTERS + blocks * of_numbers)


# Channels, and with them the tile, decide; where eps is does not
_KEY = ("pixels", "c", "centred", "activation", "dtype")
CHANNEL_NORM = Op(
    "channel_norm",
    _KEY,
    (Kernel("whole_rows", WholeRows, _refuse, _configs, _cost),),
)
CHANNEL_NORM_GRAD = Op(
    "channel_norm_bwd",
    (*_KEY, "dx", "add"),
    (
        Kernel(
            "whole_rows",
            WholeRows,
            _refuse,
            _configs,
            _cost,
            work=_work,
            fitted_by=("across",),
            borrows=HOPPER,
        ),
    ),
)


class _Grid(NamedTuple):
    """How n images are cut into programs."""

    k: int  # programs an image
    tiles: int  # of each
    masked: bool  # the last tile reaches over the last pixel
    block_p: int
    block_c: int


def _cut(spec: ChannelNormSpec, config: WholeRows, gpu: Device) -> _Grid:
    """As many programs as keep the GPU busy, each with as few tiles as that allows; backward just
    below three of four warps a multiprocessor, as many as registers allow: each leaves sums."""
    block_p = min(config.block_p, triton.next_power_of_2(max(spec.pixels, 1)))
    blocks = triton.cdiv(spec.pixels, block_p)
    warps = 4 * gpu.busy * (3 if spec.grad else 8) // 8
    tiles = max(1, triton.cdiv(spec.n * blocks, max(warps // config.num_warps, 1)))
    k = triton.cdiv(blocks, tiles)
    return _Grid(k, tiles, spec.pixels % block_p > 0, block_p, config.block_c)


# --- launchers ------------------------------------------------------------------------------------


def channel_norm_forward(
    x: Tensor,  # contiguous [N, ..., C]
    params: Params = (None,) * 4,  # weight, bias [C]; scale, shift [N, C]
    *,
    eps: float,
    centred: bool = False,
    eps_in: str = "root",
    factor: float = 1.0,
    activation: str = "identity",
    residual: Tensor | None = None,  # as x, of any dtype
    dtype: torch.dtype | None = None,  # of the result; None: of x
    tf32: bool = False,  # a result in float32 is rounded to TF32
    config: WholeRows | None = None,  # None: the registry's choice
) -> Tensor:  # as x
    """act((factor norm(x) weight + bias) (1 + scale) + shift) + residual, of which the first term
    is `reference.channel_norm`."""
    n, pixels, c = _extent(x, params)
    y = x.new_empty(x.shape, dtype=dtype or x.dtype)
    if y.numel() == 0:
        return y
    written = sum(t.itemsize for t in (y, residual) if t is not None)
    spec = ChannelNormSpec(
        n, dtype_name(x.dtype), pixels, c, centred, eps_in, activation, result=written
    )
    gpu = describe(x.device)

    def run(config: WholeRows) -> Tensor:
        k, tiles, *tile = _cut(spec, config, gpu)
        channel_norm_fwd_kernel[(n * k,)](
            x, *params, residual, y, *row_strides(params), pixels, k, tiles, eps, factor, c,
            centred, eps_in, activation, *tile, tf32, num_warps=config.num_warps,
            **overlapping(x.device),
        )  # fmt: skip
        return y

    return run(config or select(CHANNEL_NORM, spec, gpu, run).config)


class Gradients(NamedTuple):
    """Of what `channel_norm_backward` was asked for; of the rest None."""

    dx: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    rows: Tensor | None  # float32 [rows, C], whose sum is that of dx over all pixels
    sums: Tensor | None  # float32 [rows, 2 C], whose sum is those of bias and weight


def channel_norm_backward(
    dy: Tensor,  # contiguous, shape of x
    x: Tensor,  # contiguous [N, ..., C]
    params: Params = (None,) * 4,
    needed: tuple[bool, ...] = (True,) * 5,  # the gradients of x, weight, bias, scale, shift
    *,
    eps: float,
    centred: bool = False,
    eps_in: str = "root",
    factor: float = 1.0,
    activation: str = "identity",
    add: Tensor | None = None,  # shape of x: added to dx
    rows: bool | RowSums = False,  # of dx
    sums: bool | RowSums = False,  # without scale and shift
    tf32: bool = False,  # dx in float32 is rounded to TF32
    config: WholeRows | None = None,
) -> Gradients:
    """Each gradient in the dtype of its tensor; those of parameters that there are not are None.
    `rows` and `sums` ask for rows, which are kept with others or in a tensor of their own."""
    n, pixels, c = _extent(x, params)
    device = x.device
    asked = tuple(need and p is not None for need, p in zip(needed[1:], params, strict=True))
    dx = x.new_empty(x.shape) if needed[0] else None
    spec = ChannelNormSpec(
        n, dtype_name(x.dtype), pixels, c, centred, eps_in, activation, grad=True, dx=needed[0],
        add=add is not None, result=dy.itemsize,
    )  # fmt: skip
    gpu = describe(device)

    def run(config: WholeRows, rows: bool | RowSums, sums: bool | RowSums):
        k, tiles, *tile = _cut(spec, config, gpu)
        kept, summed = (
            place(n * k, columns) if (place := row_place(kind, x)) else None
            for kind, columns in ((rows, c), (sums or any(asked), 2 * c))
        )
        if x.numel():
            channel_norm_bwd_kernel[(n * k,)](
                dy, x, *params, add, dx, summed, kept, *row_strides(params), pixels, k, tiles, eps,
                factor, c, centred, eps_in, rounded_grad(activation, x.dtype), *tile, tf32,
                num_warps=config.num_warps, **overlapping(device),
            )  # fmt: skip
        return kept, summed

    def first(config: WholeRows) -> Tensor:
        _, summed = run(config, bool(rows), bool(sums))
        return summed.sum(0) if dx is None else dx

    config = config or select(CHANNEL_NORM_GRAD, spec, gpu, first).config
    kept, summed = run(config, rows, sums)
    grads = (None,) * 4
    if any(asked):
        grads = params_grad(summed.view(n, len(summed) // max(n, 1), 2, c), params, asked)
    return Gradients(dx, *grads, kept, summed if sums else None)


def _extent(x: Tensor, params: Params) -> tuple[int, int, int]:
    """N, pixels and C, with all pixels as those of one image where all are treated alike."""
    c = x.shape[-1]
    n = x.shape[0] if any(p is not None for p in params[2:]) else 1
    return n, math.prod(x.shape[:-1]) // max(n, 1), c


# --- the op ---------------------------------------------------------------------------------------


@op(
    "channel_norm",
    lambda x, weight, bias, scale, shift, *_: x.new_empty(x.shape),
    differentiable=True,
)
def _channel_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    centred: bool,
    eps_in: str,
    activation: str,
) -> Tensor:
    options = {"eps": eps, "centred": centred, "eps_in": eps_in, "activation": activation}
    return channel_norm_forward(x, (weight, bias, scale, shift), **options)


def _fake_backward(dy, x, weight, bias, scale, shift, eps, centred, eps_in, activation, needed):
    inputs = (x, weight, bias, scale, shift)
    return [t.new_empty(t.shape) for t, need in zip(inputs, needed, strict=True) if need]


@op("channel_norm_backward", _fake_backward)
def _channel_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    centred: bool,
    eps_in: str,
    activation: str,
    needed: list[bool],
) -> list[Tensor]:
    """The gradients of x, weight, bias, scale and shift, those that are needed."""
    options = {"eps": eps, "centred": centred, "eps_in": eps_in, "activation": activation}
    params = (weight, bias, scale, shift)
    grads = channel_norm_backward(dy, x, params, tuple(needed), **options)
    return [grad for grad, need in zip(grads[:5], needed, strict=True) if need]


@derivative(of=_channel_norm)
class _ChannelNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, scale, shift, *how):
        ctx.save_for_backward(x, weight, bias, scale, shift)
        ctx.how = how
        return _channel_norm.below_autograd(x, weight, bias, scale, shift, *how)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        needed = ctx.needs_input_grad[:5]
        dy = dy.contiguous()  # autograd may hand over an expanded or permuted gradient
        grads = iter(_channel_norm_backward(dy, *ctx.saved_tensors, *ctx.how, list(needed)))
        return *(next(grads) if need else None for need in needed), *(None,) * len(ctx.how)


def channel_norm(
    x: Tensor,  # [N, H, W, C]
    weight: Tensor | None = None,  # [C]
    bias: Tensor | None = None,  # [C]
    *,
    eps: float = 1e-5,
    centred: bool = False,
    eps_in: str = "root",
    activation: str = "identity",
    scale: Tensor | None = None,  # [N, C]
    shift: Tensor | None = None,  # [N, C]
) -> Tensor:  # [N, H, W, C], dtype of x
    """act((norm(x) * weight + bias) * (1 + scale) + shift), with norm over the channels of each
    pixel; statistics and arithmetic in float32.

    norm(x) = x / d, with `centred` of x without its mean. With s the mean of x^2, `eps_in` says d:

        "root"   sqrt(s + eps)        as torch.nn.RMSNorm, and with `centred` LayerNorm
        "max"    max(sqrt(s), eps)    sqrt(C) F.normalize(x, eps=sqrt(C) eps)
        "sum"    sqrt(s) + eps        as EDM2's layers (Karras et al. 2024)

    Parameters may have another dtype than x, such as float32; each gradient has the dtype of its
    tensor. The rows of `scale` and `shift` may be strided. torch.autocast has no effect.

    Raises ValueError for more than 8192 channels, and for a wrong shape, dtype, layout, activation
    or eps_in.
    """
    check_nhwc("x", x)
    check_activation(activation)
    if eps_in not in EPS_IN:
        raise ValueError(f"eps_in is {eps_in!r}; expected one of {', '.join(EPS_IN)}")
    n, _, _, c = x.shape
    if c > MOST_CHANNELS:
        raise ValueError(f"x has {c} channels; expected at most {MOST_CHANNELS}")
    check_affine(n, c, weight, bias, scale, shift)
    return _channel_norm(x, weight, bias, scale, shift, eps, centred, eps_in, activation)
