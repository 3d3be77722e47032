"""The forward process, its loss, and a step of the reverse process; noise drawn in registers.

    gather_images  x_0: a batch taken from a data set that lives on the device, mirrored, in [-1, 1]
    q_sample       x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) epsilon (Ho et al. 2020,
                   eq. 4)
    denoise_loss   |output - target|^2 / (H W C), per sample; target epsilon, x_0 or
                   v = sqrt(alpha_bar_t) epsilon - sqrt(1 - alpha_bar_t) x_0 (Salimans and Ho 2022)
    denoise_step   x0 = clip(a x + b output);  x_prev = c x0 + d x + e output + sigma z;
                   of a solver e times the x0 of the step before

Neither x_0 nor the noise is ever in memory: the loss makes both again, the noise from its counter
(`philox`), and leaves output - target to its gradient. Everything that changes from step to step
(seed, step, timesteps, row of the table) is read from device memory, so that a CUDA graph can be
replayed.

    E       elements of a sample, H * W * C, counted in that order
    chunk   4 * BLOCK elements of one sample, the work of one program
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dependent_launch import await_inputs, overlapping
from .layout import DTYPES, check_nhwc, check_shape
from .library import derivative, op
from .philox import NOISE, REVERSE, check_rng, normals
from .tuning import choose

PREDICTIONS = ("epsilon", "sample", "v_prediction")

_BLOCK = 256  # evaluations of Philox in a program, each good for four elements
_GRAD_BLOCK = 2048  # elements of a program of its gradient
_NUM_WARPS = 4


class _LossConfig(NamedTuple):
    block: int  # evaluations of Philox at a time, each good for four elements
    blocks: int  # of a program; with all of a sample's no second launch has to add partial sums
    num_warps: int


_LOSS_CONFIGS = [
    _LossConfig(1024, 1, 8),
    _LossConfig(512, 1, 4),
    _LossConfig(1024, 3, 8),  # all of an image of 64x64
    _LossConfig(1024, 3, 16),
    _LossConfig(512, 6, 16),
]

_NOISE = tl.constexpr(NOISE)
_REVERSE = tl.constexpr(REVERSE)


@triton.jit
def _clean(
    images_ptr, index_ptr, flip_ptr, n, offs, mask, elements, W: tl.constexpr, C: tl.constexpr
):
    """Elements `offs` of x_0 of sample n, float32."""
    if index_ptr is not None:
        image = tl.load(index_ptr + n)
    else:
        image = n
    if flip_ptr is not None:
        w = (offs // C) % W
        mirrored = offs + (W - 1 - 2 * w) * C
        offs = tl.where(tl.load(flip_ptr + n), mirrored, offs)
    x0 = tl.load(images_ptr + image * elements + offs, mask=mask, other=0)
    if images_ptr.dtype.element_ty == tl.uint8:
        return tl.div_rn(x0.to(tl.float32), 127.5) - 1.0
    else:
        return x0


@triton.jit
def _target(
    images_ptr,
    index_ptr,
    flip_ptr,
    t_ptr,
    table_ptr,
    rng_ptr,
    first,
    n,
    start,
    elements,
    W: tl.constexpr,
    C: tl.constexpr,
    PREDICTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the network should say of elements 4 * start and up of sample n: float32 [4 * BLOCK]."""
    offs = 4 * start + tl.arange(0, 4 * BLOCK)
    if PREDICTION != "sample":
        seed, step = tl.load(rng_ptr), tl.load(rng_ptr + 1)
        noise = normals(seed, step, first + n, start + tl.arange(0, BLOCK), _NOISE)
    if PREDICTION == "epsilon":
        return noise
    else:
        x0 = _clean(images_ptr, index_ptr, flip_ptr, n, offs, offs < elements, elements, W, C)
        if PREDICTION == "sample":
            return x0
        else:
            t = tl.load(t_ptr + n)
            a, s = tl.load(table_ptr + 2 * t), tl.load(table_ptr + 2 * t + 1)
            return a * noise - s * x0


@triton.jit
def _first_channels(offs, C: tl.constexpr, CO: tl.constexpr):
    """Where elements `offs` of [H, W, C] are in [H, W, CO]."""
    if CO == C:
        return offs
    else:
        return offs // C * CO + offs % C


@triton.jit
def _locate(chunks, BLOCK: tl.constexpr):
    """The sample (int64) and the first quad of this program."""
    pid = tl.program_id(0)
    return (pid // chunks).to(tl.int64), (pid % chunks) * BLOCK


@triton.jit(do_not_specialize=["first"])
def _q_sample_kernel(
    images_ptr,  # uint8 or float32 [M, H, W, C]
    index_ptr,  # int64 [N] or None
    flip_ptr,  # bool [N] or None
    t_ptr,  # int64 [N]
    table_ptr,  # float32 [T, 2]
    rng_ptr,  # int64 [2]
    x_ptr,  # [N, H, W, C], out
    first,
    elements,
    chunks,
    W: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n, start = _locate(chunks, BLOCK)
    offs = 4 * start + tl.arange(0, 4 * BLOCK)
    mask = offs < elements
    x = _clean(images_ptr, index_ptr, flip_ptr, n, offs, mask, elements, W, C)
    if table_ptr is not None:  # without a table this is gather_images
        t = tl.load(t_ptr + n)
        a, s = tl.load(table_ptr + 2 * t), tl.load(table_ptr + 2 * t + 1)
        seed, step = tl.load(rng_ptr), tl.load(rng_ptr + 1)
        x = a * x + s * normals(seed, step, first + n, start + tl.arange(0, BLOCK), _NOISE)
    tl.store(x_ptr + n * elements + offs, x.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first"])
def _denoise_loss_fwd_kernel(
    output_ptr,  # [N, H, W, CO]
    images_ptr,
    index_ptr,
    flip_ptr,
    t_ptr,
    table_ptr,
    rng_ptr,
    partial_ptr,  # float32 [N, chunks], out: means over E of what this chunk has
    difference_ptr,  # float32 [N, H, W, C] or None, out: output - target
    first,
    elements,
    chunks,
    W: tl.constexpr,
    C: tl.constexpr,
    CO: tl.constexpr,
    PREDICTION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a program
):
    n, start = _locate(chunks, BLOCKS * BLOCK)
    squares = tl.zeros([4 * BLOCK], tl.float32)
    for _ in range(BLOCKS):
        target = _target(
            images_ptr, index_ptr, flip_ptr, t_ptr, table_ptr, rng_ptr, first, n, start, elements,
            W, C, PREDICTION, BLOCK,
        )  # fmt: skip
        offs = 4 * start + tl.arange(0, 4 * BLOCK)
        mask = offs < elements
        offs_o = _first_channels(offs, C, CO)
        output = tl.load(output_ptr + n * (elements // C * CO) + offs_o, mask=mask, other=0.0)
        difference = tl.where(mask, output.to(tl.float32) - target, 0.0)
        if difference_ptr is not None:
            tl.store(difference_ptr + n * elements + offs, difference, mask=mask)
        squares += difference * difference
        start += BLOCK
    tl.store(partial_ptr + tl.program_id(0), tl.sum(squares) / elements)


@triton.jit
def _row_sum_kernel(x_ptr, y_ptr, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """y[m] = sum of x[m, :], in one order whatever the grid."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask_m = offs_m < rows
    mask = mask_m[:, None] & (offs_n < columns)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * columns + offs_n[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + offs_m, tl.sum(x, axis=1), mask=mask_m)


@triton.jit
def _denoise_loss_bwd_kernel(
    dloss_ptr,  # float32 [N], stride 0 below a loss.mean()
    stride_dn,
    difference_ptr,  # float32 [N, H, W, C]
    doutput_ptr,  # [N, H, W, CO], out
    elements,
    chunks,
    C: tl.constexpr,
    CO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n, start = _locate(chunks, BLOCK)
    elements_o = elements // C * CO
    offs_o = start + tl.arange(0, BLOCK)
    mask = offs_o < elements_o
    c = offs_o % CO
    in_first = mask if CO == C else mask & (c < C)  # the variance has no gradient here
    offs = offs_o if CO == C else offs_o // CO * C + c
    difference = tl.load(difference_ptr + n * elements + offs, mask=in_first, other=0.0)
    doutput = tl.load(dloss_ptr + n * stride_dn) * (2.0 / elements) * difference
    doutput = doutput.to(doutput_ptr.dtype.element_ty)
    tl.store(doutput_ptr + n * elements_o + offs_o, doutput, mask=mask)


@triton.jit(do_not_specialize=["first"])
def _denoise_step_kernel(
    x_ptr,  # [N, H, W, C]
    output_ptr,  # [N, H, W, CO], pixels PITCH apart
    table_ptr,  # float32 [K, 8]
    row_ptr,  # int64 [1]
    rng_ptr,  # int64 [2]
    first_ptr,  # int64 [1] or None: added to `first`
    memory_ptr,  # float32 [N, H, W, C] or None: x0 of the step before, in and out
    x_prev_ptr,  # float32 [N, H, W, C], out
    first,
    clip,
    elements,
    chunks,
    C: tl.constexpr,
    CO: tl.constexpr,
    PITCH: tl.constexpr,  # from a pixel of output to the next
    CLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_inputs()
    n, start = _locate(chunks, BLOCK)
    row = tl.load(row_ptr)
    table_ptr += row * 8
    a, b = tl.load(table_ptr), tl.load(table_ptr + 1)
    c, d, e = tl.load(table_ptr + 2), tl.load(table_ptr + 3), tl.load(table_ptr + 4)
    sigma = tl.load(table_ptr + 5)

    offs = 4 * start + tl.arange(0, 4 * BLOCK)
    mask = offs < elements
    x = tl.load(x_ptr + n * elements + offs, mask=mask, other=0.0).to(tl.float32)
    output_ptr += n * (elements // C * PITCH) + _first_channels(offs, C, PITCH)
    output = tl.load(output_ptr, mask=mask, other=0.0).to(tl.float32)
    x0 = a * x + b * output
    if CLIP:  # a NaN stays one: it must not become a plausible pixel
        x0 = tl.where(x0 > clip, clip, tl.where(x0 < -clip, -clip, x0))
    if CO > C:
        log_min, log_max = tl.load(table_ptr + 6), tl.load(table_ptr + 7)
        v = tl.load(output_ptr + C, mask=mask, other=0.0).to(tl.float32)
        f = (v + 1.0) * 0.5
        sigma = sigma * tl.exp(0.5 * (f * log_max + (1.0 - f) * log_min))
    sample = first + n
    if first_ptr is not None:
        sample += tl.load(first_ptr)
    seed, step = tl.load(rng_ptr), tl.load(rng_ptr + 1) + row
    z = normals(seed, step, sample, start + tl.arange(0, BLOCK), _REVERSE)
    if memory_ptr is None:
        other = output
    else:
        memory_ptr += n * elements + offs
        other = tl.load(memory_ptr, mask=mask, other=0.0)
        tl.store(memory_ptr, x0, mask=mask)
    x_prev = c * x0 + d * x + e * other + sigma * z
    tl.store(x_prev_ptr + n * elements + offs, x_prev, mask=mask)


# --- the ops -------------------------------------------------------------------------------------


def _noised(images, index, flip, t, table, rng, first, dtype):
    n = images.shape[0] if index is None else index.shape[0]
    height, width, c = images.shape[1:]
    x = torch.empty((n, height, width, c), dtype=dtype, device=images.device)
    if x.numel() > 0:
        elements = height * width * c
        chunks = triton.cdiv(elements, 4 * _BLOCK)
        _q_sample_kernel[(n * chunks,)](
            images, index, flip, t, table, rng, x, first, elements, chunks,
            W=width, C=c, BLOCK=_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return x


def _fake_batch(images, index, dtype):
    n = images.shape[0] if index is None else index.shape[0]
    return images.new_empty((n, *images.shape[1:]), dtype=dtype)


@op("gather_images", lambda images, index, _: _fake_batch(images, index, torch.float32))
def _gather_images(images: Tensor, index: Tensor | None, flip: Tensor | None) -> Tensor:
    return _noised(images, index, flip, None, None, None, 0, torch.float32)


@op("q_sample", lambda images, index, *rest: _fake_batch(images, index, rest[-1]))
def _q_sample(
    images: Tensor,
    index: Tensor | None,
    flip: Tensor | None,
    t: Tensor,
    table: Tensor,
    rng: Tensor,
    first: int,
    dtype: torch.dtype,
) -> Tensor:
    return _noised(images, index, flip, t, table, rng, first, dtype)


def _fake_loss(output, images, *rest):
    n, height, width, _ = output.shape
    kept = (n, height, width, images.shape[3]) if rest[-1] else (0,)
    return tuple(output.new_empty(shape, dtype=torch.float32) for shape in ((n,), kept))


@op("denoise_loss", _fake_loss, differentiable=True)
def _denoise_loss(
    output: Tensor,
    images: Tensor,
    index: Tensor | None,
    flip: Tensor | None,
    t: Tensor,
    table: Tensor,
    rng: Tensor,
    first: int,
    prediction: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    return _loss(output, images, index, flip, t, table, rng, first, prediction, keep=keep)


def _loss(
    output: Tensor,
    images: Tensor,
    *process: Tensor | int | str | None,  # index, flip, t, table, rng, first, prediction
    keep: bool,
    config: _LossConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss, and output - target as float32 [N, H, W, C], or [0] unless it is to be kept."""
    *batch, first, prediction = process
    n, height, width, co = output.shape
    c = images.shape[3]
    elements = height * width * c
    if config is None:
        config = choose(
            "denoise_loss",
            (n, height, width, c, co, output.dtype, prediction, keep),
            lambda: _LOSS_CONFIGS,
            lambda: _LOSS_CONFIGS[0],
            lambda config: _loss(output, images, *process, keep=keep, config=config)[0],
        )
    chunks = triton.cdiv(elements, 4 * config.block * config.blocks)
    kept = (n, height, width, c) if keep else (0,)
    difference = torch.empty(kept, dtype=torch.float32, device=output.device)
    partial = torch.empty((n, chunks), dtype=torch.float32, device=output.device)
    if partial.numel() == 0:  # the mean over nothing
        return torch.full((n,), float("nan"), device=output.device), difference
    _denoise_loss_fwd_kernel[(n * chunks,)](
        output, images, *batch, partial, difference if keep else None, first, elements, chunks,
        W=width, C=c, CO=co, PREDICTION=prediction, BLOCK=config.block, BLOCKS=config.blocks,
        num_warps=config.num_warps,
    )  # fmt: skip
    if chunks == 1:
        return partial.view(n), difference
    loss = torch.empty(n, dtype=torch.float32, device=output.device)
    block_n = triton.next_power_of_2(chunks)
    block_m = max(1, 1024 // block_n)
    _row_sum_kernel[(triton.cdiv(n, block_m),)](
        partial, loss, n, chunks, BLOCK_M=block_m, BLOCK_N=block_n
    )
    return loss, difference


def _fake_gradient(dloss, difference, channels, dtype):
    return difference.new_empty((*difference.shape[:3], channels), dtype=dtype)


@op("denoise_loss_backward", _fake_gradient)
def _denoise_loss_backward(
    dloss: Tensor, difference: Tensor, channels: int, dtype: torch.dtype
) -> Tensor:
    """The gradient of an output that had so many channels and this dtype."""
    n, height, width, c = difference.shape
    shape = (n, height, width, channels)
    doutput = torch.empty(shape, dtype=dtype, device=difference.device)
    if doutput.numel() > 0:
        elements = height * width * c
        chunks = triton.cdiv(height * width * channels, _GRAD_BLOCK)
        _denoise_loss_bwd_kernel[(n * chunks,)](
            dloss, dloss.stride(0), difference, doutput, elements, chunks,
            C=c, CO=channels, BLOCK=_GRAD_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return doutput


@op(
    "denoise_step",
    lambda x, *_: x.new_empty(x.shape, dtype=torch.float32),
    mutates=("memory",),
)
def _denoise_step(
    x: Tensor,
    output: Tensor,
    table: Tensor,
    row: Tensor,
    rng: Tensor,
    first: int,
    first_on_device: Tensor | None,
    clip: float | None,
    memory: Tensor | None,
) -> Tensor:
    x_prev = torch.empty_like(x, dtype=torch.float32)
    pitch = output.shape[3] if output.is_contiguous() else output.stride(2)
    if x.numel() > 0:
        elements = x[0].numel()
        chunks = triton.cdiv(elements, 4 * _BLOCK)
        _denoise_step_kernel[(x.shape[0] * chunks,)](
            x, output, table, row, rng, first_on_device, memory, x_prev, first,
            0.0 if clip is None else float(clip), elements, chunks, C=x.shape[3],
            CO=output.shape[3], PITCH=pitch, CLIP=clip is not None, BLOCK=_BLOCK,
            num_warps=_NUM_WARPS, **overlapping(x.device),
        )  # fmt: skip
    if memory is not None:
        torch.autograd.graph.increment_version(memory)
    return x_prev


@derivative(of=_denoise_loss)
class _DenoiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, *rest):
        loss, difference = _denoise_loss.below_autograd(output, *rest)
        ctx.save_for_backward(difference)
        ctx.output = output.shape[3], output.dtype
        ctx.mark_non_differentiable(difference)
        ctx.set_materialize_grads(False)
        return loss, difference

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _):
        (difference,) = ctx.saved_tensors
        doutput = None if dloss is None else _denoise_loss_backward(dloss, difference, *ctx.output)
        return doutput, *[None] * 9


def gather_images(
    images: Tensor,  # uint8 or float32 [M, H, W, C]
    index: Tensor | None = None,  # int64 [N]; None: all of them, in order
    flip: Tensor | None = None,  # bool [N]
) -> Tensor:  # float32 [N, H, W, C]; uint8 is mapped to x / 127.5 - 1
    """The clean batch x_0. Every index must be within [0, M); the device does not check."""
    _check_batch(images, index, flip)
    return _gather_images(images, index, flip)


def q_sample(
    images: Tensor,  # uint8 or float32 [M, H, W, C]
    t: Tensor,  # int64 [N]
    table: Tensor,  # float32 [T, 2]: sqrt(alpha_bar), sqrt(1 - alpha_bar)
    rng: Tensor,  # int64 [2]: seed, step
    *,
    first: int = 0,
    index: Tensor | None = None,  # int64 [N]
    flip: Tensor | None = None,  # bool [N]
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # [N, H, W, C], dtype
    """x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) epsilon (Ho et al. 2020, eq. 4). The
    noise of sample n is keyed by (seed, step, first + n). Every index must be within [0, M) and
    every t within [0, T); the device does not check."""
    n = _check_batch(images, index, flip)
    _check_process(n, t, table, rng)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; expected float32, float16 or bfloat16")
    return _q_sample(images, index, flip, t, table, rng, first, dtype)


def denoise_loss(
    output: Tensor,  # [N, H, W, C] or, with a learned variance, [N, H, W, 2C]
    images: Tensor,  # uint8 or float32 [M, H, W, C]
    t: Tensor,  # int64 [N]
    table: Tensor,  # float32 [T, 2]: sqrt(alpha_bar), sqrt(1 - alpha_bar)
    rng: Tensor,  # int64 [2]: seed, step
    *,
    first: int = 0,
    index: Tensor | None = None,  # int64 [N]
    flip: Tensor | None = None,  # bool [N]
    prediction: str = "epsilon",
) -> Tensor:  # float32 [N]
    """Mean squared error per sample of the first C channels against epsilon, x_0 ("sample") or
    v = sqrt(alpha_bar) epsilon - sqrt(1 - alpha_bar) x_0 ("v_prediction"; Salimans and Ho 2022),
    with the noise of `q_sample` drawn again from its counter. The gradient reaches `output` alone.
    The sum is the same to the bit in every run."""
    if prediction not in PREDICTIONS:
        raise ValueError(f"prediction is {prediction!r}; expected one of {', '.join(PREDICTIONS)}")
    n = _check_batch(images, index, flip)
    _check_process(n, t, table, rng)
    _check_output(output, n, *images.shape[1:])
    process = (images, index, flip, t, table, rng, first, prediction)
    loss, _ = _denoise_loss(output, *process, output.requires_grad)
    return loss


def denoise_step(
    x: Tensor,  # [N, H, W, C] x_t
    output: Tensor,  # [N, H, W, C or 2C] what the network says; pixels may be any distance apart
    table: Tensor,  # float32 [K, 8], a row a step of the reverse process; columns below
    row: Tensor,  # int64 [1], on the device
    rng: Tensor,  # int64 [2]: seed, step (the noise of row k is keyed by step = rng[1] + k)
    *,
    first: int | Tensor = 0,  # the number of sample 0, or int64 [1] on the device
    clip: float | None = 1.0,
    memory: Tensor | None = None,  # float32 [N, H, W, C], overwritten with x0
) -> Tensor:  # float32 [N, H, W, C] x_(t-1)
    """One step of the reverse process in its general linear form:

        x0     = clip(a x + b output)
        x_prev = c x0 + d x + e output + sigma z

    The columns of `table` are a, b, c, d, e, sigma, log_min, log_max. If `output` has 2C channels,
    its second half v sets the deviation (Nichol and Dhariwal 2021, eq. 15):
    sigma' = sigma exp((f log_max + (1 - f) log_min) / 2), f = (v + 1) / 2.
    With `memory`, for solvers of second order, e multiplies what it holds instead of `output`: the
    x0 of the step before. The row must be within [0, K); the device does not check.
    """
    check_nhwc("x", x)
    _check_channels(output, *x.shape)
    if not output.is_contiguous():
        _, h, w, _ = output.shape
        pitch = output.stride(2)
        if output.stride() != (h * w * pitch, w * pitch, pitch, 1):
            check_nhwc("output", output)
    _check_table("table", table, 8)
    if row.dtype != torch.int64 or row.shape != (1,):
        raise ValueError(f"row is {row.dtype} of shape {tuple(row.shape)}; expected int64 [1]")
    check_rng(rng)
    first_on_device = None
    if isinstance(first, Tensor):
        if first.dtype != torch.int64 or first.shape != (1,):
            raise ValueError(
                f"first is {first.dtype} of shape {tuple(first.shape)}; expected int64 [1]"
            )
        first, first_on_device = 0, first
    if memory is not None:
        check_nhwc("memory", memory)
        check_shape("memory", memory, *x.shape)
        if memory.dtype != torch.float32:
            raise ValueError(f"memory is {memory.dtype}; expected float32")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip}; expected a positive number or None")
    return _denoise_step(x, output, table, row, rng, first, first_on_device, clip, memory)


def _check_batch(images: Tensor, index: Tensor | None, flip: Tensor | None) -> int:
    """The number of samples."""
    if images.ndim != 4 or images.dtype not in (torch.uint8, torch.float32):
        raise ValueError(
            f"images is {images.dtype} of shape {tuple(images.shape)}; "
            "expected uint8 or float32 [M, H, W, C]"
        )
    if not images.is_contiguous():
        raise ValueError(f"images has strides {images.stride()}; expected contiguous NHWC")
    n = images.shape[0] if index is None else index.shape[0]
    _check_vector("index", index, n, torch.int64)
    _check_vector("flip", flip, n, torch.bool)
    return n


def _check_process(n: int, t: Tensor, table: Tensor, rng: Tensor) -> None:
    _check_vector("t", t, n, torch.int64)
    _check_table("table", table, 2)
    check_rng(rng)


def _check_output(output: Tensor, n: int, height: int, width: int, c: int) -> None:
    check_nhwc("output", output)
    _check_channels(output, n, height, width, c)


def _check_channels(output: Tensor, n: int, height: int, width: int, c: int) -> None:
    co = output.shape[-1]
    if co != c and co != 2 * c:  # `in`, of a size that is a symbol, compares wrongly in Dynamo
        raise ValueError(f"output has {co} channels; expected {c} or {2 * c}")
    check_shape("output", output, n, height, width, co)


def _check_vector(name: str, x: Tensor | None, n: int, dtype: torch.dtype) -> None:
    check_shape(name, x, n)
    if x is not None and (x.dtype != dtype or not x.is_contiguous()):
        raise ValueError(
            f"{name} is {x.dtype} with stride {x.stride()}; expected contiguous {dtype}"
        )


def _check_table(name: str, table: Tensor, columns: int) -> None:
    if table.ndim != 2 or table.shape[1] != columns or table.dtype != torch.float32:
        raise ValueError(
            f"{name} is {table.dtype} of shape {tuple(table.shape)}; "
            f"expected float32 [steps, {columns}]"
        )
    if not table.is_contiguous():
        raise ValueError(f"{name} has strides {table.stride()}; expected a contiguous tensor")
