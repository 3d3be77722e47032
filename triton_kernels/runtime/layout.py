"""Checks of the tensors that public ops are called with."""

import torch
import triton
from torch import Tensor

from .device import on_gpu
from .hardware import VECTOR

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_INTERPRETED = triton.knobs.runtime.interpret  # as it was when the kernels were loaded


def has_kernels(x: Tensor) -> bool:
    """Whether kernels can run where `x` is."""
    return x.device.type != "cpu" or on_gpu(x.device) or _INTERPRETED


def check_device(name: str, x: Tensor) -> None:
    """Raise ValueError for a tensor on the CPU, where kernels run in Triton's interpreter alone."""
    if not has_kernels(x) and not torch.compiler.is_compiling():
        raise ValueError(
            f"{name} is on the CPU; kernels need a CUDA device (triton_kernels.reference has the"
            " same functions for any)"
        )


def check_nhwc(name: str, x: Tensor, ndim: int = 4) -> None:
    """Raise ValueError unless `x` is a contiguous floating-point tensor of `ndim` dimensions that
    kernels can read."""
    check_device(name, x)
    if x.ndim != ndim:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {ndim} dimensions")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} is {x.dtype}; expected float32, float16 or bfloat16")
    if not x.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} has strides {x.stride()}; expected contiguous NHWC"
        )


def check_shape(name: str, x: Tensor | None, *shape: int) -> None:
    """Raise ValueError unless `x` is absent or has exactly this shape."""
    if x is not None and tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {shape}")


def check_contiguous(name: str, x: Tensor | None, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `x` is absent, or contiguous and of one of these dtypes."""
    if x is not None and (x.dtype not in dtypes or not x.is_contiguous()):
        names = " or ".join(map(str, dtypes))
        raise ValueError(
            f"{name} is {x.dtype} with stride {x.stride()}; expected contiguous {names}"
        )


def check_second(x2: Tensor | None, n: int, h: int, w: int) -> int:
    """The channels of what stands behind x1 [N, H, W, .] in a concatenation, 0 if it is absent.
    Raise ValueError unless `x2` is then contiguous [N, H, W, .]."""
    if x2 is None:
        return 0
    check_nhwc("x2", x2)
    check_shape("x2", x2, n, h, w, x2.shape[3])
    return x2.shape[3]


def is_aligned(x: Tensor) -> bool:
    """Whether x begins where a thread, or the TMA unit, loads 16 bytes at once."""
    return x.data_ptr() % VECTOR == 0


def check_affine(
    n: int,
    c: int,
    weight: Tensor | None,  # [C]
    bias: Tensor | None,  # [C]
    scale: Tensor | None,  # [N, C], rows any distance apart
    shift: Tensor | None,  # [N, C]
) -> None:
    """Raise ValueError unless a norm may be multiplied with these, and they added to it."""
    rows = {"scale": scale, "shift": shift}
    for name, param in {"weight": weight, "bias": bias, **rows}.items():
        if param is None:
            continue
        check_shape(name, param, *((n, c) if name in rows else (c,)))
        if param.dtype not in DTYPES:
            raise ValueError(f"{name} is {param.dtype}; expected float32, float16 or bfloat16")
        if param.stride(-1) != 1 and c > 1:
            raise ValueError(f"{name} has strides {param.stride()}; expected channels side by side")


def row_stride(x: Tensor | None) -> int:
    """Elements between the rows of x [N, C], whose channels have to lie side by side; 0 if it is
    absent."""
    assert x is None or x.stride(-1) == 1, f"strides {x.stride()}; expected channels side by side"
    return 0 if x is None else x.stride(0)


def autocast(x: Tensor) -> Tensor:
    """x in the dtype of an enclosing torch.autocast, which is how PyTorch treats what its own
    convolutions and matrix products take."""
    device = x.device.type
    if device == "meta":  # which has no autocast
        return x
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
