"""A step of the reverse process, whichever: they differ in a row of a table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..noise.philox import REVERSE, check_rng, normals
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.layout import check_nhwc, check_shape
from ..runtime.library import op
from .checks import check_channels, check_table
from .chunks import BLOCK, NUM_WARPS, first_channels, locate

_REVERSE = tl.constexpr(REVERSE)


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
        chunks = triton.cdiv(elements, 4 * BLOCK)
        _denoise_step_kernel[(x.shape[0] * chunks,)](
            x, output, table, row, rng, first_on_device, memory, x_prev, first,
            0.0 if clip is None else float(clip), elements, chunks, C=x.shape[3],
            CO=output.shape[3], PITCH=pitch, CLIP=clip is not None, BLOCK=BLOCK,
            num_warps=NUM_WARPS, **overlapping(x.device),
        )  # fmt: skip
    if memory is not None:
        torch.autograd.graph.increment_version(memory)
    return x_prev


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
    check_channels(output, *x.shape)
    if not output.is_contiguous():
        _, h, w, _ = output.shape
        pitch = output.stride(2)
        if output.stride() != (h * w * pitch, w * pitch, pitch, 1):
            check_nhwc("output", output)
    check_table("table", table, 8)
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
