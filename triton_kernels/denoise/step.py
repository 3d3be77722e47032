"""A step of the reverse process, whichever: they differ in a row of a table. Guidance and what is
known of the image beforehand are part of it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..noise.philox import KNOWN, REVERSE, check_rng, normals
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.layout import check_contiguous, check_nhwc, check_shape
from ..runtime.library import op
from .checks import check_channels, check_table
from .chunks import BLOCK, NUM_WARPS, first_channels, locate

_REVERSE, _KNOWN = tl.constexpr(REVERSE), tl.constexpr(KNOWN)
_GAIN_BLOCK, _GAIN_WARPS = 2048, 8  # elements at a time of the program that a sample has


@triton.jit
def _guided(output, negative, scale):
    """negative + scale (output - negative), and the output itself where the scale is 1."""
    return tl.where(scale == 1.0, output, negative + scale * (output - negative))


@triton.jit
def _guidance_gain_kernel(
    output_ptr,  # [N, H, W, ...], pixels PITCH apart
    negative_ptr,  # [N, H, W, ...], pixels NEGATIVE apart
    scales_ptr,  # float32 [K]
    row_ptr,  # int64 [1]
    gain_ptr,  # float32 [N], out
    rescale,
    elements,
    C: tl.constexpr,
    PITCH: tl.constexpr,
    NEGATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_inputs()
    n = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales_ptr + tl.load(row_ptr))
    output_ptr += n * (elements // C * PITCH)
    negative_ptr += n * (elements // C * NEGATIVE)
    sums, guided_sums = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, elements, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < elements
        output = tl.load(output_ptr + first_channels(offs, C, PITCH), mask=mask, other=0.0)
        negative = tl.load(negative_ptr + first_channels(offs, C, NEGATIVE), mask=mask, other=0.0)
        output = output.to(tl.float32)
        sums += output
        guided_sums += _guided(output, negative.to(tl.float32), scale)
    mean, guided_mean = tl.sum(sums) / elements, tl.sum(guided_sums) / elements
    squares, guided_squares = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, elements, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < elements
        output = tl.load(output_ptr + first_channels(offs, C, PITCH), mask=mask, other=0.0)
        negative = tl.load(negative_ptr + first_channels(offs, C, NEGATIVE), mask=mask, other=0.0)
        output = output.to(tl.float32)
        difference = output - mean
        squares += tl.where(mask, difference * difference, 0.0)
        difference = _guided(output, negative.to(tl.float32), scale) - guided_mean
        guided_squares += tl.where(mask, difference * difference, 0.0)
    square, guided_square = tl.sum(squares), tl.sum(guided_squares)
    some = guided_square > 0.0
    ratio = tl.where(some, tl.sqrt(square / tl.where(some, guided_square, 1.0)), 1.0)
    tl.store(gain_ptr + n, rescale * ratio + (1.0 - rescale))


@triton.jit(do_not_specialize=["first"])
def _denoise_step_kernel(
    x_ptr,  # [N, H, W, C]
    output_ptr,  # [N, H, W, CO], pixels PITCH apart
    table_ptr,  # float32 [K, 8]
    row_ptr,  # int64 [1]
    rng_ptr,  # int64 [2]
    first_ptr,  # int64 [1] or None: added to `first`
    memory_ptr,  # float32 [N, H, W, C] or None: x0 of the step before, in and out
    negative_ptr,  # [N, H, W, ...] or None, pixels NEGATIVE apart: the output to go away from
    scales_ptr,  # float32 [K], of guidance
    gain_ptr,  # float32 [N] or None: what the guided output is multiplied by
    known_ptr,  # float32 [N, H, W, C] or None: x0 where the mask says so
    mask_ptr,  # float32 [N, H, W]: 1 where it is known, 0 where not
    levels_ptr,  # float32 [K, 2]: signal and noise behind the step
    x_prev_ptr,  # float32 [N, H, W, C], out
    first,
    clip,
    elements,
    chunks,
    C: tl.constexpr,
    CO: tl.constexpr,
    PITCH: tl.constexpr,  # from a pixel of output to the next
    NEGATIVE: tl.constexpr,  # of negative
    CLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_inputs()
    n, start = locate(chunks, BLOCK)
    row = tl.load(row_ptr)
    table_ptr += row * 8
    a, b = tl.load(table_ptr), tl.load(table_ptr + 1)
    c, d, e = tl.load(table_ptr + 2), tl.load(table_ptr + 3), tl.load(table_ptr + 4)
    sigma = tl.load(table_ptr + 5)

    offs = 4 * start + tl.arange(0, 4 * BLOCK)
    mask = offs < elements
    x = tl.load(x_ptr + n * elements + offs, mask=mask, other=0.0).to(tl.float32)
    output_ptr += n * (elements // C * PITCH) + first_channels(offs, C, PITCH)
    output = tl.load(output_ptr, mask=mask, other=0.0).to(tl.float32)
    if negative_ptr is not None:
        negative_ptr += n * (elements // C * NEGATIVE) + first_channels(offs, C, NEGATIVE)
        negative = tl.load(negative_ptr, mask=mask, other=0.0).to(tl.float32)
        output = _guided(output, negative, tl.load(scales_ptr + row))
        if gain_ptr is not None:
            output *= tl.load(gain_ptr + n)
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
    if known_ptr is not None:
        signal, deviation = tl.load(levels_ptr + 2 * row), tl.load(levels_ptr + 2 * row + 1)
        known = tl.load(known_ptr + n * elements + offs, mask=mask, other=0.0)
        noise = normals(seed, step, sample, start + tl.arange(0, BLOCK), _KNOWN)
        kept = tl.load(mask_ptr + n * (elements // C) + offs // C, mask=mask, other=0.0)
        # noise of both is independent, and to have the level's deviation between 0 and 1 as well:
        # (1 - kept)^2 + kept (2 - kept) = 1
        noise = deviation * tl.sqrt(kept * (2.0 - kept)) * noise
        mixed = x_prev + kept * (signal * known - x_prev)
        x_prev = noise + tl.where(kept == 1.0, signal * known, mixed)
    tl.store(x_prev_ptr + n * elements + offs, x_prev, mask=mask)


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
    negative: Tensor | None = None,
    scales: Tensor | None = None,
    rescale: float = 0.0,
    known: Tensor | None = None,
    mask: Tensor | None = None,
    levels: Tensor | None = None,
) -> Tensor:
    x_prev = x.new_empty(x.shape, dtype=torch.float32)
    pitch, gain = _pitch(output), None
    negative_pitch = 0 if negative is None else _pitch(negative)
    if x.numel() > 0:
        elements = x[0].numel()
        if negative is not None and rescale > 0:
            gain = x.new_empty(x.shape[0], dtype=torch.float32)
            _guidance_gain_kernel[(x.shape[0],)](
                output, negative, scales, row, gain, float(rescale), elements, C=x.shape[3],
                PITCH=pitch, NEGATIVE=negative_pitch, BLOCK=_GAIN_BLOCK, num_warps=_GAIN_WARPS,
                **overlapping(x.device),
            )  # fmt: skip
        chunks = triton.cdiv(elements, 4 * BLOCK)
        _denoise_step_kernel[(x.shape[0] * chunks,)](
            x, output, table, row, rng, first_on_device, memory,
            negative, scales, gain, known, mask, levels, x_prev, first,
            0.0 if clip is None else float(clip), elements, chunks, C=x.shape[3],
            CO=output.shape[3], PITCH=pitch, NEGATIVE=negative_pitch, CLIP=clip is not None,
            BLOCK=BLOCK, num_warps=NUM_WARPS, **overlapping(x.device),
        )  # fmt: skip
    if memory is not None:
        torch.autograd.graph.increment_version(memory)
    return x_prev


def _pitch(output: Tensor) -> int:
    return output.shape[3] if output.is_contiguous() else output.stride(2)


def denoise_step(
    x: Tensor,  # [N, H, W, C] x_t
    output: Tensor,  # [N, H, W, C or 2C] the network's output; any pixel stride
    table: Tensor,  # float32 [K, 8], one row per step of the reverse process; columns below
    row: Tensor,  # int64 [1], on the device
    rng: Tensor,  # int64 [2]: seed, step (the noise of row k is keyed by step = rng[1] + k)
    *,
    first: int | Tensor = 0,  # index of sample 0, or int64 [1] on the device
    clip: float | None = 1.0,
    memory: Tensor | None = None,  # float32 [N, H, W, C], overwritten with x0
    negative: Tensor | None = None,  # as output: what guidance moves away from
    scales: Tensor | None = None,  # float32 [K], of guidance, with `negative`
    rescale: float = 0.0,  # of guidance's deviation, from 0 to 1
    known: Tensor | None = None,  # float32 [N, H, W, C] x_0 where it is known
    mask: Tensor | None = None,  # float32 [N, H, W]: 1 where it is known, 0 where not; with `known`
    levels: Tensor | None = None,  # float32 [K, 2]: signal and noise after each step
) -> Tensor:  # float32 [N, H, W, C] x_(t-1)
    """One step of the reverse process in its general linear form:

        x0     = clip(a x + b output)
        x_prev = c x0 + d x + e output + sigma z

    The columns of `table` are a, b, c, d, e, sigma, log_min, log_max. If `output` has 2C channels,
    its second half v sets the deviation (Nichol and Dhariwal 2021, eq. 15):
    sigma' = sigma exp((f log_max + (1 - f) log_min) / 2), f = (v + 1) / 2.
    With `memory`, for second-order solvers, e multiplies the previous step's x0, which it holds,
    instead of `output`. With `negative` the first C channels of the output are replaced by

        g = negative + scale (output - negative)
        output = g (rescale std(output) / std(g) + 1 - rescale)

    (Ho and Salimans 2022; Lin et al. 2023, section 3.4, std over a sample), except where the scale
    is 1. With `known` the result is finally

        mask signal known + (1 - mask) x_prev + (mask (2 - mask))^(1/2) noise epsilon

    with newly drawn epsilon: eq. 8 of Lugmayr et al. (2022) where the mask is 0 or 1, and between
    them still of the level's noise. The row must be within [0, K), which is not checked.
    """
    check_nhwc("x", x)
    check_channels(output, *x.shape)
    _check_pixels("output", output)
    check_table("table", table, 8)
    _check_number("row", row)
    check_rng(rng)
    first_on_device = None
    if isinstance(first, Tensor):
        _check_number("first", first)
        first, first_on_device = 0, first
    _check_float32("memory", memory, *x.shape)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip}; expected a positive number or None")
    _check_guidance(x, negative, scales, rescale, len(table))
    _check_known(x, known, mask, levels, len(table))
    return _denoise_step(
        x, output, table, row, rng, first, first_on_device, clip, memory,
        negative, scales, rescale, known, mask, levels,
    )  # fmt: skip


def _check_pixels(name: str, output: Tensor) -> None:
    """ValueError unless the pixels of a [N, H, W, C] lie evenly apart."""
    if not output.is_contiguous():
        _, h, w, _ = output.shape
        pitch = output.stride(2)
        if output.stride() != (h * w * pitch, w * pitch, pitch, 1):
            check_nhwc(name, output)


def _check_guidance(
    x: Tensor, negative: Tensor | None, scales: Tensor | None, rescale: float, rows: int
) -> None:
    if (negative is None) != (scales is None):
        raise ValueError("negative and scales go together; one is None")
    if not 0 <= rescale <= 1:
        raise ValueError(f"rescale is {rescale}; expected a number from 0 to 1")
    if negative is None:
        return
    check_channels(negative, *x.shape)
    _check_pixels("negative", negative)
    _check_float32("scales", scales, rows)


def _check_known(
    x: Tensor, known: Tensor | None, mask: Tensor | None, levels: Tensor | None, rows: int
) -> None:
    given = [part is not None for part in (known, mask, levels)]
    if any(given) != all(given):
        raise ValueError("known, mask and levels go together; some are None")
    if known is not None:
        _check_float32("known", known, *x.shape)
        _check_float32("mask", mask, *x.shape[:3])
        _check_float32("levels", levels, rows, 2)


def _check_float32(name: str, x: Tensor | None, *shape: int) -> None:
    check_shape(name, x, *shape)
    check_contiguous(name, x, torch.float32)


def _check_number(name: str, x: Tensor) -> None:
    if x.dtype != torch.int64 or x.shape != (1,):
        raise ValueError(f"{name} is {x.dtype} of shape {tuple(x.shape)}; expected int64 [1]")
