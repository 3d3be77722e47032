"""Inputs that the Gluon kernels support, and tensor descriptors for TMA."""

import math
from typing import Any

from torch import Tensor

from ..runtime.device import Device

# Gluon is an experimental part of Triton: a version may come that has moved what the kernels use.
try:
    from triton.experimental.gluon import language as gl

    from .compat import TensorDescriptor
except (ImportError, AttributeError) as error:
    SUPPORTED, MISSING = False, f"{type(error).__name__}: {error}"
    TensorDescriptor = Any  # for annotations
else:
    SUPPORTED, MISSING = True, None

LOADER_REGISTERS = 24  # of a thread of the warps that load: the fewest there are
_SHARED = 227 << 10  # bytes of shared memory that a program may use on every chip with wgmma


def missing(gpu: Device, itemsize: int = 2) -> str | None:
    """Why a kernel of this kind cannot run on a GPU, or one of 16 bits not on numbers of so many
    bytes."""
    if not SUPPORTED:
        return f"there are no Gluon kernels with this Triton: {MISSING}"
    if not gpu.hopper:
        return "it is written for compute capability 9, which alone has wgmma"
    if gpu.shared_memory < _SHARED:
        kilobytes = (size >> 10 for size in (_SHARED, gpu.shared_memory))
        return "it is written for {} KB of shared memory, not {}".format(*kilobytes)
    return None if itemsize == 2 else f"numbers have {8 * itemsize} bits; it multiplies 16"


def in_boxes(
    x: Tensor, shape: list[int], box: list[int], strides: list[int] | None = None
) -> TensorDescriptor:
    """x seen in this shape with these strides, in elements; None: as it is contiguous, whatever x
    says of sizes of 1. A row of a box is swizzled over its whole width, or over 128 bytes."""
    strides = strides or [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    width = min(128, box[-1] * x.itemsize)
    layout = gl.NVMMASharedLayout(width, 8 * x.itemsize, rank=len(box))
    return TensorDescriptor(x, shape, strides, box, layout)
