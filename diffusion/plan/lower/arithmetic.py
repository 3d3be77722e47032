"""Sums and products of tensors, and ops that a plan leaves to PyTorch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..graph import Value, numbered
from ..record.own_functions import OwnFunction
from ..views import View, in_order, whole
from .shapes import detached, memory_order, to
from .table import Lowering, call_arguments, each, lowers

_ATEN = torch.ops.aten
_OF_EACH = ("hardswish", "_prelu_kernel")  # which PyTorch does not mark as pointwise


@lowers("add", "sub", "rsub", "mul", "div", "neg")
def _arithmetic(low, a, b=-1, *, alpha=1, rounding_mode=None):
    name = low.name.split(".")[-1]
    dtype = low.meta.dtype
    tensors = [v.value for v in (a, b) if isinstance(v, View)]
    fixed = all(value in low.graph.constants for value in tensors)
    if fixed or not dtype.is_floating_point or rounding_mode is not None:
        options = {"alpha": alpha} if name in ("add", "sub", "rsub") and alpha != 1 else {}
        options |= {} if rounding_mode is None else {"rounding_mode": rounding_mode}
        return arithmetic(low, a, *(() if name == "neg" else (b,)), **options)
    name = "mul" if name == "neg" else name
    if name == "rsub":
        a, b, name = b, a, "sub"
    alpha = -alpha if name == "sub" else alpha
    if name == "div" and isinstance(b, View):
        if isinstance(a, View) and dtype.itemsize < 4:  # rounded once, and 1 / b may overflow
            return arithmetic(low, to(low, a), to(low, b))
        b, name = _power(low, b, -1), "mul"
    if not isinstance(a, View):  # a number and a tensor
        return _affine(low, b, a, 0) if name == "mul" else _affine(low, b, alpha, a)
    if isinstance(b, View):
        b = b if alpha == 1 else _affine(low, b, alpha, 0)
        return two(low, "mul" if name == "mul" else "add", a, b, dtype)
    if name == "div":
        b, name = 1 / b if b else math.copysign(math.inf, b), "mul"
    return _affine(low, a, b, 0) if name == "mul" else _affine(low, a, 1, b * alpha)


@lowers("addcmul")
def _addcmul(low, start, a, b, *, value=1):
    """start + a b: where a norm is one of them, as a sum and a product, which the norm takes. Else
    PyTorch's, which reads and writes once."""
    norms = {node.out for node in low.graph.nodes if node.op == "group_norm"}
    if value != 1 or not norms & {a.value, b.value} or not low.meta.dtype.is_floating_point:
        return arithmetic(low, start, a, b, value=value)
    a, b = (b, a) if b.value in norms else (a, b)
    y = two(low, "mul", a, b, low.meta.dtype)
    return two(low, "add", y, start, low.meta.dtype)


def _affine(low: Lowering, x: View, scale: float, offset: float) -> View:
    x = to(low, x)
    if (scale, offset) == (1, 0):
        return x
    return each(low, "affine", x, scale=scale, offset=offset)


def _power(low: Lowering, x: View, exponent: float) -> View:
    attrs = {"target": torch.ops.aten.pow.Tensor_Scalar, "options": {}}
    return each(low, "arith", to(low, x), "x0", arguments=(0, ("number", exponent)), **attrs)


def two(
    low: Lowering,
    op: str,
    a: View,
    b: View,
    dtype: torch.dtype,
    shape: tuple[int, ...] | None = None,  # None: that of the call's result
) -> View:
    """The sum or product of two tensors."""
    shape = tuple(low.meta.shape) if shape is None else shape
    a, b = ((_pointless(v, shape)) for v in (a, b))
    if a.shape != shape or any(step == 0 for _, step in a.pieces):
        if b.shape == shape and all(step for _, step in b.pieces):
            a, b = b, a
        else:
            a = whole(low.gather(a.expand(shape)))
    a, other = low.views.together(a, b)
    inputs = {"a": low.cast(a.value, dtype), "b": low.cast(other, dtype)}
    y = low.make(op, inputs, a.value.shape, dtype)
    return View(y, a.dims)


def _pointless(x: View, shape: tuple[int, ...]) -> View:
    """With as many dimensions as the result, and no steps of zero."""
    dims = ((),) * (len(shape) - len(x.dims)) + x.dims
    dims = tuple(() if all(step == 0 for _, step in dim) else dim for dim in dims)
    return View(x.value, dims, x.offset)


def arithmetic(low: Lowering, *args: Any, **options: Any) -> Any:
    """A call that stays PyTorch's. Of constants alone it is made now."""
    shape, dtype = low.meta.shape, low.meta.dtype
    of_each = _of_each_element(low, args, options)
    if of_each is not None:
        return of_each
    of_images = _of_images(low, args, options)
    if of_images is not None:
        return of_images
    inputs, arguments, options = _call_of(low, args, options)
    name = low.name.split(".")[-1]
    if name.endswith("_like") or name.startswith(("new_", "empty")):  # of the shape alone
        fill = 1 if "ones" in name else args[-1] if "full" in name else 0
        if not isinstance(fill, View):
            return whole(low.graph.constant(torch.full(tuple(shape), fill, dtype=dtype)))
    return whole(left(low, inputs, arguments, shape, options, low.target))


def _of_each_element(low: Lowering, args: Sequence[Any], options: dict[str, Any]) -> View | None:
    """A call that makes each element of those at its place, in the memory order of the first tensor
    that has the result's shape. None: it is another, or of several dtypes: which of them counts
    depends on how many dimensions each tensor has."""
    tensors = [x for x in args if isinstance(x, View)]
    op = low.target
    of_each = isinstance(op, torch._ops.OpOverload) and (
        torch.Tag.pointwise in op.tags or op._opname in _OF_EACH
    )
    dtypes = {x.value.dtype for x in tensors} - {torch.bool}
    if not of_each or len(dtypes) > 1 or any(isinstance(x, View) for x in options.values()):
        return None
    shape = tuple(low.meta.shape)
    fits = (x for x in tensors if x.shape == shape and x.value not in low.graph.constants)
    lead = next((x for x in fits if all(step for _, step in x.pieces)), None)
    if lead is None or any(len(x.dims) > len(shape) for x in tensors):
        return None
    lead = low.views.owned(lead)
    placed = [
        low.views.beside(lead, _pointless(x, shape)) if isinstance(x, View) else ("number", x)
        for x in args
    ]
    if None in placed:
        return None
    inputs = [x for x in placed if isinstance(x, Value)]
    numbers = iter(range(len(inputs)))
    arguments = tuple(next(numbers) if isinstance(x, Value) else x for x in placed)
    y = left(low, inputs, arguments, lead.value.shape, options, low.target)
    return View(y, lead.dims)


# of images, signals and videos [N, C, ...], whose kernels of PyTorch take channels where they lie
_OF_IMAGES = (
    *(f"upsample_{kind}" for kind in ("bicubic2d", "bilinear2d", "nearest2d", "trilinear3d")),
    *("_upsample_nearest_exact2d", "_adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"),
    *("replication_pad2d", "convolution", "_native_batch_norm_legit"),
)


@dataclass(frozen=True)
class _Result:
    """One of the tensors that an op makes, in memory of its own."""

    op: torch._ops.OpOverload
    at: int | None  # None: it makes one

    def made(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = self.op(*args, **kwargs)
        return made if self.at is None else made[self.at]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = self.made(*args, **kwargs)
        return made.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


class _ChannelsLast(_Result):
    """The image that such an op makes, of [N, ..., C]."""

    def __call__(self, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return self.made(x.movedim(-1, 1), *args, **options).movedim(1, -1).contiguous()


def _of_images(low: Lowering, args: Sequence[Any], options: dict[str, Any]) -> View | None:
    """A call of images that lie as those of our layers, which then write and read it without a copy
    in another order. None: it is another, or a convolution in groups: PyTorch has kernels of single
    channels for images in the module's order alone."""
    made = low.target if isinstance(low.target, _Result) else _Result(low.target, None)
    op, x = made.op, args[0]
    named = isinstance(op, torch._ops.OpOverload) and op._opname in _OF_IMAGES
    if not named or not isinstance(x, View) or op._opname == "convolution" and args[8] != 1:
        return None
    last = (0, *range(2, len(x.dims)), 1)
    if tuple(memory_order(low.views.owned(x))) != last:
        return None
    if len(low.meta.shape) != len(last):
        return None  # of an image no image, such as its channels' means
    inputs, arguments, options = _call_of(low, (x.permute(last), *args[1:]), options)
    shape = [low.meta.shape[i] for i in last]
    target = _ChannelsLast(op, made.at)
    return in_order(left(low, inputs, arguments, shape, options, target), shape, last)


def _call_of(
    low: Lowering, args: tuple, options: dict[str, Any]
) -> tuple[list[Value], tuple, dict[str, Any]]:
    """The tensors of a call, and its arguments, in which these have their numbers."""
    inputs: list[Value] = []

    def placed(arg: Any) -> Any:
        if isinstance(arg, View):
            inputs.append(low.gather(arg))
            return len(inputs) - 1
        if isinstance(arg, list | tuple) and any(isinstance(a, View) for a in arg):
            return ("list", tuple(map(placed, arg)))
        return ("number", arg)

    arguments = tuple(map(placed, args))
    # the trace has its tensors nowhere, a plan's constants are made on the CPU
    nowhere = ("pin_memory", "layout", "device")
    return inputs, arguments, {k: v for k, v in options.items() if k not in nowhere}


def draw(low: Lowering, *args: Any, **options: Any) -> View:
    """A draw of PyTorch's generator, besides dropout: noise, timesteps, labels that are dropped. No
    gradient is sent to what it is of.

    The node draws anew in every call, in the order in which the module draws. So a plan has the
    module's numbers where it starts from the same state of the generator, has no dropout and draws
    nothing like a tensor in channels_last: the module fills that in another order. It draws on the
    device of its images, also what a module draws on the host and moves there."""
    if options.get("generator") is not None:
        raise low.refuse("of a generator of the module's own")
    args = tuple(detached(low, a) if isinstance(a, View) else a for a in args)
    inputs, arguments, options = _call_of(low, args, options)
    given = numbered("x", inputs) if inputs else low.beside()
    attrs = {"target": low.target, "arguments": arguments, "options": options}
    return whole(low.make("draw", given, low.meta.shape, low.meta.dtype, **attrs))


_PARTS = {  # what writes a part of a copy: the op that names the part
    _ATEN.slice_scatter.default: _ATEN.slice.Tensor,
    _ATEN.select_scatter.default: _ATEN.select.int,
    _ATEN.diagonal_scatter.default: _ATEN.diagonal.default,
}


@dataclass(frozen=True)
class _Written:
    """A copy of a tensor with another in the place of a part of it. PyTorch's ops that do so have
    no gradient of complex numbers; writing has."""

    part: torch._ops.OpOverload

    def __call__(self, x: torch.Tensor, source: torch.Tensor, *where: Any) -> torch.Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        self.part(y, *where).copy_(source)
        return y


def is_function(op: torch._ops.OpOverload) -> bool:
    """Whether an op's results depend on the elements of its arguments alone."""
    if isinstance(op, OwnFunction):
        return True
    drawn = torch.Tag.nondeterministic_seeded in op.tags
    # the first depends on where they lie, too, the second has no gradient
    never = op._opname in ("as_strided", "_embedding_bag_forward_only")
    return op.namespace == "aten" and not (drawn or never or op._schema.is_mutable)


def function(low: Lowering, *args: Any, **options: Any) -> Any:
    """A call that is in no table: of any op that `is_function`, in PyTorch. Of several results
    each is a call, and those that nothing reads are none."""
    returns, op = low.target._schema.returns, low.target
    alone = not isinstance(low.meta, list)
    if op in _PARTS and low.meta.is_complex():
        low.target = _Written(_PARTS[op])
    if alone and not returns[0].alias_info:
        return arithmetic(low, *args, **options)
    several, made = low.meta, []
    for at, low.meta in enumerate([several] if alone else several):
        low.target = _Result(op, None if alone else at)
        made.append(arithmetic(low, *args, **options))
    low.meta, low.target = several, op
    return made


def left(
    low: Lowering,
    inputs: list[Value],
    arguments: tuple,
    shape: Sequence[int],
    options: dict[str, Any],
    target: Callable,
) -> Value:
    """A node that calls PyTorch; of constants alone what it makes."""
    if all(value in low.graph.constants for value in inputs):
        given = [low.graph.constants[value] for value in inputs]
        return low.graph.constant(target(*call_arguments(arguments, given), **options))
    meta = low.meta if isinstance(low.meta, torch.Tensor) else low.meta[0]
    attrs = {"target": target, "arguments": arguments, "options": options}
    return low.make("arith", numbered("x", inputs), shape, meta.dtype, **attrs)
