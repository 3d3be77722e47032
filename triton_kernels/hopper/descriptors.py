"""What the Gluon kernels take, and tensors as the TMA unit is told of them.

Gluon is an experimental part of Triton: it is used with versions that it was tried with.
"""

import triton
from torch import Tensor

from ..runtime.device import describe

SUPPORTED = tuple(map(int, triton.__version__.split(".")[:2])) in ((3, 6), (3, 7))
if SUPPORTED:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def takes(x: Tensor) -> bool:
    """Whether there is a Hopper GPU, with such a version of Triton, and x has 16 bits a number."""
    return SUPPORTED and describe(x.device).hopper and x.itemsize == 2


def in_boxes(x: Tensor, shape: list[int], strides: list[int], box: list[int]) -> "TensorDescriptor":
    """x seen in this shape with these strides, in elements. A row of a box is swizzled over its
    whole width, or over 128 bytes."""
    width = min(128, box[-1] * x.itemsize)
    layout = gl.NVMMASharedLayout(width, 8 * x.itemsize, rank=len(box))
    return TensorDescriptor(x, shape, strides, box, layout)
