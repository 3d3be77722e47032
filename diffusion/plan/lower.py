"""The one table from PyTorch's ops to the graph's: what a trace may contain.

Each lowering is given views (`views`) of the tensors that the op was called with, and gives views
of its results. What only changes a view (permute, reshape, expand, chunk, ...) makes no node. An op
that is not in the table has no place in a plan: `trace` raises PlanError with its line.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .graph import Graph, PlanError, Value, numbered
from .views import View, Views, in_order, whole

ACTIVATIONS = ("relu", "silu", "gelu", "mish")

# Small functions that a plan leaves to PyTorch: what is computed of timesteps and labels
ARITHMETIC = frozenset(
    """
    abs arange bitwise_and bitwise_or bitwise_xor bitwise_not __and__ __or__ __xor__ __lshift__
    __rshift__ ceil clamp cos cumsum div eq exp floor floor_divide full full_like gather ge gt
    index index_select le log logical_and logical_not logical_or lt masked_fill maximum minimum mul
    add sub rsub ne neg new_zeros new_ones new_full ones ones_like one_hot pow reciprocal remainder
    rsqrt scalar_tensor sigmoid sign sin sqrt tanh where zeros zeros_like bitwise_left_shift
    bitwise_right_shift outer
    """.split()
)

LOWERINGS: dict[str, Callable] = {}


def lowers(*names: str) -> Callable[[Callable], Callable]:
    """Decorator of the lowering of these ops of aten."""

    def register(function: Callable) -> Callable:
        LOWERINGS.update(dict.fromkeys(names, function))
        return function

    return register


class Lowering:
    """The graph as far as it is, and the call that is being lowered."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.views = graph, Views(graph)
        self.name = ""  # of the op
        self.source = ""  # the line of the module
        self.meta: Any = None  # what the trace says of the result: shape and dtype
        self.target: Any = None

    def refuse(self, why: str) -> PlanError:
        return PlanError(f"{self.name} {why} has no place in a plan ({self.source})")

    def make(self, op: str, inputs: dict, shape, dtype, **more) -> Value:
        return self.graph.make(op, inputs, shape, dtype, source=self.source, **more)

    def gather(self, view: View | None, shape=None, layout: str = "") -> Value | None:
        """The view as a value, see `Views.gather`."""
        if view is None:
            return None
        return self.views.gather(view, shape, self.source, layout)

    def cast(self, value: Value | None, dtype: torch.dtype) -> Value | None:
        if value is None or value.dtype == dtype:
            return value
        return self.make("cast", {"x": value}, value.shape, dtype, layout=value.layout)

    def cast_all(self, inputs: dict[str, Value | None], dtype: torch.dtype) -> dict:
        """In the dtype of the result, which under autocast is not that of the inputs."""
        return {role: self.cast(value, dtype) for role, value in inputs.items()}


# --- views ----------------------------------------------------------------------------------------


@lowers("contiguous", "clone", "alias", "detach", "detach_", "lift_fresh_copy", "lift_fresh")
def _same(low: Lowering, x: View, *_: Any, **__: Any) -> View:
    return x


@lowers("permute")
def _permute(low, x, order):
    return x.permute([i % len(x.dims) for i in order])


@lowers("transpose", "swapaxes")
def _transpose(low, x, a, b):
    order = list(range(len(x.dims)))
    order[a], order[b] = order[b], order[a]
    return x.permute(order)


@lowers("t")
def _t(low, x):
    return x.permute(range(len(x.dims))[::-1])


@lowers("movedim")
def _movedim(low, x, source, to):
    if not isinstance(source, int):
        raise low.refuse("of several dimensions")
    order = [i for i in range(len(x.dims)) if i != source % len(x.dims)]
    order.insert(to % len(x.dims), source % len(x.dims))
    return x.permute(order)


@lowers("unsqueeze")
def _unsqueeze(low, x, at):
    return x.insert(at % (len(x.dims) + 1))


@lowers("squeeze")
def _squeeze(low, x, at=None):
    every = range(len(x.dims)) if at is None else [at] if isinstance(at, int) else at
    for i in sorted((i % len(x.dims) for i in every), reverse=True):
        x = x.drop(i) if x.shape[i] == 1 else x
    return x


@lowers("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as")
def _reshape(low, x, *_):
    shape = tuple(low.meta.shape)
    view = x.reshape(shape)
    return whole(low.gather(x), shape) if view is None else view


@lowers("expand", "expand_as")
def _expand(low, x, *_, **__):
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


@lowers("narrow")
def _narrow(low, x, at, start, count):
    return _part(low, x, at, start, start + count)


@lowers("select")
def _select(low, x, at, index):
    index %= x.shape[at]
    return _part(low, x, at, index, index + 1).drop(at % len(x.dims))


@lowers("unbind")
def _unbind(low, x, at=0):
    return [_select(low, x, at, i) for i in range(x.shape[at])]


@lowers("chunk", "split", "split_with_sizes", "tensor_split")
def _chunk(low, x, how, at=0):
    parts, start = [], 0
    for meta in low.meta:  # the trace knows how long each is
        parts.append(_part(low, x, at, start, start + meta.shape[at]))
        start += meta.shape[at]
    return parts


@lowers("to", "_to_copy", "type_as", "to_copy", "float", "double", "half", "bfloat16")
def _to(low, x, *_, **__):
    if low.meta.dtype == x.value.dtype:
        return x
    x = low.views.owned(x, low.source)
    return View(low.cast(x.value, low.meta.dtype), x.dims)


@lowers("_assert_tensor_metadata", "_assert_async", "sym_constrain_range", "_assert_scalar")
def _nothing(low, *_, **__):
    return None


# --- layers ---------------------------------------------------------------------------------------


@lowers("conv2d", "conv1d", "convolution")
def _conv(low, x, weight, bias=None, stride=1, padding=0, dilation=1, *rest):
    transposed, groups = (rest[0], rest[2]) if low.name.endswith("convolution") else (False, 1)
    groups = rest[0] if rest and not low.name.endswith("convolution") else groups
    if transposed:
        raise low.refuse("that is transposed")
    if groups != 1:
        raise low.refuse(f"with groups={groups}")
    if len(x.dims) == 3:  # one row of pixels
        x, weight = x.insert(2), weight.insert(2)
        one_row = True
    else:
        one_row = False
    (sy, sx), (dy, dx) = _pair(stride, one_row, 1), _pair(dilation, one_row, 1)
    if (dy, dx) != (1, 1):
        raise low.refuse(f"with dilation={dilation}")
    co, ci, r, s = weight.shape
    n, _, h, w = x.shape
    if isinstance(padding, str):
        if padding == "same" and not (r % 2 and s % 2):
            raise low.refuse("with padding=same and an even number of taps")
        py, px = (r // 2, s // 2) if padding == "same" else (0, 0)
    else:
        py, px = _pair(padding, one_row, 0)
    dtype = low.meta.dtype
    if (r, s, sy, sx, py, px) == (1, 1, 1, 1, 0, 0):
        columns = low.gather(weight, (co, ci))
        y = _linear_of(low, x.permute((0, 2, 3, 1)), columns, low.gather(bias))
    else:
        image = low.gather(x.permute((0, 2, 3, 1)), layout="NHWC")
        inputs = {"x": image, "weight": low.gather(weight), "bias": low.gather(bias)}
        p, q = (h + 2 * py - r) // sy + 1, (w + 2 * px - s) // sx + 1
        value = low.make(
            "conv",
            low.cast_all(inputs, dtype),
            (n, p, q, co),
            dtype,
            layout="NHWC",
            stride=(sy, sx),
            padding=(py, py, px, px),
        )
        y = whole(value)
    y = y.permute((0, 3, 1, 2))
    return y.drop(2) if one_row else y


def _pair(given: int | Sequence[int], one_row: bool, of_rows: int) -> tuple[int, int]:
    pair = (given,) if isinstance(given, int) else tuple(given)
    if one_row:
        return of_rows, pair[-1]
    return pair if len(pair) == 2 else pair * 2


def _linear_of(low: Lowering, x: View, weight: Value, bias: Value | None) -> View:
    """x [..., CI] weight [CO, CI]^T + bias."""
    value = low.views.rows(x, low.source)
    co = weight.shape[0]
    y = low.make(
        "linear",
        low.cast_all({"x": value, "weight": weight, "bias": bias}, low.meta.dtype),
        (*value.shape[:-1], co),
        low.meta.dtype,
        layout=value.layout,
    )
    return whole(y, (*x.shape[:-1], co))


@lowers("linear")
def _linear(low, x, weight, bias=None):
    return _linear_of(low, x, low.gather(weight), low.gather(bias))


@lowers("addmm")
def _addmm(low, bias, x, weight, *, beta=1, alpha=1):
    if (beta, alpha) != (1, 1):
        raise low.refuse(f"with beta={beta}, alpha={alpha}")
    return _linear_of(low, x, low.gather(weight.permute((1, 0))), low.gather(bias))


@lowers("mm", "matmul")
def _matmul(low, x, weight):
    if len(weight.dims) != 2:
        raise low.refuse(f"of {list(x.shape)} and {list(weight.shape)}")
    return _linear_of(low, x, low.gather(weight.permute((1, 0))), None)


@lowers("group_norm")
def _group_norm(low, x, groups, weight=None, bias=None, eps=1e-5, *_):
    order = (0, *range(2, len(x.dims)), 1)
    x = x.permute(order)
    value = low.views.rows(x, low.source)
    y = low.make(
        "group_norm",
        {"x": value, "weight": low.gather(weight), "bias": low.gather(bias)},
        value.shape,
        low.meta.dtype,
        layout=value.layout,
        groups=groups,
        eps=eps,
        activation="identity",
    )
    return in_order(y, x.shape, order)


@lowers(*ACTIVATIONS)
def _activation(low, x, *_, approximate="none"):
    name = low.name.split(".")[-1]
    name = "gelu_tanh" if approximate == "tanh" else name
    return _each(low, "act", x, activation=name)


def _each(low: Lowering, op: str, x: View, **attrs: Any) -> View:
    """A node that changes each element, wherever it lies."""
    x = low.views.owned(x, low.source)
    value = x.value
    return View(
        low.make(op, {"x": value}, value.shape, low.meta.dtype, layout=value.layout, **attrs),
        x.dims,
    )


@lowers("scaled_dot_product_attention")
def _attention(low, q, k, v, mask=None, p=0.0, causal=False, *, scale=None, enable_gqa=False):
    if mask is not None or p or causal or enable_gqa:
        raise low.refuse("with a mask, dropout or shared heads")
    if len(q.dims) != 4 or q.shape != k.shape or k.shape != v.shape:
        raise low.refuse(f"of {list(q.shape)}, {list(k.shape)} and {list(v.shape)}")
    n, heads, t, d = q.shape
    c = heads * d
    scale = d**-0.5 if scale is None else scale
    attrs = {"heads": heads, "scale": scale}
    order = _packed(q, k, v)
    if order is not None:
        value = q.value
        inputs = {"qkv": value}
        attrs["order"] = order
    else:
        parts = [low.views.rows(_joined(view), low.source) for view in (q, k, v)]
        shape = parts[0].shape
        parts = [p if p.shape == shape else low.gather(whole(p), shape) for p in parts]
        inputs, value = dict(zip("qkv", parts, strict=True)), parts[0]
    shape = (*value.shape[:-1], c)
    inputs = low.cast_all(inputs, low.meta.dtype)
    y = low.make("attention", inputs, shape, low.meta.dtype, layout=value.layout, **attrs)
    return whole(y, (n, t, heads, d)).permute((0, 2, 1, 3))


def _joined(view: View) -> View:
    """[N, heads, T, d] as [N, T, C]"""
    n, heads, t, d = view.shape
    joined = view.permute((0, 2, 1, 3)).reshape((n, t, heads * d))
    assert joined is not None
    return joined


def _packed(q: View, k: View, v: View) -> str | None:
    """How q, k and v lie side by side in one value [N, ..., 3C], or None if they do not."""
    n, heads, t, d = q.shape
    value, c = q.value, heads * d
    if not (value is k.value is v.value) or q.dims != k.dims or k.dims != v.dims:
        return None
    if value.shape[-1] != 3 * c or value.shape[0] != n or value.numel != n * t * 3 * c:
        return None
    apart = {"qkv_heads": (c, d), "heads_qkv": (d, 3 * d)}  # q from k, head from head
    for order, (next_part, next_head) in apart.items():
        sizes, steps = (n, heads, t, d), (t * 3 * c, next_head, 3 * c, 1)
        dims = tuple(((m, s),) if m > 1 else () for m, s in zip(sizes, steps, strict=True))
        offsets = tuple(view.offset for view in (q, k, v))
        if q.dims == dims and offsets == (0, next_part, 2 * next_part):
            return order
    return None


@lowers("upsample_nearest2d", "_upsample_nearest_exact2d")
def _upsample(low, x, *_):
    x = x.permute((0, 2, 3, 1))
    value = low.gather(x, layout="NHWC")
    n, h, w, c = value.shape
    *_, p, q = low.meta.shape
    if p % h or q % w:
        raise low.refuse(f"from {h}x{w} to {p}x{q} pixels")
    factor = (p // h, q // w)
    y = low.make("upsample", {"x": value}, (n, p, q, c), value.dtype, layout="NHWC", factor=factor)
    return whole(y).permute((0, 3, 1, 2))


@lowers("avg_pool2d")
def _avg_pool(low, x, window, stride=None, padding=0, ceil=False, *rest):
    window = _pair(window, False, 1)
    if (stride and _pair(stride, False, 1) != window) or any(_pair(padding, False, 0)) or ceil:
        raise low.refuse(f"with window={window}, stride={stride}, padding={padding}")
    value = low.gather(x.permute((0, 2, 3, 1)), layout="NHWC")
    n, c, p, q = low.meta.shape
    y = low.make("avg_pool", {"x": value}, (n, p, q, c), value.dtype, layout="NHWC", window=window)
    return whole(y).permute((0, 3, 1, 2))


@lowers("pad", "constant_pad_nd")
def _pad(low, x, amounts, *rest):
    mode = rest[0] if rest and isinstance(rest[0], str) else "constant"
    if mode != "constant" or any(v not in (None, 0, mode) for v in rest) or min(amounts) < 0:
        raise low.refuse(f"with {amounts}, {rest}")
    pads = [(0, 0)] * len(x.dims)
    for i in range(len(amounts) // 2):
        pads[-1 - i] = tuple(amounts[2 * i : 2 * i + 2])
    order = _memory_order(low.views.owned(x, low.source))
    value = low.gather(x.permute(order))
    pads = tuple(pads[i] for i in order)
    shape = [n + sum(pad) for n, pad in zip(value.shape, pads, strict=True)]
    y = low.make("pad", {"x": value}, shape, value.dtype, layout=value.layout, pads=pads)
    return in_order(y, shape, order)


def _memory_order(x: View) -> list[int]:
    """Dimensions by their steps in memory, the largest first; those of length 1 stay in place."""
    long = [i for i, dim in enumerate(x.dims) if dim]
    ranked = iter(sorted(long, key=lambda i: -max(step for _, step in x.dims[i])))
    return [next(ranked) if x.dims[i] else i for i in range(len(x.dims))]


@lowers("cat", "concat", "concatenate")
def _cat(low, views, at=0):
    dtype = low.meta.dtype
    at %= len(low.meta.shape)
    views = [x for x in views if x.shape != (0,)]
    order = _memory_order(low.views.owned(views[0], low.source))
    parts = [low.cast(low.gather(x.permute(order)), dtype) for x in views]
    shape = [low.meta.shape[i] for i in order]
    layout = parts[0].layout
    inputs, axis = numbered("x", parts), order.index(at)
    return in_order(low.make("cat", inputs, shape, dtype, layout=layout, axis=axis), shape, order)


@lowers("stack")
def _stack(low, views, at=0):
    at %= len(low.meta.shape)
    return _cat(low, [x.insert(at) for x in views], at)


@lowers("embedding")
def _embedding(low, weight, index, *_):
    inputs = {"weight": low.gather(weight), "index": low.gather(index)}
    return whole(low.make("embedding", inputs, low.meta.shape, low.meta.dtype))


@lowers("dropout")
def _dropout(low, x, p, train):
    if not train or p == 0:
        return x
    return _dropped(low, x, p, {}, mask=True)


@lowers("triton_kernels.dropout")
def _keyed_dropout(low, x, p, rng, layer, first):
    if not x.is_all or whole(x.value, x.shape) != x:
        raise low.refuse("of a tensor in another order")  # elements are counted in memory
    return _dropped(low, x, p, {"rng": low.gather(rng)}, layer=layer, first=first)


def _dropped(low: Lowering, x: View, p: float, more: dict[str, Value], **attrs: Any) -> View:
    x = low.views.owned(x, low.source)
    value = x.value
    mask = {"mask": (value.shape, value.dtype)} if attrs.pop("mask", False) else {}
    node = low.graph.node(
        "dropout",
        {"x": value, **more},
        {"y": (value.shape, value.dtype), **mask},
        low.source,
        value.layout,
        p=p,
        **attrs,
    )
    return View(node.out, x.dims)


# --- arithmetic -----------------------------------------------------------------------------------


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
    if not isinstance(a, View) and name in ("add", "mul"):
        a, b = b, a
    if isinstance(a, View) and isinstance(b, View):
        if name == "div":
            b, name = _power(low, b, -1), "mul"
        if name == "sub":
            b, alpha = b, -alpha
        if alpha != 1:
            b = _affine(low, b, alpha, 0)
        return _two(low, "mul" if name == "mul" else "add", a, b, dtype)
    if isinstance(a, View):
        b = b * alpha if name in ("add", "sub") else b
        scale, offset = {
            "add": (1, b),
            "sub": (1, -b),
            "mul": (b, 0),
            "div": (1 / b if b else 0, 0),
        }[name]
        return _affine(low, a, scale, offset)
    if name == "sub":  # a number less a tensor
        return _affine(low, b, -alpha, a)
    return _affine(low, _power(low, b, -1), a, 0)


def _affine(low: Lowering, x: View, scale: float, offset: float) -> View:
    x = _to(low, x)
    if (scale, offset) == (1, 0):
        return x
    return _each(low, "affine", x, scale=scale, offset=offset)


def _power(low: Lowering, x: View, exponent: float) -> View:
    x = _to(low, x)
    y = low.make(
        "arith",
        {"x0": x.value},
        x.value.shape,
        x.value.dtype,
        target=torch.ops.aten.pow.Tensor_Scalar,
        arguments=(0, ("number", exponent)),
        options={},
    )
    return View(y, x.dims, x.offset)


def _two(low: Lowering, op: str, a: View, b: View, dtype: torch.dtype) -> View:
    shape = tuple(low.meta.shape)
    a, b = ((_pointless(v, shape)) for v in (a, b))
    if a.shape != shape or any(step == 0 for _, step in a.pieces):
        if b.shape == shape and all(step for _, step in b.pieces):
            a, b = b, a
        else:
            a = whole(low.gather(a.expand(shape)))
    a, other = low.views.together(a, b, low.source)
    inputs = {"a": low.cast(a.value, dtype), "b": low.cast(other, dtype)}
    y = low.make(op, inputs, a.value.shape, dtype, layout=a.value.layout)
    return View(y, a.dims)


def _pointless(x: View, shape: tuple[int, ...]) -> View:
    """With as many dimensions as the result, and no steps of zero."""
    dims = ((),) * (len(shape) - len(x.dims)) + x.dims
    dims = tuple(() if all(step == 0 for _, step in dim) else dim for dim in dims)
    return View(x.value, dims, x.offset)


def arithmetic(low: Lowering, *args: Any, **options: Any) -> Any:
    """A call that stays PyTorch's. Of constants alone it is made now."""
    inputs: list[Value] = []

    def placed(arg: Any) -> Any:  # tensors by their number among the inputs
        if isinstance(arg, View):
            inputs.append(low.gather(arg))
            return len(inputs) - 1
        if isinstance(arg, list | tuple) and any(isinstance(a, View) for a in arg):
            return ("list", tuple(map(placed, arg)))
        return ("number", arg)

    arguments = tuple(map(placed, args))
    options = {k: v for k, v in options.items() if k not in ("pin_memory", "layout")}
    shape, dtype = low.meta.shape, low.meta.dtype
    if low.name.split(".")[-1].endswith("_like"):  # of the shape alone
        inputs, arguments = [], ()
        fill = {"zeros_like": 0, "ones_like": 1}.get(low.name.split(".")[-1], args[-1])
        options = {}
        return whole(low.graph.constant(torch.full(tuple(shape), fill, dtype=dtype)))
    if all(value in low.graph.constants for value in inputs):
        given = [low.graph.constants[value] for value in inputs]
        result = low.target(*call_arguments(arguments, given), **options)
        return whole(low.graph.constant(result))
    y = low.make(
        "arith",
        numbered("x", inputs),
        shape,
        dtype,
        target=low.target,
        arguments=arguments,
        options=options,
    )
    return whole(y)


def call_arguments(arguments: tuple, tensors: Sequence[Any]) -> list[Any]:
    """The arguments of an arith node's target, of its inputs."""

    def filled(arg: Any) -> Any:
        if isinstance(arg, int):
            return tensors[arg]
        kind, value = arg
        return [filled(v) for v in value] if kind == "list" else value

    return [filled(arg) for arg in arguments]
