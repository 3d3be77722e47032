"""What the ops of the forward and the reverse process may assume of their arguments."""

import torch
from torch import Tensor

from ..noise.philox import check_rng
from ..runtime.layout import check_contiguous, check_device, check_nhwc, check_shape


def check_batch(images: Tensor, index: Tensor | None, flip: Tensor | None) -> int:
    """The number of samples N. ValueError unless images are contiguous uint8 or float32
    [M, H, W, C], index int64 [N] and flip bool [N]."""
    check_device("images", images)
    if images.ndim != 4 or images.dtype not in (torch.uint8, torch.float32):
        raise ValueError(
            f"images is {images.dtype} of shape {tuple(images.shape)}; "
            "expected uint8 or float32 [M, H, W, C]"
        )
    if not images.is_contiguous():
        raise ValueError(f"images has strides {images.stride()}; expected contiguous NHWC")
    n = images.shape[0] if index is None else index.shape[0]
    _check_vector("index", index, n, torch.int64)
    _check_vector("flip", flip, n, torch.bool)
    return n


def check_process(n: int, t: Tensor, table: Tensor, rng: Tensor) -> None:
    """ValueError unless t is int64 [N], table float32 [T, 2] and rng int64 [2]."""
    _check_vector("t", t, n, torch.int64)
    check_table("table", table, 2)
    check_rng(rng)


def check_output(output: Tensor, n: int, height: int, width: int, c: int) -> None:
    """ValueError unless output is contiguous [N, H, W, C or 2C]."""
    check_nhwc("output", output)
    check_channels(output, n, height, width, c)


def check_channels(output: Tensor, n: int, height: int, width: int, c: int) -> None:
    """ValueError unless output is [N, H, W, C or 2C], however it lies in memory."""
    co = output.shape[-1]
    if co != c and co != 2 * c:  # `in`, of a size that is a symbol, compares wrongly in Dynamo
        raise ValueError(f"output has {co} channels; expected {c} or {2 * c}")
    check_shape("output", output, n, height, width, co)


def check_table(name: str, table: Tensor, columns: int) -> None:
    """ValueError unless table is contiguous float32 with so many columns."""
    if table.ndim != 2 or table.shape[1] != columns or table.dtype != torch.float32:
        raise ValueError(
            f"{name} is {table.dtype} of shape {tuple(table.shape)}; "
            f"expected float32 [steps, {columns}]"
        )
    if not table.is_contiguous():
        raise ValueError(f"{name} has strides {table.stride()}; expected a contiguous tensor")


def _check_vector(name: str, x: Tensor | None, n: int, dtype: torch.dtype) -> None:
    check_shape(name, x, n)
    check_contiguous(name, x, dtype)
