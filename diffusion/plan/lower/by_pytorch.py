"""Layers whose kernels a plan has from PyTorch: softmax, means and other reductions, products of
two batches. Each is one node, `arith`."""

from collections.abc import Sequence
from typing import Any

import torch

from ..graph import Value
from ..views import View, in_order
from .arithmetic import arithmetic, function, left
from .shapes import memory_order
from .table import Lowering, lowers

_ATEN = torch.ops.aten


@lowers("amax", "amin", "linalg_vector_norm", "logsumexp", "mean", "sum", "var")
def _reduction(low: Lowering, x: View, *args: Any, **options: Any) -> View:
    """Over dimensions, in the order in which they lie in memory."""
    given = _named(low, args) | options
    n, keeps = len(x.dims), given.pop("keepdim", False)
    said = given.pop("dim", None)
    said = [said] if isinstance(said, int) else said
    dims = sorted(i % n for i in said) if said else list(range(n))
    value, order = _as_it_lies(low, x)
    places = sorted(order.index(i) for i in dims)
    sizes = [1 if i in dims else x.shape[i] for i in order]
    target = {"mean": _ATEN.mean.dim, "sum": _ATEN.sum.dim_IntList}
    target = target.get(low.name.removeprefix("aten."), low.target)
    ahead = [given.pop("ord", 2)] if "vector_norm" in low.name else []
    arguments = (0, *(("number", a) for a in (*ahead, places)))
    options = given | {"keepdim": True}
    y = left(low, [value], arguments, sizes, options, target)
    if low.meta.dtype != y.dtype:
        y = low.cast(y, low.meta.dtype)
    view = in_order(y, sizes, order)
    for i in reversed([] if keeps else dims):
        view = view.drop(i)
    return view


@lowers("_softmax", "_log_softmax", "_safe_softmax", known=("half_to_float",))
def _softmax(low, x, at):
    value, order = _as_it_lies(low, x)
    targets = {"_log_softmax": _ATEN.log_softmax.int, "_safe_softmax": low.target}
    target = targets.get(low.name.removeprefix("aten."), _ATEN.softmax.int)
    sizes = [x.shape[i] for i in order]
    axis = order.index(at % len(x.dims))
    y = left(low, [value], (0, ("number", axis)), sizes, {}, target)
    if "log" not in low.name:
        low.softmaxes[y] = value, axis
    return in_order(y, sizes, order)


def _named(low: Lowering, args: Sequence[Any]) -> dict[str, Any]:
    """Arguments behind the first, by their names; those that say nothing are left out."""
    names = [a.name for a in low.target._schema.arguments[1:]]
    return {k: v for k, v in zip(names, args, strict=False) if v is not None}


def _as_it_lies(low: Lowering, x: View) -> tuple[Value, list[int]]:
    """The view as a value without a copy if it can be, and which dimensions its axes are."""
    x = low.views.owned(x)
    order = memory_order(x)
    return low.gather(x.permute(order)), order


@lowers("max_pool2d_with_indices")
def _max_pool(low, x, *args):
    """The indices are another call: of several results PyTorch's autograd wants one that has
    one."""
    several, op = low.meta, low.target
    indices = function(low, x, *args)[1]
    low.meta, low.target = several[0], _ATEN.max_pool2d.default
    y = arithmetic(low, x, *args)
    low.meta, low.target = several, op
    return [y, indices]
