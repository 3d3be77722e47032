"""Programmatic dependent launch: a kernel is set up while the one before it drains.

A step at a small batch is hundreds of kernels of a few microseconds, and half a microsecond passes
from the end of one to the first instruction of the next. From Hopper on a kernel may be put on the
multiprocessors as soon as every program of its predecessor has begun, to wait there for what the
predecessor writes. Stream capture keeps this as a programmatic edge of the graph.

It is for a chain of kernels with nothing beside it, as in sampling. A training step has weight
gradients on a side branch, which fill the gaps better; a kernel that waits takes their place. There
it lost 3 % (see docs/performance.md), so it is off but within `dependent_launches()`. The later
launches of one public op are another matter (`following`): in a stream of its own nothing else can
begin between them. The predecessor may be a kernel that does not call `await_inputs`, if it was
launched in the ordinary way: it ends after all before it, too.

The rule that makes it safe: whatever is launched with `overlapping()` calls `await_inputs()` before
it touches memory. Every kernel then ends after its predecessor has, so that by induction all
earlier kernels of the stream are done, and not just the last, when `await_inputs` returns. It waits
before it lets the next kernel begin: so when a kernel begins, all but its predecessor are done. It
may read before the wait what these have written, and parameters, which none of them writes.

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

from .device import describe


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
def begin_next():
    """Let the kernel after this one be set up before this one waits."""
    if _available():
        gdc_launch_dependents()


_on = False


@contextmanager
def dependent_launches(on: bool = True) -> Iterator[None]:
    """Within the block kernels overlap with their predecessors, on GPUs that can do it; or not."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


def overlapping(device: torch.device) -> dict[str, bool]:
    """The launch option of kernels that begin with `await_inputs`."""
    hopper = device.type == "cuda" and describe(device).tma
    return {"launch_pdl": True} if _on and hopper else {}


def following(device: torch.device) -> dict[str, bool]:
    """That of a kernel which begins with `await_inputs` and reads what the kernel just before it,
    of the same op, has written. It is always on: that predecessor is short, and its own was waited
    for, so that nothing else is held up."""
    hopper = device.type == "cuda" and describe(device).tma
    return {"launch_pdl": True} if hopper else {}
