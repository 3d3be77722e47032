"""Resampling by a FIR filter over NHWC, the same for every channel ("upfirdn2d" of StyleGAN2):

    y[p, q] = sum over i, j of taps[i, j] z[p down + i - top, q down + j - left]

where z has up - 1 zeros behind each pixel and around them more. NCSN++, the blocks `Skip...` of
diffusers and others halve and double images by it. Its adjoint is the same with `up` and `down`
exchanged, the filter turned round and R - 1 - top zeros above (S - 1 - left beside), so one kernel
makes both passes. It is compiled for a filter: numbers are constants, zeros cost nothing. A program
makes BLOCK_Q pixels of one row, of BLOCK_C channels; what its taps share it reads from the cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.dependent_launch import await_inputs, overlapping

_TILE = 2048  # numbers of a program: 16 a thread of four warps
_MOST_CHANNELS = 256
MOST_TAPS = 64  # each is a load in the kernel's code
Taps = tuple[tuple[float, ...], ...]  # R rows of S


@triton.jit
def _fir_kernel(
    x_ptr,  # [N, H, W, C]
    y_ptr,  # [N, P, Q, C]
    H,
    W,
    C,
    P,
    Q,
    top,
    left,
    QB,
    CB,
    TAPS: tl.constexpr,  # R S numbers, row by row
    R: tl.constexpr,
    S: tl.constexpr,
    UP: tl.constexpr,
    DOWN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0)
    offs_c = (pid % CB * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    offs_q = (pid // CB % QB * BLOCK_Q + tl.arange(0, BLOCK_Q))[:, None]
    row = (pid // CB // QB).to(tl.int64)
    n, p = row // P, (row % P).to(tl.int32)
    mask = (offs_q < Q) & (offs_c < C)
    x_ptr += n * H * W * C
    acc = tl.zeros((BLOCK_Q, BLOCK_C), tl.float32)
    for i in tl.static_range(R):
        y = p * DOWN + i - top  # in z
        is_row = (y >= 0) & (y % UP == 0) & (y // UP < H)
        for j in tl.static_range(S):
            if TAPS[i * S + j] != 0:
                x = offs_q * DOWN + j - left
                seen = is_row & (x >= 0) & (x % UP == 0) & (x // UP < W)
                offs = (y // UP * W + x // UP) * C + offs_c
                value = tl.load(x_ptr + offs, mask=mask & seen, other=0.0)
                acc += value.to(tl.float32) * TAPS[i * S + j]
    y_ptr += row * Q * C
    tl.store(y_ptr + offs_q * C + offs_c, acc.to(y_ptr.dtype.element_ty), mask=mask)


def fir(
    x: Tensor,  # [N, H, W, C]
    taps: Taps,
    up: int,
    down: int,
    start: tuple[int, int],  # top, left: zeros above and left of the image
    size: tuple[int, int],  # P, Q; below and right are as many zeros as that needs
) -> Tensor:  # [N, P, Q, C]
    """x filtered, in float32, rounded once."""
    n, h, w, c = x.shape
    p, q = size
    y = x.new_empty((n, p, q, c))
    if y.numel() == 0:
        return y
    block_c = min(triton.next_power_of_2(c), _MOST_CHANNELS)
    block_q = min(triton.next_power_of_2(q), _TILE // block_c)
    qb, cb = triton.cdiv(q, block_q), triton.cdiv(c, block_c)
    numbers = tuple(float(number) for row in taps for number in row)
    _fir_kernel[(n * p * qb * cb,)](
        x, y, h, w, c, p, q, *start, qb, cb,
        TAPS=numbers, R=len(taps), S=len(taps[0]), UP=up, DOWN=down,
        BLOCK_Q=block_q, BLOCK_C=block_c, **overlapping(x.device, n * h * w),
    )  # fmt: skip
    return y


def adjoint(
    taps: Taps, up: int, down: int, start: tuple[int, int]
) -> dict[str, Taps | int | tuple[int, int]]:
    """The options of `fir` for its gradient."""
    turned = tuple(row[::-1] for row in taps[::-1])
    before = len(taps) - 1 - start[0], len(taps[0]) - 1 - start[1]
    return {"taps": turned, "up": down, "down": up, "start": before}
