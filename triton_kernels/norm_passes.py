"""The passes over memory of a GroupNorm whose statistics come from elsewhere (`norm_tables`):

    apply     x, table -> a = act((x - mean) rstd g + b)
    norm_dx   dz, x, coeff -> dx = p dz + q x + r  (+ gradients of other uses of x)

Launchers without autograd. x is one tensor or the concatenation of x1 and x2 over channels, which
never exists in memory: a program reads one half, and norm_dx writes the halves apart. A program has
TILES tiles of BLOCK_P pixels by BLOCK_C channels; K programs cover the pixels of an image, CB1
blocks of channels the first half and CB both.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activations import activate, check_activation
from .layout import check_nhwc, check_shape
from .norm_tables import channel_block

_empty = torch.empty  # tests put a function here that returns NaNs


class _Config(NamedTuple):
    tile: int  # elements of a tile
    tiles: int  # tiles of a program in a large image
    num_warps: int


# Sixteen to 32 elements a thread: two or more 16-byte loads in flight, few registers
_APPLY_CONFIGS = [
    _Config(4096, 2, 4),
    _Config(2048, 2, 4),
    _Config(4096, 1, 4),
    _Config(2048, 4, 4),
]
_DX_CONFIGS = [_Config(2048, 2, 4), _Config(2048, 4, 4), _Config(4096, 2, 8), _Config(2048, 1, 4)]

_MIN_PROGRAMS = 1024  # below this the chunk of a program is cut down to fill the chip
_MIN_TILE = 1024  # eight elements a thread


# --- kernels --------------------------------------------------------------------------------------


@triton.jit
def _apply_half(
    x_ptr,  # this half: [N, HW, CH], or [N, H/2, W/2, CH] to be upsampled
    table_ptr,  # float32 [N, 4, C]
    a_ptr,  # [N, HW, C]
    n,
    k,
    c0,  # first channel of the program, within the half
    border,  # first channel of the half
    HW,
    W,
    CH,
    C,
    ACT: tl.constexpr,
    UPSAMPLE: tl.constexpr,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    offs_p = tl.arange(0, BLOCK_P)
    offs_c = c0 + tl.arange(0, BLOCK_C)
    mask_c = offs_c < CH
    row_ptr = table_ptr + n * 4 * C + border + offs_c
    mean = tl.load(row_ptr, mask=mask_c, other=0.0)
    rstd = tl.load(row_ptr + C, mask=mask_c, other=0.0)
    g = tl.load(row_ptr + 2 * C, mask=mask_c, other=0.0)
    b = tl.load(row_ptr + 3 * C, mask=mask_c, other=0.0)
    slope = rstd * g
    for i in range(TILES):
        p0 = (k * TILES + i) * BLOCK_P
        mask = (offs_p < HW - p0)[:, None] & mask_c[None, :] if MASKED else None
        if UPSAMPLE:
            p = p0 + offs_p
            source = n * (HW // 4) + p // W // 2 * (W // 2) + p % W // 2
            offs = source[:, None] * CH + offs_c[None, :]
        else:
            offs = (n * HW + p0) * CH + (offs_p[:, None] * CH + offs_c[None, :])
        x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
        # x - mean first: x slope + (b - mean slope) would cancel when the mean is large
        a = activate((x - mean[None, :]) * slope[None, :] + b[None, :], ACT)
        out_ptr = a_ptr + (n * HW + p0) * C + border
        offs = offs_p[:, None] * C + offs_c[None, :]
        tl.store(out_ptr + offs, a.to(a_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _apply_kernel(
    x1_ptr,  # [N, HW, C1], or [N, H/2, W/2, C1] with UPSAMPLE
    x2_ptr,  # [N, HW, C2] or None
    table_ptr,  # float32 [N, 4, C]
    a_ptr,  # [N, HW, C]
    HW,
    W,
    C1,
    C2,
    K,
    CB1,
    CB,
    ACT: tl.constexpr,
    UPSAMPLE: tl.constexpr,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # last pixels first: L2 has those of x from its maker, and keeps the first of a for its reader
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    pid_c = pid % CB
    k = pid // CB % K
    n = (pid // CB // K).to(tl.int64)
    C = C1 + C2
    if pid_c < CB1:
        c0 = pid_c * BLOCK_C
        _apply_half(
            x1_ptr, table_ptr, a_ptr, n, k, c0, 0, HW, W, C1, C,
            ACT, UPSAMPLE, MASKED, TILES, BLOCK_P, BLOCK_C,
        )  # fmt: skip
    elif x2_ptr is not None:
        c0 = (pid_c - CB1) * BLOCK_C
        _apply_half(
            x2_ptr, table_ptr, a_ptr, n, k, c0, C1, HW, W, C2, C,
            ACT, False, MASKED, TILES, BLOCK_P, BLOCK_C,
        )  # fmt: skip


@triton.jit
def _dx_half(
    dz_ptr,  # [N, HW, C]
    x_ptr,  # this half: [N, HW, CH], as the four below
    coeff_ptr,  # float32 [N, 3, C]
    add_ptr,  # or None
    add_second_ptr,  # or None
    dx_ptr,
    sums_ptr,  # float32 [N, K, CH] or None
    n,
    k,
    c0,  # first channel of the program, within the half
    border,  # first channel of the half
    HW,
    CH,
    C,
    K,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    offs_p = tl.arange(0, BLOCK_P)
    offs_c = c0 + tl.arange(0, BLOCK_C)
    mask_c = offs_c < CH
    row_ptr = coeff_ptr + n * 3 * C + border + offs_c
    p = tl.load(row_ptr, mask=mask_c, other=0.0)
    q = tl.load(row_ptr + C, mask=mask_c, other=0.0)
    r = tl.load(row_ptr + 2 * C, mask=mask_c, other=0.0)
    acc = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for i in range(TILES):
        p0 = (k * TILES + i) * BLOCK_P
        mask = (offs_p < HW - p0)[:, None] & mask_c[None, :] if MASKED else None
        first = (n * HW + p0) * CH
        offs = offs_p[:, None] * CH + offs_c[None, :]
        offs_z = offs_p[:, None] * C + offs_c[None, :]
        dz = tl.load(dz_ptr + (n * HW + p0) * C + border + offs_z, mask=mask).to(tl.float32)
        x = tl.load(x_ptr + first + offs, mask=mask).to(tl.float32)
        dx = p[None, :] * dz + (q[None, :] * x + r[None, :])
        if add_ptr is not None:
            dx += tl.load(add_ptr + first + offs, mask=mask).to(tl.float32)
        if add_second_ptr is not None:
            dx += tl.load(add_second_ptr + first + offs, mask=mask).to(tl.float32)
        tl.store(dx_ptr + first + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if sums_ptr is not None:
            acc += tl.where(mask, dx, 0.0) if MASKED else dx
    if sums_ptr is not None:
        tl.store(sums_ptr + (n * K + k) * CH + offs_c, tl.sum(acc, 0), mask=mask_c)


@triton.jit
def _norm_dx_kernel(
    dz_ptr,  # [N, HW, C]
    x1_ptr,  # [N, HW, C1]
    x2_ptr,  # [N, HW, C2] or None
    coeff_ptr,  # float32 [N, 3, C]
    add1_ptr,  # [N, HW, C1] or None
    add1_second_ptr,  # [N, HW, C1] or None
    add2_ptr,  # [N, HW, C2] or None
    dx1_ptr,  # [N, HW, C1]
    dx2_ptr,  # [N, HW, C2] or None
    sums_ptr,  # float32 [N, K, C1] or None
    HW,
    C1,
    C2,
    K,
    CB1,
    CB,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # as in apply
    pid_c = pid % CB
    k = pid // CB % K
    n = (pid // CB // K).to(tl.int64)
    C = C1 + C2
    if pid_c < CB1:
        c0 = pid_c * BLOCK_C
        _dx_half(
            dz_ptr, x1_ptr, coeff_ptr, add1_ptr, add1_second_ptr, dx1_ptr, sums_ptr,
            n, k, c0, 0, HW, C1, C, K, MASKED, TILES, BLOCK_P, BLOCK_C,
        )  # fmt: skip
    elif x2_ptr is not None:
        c0 = (pid_c - CB1) * BLOCK_C
        _dx_half(
            dz_ptr, x2_ptr, coeff_ptr, add2_ptr, None, dx2_ptr, None,
            n, k, c0, C1, HW, C2, C, K, MASKED, TILES, BLOCK_P, BLOCK_C,
        )  # fmt: skip


# --- launchers ------------------------------------------------------------------------------------


class _Grid(NamedTuple):
    """How a pass over [N, HW, C1 + C2] is cut into programs."""

    programs: int
    k: int  # chunks of pixels an image
    cb1: int  # blocks of channels in the first half
    cb: int  # in both
    masked: bool  # some tiles reach over an edge
    tile: tuple[int, int, int]  # TILES, BLOCK_P, BLOCK_C


def _cut(n: int, hw: int, c1: int, c2: int, config: _Config) -> _Grid:
    block_c = channel_block(c1, c2)
    cb1 = triton.cdiv(c1, block_c)
    cb = cb1 + triton.cdiv(c2, block_c)
    block_p = max(min(config.tile // block_c, triton.next_power_of_2(hw)), 1)
    tiles = min(config.tiles, triton.next_power_of_2(triton.cdiv(hw, block_p)))
    while tiles > 1 and n * cb * triton.cdiv(hw, tiles * block_p) < _MIN_PROGRAMS:
        tiles //= 2
    smaller = max(_MIN_TILE // block_c, 1)
    while block_p > smaller and n * cb * triton.cdiv(hw, tiles * block_p) < _MIN_PROGRAMS:
        block_p //= 2
    k = triton.cdiv(hw, tiles * block_p)
    masked = hw % (tiles * block_p) != 0 or c1 % block_c != 0 or c2 % block_c != 0
    return _Grid(n * k * cb, k, cb1, cb, masked, (tiles, block_p, block_c))


def apply(
    x1: Tensor,  # [N, H, W, C1], or [N, H / 2, W / 2, C1] with upsample1
    x2: Tensor | None,  # [N, H, W, C2]
    table: Tensor,  # float32 [N, 4, C1 + C2], of `norm_table`
    activation: str,
    *,
    upsample1: bool = False,
) -> Tensor:  # [N, H, W, C1 + C2], dtype of x1
    """act(norm(x)) of x = x1 beside x2.

    With upsample1 x1 is read as if every pixel were a 2x2 block of the image.
    """
    check_activation(activation)
    check_nhwc("x1", x1)
    n, h, w, c1 = x1.shape
    h, w, c2 = (2 * h, 2 * w, 0) if upsample1 else (h, w, 0)
    if x2 is not None:
        check_nhwc("x2", x2)
        c2 = x2.shape[3]
        check_shape("x2", x2, n, h, w, c2)
    check_shape("table", table, n, 4, c1 + c2)
    config = _APPLY_CONFIGS[0]
    grid = _cut(n, h * w, c1, c2, config)
    a = _empty((n, h, w, c1 + c2), dtype=x1.dtype, device=x1.device)
    shape = (h * w, w, c1, c2, grid.k, grid.cb1, grid.cb)
    options = (activation, upsample1, grid.masked, *grid.tile)
    _apply_kernel[(grid.programs,)](x1, x2, table, a, *shape, *options, num_warps=config.num_warps)
    return a


def norm_dx(
    dz: Tensor,  # [N, H, W, C1 + C2]
    x1: Tensor,  # [N, H, W, C1]
    x2: Tensor | None,  # [N, H, W, C2]
    coeff: Tensor,  # float32 [N, 3, C1 + C2], of `norm_grad_table`
    add1: Tensor | None = None,  # [N, H, W, C1]
    add2: Tensor | None = None,  # [N, H, W, C2]
    add1_second: Tensor | None = None,  # [N, H, W, C1]
    sums: bool = False,
    *,
    out: Tensor | None = None,  # [N, H, W, C1], may be dz if there is no x2
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx1 = p dz + q x1 + r + add1 + add1_second and dx2 alike, in the dtype of their x, each sum
    rounded once.

    With `sums` the third result is float32 [rows, C1], whose sum over rows (`bias_grad`) is the sum
    of dx1 over samples and pixels; otherwise None.
    """
    check_nhwc("dz", dz)
    check_nhwc("x1", x1)
    n, h, w, c1 = x1.shape
    c2 = 0 if x2 is None else x2.shape[3]
    check_shape("dz", dz, n, h, w, c1 + c2)
    check_shape("coeff", coeff, n, 3, c1 + c2)
    first = {"add1": add1, "add1_second": add1_second, "out": out}
    for c, halves in ((c1, first), (c2, {"x2": x2, "add2": add2})):
        for name, half in halves.items():
            if half is not None:
                check_nhwc(name, half)
                check_shape(name, half, n, h, w, c)
    config = _DX_CONFIGS[0]
    grid = _cut(n, h * w, c1, c2, config)
    dx1 = _empty(x1.shape, dtype=x1.dtype, device=x1.device) if out is None else out
    dx2 = None if x2 is None else _empty(x2.shape, dtype=x2.dtype, device=x2.device)
    rows = None
    if sums:
        rows = _empty((n * grid.k, c1), dtype=torch.float32, device=x1.device)
    adds = (add1, add1_second, add2)
    shape = (h * w, c1, c2, grid.k, grid.cb1, grid.cb)
    _norm_dx_kernel[(grid.programs,)](
        dz, x1, x2, coeff, *adds, dx1, dx2, rows, *shape, grid.masked, *grid.tile,
        num_warps=config.num_warps,
    )  # fmt: skip
    return dx1, dx2, rows
