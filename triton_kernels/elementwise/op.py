"""Sums, products and activations of whole tensors, computed in one pass over memory.

PyTorch launches a kernel for each of them, which reads and writes a tensor. Here every tensor is
read once, `steps` say what is computed of each element, in float32, and what is wanted of that is
rounded once and written. There is one compiled kernel for a list of steps.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ..runtime.dependent_launch import overlapping
from .kernel import elementwise_kernel
from .steps import ALL, MOST_READ, MOST_STEPS, MOST_WRITTEN, ONE, Step

_TILE = 2048  # numbers of a program: 16 a thread of four warps
_MOST_COLUMNS = 256


def elementwise(
    tensors: Sequence[Tensor],  # contiguous, of `has`'s sizes
    has: Sequence[int],  # of each what it has: ALL, OF_CHANNELS, ... of `steps`
    steps: Sequence[Step],
    results: Sequence[tuple[int, torch.dtype]],  # the places that are wanted, and their types
    shape: Sequence[int],  # of all results: [N, ..., C]
) -> list[Tensor]:
    """The results."""
    n, *_, c = shape
    m = torch.Size(shape).numel() // max(1, c)
    sizes = (m * c, c, n * c, m, 1)
    assert len(tensors) == len(has) <= MOST_READ and len(results) <= MOST_WRITTEN
    assert len(steps) <= MOST_STEPS
    for x, kind in zip(tensors, has, strict=True):
        assert x.is_contiguous() and x.numel() == sizes[kind], (x.shape, kind, shape)
    ys = [tensors[0].new_empty(tuple(shape), dtype=dtype) for _, dtype in results]
    if m == 0 or c == 0:
        return ys
    pixels = max(1, m // n)
    if set(has) <= {ALL, ONE}:
        m, c = _evenly(m * c)
    block_c = min(_TILE if m == 1 else _MOST_COLUMNS, triton.next_power_of_2(c))
    block_m, cb = _TILE // block_c, triton.cdiv(c, block_c)
    read = [*tensors, *[None] * (MOST_READ - len(tensors))]
    written = [*ys, *[None] * (MOST_WRITTEN - len(ys))]
    elementwise_kernel[(triton.cdiv(m, block_m) * cb,)](
        *read, *written, m, c, pixels, cb,
        STEPS=tuple(steps), HAS=tuple(has), RESULTS=tuple(at for at, _ in results),
        BLOCK_M=block_m, BLOCK_C=block_c, **overlapping(ys[0].device, m),
    )  # fmt: skip
    return ys


def _evenly(count: int) -> tuple[int, int]:
    """Rows and columns of so many numbers, of which none is read twice."""
    return (count // _MOST_COLUMNS, _MOST_COLUMNS) if count % _MOST_COLUMNS == 0 else (1, count)
