"""`LAUNCHES` has one entry per op: its call of a module of kernels, which is either
`triton_kernels.fused_ops` or `triton_kernels.reference.fused`, with the same names."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from triton_kernels.noise.dropout import Mask

from ..graph import Node

Inputs = dict[str, Any]
LAUNCHES: dict[str, Callable[[ModuleType, Node, Inputs], Any]] = {}


def launches(op: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        LAUNCHES[op] = function
        return function

    return register


def many(inputs: Inputs, role: str) -> list[Tensor]:
    """inputs role0, role1, ..."""
    return [v for k, v in inputs.items() if k.startswith(role) and k[len(role) :].isdigit()]


def image(x: Tensor | None) -> Tensor | None:
    """[N, ..., C] as [N, H, W, C]"""
    return x if x is None or x.ndim == 4 else x.reshape(x.shape[0], 1, -1, x.shape[-1])


def as_filters(weight: Tensor) -> Tensor:
    """[CO, CI] as [CO, CI, 1, 1]"""
    return weight if weight.ndim == 4 else weight[:, :, None, None]


def filters(weight: Tensor) -> Tensor:
    """[CO, CI, R, S], or [CO, CI], as kernels see them: in [CO, R, S, CI] memory."""
    inner = as_filters(weight).permute(0, 2, 3, 1)
    return inner.contiguous().permute(0, 3, 1, 2)


def mask_of(node: Node, given: Inputs) -> Mask | None:
    """What the fused kernels drop by, or None."""
    if "rng" not in given:
        return None
    a = node.attrs
    first = given.get("first", a["first"])  # of the call, where it changes from call to call
    return Mask(a["p"], given["rng"], a["layer"], first)
