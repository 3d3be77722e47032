"""Ops that change a view, or concatenate tensors."""

import math

from ..graph import numbered
from ..views import View, in_order, whole
from .table import Lowering, lowers


@lowers("clone", "alias", "lift_fresh", "lift_fresh_copy", known=("memory_format",))
def _same(low: Lowering, x: View) -> View:
    return x


@lowers("detach")
def detached(low: Lowering, x: View) -> View:
    """The view, to whose value no gradient is sent."""
    fixed = x.value in low.graph.constants or not x.value.has_gradients
    if fixed or not low.differentiable:
        return x
    value = x.value
    y = low.make("detach", {"x": value}, value.shape, value.dtype)
    return View(y, x.dims, x.offset)


@lowers("permute")
def _permute(low, x, order):
    return x.permute([i % len(x.dims) for i in order])


@lowers("transpose")
def _transpose(low, x, a, b):
    order = list(range(len(x.dims)))
    order[a], order[b] = order[b], order[a]
    return x.permute(order)


@lowers("t")
def _t(low, x):
    return x.permute(range(len(x.dims))[::-1])


@lowers("unsqueeze")
def _unsqueeze(low, x, at):
    return x.insert(at % (len(x.dims) + 1))


@lowers("squeeze")
def _squeeze(low, x, at=None):
    every = range(len(x.dims)) if at is None else [at] if isinstance(at, int) else at
    for i in sorted((i % len(x.dims) for i in every), reverse=True):
        x = x.drop(i) if x.shape[i] == 1 else x
    return x


@lowers("view", "_unsafe_view", known=("size",))
def _reshape(low, x):
    shape = tuple(low.meta.shape)
    view = x.reshape(shape)
    return whole(low.gather(x), shape) if view is None else view


@lowers("expand", known=("size", "implicit"))
def _expand(low, x):
    return x.expand(tuple(low.meta.shape))


@lowers("repeat")
def _repeat(low, x, counts):
    dims = len(counts)
    x = x.expand((1,) * (dims - len(x.dims)) + x.shape)
    for i in range(dims):  # [n, ...] as [count, n, ...]
        x = x.insert(2 * i)
    shape = [n for count, size in zip(counts, x.shape[1::2], strict=True) for n in (count, size)]
    return _reshape(low, x.expand(shape))


@lowers("slice")
def _slice(low, x, at=0, start=None, stop=None, step=1):
    n = x.shape[at]
    start, stop, step = slice(start, stop, step).indices(n)
    return x if (start, stop, step) == (0, n, 1) else _part(low, x, at, start, stop, step)


def _part(low: Lowering, x: View, at: int, start: int, stop: int, step: int = 1) -> View:
    at %= len(x.dims)
    view = x.narrow(at, start, stop, step)
    return view if view is not None else whole(low.gather(x)).narrow(at, start, stop, step)


@lowers("select")
def _select(low, x, at, index):
    index %= x.shape[at]
    return _part(low, x, at, index, index + 1).drop(at % len(x.dims))


@lowers("unbind")
def _unbind(low, x, at=0):
    return [_select(low, x, at, i) for i in range(x.shape[at])]


@lowers("split", "split_with_sizes", known=("split_size", "split_sizes"))
def _split(low, x, at=0):
    parts, start = [], 0
    for meta in low.meta:  # the trace knows how long each is
        parts.append(_part(low, x, at, start, start + meta.shape[at]))
        start += meta.shape[at]
    return parts


@lowers(
    "_to_copy", known=("dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format")
)
def to(low, x):
    if low.meta.dtype == x.value.dtype:
        return x
    x = low.views.owned(x)
    return View(low.cast(x.value, low.meta.dtype), x.dims)


@lowers("copy", known=("non_blocking",))
def _copy(low, x, source):
    """What a tensor is after another was written over it."""
    return to(low, source.expand(x.shape))


def memory_order(x: View) -> list[int]:
    """Dimensions by their steps in memory, the largest first; those of length 1 stay in place."""
    long = [i for i, dim in enumerate(x.dims) if dim]
    ranked = iter(sorted(long, key=lambda i: -max(step for _, step in x.dims[i])))
    return [next(ranked) if x.dims[i] else i for i in range(len(x.dims))]


def _order_of_layers(views: list[View]) -> list[int]:
    """The order in which most elements are already that is not the module's, if there is one: it is
    that of our layers, and others read what is made here."""
    elements: dict[tuple[int, ...], int] = {}
    for x in views:
        order = tuple(memory_order(x))
        elements[order] = elements.get(order, 0) + math.prod(x.shape)
    return list(max(elements, key=lambda order: (order != tuple(sorted(order)), elements[order])))


@lowers("cat")
def _cat(low, views, at=0):
    dtype = low.meta.dtype
    at %= len(low.meta.shape)
    views = [x for x in views if x.shape != (0,)]
    order = _order_of_layers(views)
    parts = [low.cast(low.gather(x.permute(order)), dtype) for x in views]
    shape = [low.meta.shape[i] for i in order]
    inputs, axis = numbered("x", parts), order.index(at)
    return in_order(low.make("cat", inputs, shape, dtype, axis=axis), shape, order)


@lowers("stack")
def _stack(low, views, at=0):
    at %= len(low.meta.shape)
    return _cat(low, [x.insert(at) for x in views], at)
