"""The loss and its gradient as kernels; `loss` launches them."""

import triton
import triton.language as tl

from ..reductions.last_program import fetch_slots, hand_in
from .chunks import first_channels, locate
from .process import clean, coefficients, noise


@triton.jit
def _target(
    images_ptr,
    index_ptr,
    flip_ptr,
    t_ptr,
    table_ptr,
    seed,
    step,
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
        epsilon = noise(seed, step, first, n, start, BLOCK)
    if PREDICTION == "epsilon":
        return epsilon
    else:
        x0 = clean(images_ptr, index_ptr, flip_ptr, n, offs, offs < elements, elements, W, C)
        if PREDICTION == "sample":
            return x0
        else:
            a, s = coefficients(t_ptr, table_ptr, n)
            return a * epsilon - s * x0


@triton.jit(do_not_specialize=["first"])
def denoise_loss_fwd_kernel(
    output_ptr,  # [N, H, W, CO]
    images_ptr,
    index_ptr,
    flip_ptr,
    t_ptr,
    table_ptr,
    rng_ptr,
    loss_ptr,  # float32 [N], out
    slots_ptr,  # int32 [N, SLOTS], zero before and after; None: a sample is one chunk
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
    SLOTS: tl.constexpr,
    QUADS: tl.constexpr,  # whether a thread has four elements, as many as come of Philox at once
):
    seed, step = tl.load(rng_ptr), tl.load(rng_ptr + 1)
    n, start = locate(chunks, BLOCKS * BLOCK)
    if slots_ptr is not None:
        slots_ptr += n * SLOTS
        if QUADS:  # few programs, whose every wait shows
            fetch_slots(slots_ptr, SLOTS)
    squares = tl.zeros([4 * BLOCK], tl.float32)
    for _ in range(BLOCKS):
        offs = 4 * start + tl.arange(0, 4 * BLOCK)
        mask = offs < elements
        # If the compiler sees what divides a sample, a thread that has many loads 16 bytes, and
        # the numbers change places through shared memory.
        elements_o = elements if CO == C and QUADS else elements // C * CO
        offs_o = first_channels(offs, C, CO)
        output = tl.load(output_ptr + n * elements_o + offs_o, mask=mask, other=0.0)
        target = _target(
            images_ptr, index_ptr, flip_ptr, t_ptr, table_ptr, seed, step, first, n, start,
            elements, W, C, PREDICTION, BLOCK,
        )  # fmt: skip
        difference = tl.where(mask, output.to(tl.float32) - target, 0.0)
        if difference_ptr is not None:
            tl.store(difference_ptr + n * elements + offs, difference, mask=mask)
        squares += difference * difference
        start += BLOCK
    mean = tl.sum(squares) / elements
    if slots_ptr is None:
        tl.store(loss_ptr + n, mean)
    else:
        last, mean = hand_in(mean, slots_ptr, tl.program_id(0) % chunks, chunks, SLOTS)
        if last:
            tl.store(loss_ptr + n, mean)


@triton.jit
def denoise_loss_bwd_kernel(
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
    n, start = locate(chunks, BLOCK)
    elements_o = elements if CO == C else elements // C * CO  # the compiler sees what divides it
    offs_o = start + tl.arange(0, BLOCK)
    mask = offs_o < elements_o
    c = offs_o % CO
    in_first = mask if CO == C else mask & (c < C)  # the variance has no gradient here
    offs = offs_o if CO == C else offs_o // CO * C + c
    difference = tl.load(difference_ptr + n * elements + offs, mask=in_first, other=0.0)
    doutput = tl.load(dloss_ptr + n * stride_dn) * (2.0 / elements) * difference
    doutput = doutput.to(doutput_ptr.dtype.element_ty)
    tl.store(doutput_ptr + n * elements_o + offs_o, doutput, mask=mask)
