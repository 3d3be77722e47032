"""Programmatic dependent launch: the next kernel is set up while its predecessor drains.

A step at a small batch consists of hundreds of kernels of a few microseconds, with half a
microsecond between the end of one and the first instruction of the next. From Hopper on, a kernel
may occupy multiprocessors as soon as every program of its predecessor has started, and wait there
for the predecessor's results. Stream capture keeps this as a programmatic edge of the graph.

Chains of kernels gain: sampling, and the forward pass of a training step. In backward, weight
gradients on the second stream fill the gaps too, and a waiting kernel takes their place. There, all
kernels as dependent launches lost 3 %, while small kernels and Gluon convolutions gain (see
docs/tried.md). Dependent launches are off outside of `dependent_launches()`. The later launches
of one public op are an exception (`following`): on a separate stream nothing else can start
between them. The predecessor may be an ordinary launch that does not call `await_inputs`, since it
ends after everything before it.

Small kernels gain, and kernels with one program per multiprocessor. While a large kernel drains,
the programs of the next crowd on the few multiprocessors that are free first: the norm's tables of
large images, 64 small programs each, added 27 us to an evaluation of 16 images.

One rule makes this safe: every kernel launched with `overlapping()` calls `await_inputs()` before
it reads or writes memory. Every kernel then ends after its predecessor, so by induction all earlier
kernels of the stream are done when `await_inputs` returns. It waits before it lets the next kernel
start, so when a kernel starts, all kernels except its predecessor are done. Before the wait a
kernel may therefore read what these wrote, and parameters, which none of them writes: Gluon
convolutions read their weights, and a norm's pass its pixels if the predecessor computes the table.
Such reads bypass the L1 cache, which may still have an older tensor there.

A kernel that has less to do than its successor has to load calls `begin_next()` first, and the
successor starts while its inputs are two or more kernels away. Kernels after such a kernel read
before their wait only parameters, and what was complete before the first kernel that waited, such
as the embedding of a sampler's step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .device import describe, on_gpu


@triton.constexpr_function
def _available() -> bool:
    interpreted = triton.knobs.runtime.interpret
    return not interpreted and tl.target_info.cuda_capability_geq(9, 0)


@triton.jit
def await_inputs():
    """Wait for the kernels before this one, and let the one after it be set up."""
    if _available():
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def await_inputs_alone():
    """The first half of it."""
    if _available():
        gdc_wait()


@triton.jit
def begin_next():
    """The second half: before this kernel waits; or behind most of what one does that leaves no
    room beside it, so that programs of the next do not crowd where it ends first."""
    if _available():
        gdc_launch_dependents()


_batch: int | None = None  # pixels; None: kernels do not overlap


@contextmanager
def dependent_launches(pixels: int | None = 0) -> Iterator[None]:
    """Within the block small kernels overlap with their predecessors, on GPUs that can do it: all
    of a network whose batch has few pixels, else those that know that they are small. None: no
    kernel does, as outside of any block."""
    global _batch
    before, _batch = _batch, pixels
    try:
        yield
    finally:
        _batch = before


def overlapping(device: torch.device, pixels: int | None = None) -> dict[str, bool]:
    """The launch option of kernels that begin with `await_inputs`, and go over so many pixels; None
    if they do not know. 0: they should overlap in any case."""
    if not on_gpu(device) or not (gpu := describe(device)).tma or _batch is None:
        return {}
    # kernels of so few pixels are so short that they should: 16 a program, where it is busy
    short = (_batch if pixels is None else pixels) <= 16 * gpu.busy
    return {"launch_pdl": True} if short else {}


def following(device: torch.device) -> dict[str, bool]:
    """That of a kernel which begins with `await_inputs` and reads what the kernel just before it,
    of the same op, has written. It is always on: that predecessor is short, and its own was waited
    for, so that nothing else is held up."""
    hopper = on_gpu(device) and describe(device).tma
    return {"launch_pdl": True} if hopper else {}
