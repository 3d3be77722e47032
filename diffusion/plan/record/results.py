"""Results of common calls on the meta device: shape, strides and dtype, for `record`.

PyTorch derives them in Python, and imports sympy and Dynamo for the first of them: seconds of the
start of a run. Each rule here covers a plain case; for any other call PyTorch is asked. Tests
compare every result with PyTorch's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten
Result = Tensor | tuple[Tensor, ...]


def known_result(target: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Result | None:
    """What `target(*args, **kwargs)` returns, for tensors on the meta device; None: no rule covers
    the call."""
    rule = _RULES.get(target)
    if rule is None or not all(x.is_meta and x.numel() > 0 for x in _tensors(args)):
        return None
    try:
        return rule(*args, **kwargs)
    except TypeError:  # arguments that the rule does not have
        return None


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    flat = [y for x in args for y in (x if isinstance(x, list | tuple) else (x,))]
    return [x for x in flat if isinstance(x, Tensor)]


def _made(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _ATEN.empty_strided.default(shape, strides, dtype=dtype, device="meta")


def _contiguous(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _made(shape, _packed(shape, range(len(shape))), dtype)


def _packed(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Strides without gaps; `order` has the dimensions from the outermost."""
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= shape[d]
    return strides


def _like(x: Tensor) -> Tensor | None:
    """In the order in which x is in memory, without gaps; None if x has an element twice."""
    if any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)):
        return None
    order = sorted(range(x.ndim), key=lambda d: -x.stride(d))
    return _made(x.shape, _packed(x.shape, order), x.dtype)


def _elementwise(x: Any, *others: Any) -> Tensor | None:
    """The first tensor decides on the order, so it has the result's shape, and no dimension whose
    place its strides do not tell."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    for y in others:
        if not isinstance(y, Tensor):
            if not isinstance(y, int | float):
                return None
        elif y.dtype != x.dtype or y.ndim != x.ndim:
            return None
        elif y.shape != x.shape or y.stride() != x.stride():
            fits = all(n in (1, m) for n, m in zip(y.shape, x.shape, strict=True))
            if not fits or 1 in x.shape:
                return None
    return _like(x)


def _drawn(x: Tensor, *_: Any) -> Tensor:
    """As its op's own says."""
    return _contiguous(x.shape, x.dtype)


def _clone(x: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor | None:
    return _contiguous(x.shape, x.dtype) if memory_format is torch.contiguous_format else None


def _view(x: Tensor, size: Sequence[int]) -> Tensor | None:
    known = -1 not in size and x.is_contiguous()
    return _contiguous(size, x.dtype) if known else None


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor | None:
    n, channels, *size = x.shape
    outputs, each, *taps = weight.shape
    plain = not transposed and len(size) == len(taps) and outputs % groups == 0
    if not plain or each * groups != channels:
        return None
    if any(len(given) != len(size) for given in (stride, padding, dilation)):
        return None
    size = [
        (m + 2 * p - d * (k - 1) - 1) // s + 1
        for m, k, s, p, d in zip(size, taps, stride, padding, dilation, strict=True)
    ]
    return _contiguous((n, outputs, *size), x.dtype) if min(size) > 0 else None


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, ...] | None:
    """Up to PyTorch 2.13 images in channels_last come copied, from 2.15 on as they are."""
    if x.dtype not in (torch.float32, torch.float64) or channels % groups:
        return None
    if x.is_contiguous():
        z = _contiguous(x.shape, x.dtype)
    elif x.is_contiguous(memory_format=torch.channels_last):
        z = _made(x.shape, _packed(x.shape, (0, 2, 3, 1)), x.dtype)
    else:
        return None
    return z, *(_contiguous((n, groups), x.dtype) for _ in range(2))


def _bmm(a: Tensor, b: Tensor) -> Tensor | None:
    fits = a.dtype == b.dtype and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1]
    return _contiguous((*a.shape[:2], b.shape[2]), a.dtype) if fits else None


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = parts[0]
    shapes = [list(x.shape) for x in parts]
    if not all(x.is_contiguous() and x.dtype == first.dtype for x in parts):
        return None
    dim %= first.ndim
    total = sum(shape.pop(dim) for shape in shapes if len(shape) > dim)
    if any(shape != shapes[0] for shape in shapes):
        return None
    shape = shapes[0]
    shape.insert(dim, total)
    return _contiguous(shape, first.dtype)


def _softmax(x: Tensor, dim: int) -> Tensor | None:
    return _contiguous(x.shape, x.dtype) if x.is_contiguous() else None


def _resized(x: Tensor, size: Sequence[int]) -> Tensor | None:
    """Images [N, C, H, W] of another size, in the same order."""
    if x.ndim != 4 or min(x.shape) == 1:
        return None
    shape = (*x.shape[:2], *size)
    if x.is_contiguous():
        return _contiguous(shape, x.dtype)
    last = x.is_contiguous(memory_format=torch.channels_last)
    return _made(shape, _packed(shape, (0, 2, 3, 1)), x.dtype) if last else None


def _avg_pool(x: Tensor, window: Sequence[int]) -> Tensor | None:
    if x.ndim != 4 or len(window) != 2:
        return None
    size = [n // k for n, k in zip(x.shape[2:], window, strict=True)]
    return _resized(x, size) if min(size) > 0 else None


def _upsample(x: Tensor, size: Sequence[int], *scales: float | None) -> Tensor | None:
    return _resized(x, size)


_RULES: dict[Any, Callable[..., Result | None]] = {
    _ATEN.add.Tensor: _elementwise,
    _ATEN.mul.Tensor: _elementwise,
    _ATEN.mul.Scalar: _elementwise,
    _ATEN.silu.default: _elementwise,
    torch.ops.triton_kernels.dropout.default: _drawn,
    _ATEN.clone.default: _clone,
    _ATEN._unsafe_view.default: _view,
    _ATEN.convolution.default: _convolution,
    _ATEN.native_group_norm.default: _group_norm,
    _ATEN.bmm.default: _bmm,
    _ATEN.cat.default: _cat,
    _ATEN._safe_softmax.default: _softmax,
    _ATEN.avg_pool2d.default: _avg_pool,
    _ATEN.upsample_nearest2d.default: _upsample,
}
