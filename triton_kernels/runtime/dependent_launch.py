"""Programmatic dependent launch: a kernel is set up while the one before it drains.

A step at a small batch is hundreds of kernels of a few microseconds, and half a microsecond passes
from the end of one to the first instruction of the next. From Hopper on a kernel may be put on the
multiprocessors as soon as every program of its predecessor has begun, to wait there for what the
predecessor writes. Stream capture keeps this as a programmatic edge of the graph.

It is for a chain of kernels, as in sampling and in the forward pass of a training step. In backward
weight gradients on a side branch fill the gaps as well, and a kernel that waits takes their place:
with all kernels it lost 3 %, with small ones and Gluon convolutions it gains (see
docs/tried.md). It is off but within `dependent_launches()`. The later launches of one public
op are another matter (`following`): in a stream of its own nothing else can begin between them.
The predecessor may be a kernel that does not call `await_inputs`, if it was
launched in the ordinary way: it ends after all before it, too.

And it is for small kernels, or for those that have a multiprocessor each to themselves. While a
large kernel drains, programs of the next crowd on the few multiprocessors that are free first: the
norm's tables of large images, 64 small programs each, added 27 us to an evaluation of 16 images.

The rule that makes it safe: whatever is launched with `overlapping()` calls `await_inputs()` before
it touches memory. Every kernel then ends after its predecessor has, so that by induction all
earlier kernels of the stream are done, and not just the last, when `await_inputs` returns. It waits
before it lets the next kernel begin: so when a kernel begins, all but its predecessor are done. It
may read before the wait what these have written, and parameters, which none of them writes: the
Gluon convolutions their filters, and a norm's pass its pixels, if the launch in front makes the
table. It reads past the cache of its multiprocessor then, which may know an older tensor there.

A kernel that has less to do than its successor has to fetch calls `begin_next()` first of all, and
the successor begins while its own inputs are two or more kernels away. What stands behind such a
kernel reads nothing before its wait but parameters, and what was done before the first kernel that
waited, as the embedding of a sampler's step.
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


_MOST_PIXELS = 2**14  # up to which kernels are so short that they should overlap

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
    hopper = on_gpu(device) and describe(device).tma
    if not hopper or _batch is None or (_batch if pixels is None else pixels) > _MOST_PIXELS:
        return {}
    return {"launch_pdl": True}


def following(device: torch.device) -> dict[str, bool]:
    """That of a kernel which begins with `await_inputs` and reads what the kernel just before it,
    of the same op, has written. It is always on: that predecessor is short, and its own was waited
    for, so that nothing else is held up."""
    hopper = on_gpu(device) and describe(device).tma
    return {"launch_pdl": True} if hopper else {}
