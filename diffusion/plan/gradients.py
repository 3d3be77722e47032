"""`GRADIENTS` has a row per op: the gradients of its inputs, given the gradient of its result.

A row is a function of the differentiation (`differentiate`), the node and that gradient `dy`; it
sends each input its gradient, which is made if anybody wants it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from triton_kernels.resample.fir import adjoint

from .graph import Value, numbered, rows_beside
from .ops import AFTER, MEMORY, PARTS

GRADIENTS: dict[str, Callable] = {}


def gradient(*ops: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        GRADIENTS.update(dict.fromkeys(ops, function))
        return function

    return register


@dataclass(frozen=True)
class Part:
    """The gradient of a slice."""

    grad: Value
    axis: int
    start: int
    stop: int


# --- layers ---------------------------------------------------------------------------------------


@gradient("conv", "linear")
def _product(d, node, dy):
    x, weight, bias = (node.inputs.get(role) for role in ("x", "weight", "bias"))

    def product(of: str, inputs: dict[str, Value], like: Value) -> Value:
        made = d.make(f"{node.op}_{of}", inputs, like, **node.attrs)
        d.graph.nodes[-1].of_matrices = node.of_matrices
        return made

    d.send(bias, lambda: d.channel_sums(dy, bias))
    d.send(weight, lambda: product("dw", {"x": x, "dy": dy}, weight))
    d.send(x, lambda: product("dx", {"dy": dy, "weight": weight}, x))


@gradient("conv_dx")
def _transposed_conv(d, node, dy):
    """Of a convolution, whose input gradient the node is."""
    x, weight = node.inputs["dy"], node.inputs["weight"]
    d.send(weight, lambda: d.make("conv_dw", {"x": dy, "dy": x}, weight, **node.attrs))
    d.send(x, lambda: d.make("conv", {"x": dy, "weight": weight}, x, **node.attrs))


# of ops of one tensor: op, inputs and attributes of its gradient
_OF_X: dict[str, Callable] = {
    "act": lambda node, dy: ("act_grad", {"dy": dy, "x": node.inputs["x"]}, node.attrs),
    "gated": lambda node, dy: ("gated_grad", {"dy": dy, "x": node.inputs["x"]}, node.attrs),
    "cast": lambda node, dy: ("cast", {"x": dy}, {}),
    "reshape": lambda node, dy: ("reshape", {"x": dy}, {}),
    "upsample": lambda node, dy: ("sum_pool", {"x": dy}, {"window": node.attrs["factor"]}),
    "fir": lambda node, dy: ("fir", {"x": dy}, adjoint(**node.attrs)),
}


@gradient(*_OF_X)
def _of_x(d, node, dy):
    x, (op, inputs, attrs) = node.inputs["x"], _OF_X[node.op](node, dy)
    d.send(x, lambda: d.make(op, inputs, x, **attrs))


@gradient("norm_apply")
def _norm(d, node, dy):
    """All of a norm: its table and its moments send nothing themselves."""
    xs, table = node.many("x"), node.inputs["table"]
    made = d.producers[table]
    if made.op != "norm_table":
        return _pass_of_rows(d, node, made, dy)
    film = {r: made.inputs[r] for r in ("weight", "bias", "scale", "shift") if r in made.inputs}
    after = {r: node.inputs[r] for r in AFTER if r in node.inputs}
    if d.needed.isdisjoint((*xs, *film.values(), *after.values())):
        return
    (n, _, c), several = table.shape, numbered("x", xs)
    dz, partials, *sums = _norm_act_grad(d, node, dy)
    for value, grad in zip(after.values(), sums, strict=True):
        d.send(value, lambda grad=grad: grad)
    second = d.graph.node(
        "norm_grad_table",
        {"partials": partials, "table": table, **film},
        {
            "coeff": ((n, 3, c), table.dtype),
            **{role: (value.shape, value.dtype) for role, value in film.items()},
        },
        groups=made.attrs["groups"],
        pixels=math.prod(dy.shape[1:-1]),
    )
    for role, value in film.items():
        d.send(value, lambda role=role: second.outputs[role])
    inputs = {"dz": dz, **several, "coeff": second.outputs["coeff"]}
    d.send_each("norm_dx", inputs, {f"dx{i}": x for i, x in enumerate(xs, 1)})


def _norm_act_grad(d, node, dy) -> tuple[Value, ...]:
    """dz, and its partials; and the gradients of what comes behind the activation."""
    table = node.inputs["table"]
    n, _, c = table.shape
    inputs = {"da": dy, **numbered("x", node.many("x")), "table": table}
    outputs = {"dz": (dy.shape, dy.dtype), "partials": ((n, 1, 2, c), table.dtype)}
    after = {role: node.inputs[role] for role in AFTER if role in node.inputs}
    if after:
        inputs["after_scale"] = after["after_scale"]
        outputs |= {role: (value.shape, value.dtype) for role, value in after.items()}
    made = d.graph.node("norm_act_grad", inputs, outputs, **node.attrs)
    return tuple(made.outputs.values())


def _pass_of_rows(d, node, table, dy):
    """act(x g + b): of g and b the sums that a norm's table would have the gradients of."""
    (x,), (_, gain, offset) = node.many("x"), table.many("x")
    if d.needed.isdisjoint((x, gain, offset)):
        return
    (n, _, c), (dz, partials) = table.out.shape, _norm_act_grad(d, node, dy)

    @cache
    def sums() -> Value:
        return d.make("sum", {"x": partials}, partials, (n, 2, c), axes=(1,))

    def row(of: Value, at: int) -> Value:
        return d.make("slice", {"x": sums()}, of, axis=1, start=at, stop=at + 1)

    d.send(gain, lambda: row(gain, 1))
    d.send(offset, lambda: row(offset, 0))

    def dx() -> Value:
        factor = gain
        if gain.dtype != dy.dtype:
            factor = d.make("cast", {"x": gain}, gain, dtype=dy.dtype)
        factor = d.make("reshape", {"x": factor}, factor, rows_beside(dy.shape))
        return d.make("mul", {"a": dz, "b": factor}, x)

    d.send(x, dx)


@gradient("attention")
def _attention(d, node, dy):
    parts = {role: node.inputs[role] for role in PARTS if role in node.inputs}
    if d.needed.isdisjoint(parts.values()):
        return
    first, heads = next(iter(parts.values())), node.attrs["heads"]
    positions = math.prod(first.shape[1:-1])
    state = d.graph.value("attention.state", (first.shape[0], heads, positions), first.exact)
    node.outputs["state"] = state
    inputs = {"dy": dy, "o": node.out, "state": state, **node.inputs}
    d.send_each("attention_grad", inputs, parts, **node.attrs)


@gradient("linear_attention")
def _linear_attention(d, node, dy):
    parts = {r: node.inputs[r] for r in (*PARTS, *MEMORY) if r in node.inputs}
    if d.needed.isdisjoint(parts.values()):
        return
    n, heads, width = node.out.shape[0], node.attrs["heads"], node.out.shape[-1]
    each, exact = width // heads, node.out.exact
    node.outputs["context"] = d.graph.value("context", (n, heads, each, each), exact)
    node.outputs["lse"] = d.graph.value("lse", (n, heads, each), exact)
    kept = {role: node.outputs[role] for role in ("context", "lse")}
    d.send_each("linear_attention_grad", {**node.inputs, **kept, "dy": dy}, parts, **node.attrs)


# --- between layers -------------------------------------------------------------------------------


@gradient("cat")
def _cat(d, node, dy):
    start, axis = 0, node.attrs["axis"]
    for x in node.many("x"):
        stop = start + x.shape[axis]
        ends = {"axis": axis, "start": start, "stop": stop}
        d.send(x, lambda x=x, ends=ends: d.make("slice", {"x": dy}, x, **ends))
        start = stop


@gradient("slice")
def _slice(d, node, dy):
    d.send(node.inputs["x"], lambda: Part(dy, **node.attrs))


@gradient("add")
def _add(d, node, dy):
    for role in ("a", "b"):
        x = node.inputs[role]
        d.send(x, lambda x=x: d.summed(dy, x.shape, x.dtype))


@gradient("mul")
def _mul(d, node, dy):
    for role, other in (("a", "b"), ("b", "a")):
        x, factor = node.inputs[role], node.inputs[other]

        def product(x=x, factor=factor) -> Value:
            return d.summed(d.make("mul", {"a": dy, "b": factor}, dy), x.shape, x.dtype)

        d.send(x, product)


@gradient("affine")
def _affine(d, node, dy):
    x, scale = node.inputs["x"], node.attrs["scale"]
    d.send(x, lambda: dy if scale == 1 else d.make("affine", {"x": dy}, x, scale=scale, offset=0))


@gradient("avg_pool")
def _avg_pool(d, node, dy):
    x, (y, z) = node.inputs["x"], node.attrs["window"]

    def grad() -> Value:
        n, p, q, c = dy.shape
        shape = n, p * y, q * z, c
        small = d.make("affine", {"x": dy}, dy, scale=1 / (y * z), offset=0)
        if shape == x.shape:
            return d.make("upsample", {"x": small}, x, factor=(y, z))
        part = d.make("upsample", {"x": small}, x, shape, factor=(y, z))
        pads = ((0, 0), (0, x.shape[1] - p * y), (0, x.shape[2] - q * z), (0, 0))
        return d.make("pad", {"x": part}, x, pads=pads)  # what was left over counts nothing

    d.send(x, grad)


@gradient("pad")
def _pad(d, node, dy):
    x = node.inputs["x"]

    def grad() -> Value:
        part, shape = dy, list(dy.shape)
        for axis, (before, behind) in enumerate(node.attrs["pads"]):
            if before or behind:
                shape[axis] = x.shape[axis]
                ends = {"axis": axis, "start": before, "stop": before + x.shape[axis]}
                part = d.make("slice", {"x": part}, x, tuple(shape), **ends)
        return part

    d.send(x, grad)


@gradient("dropout")
def _dropout(d, node, dy):
    """It is linear: what was dropped is dropped again, by the same draws or by the mask."""
    x, attrs = node.inputs["x"], node.attrs
    if "rng" in node.inputs:
        inputs = {"x": dy, "rng": node.inputs["rng"]}
        d.send(x, lambda: d.make("dropout", inputs, x, **attrs))
    else:
        d.send(x, lambda: d.make("mul", {"a": dy, "b": node.outputs["mask"]}, x))


@gradient("detach", "draw")
def _none(d, node, dy):
    """None, if the value is itself a result."""


@gradient("rewritten")
def _rewritten(d, node, dy):
    d.send(node.inputs["of"], lambda: dy)


@gradient("layout")
def _layout(d, node, dy):
    x, pieces = node.inputs["x"], node.attrs["pieces"]

    def grad() -> Value:
        if x.numel != dy.numel or any(step == 0 for _, step in pieces):
            return d.make("layout_grad", {"dy": dy}, x, **node.attrs)
        steps, step = [], 1  # a permutation: the way back is one, too
        for size, place in reversed(pieces):
            steps.append((place, size, step))
            step *= size
        back = tuple((size, step) for place, size, step in sorted(steps, key=lambda s: -s[0]))
        return d.make("layout", {"x": dy}, x, pieces=back, offset=0)

    d.send(x, grad)


@gradient("embedding")
def _embedding(d, node, dy):
    weight, index = node.inputs["weight"], node.inputs["index"]
    inputs = {"dy": dy, "index": index}
    d.send(weight, lambda: d.make("embedding_grad", inputs, weight, **node.attrs))


@gradient("arith")
def _arith(d, node, dy):
    of = {i: x for i, x in enumerate(node.many("x")) if x in d.needed}
    values = {f"d{i}": x for i, x in of.items()}
    d.send_each("arith_grad", {**node.inputs, "dy": dy}, values, of=list(of), **node.attrs)


@gradient("channel_norm")
def _channel_norm(d, node, dy):
    """It makes its statistics again."""
    given = {r: v for r, v in node.inputs.items() if v in d.needed}
    d.send_each("channel_norm_grad", {**node.inputs, "dy": dy}, given, **node.attrs)
