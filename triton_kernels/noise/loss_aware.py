"""Timesteps drawn by how large their losses have been (Nichol and Dhariwal 2021, section 3.4).

    p_t = (1 - u) w_t / sum w + u / T,   w_t = sqrt(mean of the last H squared losses at t)

and p_t = 1 / T until there are H losses of every timestep. Probabilities are whole numbers here,
q_t = floor(2^30 p_t) + 1, and what is drawn from is their running sum, `ends`: integers add up to
the same in any order, and what a timestep weighs is exactly the inverse of how likely it is.

    record_losses           takes in the losses of a batch, in its order, and gives the new ends
    draw_weighted_timesteps t with probability q_t / sum q, by the counter that `draw_timesteps` has
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.device import is_rehearsal
from ..runtime.layout import check_contiguous, check_device, check_shape
from ..runtime.library import op
from .draw import first_words
from .philox import BLOCK, TIMESTEP, check_rng

MOST_TIMESTEPS = 4096  # that one program holds


@triton.jit
def _record_losses_kernel(
    losses_ptr,  # float32 [N]
    t_ptr,  # int64 [N]
    history_ptr,  # float32 [H, T], in and out: loss number k of a timestep is in row k % H
    counts_ptr,  # int32 [T], in and out: losses so far
    ends_ptr,  # int64 [T], out
    uniform,
    n,
    T,
    H: tl.constexpr,
    BLOCK: tl.constexpr,  # at least T
):
    offs = tl.arange(0, BLOCK)
    mask = offs < T
    count = tl.load(counts_ptr + offs, mask=mask, other=0)
    for i in range(n):
        t, loss = tl.load(t_ptr + i), tl.load(losses_ptr + i)
        finite = (loss - loss) == 0.0  # NaN would be all that there is from then on
        hit = (offs == t) & mask & finite
        tl.store(history_ptr + (count % H) * T + offs, loss, mask=hit)
        count += hit.to(tl.int32)
    tl.store(counts_ptr + offs, count, mask=mask)
    tl.debug_barrier()  # other threads may read a loss than have written it
    squares = tl.zeros([BLOCK], tl.float32)
    for h in range(H):
        loss = tl.load(history_ptr + h * T + offs, mask=mask, other=0.0)
        squares += loss * loss
    weight = tl.sqrt(squares / H)
    total = tl.sum(weight)
    known = (tl.min(tl.where(mask, count, H)) >= H) & (total > 0.0)
    share = tl.where(known, weight / tl.where(known, total, 1.0), 1.0 / T)
    share = share * (1.0 - uniform) + uniform / T
    q = tl.where(mask, (share * 1073741824.0).to(tl.int64) + 1, 0)
    tl.store(ends_ptr + offs, tl.cumsum(q), mask=mask)


@triton.jit(do_not_specialize=["first"])
def _draw_weighted_kernel(
    out_ptr,  # int64 [N]
    rng_ptr,  # int64 [2]
    ends_ptr,  # int64 [T]
    first,
    n,
    T,
    STREAM: tl.constexpr,
    BITS: tl.constexpr,  # of T
    BLOCK: tl.constexpr,
):
    offs, word = first_words(rng_ptr, first, STREAM, BLOCK)
    r = (word.to(tl.int64) * tl.load(ends_ptr + T - 1)) >> 32
    t = tl.zeros([BLOCK], tl.int32)  # how many ends are at most r
    for i in tl.static_range(BITS):
        further = t + (1 << (BITS - 1 - i))
        end = tl.load(ends_ptr + further - 1, mask=further <= T, other=0)
        t = tl.where((further <= T) & (end <= r), further, t)
    tl.store(out_ptr + offs, t.to(tl.int64), mask=offs < n)


@op(
    "record_losses",
    lambda losses, t, history, *_: history.new_empty(history.shape[1], dtype=torch.int64),
    mutates=("history", "counts"),
)
def _record_losses(
    losses: Tensor, t: Tensor, history: Tensor, counts: Tensor, uniform: float
) -> Tensor:
    rows, total = history.shape
    ends = history.new_empty(total, dtype=torch.int64)
    _record_losses_kernel[(1,)](
        losses, t, history, counts, ends, uniform, len(losses), total,
        H=rows, BLOCK=triton.next_power_of_2(total), num_warps=8,
    )  # fmt: skip
    for changed in (history, counts):
        torch.autograd.graph.increment_version(changed)
    return ends


@op(
    "draw_weighted_timesteps",
    lambda rng, n, *_: rng.new_empty(n, dtype=torch.int64),
)
def _draw_weighted_timesteps(rng: Tensor, n: int, ends: Tensor, first: int) -> Tensor:
    out = rng.new_empty(n, dtype=torch.int64)
    if n > 0:
        total = len(ends)
        _draw_weighted_kernel[(triton.cdiv(n, BLOCK),)](
            out, rng, ends, first, n, total,
            STREAM=TIMESTEP, BITS=total.bit_length(), BLOCK=BLOCK,
        )  # fmt: skip
    if is_rehearsal():  # PyTorch's own ops look them up in tables
        out.zero_()
    return out


def record_losses(
    losses: Tensor,  # float32 [N]
    t: Tensor,  # int64 [N], in [0, T), which is not checked
    history: Tensor,  # float32 [H, T], in place: loss number k of a timestep is in row k % H
    counts: Tensor,  # int32 [T], in place: losses so far
    *,
    uniform: float = 0.001,  # u
) -> Tensor:  # int64 [T]
    """Append the losses of a batch to the history, in their order. Returns the running sum of

        q_t = floor(2^30 p_t) + 1    p_t = (1 - u) w_t / sum w + u / T,  w_t^2 = mean of history^2

    (Nichol and Dhariwal 2021, section 3.4), with p_t = 1 / T until every timestep has H losses.
    Losses that are not finite are skipped. ValueError: T is above 4,096, or u not in [0, 1]."""
    check_device("history", history)
    for name, x, dtype in (
        ("losses", losses, torch.float32),
        ("t", t, torch.int64),
        ("history", history, torch.float32),
        ("counts", counts, torch.int32),
    ):
        check_contiguous(name, x, dtype)
    if history.ndim != 2 or not 0 < history.shape[1] <= MOST_TIMESTEPS or history.shape[0] < 1:
        raise ValueError(
            f"history has shape {tuple(history.shape)}; expected [H, T], T at most {MOST_TIMESTEPS}"
        )
    check_shape("t", t, losses.numel())
    check_shape("losses", losses, losses.numel())
    check_shape("counts", counts, history.shape[1])
    if not 0 <= uniform <= 1:
        raise ValueError(f"uniform is {uniform}; expected a number from 0 to 1")
    return _record_losses(losses, t, history, counts, uniform)


def draw_weighted_timesteps(
    rng: Tensor,  # int64 [2]: seed, step
    n: int,
    ends: Tensor,  # int64 [T], of `record_losses`
    *,
    first: int = 0,
) -> Tensor:  # int64 [N]
    """Timesteps t with probability q_t / sum q of `record_losses`: the number of ends that are at
    most (word * ends[T - 1]) >> 32."""
    check_device("rng", rng)
    check_rng(rng)
    if ends.dtype != torch.int64 or ends.ndim != 1 or not len(ends) or not ends.is_contiguous():
        raise ValueError(
            f"ends is {ends.dtype} of shape {tuple(ends.shape)}; expected contiguous int64 [T]"
        )
    return _draw_weighted_timesteps(rng, n, ends, first)
