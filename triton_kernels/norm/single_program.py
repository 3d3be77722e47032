"""GroupNorm of a small image in one launch: a program keeps whole groups of a sample in registers,
reads them once and needs no partial sums; see `group_norm` for the formulas.

A program has GROUPS groups of CG channels, GROUPS * CG <= BLOCK_C, and all pixels, HW <= BLOCK_P;
CB programs make a sample. Mean and variance are taken in two passes over the registers, so that a
large mean costs nothing.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import activate
from ..registry.cost import of_passes
from ..registry.kernel import Kernel, configures
from ..registry.spec import NormSpec
from ..runtime.device import Device
from ..runtime.hardware import SECTOR, WARP
from .coefficients import affine, coefficients, normalised_and_dz
from .multi_pass import Halves, Params, empty_like, row_strides, spec_of
from .pass_grid import MOST_HELD


@configures("single_program")
class SingleProgram(NamedTuple):
    """What a program has."""

    groups: int
    num_warps: int


_GOOD_TILE = 8192  # twice as large was a fifth slower
_ROW_CHANNELS = 20  # of a program, if the groups and the image allow
_ELEMENTS = 64  # of a thread: fewer warps meet sooner at a barrier, and more programs fit
_LARGE_GRAD = 32  # backward, if the tile is larger than a good one


# --- kernels --------------------------------------------------------------------------------------


@triton.jit
def _group_sum(v, member):
    """For each channel the sum of v over its group, both [BLOCK_C]. `member` [BLOCK_C, BLOCK_G]
    says which channel is in which group."""
    per_group = tl.sum(tl.where(member, v[:, None], 0.0), 0)
    return tl.sum(tl.where(member, per_group[None, :], 0.0), 1)


@triton.jit
def _group_sums(v, w, member):
    """That of v and that of w. The warps meet at a barrier many times in a sum: once for both."""
    both = tl.join(v, w)  # [BLOCK_C, 2]
    member = member[:, :, None]
    per_group = tl.sum(tl.where(member, both[:, None, :], 0.0), 0)  # [BLOCK_G, 2]
    return tl.split(tl.sum(tl.where(member, per_group[None, :, :], 0.0), 1))


@triton.jit
def _locate(
    CB,
    HW,
    CG: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """The sample (int64) of a program, its pixels and channels, the mask of the channels and that
    of the tile, and the groups' members."""
    pid = tl.program_id(0)
    lane = tl.arange(0, BLOCK_C)
    mask_c = lane < GROUPS * CG
    offs_c = pid % CB * (GROUPS * CG) + lane
    offs_p = tl.arange(0, BLOCK_P)
    mask = (offs_p < HW)[:, None] & mask_c[None, :]
    member = (lane // CG)[:, None] == tl.arange(0, BLOCK_G)[None, :]
    return (pid // CB).to(tl.int64), offs_p, offs_c, mask_c, mask, member


@triton.jit
def _pointers(x1_ptr, x2_ptr, n, offs_p, offs_c, HW, C1, C):
    """Where a tile of x is or, as its groups may lie across the border, of x1 beside x2."""
    if x2_ptr is None:
        offs = offs_p[:, None] * C + offs_c[None, :]  # within an image: 32 bits
        return x1_ptr + n * HW * C + offs
    else:
        C2 = C - C1
        offs1 = offs_p[:, None] * C1 + offs_c[None, :]
        offs2 = offs_p[:, None] * C2 + (offs_c - C1)[None, :]
        in_x1 = (offs_c < C1)[None, :]
        return tl.where(in_x1, x1_ptr + n * HW * C1 + offs1, x2_ptr + n * HW * C2 + offs2)


@triton.jit
def _group_norm_single_program_fwd_kernel(
    x1_ptr,  # [N, HW, C1]
    x2_ptr,  # [N, HW, C - C1] or None
    mean_ptr,  # float32 [N, G], out
    rstd_ptr,  # float32 [N, G], out
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    y_ptr,  # [N, HW, C]
    stride_scale,
    stride_shift,
    HW,
    C1,
    C,
    G,
    CB,
    eps,
    CG: tl.constexpr,
    ACT: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    n, offs_p, offs_c, mask_c, mask, member = _locate(CB, HW, CG, GROUPS, BLOCK_P, BLOCK_C, BLOCK_G)
    total = HW * 1.0 * CG

    x_ptrs = _pointers(x1_ptr, x2_ptr, n, offs_p, offs_c, HW, C1, C)
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    mean = tl.div_rn(_group_sum(tl.sum(x, 0), member), total)  # exact for a constant image
    delta = tl.where(mask, x - mean[None, :], 0.0)
    m2, rest = _group_sums(tl.sum(delta * delta, 0), tl.sum(delta, 0), member)
    rest /= total  # what the first sum has rounded off
    rstd = 1.0 / tl.sqrt(m2 / total + eps)

    gain, offset = affine(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c
    )
    z = (delta - rest[None, :]) * (rstd * gain)[None, :] + offset[None, :]
    y_ptrs = _pointers(y_ptr, None, n, offs_p, offs_c, HW, C1, C)
    tl.store(y_ptrs, activate(z, ACT).to(y_ptr.dtype.element_ty), mask=mask)
    offs_g = n * G + offs_c // CG
    first = mask_c & (offs_c % CG == 0)  # of its group
    tl.store(mean_ptr + offs_g, mean + rest, mask=first)
    tl.store(rstd_ptr + offs_g, rstd, mask=first)


@triton.jit
def _group_norm_single_program_bwd_kernel(
    x1_ptr,  # [N, HW, C1]
    x2_ptr,  # [N, HW, C - C1] or None
    dy_ptr,  # [N, HW, C]
    mean_ptr,  # float32 [N, G]
    rstd_ptr,  # float32 [N, G]
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    dx1_ptr,  # [N, HW, C1]
    dx2_ptr,  # [N, HW, C - C1] or None
    sums_ptr,  # float32 [N, 2, C]: D and E, out
    stride_scale,
    stride_shift,
    HW,
    C1,
    C,
    G,
    CB,
    CG: tl.constexpr,
    ACT: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    n, offs_p, offs_c, mask_c, mask, member = _locate(CB, HW, CG, GROUPS, BLOCK_P, BLOCK_C, BLOCK_G)
    total = HW * 1.0 * CG

    x_ptrs = _pointers(x1_ptr, x2_ptr, n, offs_p, offs_c, HW, C1, C)
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    dy_ptrs = _pointers(dy_ptr, None, n, offs_p, offs_c, HW, C1, C)
    dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
    mean, rstd, gain, offset = coefficients(
        mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
        stride_scale, stride_shift, n, offs_c, mask_c, G, CG,
    )  # fmt: skip
    xhat, dz = normalised_and_dz(x, dy, mean, rstd, gain, offset, ACT)
    sum_d = tl.sum(dz, 0)
    sum_e = tl.sum(dz * xhat, 0)
    tl.store(sums_ptr + n * 2 * C + offs_c, sum_d, mask=mask_c)
    tl.store(sums_ptr + n * 2 * C + C + offs_c, sum_e, mask=mask_c)

    m1, m2 = _group_sums(gain * sum_d, gain * sum_e, member)
    m1 /= total
    m2 /= total
    dx = (gain[None, :] * dz - m1[None, :] - xhat * m2[None, :]) * rstd[None, :]
    dx_ptrs = _pointers(dx1_ptr, dx2_ptr, n, offs_p, offs_c, HW, C1, C)
    tl.store(dx_ptrs, dx.to(dx1_ptr.dtype.element_ty), mask=mask)


# --- launchers ------------------------------------------------------------------------------------


@lru_cache
def _groups_of_a_program(hw: int, c: int, num_groups: int, element_size: int) -> int:
    """0 if the image is too large for this file.

    As few as give rows of 20 channels, for many small programs: the first whose rows keep to whole
    16-byte loads, if its tile is not large, else the first. If none does, as many as fit, unless
    that leaves rows that memory does not deliver by themselves.
    """
    cg = c // num_groups
    fitting = []
    for groups in range(1, num_groups + 1):
        tile = triton.next_power_of_2(hw) * triton.next_power_of_2(groups * cg)
        if num_groups % groups == 0 and tile <= MOST_HELD:
            fitting.append((groups, groups * cg, tile))
    wide = [(g, tile) for g, row, tile in fitting if row >= _ROW_CHANNELS]
    aligned = [g for g, tile in wide if tile <= _GOOD_TILE and g * cg * element_size % 16 == 0]
    if wide:
        return (aligned or [wide[0][0]])[0]
    if not fitting:
        return 0
    groups, row, _ = fitting[-1]
    return groups if groups == num_groups or row * element_size >= SECTOR else 0


def _groups(spec: NormSpec) -> int:
    return _groups_of_a_program(spec.pixels, spec.c, spec.groups, spec.itemsize)


def _refuse(spec: NormSpec, gpu: Device) -> str | None:
    if spec.pixels == 0:
        return "images without pixels"
    size = f"{spec.pixels} pixels of {spec.c // spec.groups} channels a group"
    return None if _groups(spec) else f"{size} are too many for registers"


def _blocks(spec: NormSpec, groups: int) -> tuple[int, int, int, int]:
    """GROUPS, BLOCK_P, BLOCK_C, BLOCK_G."""
    sizes = (spec.pixels, groups * spec.c // spec.groups, groups)
    return groups, *map(triton.next_power_of_2, sizes)


def _default(spec: NormSpec) -> SingleProgram:
    groups = _groups(spec)
    _, block_p, block_c, _ = _blocks(spec, groups)
    tile = block_p * block_c
    elements = _LARGE_GRAD if spec.grad and tile > _GOOD_TILE else _ELEMENTS
    return SingleProgram(groups, max(tile // (WARP * elements), 1))


def _configs(spec: NormSpec, gpu: Device) -> list[SingleProgram]:
    """The default first. Fewer groups make more programs and shorter rows, more warps have fewer
    elements each."""
    found = [_default(spec)]
    for groups in range(1, spec.groups + 1):
        _, block_p, block_c, _ = _blocks(spec, groups)
        tile = block_p * block_c
        row = groups * spec.c // spec.groups * spec.itemsize
        whole = spec.groups % groups == 0 and (row >= SECTOR or groups == spec.groups)
        if whole and 1024 <= tile <= MOST_HELD:
            warps = [w for w in (1, 2, 4, 8, 16) if 16 <= tile // (WARP * w) <= _ELEMENTS]
            found += [SingleProgram(groups, w) for w in warps]
    return found


def _cost(spec: NormSpec, gpu: Device, config: SingleProgram) -> float:
    """Forward, rows of few channels are to be measured: three launches may be the faster."""
    groups = _groups(spec)
    wide = groups == spec.groups or groups * (spec.c // spec.groups) >= _ROW_CHANNELS
    return of_passes(spec.bytes, 1) if wide or spec.grad else math.inf


def _forward(
    config: SingleProgram,
    xs: Halves,
    num_groups: int,
    eps: float,
    params: Params,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """y, and mean and rstd as [2, N, G]."""
    x, spec = xs[0], spec_of(xs, num_groups)
    n, hw, c = spec.n, spec.pixels, spec.c
    y = x.new_empty((*x.shape[:3], c))
    stats = x.new_empty((2, n, num_groups), dtype=torch.float32)
    cb = num_groups // config.groups
    shape = (*row_strides(params), hw, x.shape[3], c, num_groups, cb, eps, c // num_groups)
    _group_norm_single_program_fwd_kernel[(n * cb,)](
        *xs, *stats, *params, y, *shape, activation, *_blocks(spec, config.groups),
        num_warps=config.num_warps,
    )  # fmt: skip
    return y, stats


def _backward(
    config: SingleProgram,
    xs: Halves,
    dy: Tensor,
    stats: Tensor,
    params: Params,
    activation: str,
    dx: bool,  # written in any case
) -> tuple[Halves, Tensor]:
    """The gradient of x, and D and E as [N, 1, 2, C]."""
    g = stats.shape[2]
    spec = spec_of(xs, g)
    n, hw, c = spec.n, spec.pixels, spec.c
    dxs = empty_like(xs)
    sums = dy.new_empty((n, 1, 2, c), dtype=torch.float32)
    cb = g // config.groups
    shape = (*row_strides(params), hw, xs[0].shape[3], c, g, cb, c // g)
    _group_norm_single_program_bwd_kernel[(n * cb,)](
        *xs, dy, *stats, *params, *dxs, sums, *shape, activation, *_blocks(spec, config.groups),
        num_warps=config.num_warps,
    )  # fmt: skip
    return dxs, sums


SINGLE_PROGRAM = Kernel("single_program", SingleProgram, _refuse, _configs, _cost, _forward)
SINGLE_PROGRAM_GRAD = Kernel("single_program", SingleProgram, _refuse, _configs, _cost, _backward)
