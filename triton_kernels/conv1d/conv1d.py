"""Convolutions over short sequences where reading the weights is the work: a 1-D UNet in real time.

At batch 1 a layer of Diffusion Policy's network multiplies 10 MB of weights by 4 positions. So the
weights are cut into as many pieces as there are multiprocessors, along output channels and along
input channels (K-slices), and each program

    asks for its piece of the weights, whole, before the previous kernel has ended,
    makes its K-slice of the input: the partial sums of the layer in front, their bias, GroupNorm,
        Mish, FiLM, residual; a slice is whole groups, so that the statistics are its own,
    multiplies, and stores partial sums for the next launch.

A layer is one launch: there is no pass for a norm, an activation or a sum. What is computed more
than once (every program of a slice makes the same activation) is a few thousand numbers. Sums are
added in one order, so that the same input gives the same bits.

With many samples that no longer holds, and `conv_stage` makes the activation once in a launch of
its own, for `conv1d_multiply_kernel` or, where `whole` takes it, for that.

Launches overlap by programmatic dependent launch, where there is any (compute capability 9.0 and
later): weights are constants, and everything else is read behind the wait.

Layout: [N, C, T] within the network, float32, in batches as views of [N, T, C]; [N, T, CX] at its
ends.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..registry.choose import select
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import dtype_name
from ..runtime.device import Device, describe, on_gpu
from ..runtime.hardware import THREAD_REGISTERS, WARP
from . import whole
from .conv1d_kernels import (
    conv1d_apply_kernel,
    conv1d_head_kernel,
    conv1d_multiply_kernel,
    conv1d_project_kernel,
    conv1d_stage_kernel,
)
from .operands import Activation, Stem, Sums
from .stage_spec import StageSpec
from .weights import Conv

_NUM_WARPS = 4
# Unless told what a thread may have, ptxas has few loads under way at once
_MANY_LOADS = {"maxnreg": THREAD_REGISTERS}


class Outcome(NamedTuple):
    """What `conv_stage` returns."""

    partial: Tensor  # float32 [S, N, CO, TO]
    side: Tensor | None  # float32 [S, N, CO, T]
    kept: Tensor | None  # float32 [N, C, T]: the activation


def conv_stage(
    activation: Activation,
    conv: Conv,
    *,
    skip: Tensor | None = None,  # float32 [N, C2, T], channels behind those of the activation
    keep: bool = False,  # also return the activation
    batched: bool = False,
    allow_tf32: bool = False,
    config: tuple | None = None,  # of a kernel of `CONV_STAGE`
) -> Outcome:
    """The convolution of an activation, without its bias, as partial sums."""
    n, c, t = activation.shape
    device = conv.weight.device
    slices, blocks, tiles, bm, cg = conv.weight.shape
    to = conv.out_length(t)
    last = _channels_last(activation, skip, batched)
    kept = _new(conv.weight, (n, c, t), last) if keep else None
    pointers, numbers, shape = _input_arguments(activation, kept, skip, cg)
    shape["LAST"] = last
    precision = _precision(conv.weight.dtype, allow_tf32)
    options = _launch_options(device)
    spec = StageSpec(
        n, dtype_name(conv.weight.dtype, allow_tf32), t, blocks * bm, slices * cg, conv.taps,
        conv.side, 1 if conv.transposed else conv.stride, conv.transposed, batched,
        conv.by_tap is not None, cg, bm,
    )  # fmt: skip
    if config is None:
        config = select(CONV_STAGE, spec, describe(device)).config
    if config.kernel == "stage":
        partial, side = _new_sums(conv, slices, n, t)
        conv1d_stage_kernel[(slices * blocks, n)](
            *pointers, conv.weight, partial, side, *numbers,
            TO=to, CO=conv.out_channels, BTO=_positions(t if conv.transposed else to), BM=bm,
            TAPS=conv.taps, WIDEST=conv.widest, STRIDE=conv.stride, TRANSPOSED=conv.transposed,
            PRECISION=precision, **shape, **options, num_warps=_NUM_WARPS, **_MANY_LOADS,
        )  # fmt: skip
        return Outcome(partial, side, kept)
    is_whole = isinstance(config, whole.Cut)
    parts = spec.parts if is_whole else 1
    a = conv.weight.new_empty((n, t, parts * slices * cg))
    conv1d_apply_kernel[(slices, n)](
        *pointers, a, *numbers, SPLIT=parts == 2, PRECISION=precision, **shape, **options,
        num_warps=_NUM_WARPS, **_MANY_LOADS,
    )  # fmt: skip
    splits = whole.splits(spec, config) if is_whole else slices * cg // config.channels
    partial, side = _new_sums(conv, splits, n, t, last=True)
    if is_whole:
        results = partial.mT, side if side is None else side.mT
        whole.launch(a, conv.by_tap, *results, spec, config, overlap=options["PDL"])
    else:
        _multiply(config, a, conv, partial, side, PRECISION=precision, **options)
    return Outcome(partial, side, kept)


def _multiply(
    config: "Tile",
    a: Tensor,  # [N, T, C]
    conv: Conv,
    partial: Tensor,  # as `Outcome` has them, to be written
    side: Tensor | None,
    **options: Any,
) -> None:
    """The partial sums of a convolution of an activation that is there."""
    n, t, c = a.shape
    splits, _, co, to = partial.shape
    _, blocks, _, bm, cg = conv.weight.shape
    positions = n * (t if conv.transposed else to)
    programs = blocks * bm // config.rows * triton.cdiv(positions, config.positions)
    conv1d_multiply_kernel[(programs, splits, 1 + conv.side)](
        a, conv.weight, partial, side, n, C=c, T=t, TO=to, CO=co, CG=cg, BM=bm,
        ROWS=config.rows, BN=config.positions, BK=config.depth, TAPS=conv.taps, WIDEST=conv.widest,
        STRIDE=conv.stride, TRANSPOSED=conv.transposed, CHANNELS=config.channels,
        **options, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _new_sums(
    conv: Conv, splits: int, n: int, t: int, last: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Where the partial sums of rows of t positions go, and those of a 1x1 convolution beside."""
    shape = splits, n, conv.out_channels
    partial = _new(conv.weight, (*shape, conv.out_length(t)), last)
    return partial, _new(conv.weight, (*shape, t), last) if conv.side else None


def _new(like: Tensor, shape: tuple[int, ...], last: bool = False) -> Tensor:
    """float32 [..., C, T], where `like` is; `last`: as a view of [..., T, C]."""
    *outer, c, t = shape
    size = (*outer, t, c) if last else (*outer, c, t)
    new = like.new_empty(size, dtype=torch.float32)
    return new.mT if last else new


def _channels_last(activation: Activation, skip: Tensor | None, batched: bool) -> bool:
    """How what an activation is made of lies in memory: all of it in one way."""
    source, _, _, residual = activation
    parts = (source, residual, skip)
    tensors = [p.partial if isinstance(p, Sums) else p for p in parts]
    found = {_is_last(x) for x in tensors if isinstance(x, Tensor)}
    if len(found) > 1:
        raise ValueError("sums, residual and skip connection differ in their order of dimensions")
    return found.pop() if found else batched


def _is_last(x: Tensor) -> bool:  # [..., C, T]
    return not x.is_contiguous() and x.mT.is_contiguous()


@configures("multiply")
class Tile(NamedTuple):
    """What a program of a batched convolution computes."""

    rows: int  # output channels
    positions: int
    channels: int  # input channels, in steps of `depth`
    depth: int
    num_warps: int
    num_stages: int


def _tiles(spec: StageSpec, gpu: Device) -> list[Tile]:
    """Tiles of 64 channels, which is the height of `wgmma`, by up to 128 positions (64 where
    operands are split in registers); and as many pieces of the input channels as there are
    multiprocessors for. Of narrow tiles twice as many: most of what they do is read weights."""
    rows, out_channels = spec.block, spec.rows // (2 if spec.transposed else 1)
    while rows < 64 and out_channels % (2 * rows) == 0:
        rows *= 2
    positions = spec.n * (spec.t if spec.transposed else spec.positions)
    width = min(64 if spec.split else 128, max(16, triton.next_power_of_2(positions)))
    programs = spec.rows // rows * triton.cdiv(positions, width)
    depth = min(spec.slice_channels, spec.width)  # a row of an operand in shared memory
    while depth < spec.width and spec.channels % (2 * depth) == 0:
        depth *= 2
    each, at_once = spec.channels, gpu.num_sms if width == 128 else 2 * gpu.num_sms
    while each % (2 * depth) == 0 and 2 * programs * (spec.channels // each) <= at_once:
        each //= 2
    return [Tile(rows, width, each, depth, 4, 4)]


def _refuse_alone(spec: StageSpec, gpu: Device) -> str | None:
    return "the activation is of an earlier launch" if spec.batched else None


def _refuse_multiply(spec: StageSpec, gpu: Device) -> str | None:
    return None if spec.batched else "it reads an activation of an earlier launch"


CONV_STAGE = Op(
    "conv_stage",
    ("t", "rows", "channels", "taps", "side", "stride", "transposed", "batched", "dtype"),
    (
        Kernel("stage", refuse=_refuse_alone),
        whole.KERNEL,
        Kernel("multiply", Tile, _refuse_multiply, _tiles),
    ),
    similar=False,
)


def head(
    activation: Activation,  # of sums and a norm
    weight: Tensor,  # [CX, C]
    bias: Tensor,  # float32 [CX]
) -> Tensor:  # float32 [N, T, CX]
    """A 1x1 convolution of the activation: the end of the network."""
    n, c, t = activation.shape
    (partial, conv_bias), norm = activation.source, activation.norm
    cx = weight.shape[0]
    out = weight.new_empty((n, t, cx), dtype=torch.float32)
    conv1d_head_kernel[(n,)](
        partial, conv_bias, norm.weight, norm.bias, weight, bias, out, norm.eps, C=c, T=t,
        CPG=c // norm.groups, BT=triton.next_power_of_2(t), SPLITS=partial.shape[0], CX=cx,
        LAST=_is_last(partial),
        **_launch_options(weight.device), num_warps=8, **_MANY_LOADS,
    )  # fmt: skip
    return out


def project(
    z: Tensor,  # float32 [R, E]
    weight: Tensor,  # [F, EP], zeros behind the first E columns
    bias: Tensor | None = None,  # float32 [F]
    *,
    allow_tf32: bool = False,
) -> Tensor:  # float32 [R, F]
    """mish(z) weight^T + bias: every block's FiLM at once."""
    (r, e), (f, ep) = z.shape, weight.shape
    out = z.new_empty((r, f), dtype=torch.float32)
    bf, br = 64, 16
    conv1d_project_kernel[(triton.cdiv(f, bf), triton.cdiv(r, br))](
        z, weight, bias, out, r, e, f, EP=ep, BF=bf, BE=PROJECT_BLOCK, BR=br,
        PRECISION=_precision(weight.dtype, allow_tf32), num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


PROJECT_BLOCK = 64  # columns of the weights of `project` are a multiple of it


def _input_arguments(
    activation: Activation, kept: Tensor | None, skip: Tensor | None, cg: int
) -> tuple[tuple, tuple, dict]:
    """Arguments of `make_input_slice`: pointers, numbers, constants of the compilation."""
    n, c, t = activation.shape
    source, norm, film, residual = activation
    stem = source if isinstance(source, Stem) else None
    side = residual if isinstance(residual, Stem) else None
    given = stem or side
    sums = None if stem else source.partial
    residual_tensor = residual.partial if isinstance(residual, Sums) else residual
    pointers = (
        source.bias,
        norm.weight if norm else None,
        norm.bias if norm else None,
        film.table[:, film.offset :] if film else None,
        film.cond[:, film.offset :] if film and film.cond is not None else None,
        film.row if film else None,
        residual.bias if isinstance(residual, Sums | Stem) else None,
        sums,
        given.x if given else None,
        stem.weight if stem else None,
        None if side else residual_tensor,
        side.weight if side else None,
        kept,
        skip,
    )
    strides = (0, 0)
    if film:
        strides = film.table.stride(0), 0 if film.cond is None else film.cond.stride(0)
    numbers = (*strides, norm.eps if norm else 0.0)
    shape = {
        "C": c,
        "C2": 0 if skip is None else skip.shape[1],
        "T": t,
        "CG": cg,
        "CPG": c // norm.groups if norm else cg,
        # a gather of fewer elements than there are threads does not compile
        "BT": max(triton.next_power_of_2(t), WARP * _NUM_WARPS // cg),
        "SPLITS": 0 if stem else sums.shape[0],
        "RES_SPLITS": residual.partial.shape[0] if isinstance(residual, Sums) else 0,
        "SCALE": film.scale if film else False,
        "CX": given.x.shape[2] if given else 0,
        "TAPS_X": stem.weight.shape[1] if stem else 0,
    }
    return pointers, numbers, shape


def _positions(t: int) -> int:
    """The tile that holds t positions, wide enough for a product."""
    return max(8, triton.next_power_of_2(t))


def _precision(dtype: torch.dtype, allow_tf32: bool) -> str:
    return "tf32" if allow_tf32 or dtype != torch.float32 else "tf32x3"


def _launch_options(device: torch.device) -> dict:
    if on_gpu(device) and describe(device).tma:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
