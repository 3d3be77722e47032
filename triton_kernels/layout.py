"""What a launcher may assume of its tensors, checked once at the door of every public op."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_nhwc(name: str, x: Tensor, ndim: int = 4) -> None:
    """Raise ValueError unless `x` is a contiguous floating-point tensor of `ndim` dimensions."""
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


def autocast(x: Tensor) -> Tensor:
    """x in the dtype of an enclosing torch.autocast, which is how PyTorch treats what its own
    convolutions and matrix products take."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
