"""Gated products, as of a transformer's feed-forward layers (GEGLU, SwiGLU: Shazeer 2020,
arXiv:2002.05202):

    y[m, c] = h[m, c] act(g[m, c])        h and g are the halves of x [M, 2C]

    dh = dy act(g),  dg = dy h act'(g)    the halves of dx [M, 2C]

Arithmetic is in float32, and each result is rounded once. A program handles BLOCK_M rows by BLOCK_C
columns of y, and reads both halves where they lie.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..activations import activate, activate_grad, check_activation
from ..runtime.dependent_launch import await_inputs, overlapping

_TILE = 2048  # numbers of y of a program: 16 a thread of four warps, loads of 16 bytes
_MOST_COLUMNS = 256


@triton.jit
def _halves(
    x_ptr,  # [M, 2C]
    M,
    C,
    CB,  # blocks of columns
    GATE: tl.constexpr,  # the half that is g: 0 | 1
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Of this program's tile: rows [BLOCK_M, 1], columns [1, BLOCK_C], which exist, h and g."""
    pid = tl.program_id(0)
    cols = (pid % CB * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    rows = ((pid // CB).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    mask = (rows < M) & (cols < C)
    x_ptrs = x_ptr + rows * (2 * C) + cols
    g = tl.load(x_ptrs + GATE * C, mask=mask, other=0.0).to(tl.float32)
    h = tl.load(x_ptrs + (1 - GATE) * C, mask=mask, other=0.0).to(tl.float32)
    return rows, cols, mask, h, g


@triton.jit
def _gated_kernel(
    x_ptr,  # [M, 2C]
    y_ptr,  # [M, C]
    M,
    C,
    CB,
    GATE: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    rows, cols, mask, h, g = _halves(x_ptr, M, C, CB, GATE, BLOCK_M, BLOCK_C)
    tl.store(y_ptr + rows * C + cols, h * activate(g, ACT), mask=mask)


@triton.jit
def _gated_grad_kernel(
    dy_ptr,  # [M, C]
    x_ptr,  # [M, 2C]
    dx_ptr,  # [M, 2C]
    M,
    C,
    CB,
    GATE: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    rows, cols, mask, h, g = _halves(x_ptr, M, C, CB, GATE, BLOCK_M, BLOCK_C)
    dy = tl.load(dy_ptr + rows * C + cols, mask=mask, other=0.0).to(tl.float32)
    dx_ptrs = dx_ptr + rows * (2 * C) + cols
    tl.store(dx_ptrs + (1 - GATE) * C, dy * activate(g, ACT), mask=mask)
    tl.store(dx_ptrs + GATE * C, dy * h * activate_grad(g, ACT), mask=mask)


class _Grid(NamedTuple):
    programs: int
    cb: int
    block_m: int
    block_c: int


def _cut(m: int, c: int) -> _Grid:
    block_c = min(_MOST_COLUMNS, triton.next_power_of_2(c))
    block_m, cb = _TILE // block_c, triton.cdiv(c, block_c)
    return _Grid(triton.cdiv(m, block_m) * cb, cb, block_m, block_c)


def gated_forward(
    x: Tensor,  # contiguous [..., 2C]
    activation: str,  # of the gate
    gate: int = 1,  # the half that is the gate: 0 or 1
) -> Tensor:  # [..., C]
    """y above."""
    m, c = _sizes(x, activation, gate)
    y = x.new_empty((*x.shape[:-1], c))
    if y.numel():
        grid = _cut(m, c)
        _gated_kernel[(grid.programs,)](
            x, y, m, c, grid.cb, gate, activation, *grid[2:], **overlapping(x.device, m)
        )
    return y


def gated_backward(
    dy: Tensor,  # contiguous [..., C]
    x: Tensor,  # contiguous [..., 2C]
    activation: str,
    gate: int = 1,
) -> Tensor:  # [..., 2C]
    """dx above."""
    m, c = _sizes(x, activation, gate)
    assert dy.shape == (*x.shape[:-1], c) and dy.is_contiguous() and dy.dtype == x.dtype
    dx = x.new_empty(x.shape)
    if dy.numel():
        grid = _cut(m, c)
        _gated_grad_kernel[(grid.programs,)](
            dy, x, dx, m, c, grid.cb, gate, activation, *grid[2:], **overlapping(x.device, m)
        )
    return dx


def _sizes(x: Tensor, activation: str, gate: int) -> tuple[int, int]:
    """M and C."""
    check_activation(activation)
    assert x.is_contiguous() and x.shape[-1] % 2 == 0 and gate in (0, 1)
    c = x.shape[-1] // 2
    return x.numel() // max(1, 2 * c), c
