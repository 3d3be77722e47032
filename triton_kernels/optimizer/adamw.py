"""The optimizer over all parameters at once, which lie in one flat buffer.

    g       <- g min(1, max_norm / (|g| + 1e-6))       (as torch.nn.utils.clip_grad_norm_)
    w       <- w (1 - lr weight_decay)                 (Loshchilov and Hutter 2019, alg. 2)
    m       <- beta1 m + (1 - beta1) g
    v       <- beta2 v + (1 - beta2) g^2
    w       <- w - lr / correction1  m / (sqrt(v / correction2) + eps)
    ema     <- decay ema + (1 - decay) w
    shadow  <- w, rounded to 16 bits or to TF32: the copy that the layers compute with

`grad_norm` and `adamw_step` are a launch each. The first may be taken apart: `square_sums` sums the
squares of a part of the gradient as soon as that part is complete, and with the last part adds up.
Each program sums one chunk, whose size depends on P alone, and the last to be done adds the chunks
in their order, so the norm has the same bits however the gradient was taken apart. Nothing is read
on the host: the learning rate, the bias corrections and the rest come from `hyper`, and a norm that
is not finite leaves everything as it was but the count of skipped steps.

    P       parameters
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reductions.last_program import is_last, sum_of_parts, zero_counters
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.device import describe
from ..runtime.layout import check_contiguous, check_device, check_shape
from ..runtime.library import op
from ..tf32 import as_operand

_NUM_WARPS = 8
_BLOCK = 4 * 32 * _NUM_WARPS  # 4 a thread: beyond, the layouts of 32 and 16 bits would differ
_NORM_BLOCK = 4096  # gradients in one turn of a program of square_sums
_NORM_CHUNKS = 2048  # at most so many: one program adds up their sums


@triton.jit
def _square_sums_kernel(
    grad_ptr,  # float32 [P]
    sums_ptr,  # float32 [chunks], out: the sum of the squares of each chunk
    norm_ptr,  # float32 [1], out, once all sums are there; or None
    counter_ptr,  # int32 [1], zero before and after; or None
    size,
    first,  # chunk of the first program; the last chunk is followed by chunk 0
    count,  # chunks to sum
    chunks,
    TURNS: tl.constexpr,  # of BLOCK elements each make a chunk
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,  # at least as many, a power of two
):
    await_inputs()
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        chunk = (first + i) % chunks
        start = chunk.to(tl.int64) * (TURNS * BLOCK)
        offs = tl.arange(0, BLOCK)
        acc = tl.zeros([BLOCK], tl.float32)
        if start + TURNS * BLOCK <= size:  # without a mask: 16-byte loads for every P
            for turn in range(TURNS):
                grad = tl.load(grad_ptr + start + turn * BLOCK + offs)
                acc += grad * grad
        else:
            for turn in range(TURNS):
                rest = (size - start - turn * BLOCK).to(tl.int64)
                grad = tl.load(grad_ptr + start + turn * BLOCK + offs, mask=offs < rest, other=0.0)
                acc += grad * grad
        tl.store(sums_ptr + chunk, tl.sum(acc))
    if norm_ptr is not None:
        if is_last(counter_ptr, tl.num_programs(0)):
            tl.store(norm_ptr, tl.sqrt(sum_of_parts(sums_ptr, chunks, CHUNKS)))


@triton.jit
def _adamw_kernel(
    param_ptr,  # float32 [P], in place
    grad_ptr,  # float32 [P]
    exp_avg_ptr,  # float32 [P], in place
    exp_avg_sq_ptr,  # float32 [P], in place
    ema_ptr,  # float32 [P], in place
    shadow_ptr,  # bfloat16, float16 or float32 for TF32 [P], out, or None
    norm_ptr,  # float32 [1]
    hyper_ptr,  # float64 [9]
    skipped_ptr,  # int32 [1], in place
    size,
    BLOCK: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0)
    norm = tl.load(norm_ptr)
    finite = norm < float("inf")  # false for a NaN as well
    if pid == 0 and not finite:
        tl.store(skipped_ptr, tl.load(skipped_ptr) + 1)
    start = pid.to(tl.int64) * BLOCK
    tensors = (param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, ema_ptr, shadow_ptr)
    # Two copies of the code: under a mask the accesses are only as wide as the divisors of P allow.
    if start + BLOCK <= size:
        _update(tensors, hyper_ptr, norm, finite, start, size, MASKED=False, BLOCK=BLOCK)
    else:
        _update(tensors, hyper_ptr, norm, finite, start, size, MASKED=True, BLOCK=BLOCK)


@triton.jit
def _update(
    tensors, hyper_ptr, norm, finite, start, size, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, ema_ptr, shadow_ptr = tensors
    offs = start + tl.arange(0, BLOCK)
    mask = offs < size if MASKED else None
    param = tl.load(param_ptr + offs, mask=mask)
    grad = tl.load(grad_ptr + offs, mask=mask)
    exp_avg = tl.load(exp_avg_ptr + offs, mask=mask)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offs, mask=mask)
    ema = tl.load(ema_ptr + offs, mask=mask)

    beta1, beta2 = tl.load(hyper_ptr + 1), tl.load(hyper_ptr + 2)
    # 1 - 0.999 in float32 is off by 1e-5 of itself, so the differences are taken in float64
    rise1, rise2 = (1.0 - beta1).to(tl.float32), (1.0 - beta2).to(tl.float32)
    ema_rise = (1.0 - tl.load(hyper_ptr + 7)).to(tl.float32)
    lr, beta2 = tl.load(hyper_ptr).to(tl.float32), beta2.to(tl.float32)
    eps = tl.load(hyper_ptr + 3).to(tl.float32)
    weight_decay = tl.load(hyper_ptr + 4).to(tl.float32)
    correction1 = tl.load(hyper_ptr + 5).to(tl.float32)
    correction2 = tl.load(hyper_ptr + 6).to(tl.float32)
    max_norm = tl.load(hyper_ptr + 8).to(tl.float32)

    grad *= tl.where(max_norm > 0, tl.minimum(max_norm / (norm + 1e-6), 1.0), 1.0)
    param *= 1.0 - lr * weight_decay
    exp_avg += rise1 * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + rise2 * grad * grad
    denominator = tl.sqrt(exp_avg_sq) * (1.0 / tl.sqrt(correction2)) + eps
    param -= (lr / correction1) * (exp_avg / denominator)
    ema += ema_rise * (param - ema)

    if finite:
        tl.store(param_ptr + offs, param, mask=mask)
        tl.store(exp_avg_ptr + offs, exp_avg, mask=mask)
        tl.store(exp_avg_sq_ptr + offs, exp_avg_sq, mask=mask)
        tl.store(ema_ptr + offs, ema, mask=mask)
        if shadow_ptr is not None:
            tl.store(
                shadow_ptr + offs, as_operand(param, shadow_ptr.dtype.element_ty, True), mask=mask
            )


def norm_chunk(size: int) -> int:
    """How many elements of a gradient of `size` one of its sums of squares is over."""
    turns = triton.cdiv(size, _NORM_BLOCK * _NORM_CHUNKS)
    return _NORM_BLOCK * max(1, triton.next_power_of_2(turns))


def norm_chunks(size: int) -> int:
    """How many such sums there are."""
    return max(1, triton.cdiv(size, norm_chunk(size)))


@op("grad_norm", lambda grad: grad.new_empty(1))
def _grad_norm(grad: Tensor) -> Tensor:
    chunks = norm_chunks(grad.numel())
    sums = grad.new_empty(chunks, dtype=torch.float32)
    norm = grad.new_empty(1, dtype=torch.float32)
    _launch_square_sums(grad, sums, 0, chunks, norm)
    return norm


def _launch_square_sums(
    grad: Tensor, sums: Tensor, first: int, count: int, norm: Tensor | None
) -> None:
    size, chunks = grad.numel(), sums.numel()
    counter = None if norm is None else zero_counters(1, grad.device)
    slots = describe(grad.device).loops
    programs = triton.cdiv(count, triton.cdiv(count, slots))  # all at once, and evenly
    _square_sums_kernel[(programs,)](
        grad, sums, norm, counter, size, first, count, chunks,
        TURNS=norm_chunk(size) // _NORM_BLOCK, BLOCK=_NORM_BLOCK,
        CHUNKS=triton.next_power_of_2(chunks), num_warps=_NUM_WARPS, **overlapping(grad.device),
    )  # fmt: skip


@op(
    "adamw_step",
    lambda *_: None,
    mutates=("param", "exp_avg", "exp_avg_sq", "ema", "skipped", "shadow"),
)
def _adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    ema: Tensor,
    norm: Tensor,
    hyper: Tensor,
    skipped: Tensor,
    shadow: Tensor | None,
) -> None:
    size = param.numel()
    _adamw_kernel[(max(1, triton.cdiv(size, _BLOCK)),)](
        param, grad, exp_avg, exp_avg_sq, ema, shadow, norm, hyper, skipped, size,
        BLOCK=_BLOCK, num_warps=_NUM_WARPS, **overlapping(param.device),
    )  # fmt: skip
    changed = (param, exp_avg, exp_avg_sq, ema, skipped, shadow)
    torch.autograd.graph.increment_version([t for t in changed if t is not None])


def grad_norm(grad: Tensor) -> Tensor:  # float32 [P] -> float32 [1]
    """Euclidean norm of the flat gradient, with the same bits in every run."""
    _check_flat("grad", grad, grad.numel())
    return _grad_norm(grad)


def square_sums(
    grad: Tensor,  # float32 [P]
    sums: Tensor,  # float32 [norm_chunks(P)], written in place
    first: int,
    count: int,
    *,
    norm: Tensor | None = None,  # float32 [1], out
) -> None:
    """Sum the squares of `count` chunks of norm_chunk(P) elements, from chunk `first` on; the last
    chunk is followed by chunk 0. The rest of `sums` stays as it is. With `norm` that rest is there
    already, and the same launch leaves the norm of the gradient; it has to be of one chunk at
    least."""
    _check_flat("grad", grad, grad.numel())
    _check_flat("sums", sums, norm_chunks(grad.numel()))
    least = 0 if norm is None else 1
    if not (0 <= first < sums.numel() and least <= count <= sums.numel()):
        raise ValueError(
            f"chunks {first} .. {first} + {count} are asked for; the gradient has {sums.numel()}"
        )
    if norm is not None:
        _check_flat("norm", norm, 1)
    if count:
        _launch_square_sums(grad, sums, first, count, norm)


def adamw_step(
    param: Tensor,  # float32 [P], updated in place
    grad: Tensor,  # float32 [P]
    exp_avg: Tensor,  # float32 [P], in place
    exp_avg_sq: Tensor,  # float32 [P], in place
    ema: Tensor,  # float32 [P], in place
    norm: Tensor,  # float32 [1], of the whole gradient
    hyper: Tensor,  # float64 [9]: lr, beta1, beta2, eps, weight_decay, bias_correction1,
    #                 bias_correction2, ema_decay, max_norm (0: no clipping)
    skipped: Tensor,  # int32 [1], counts skipped steps, in place
    shadow: Tensor | None = None,  # [P], set to the new param in 16 bits, or rounded to TF32
) -> None:
    """Gradient clipping, AdamW (Loshchilov and Hutter 2019) and EMA in one launch, with `norm` of
    `grad_norm`. If it is not finite, only `skipped` changes.

        grad <- grad min(1, max_norm / norm)     param <- param (1 - lr weight_decay)
        param <- param - lr / bias_correction1 m / (sqrt(v / bias_correction2) + eps)
        ema   <- ema_decay ema + (1 - ema_decay) param

    m and v are `exp_avg` and `exp_avg_sq`; bias_correction1 = 1 - beta1^k in step k.
    """
    size = param.numel()
    for name, x in (
        ("param", param),
        ("grad", grad),
        ("exp_avg", exp_avg),
        ("exp_avg_sq", exp_avg_sq),
        ("ema", ema),
    ):
        _check_flat(name, x, size)
    _check_flat("norm", norm, 1)
    _check_flat("hyper", hyper, 9, torch.float64)
    _check_flat("skipped", skipped, 1, torch.int32)
    if shadow is not None:
        _check_flat("shadow", shadow, size, torch.bfloat16, torch.float16, torch.float32)
    _adamw_step(param, grad, exp_avg, exp_avg_sq, ema, norm, hyper, skipped, shadow)


def _check_flat(name: str, x: Tensor, size: int, *dtypes: torch.dtype) -> None:
    check_device(name, x)
    check_shape(name, x, size)
    check_contiguous(name, x, *(dtypes or (torch.float32,)))
