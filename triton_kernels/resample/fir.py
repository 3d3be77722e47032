"""Resampling by a FIR filter over NHWC, the same for every channel ("upfirdn2d" of StyleGAN2):

    y[p, q] = sum over i, j of taps[i, j] z[p down + i - top, q down + j - left]

where z has up - 1 zeros behind each pixel and around them more. NCSN++, the blocks `Skip...` of
diffusers and others halve and double images by it. Its adjoint is the same with `up` and `down`
exchanged, the filter turned round and R - 1 - top zeros above (S - 1 - left beside), so one kernel
makes both passes. It is compiled for a filter: numbers are constants, zeros cost nothing. A program
makes BLOCK_Q pixels of one row, of BLOCK_C channels; what its taps share it reads from the cache.

Pixels around the image may be mirrored ones instead of zeros (`reflect`): row -a is row a, and row
H - 1 + a is row H - 1 - a. The adjoint of that adds, to what each pixel gets, what those get where
it is seen mirrored (`folded`). Of one tap, 1, it is the image with a mirrored border.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.dependent_launch import await_inputs, overlapping

_TILE = 2048  # numbers of a program: 16 a thread of four warps
_MOST_CHANNELS = 256
MOST_TAPS = 64  # each is a load in the kernel's code
Taps = tuple[tuple[float, ...], ...]  # R rows of S
# what is around the image; of the gradient, where what falls there goes
ADJOINT_BORDER = {"zeros": "zeros", "reflect": "folded", "folded": "reflect"}


@triton.jit
def _within(at, n):
    """Of n pixels the one that is seen at this place, around them mirrored."""
    at = tl.abs(at)
    return tl.minimum(at, 2 * (n - 1) - at)


@triton.jit
def _seen_at(at, side, n):
    """Where one of n pixels is seen: on side 0 itself, 1 before the first, 2 behind the last."""
    return tl.where(side == 0, at, tl.where(side == 1, -at, 2 * (n - 1) - at))


@triton.jit
def _to_next(at, UP: tl.constexpr):
    """How far the next multiple of UP is."""
    return (UP - at % UP) % UP


@triton.jit
def _filtered(
    x_ptr,  # [H, W, C]
    p,
    offs_q,  # [BLOCK_Q, 1]
    offs_c,  # [1, BLOCK_C]
    mask,
    H,
    W,
    C,
    top,
    left,
    TAPS: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    UP: tl.constexpr,
    DOWN: tl.constexpr,
    REFLECT: tl.constexpr,
):  # y[p, q]
    # of every UP rows and columns of z one has pixels, which taps i0 + UP i and j0 + UP j meet
    i0, j0 = _to_next(p * DOWN - top, UP), _to_next(offs_q * DOWN - left, UP)
    first_row, first_column = (p * DOWN - top + i0) // UP, (offs_q * DOWN - left + j0) // UP
    acc = tl.zeros(mask.shape, tl.float32)
    for i in tl.static_range(R // UP):
        row = first_row + i
        is_row = (row >= 0) & (row < H)
        if REFLECT:
            row = _within(row, H)
        for j in tl.static_range(S // UP):
            if (UP > 1) | (TAPS[i * UP * S + j * UP] != 0):
                tap, is_seen, column = TAPS[i * UP * S + j * UP], mask, first_column + j
                if UP > 1:
                    for u in tl.static_range(UP):
                        for v in tl.static_range(UP):
                            other = TAPS[(i * UP + u) * S + j * UP + v]
                            tap = tl.where((i0 == u) & (j0 == v), other, tap)
                    is_seen &= tap != 0
                if REFLECT:
                    column = _within(column, W)
                else:
                    is_seen &= is_row & (column >= 0) & (column < W)
                offs = (row * W + column) * C + offs_c
                value = tl.load(x_ptr + offs, mask=is_seen, other=0.0)
                acc += value.to(tl.float32) * tap
    return acc


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
    BORDER: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0)
    offs_c = (pid % CB * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    first = pid // CB % QB * BLOCK_Q
    offs_q = (first + tl.arange(0, BLOCK_Q))[:, None]
    row = (pid // CB // QB).to(tl.int64)
    n, p = row // P, (row % P).to(tl.int32)
    mask = (offs_q < Q) & (offs_c < C)
    x_ptr += n * H * W * C
    if BORDER == "folded":
        last = tl.minimum(first + BLOCK_Q, Q) - 1
        acc = tl.zeros((BLOCK_Q, BLOCK_C), tl.float32)
        for sides in range(9):
            above, beside = sides // 3, sides % 3
            at, places = _seen_at(p, above, P), _seen_at(offs_q, beside, Q)
            ends = _seen_at(first, beside, Q), _seen_at(last, beside, Q)
            low, high = tl.minimum(ends[0], ends[1]), tl.maximum(ends[0], ends[1])
            # elsewhere no tap meets a pixel, which is so of most programs but on side 0
            meets = (at * DOWN + R - 1 >= top) & (at * DOWN - top < H * UP)
            meets &= (high * DOWN + S - 1 >= left) & (low * DOWN - left < W * UP)
            if meets & ((above == 0) | (at != p)):
                others = mask & ((beside == 0) | (places != offs_q))
                acc += _filtered(
                    x_ptr, at, places, offs_c, others, H, W, C, top, left,
                    TAPS, R, S, UP, DOWN, False,
                )  # fmt: skip
    else:
        acc = _filtered(
            x_ptr, p, offs_q, offs_c, mask, H, W, C, top, left,
            TAPS, R, S, UP, DOWN, BORDER == "reflect",
        )  # fmt: skip
    y_ptr += row * Q * C
    tl.store(y_ptr + offs_q * C + offs_c, acc.to(y_ptr.dtype.element_ty), mask=mask)


def fir(
    x: Tensor,  # [N, H, W, C]
    taps: Taps,
    up: int,
    down: int,
    start: tuple[int, int],  # top, left: zeros above and left of the image
    size: tuple[int, int],  # P, Q; below and right are as many zeros as that needs
    border: str = "zeros",  # or what is there instead: at most H - 1 rows, W - 1 columns
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
    r, s = (triton.cdiv(taken, up) * up for taken in (len(taps), len(taps[0])))  # with zeros behind
    rows = (*taps, *[()] * (r - len(taps)))
    numbers = tuple(float(tap) for row in rows for tap in (*row, *[0.0] * (s - len(row))))
    _fir_kernel[(n * p * qb * cb,)](
        x, y, h, w, c, p, q, *start, qb, cb,
        TAPS=numbers, R=r, S=s, UP=up, DOWN=down,
        BORDER=border, BLOCK_Q=block_q, BLOCK_C=block_c, **overlapping(x.device, n * h * w),
    )  # fmt: skip
    return y


def adjoint(
    taps: Taps, up: int, down: int, start: tuple[int, int], border: str = "zeros"
) -> dict[str, Taps | int | tuple[int, int] | str]:
    """The options of `fir` for its gradient."""
    turned = tuple(row[::-1] for row in taps[::-1])
    before = len(taps) - 1 - start[0], len(taps[0]) - 1 - start[1]
    how = {"taps": turned, "up": down, "down": up, "start": before}
    return how | {"border": ADJOINT_BORDER[border]}
