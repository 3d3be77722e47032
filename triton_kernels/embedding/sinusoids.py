"""The sinusoids that tell a network its timesteps, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.dependent_launch import await_inputs, overlapping

_BLOCK = 256


@triton.jit(do_not_specialize=["size", "stride_t"])
def _sinusoids_kernel(
    t_ptr,  # [N]
    frequencies_ptr,  # float32 [HALF]
    out_ptr,  # float32 [N, WIDTH]
    stride_t,
    size,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_inputs()
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    c = offs % WIDTH
    inside = mask & (c < 2 * HALF)
    t = tl.load(t_ptr + offs // WIDTH * stride_t, mask=inside, other=0).to(tl.float32)
    angle = t * tl.load(frequencies_ptr + c % HALF, mask=inside, other=0.0)
    value = tl.where(c < HALF, tl.cos(angle), tl.sin(angle))
    tl.store(out_ptr + offs, tl.where(inside, value, 0.0), mask=mask)


def sinusoids(
    t: Tensor,  # int64 or float32 [N]
    frequencies: Tensor,  # float32 [F]
    width: int,  # at least 2F
) -> Tensor:  # float32 [N, width]
    """cos(t f) of every frequency, then sin(t f), then zeros (Vaswani et al. 2017, section 3.5)."""
    half = frequencies.numel()
    assert t.ndim == 1 and frequencies.is_contiguous() and width >= 2 * half > 0
    assert frequencies.dtype == torch.float32
    out = t.new_empty((t.numel(), width), dtype=torch.float32)
    if out.numel():
        _sinusoids_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
            t, frequencies, out, t.stride(0), out.numel(), HALF=half, WIDTH=width, BLOCK=_BLOCK,
            **overlapping(t.device),
        )  # fmt: skip
    return out
