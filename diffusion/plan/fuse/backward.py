"""Rows of the backward pass: what is added to a gradient when it is written."""

from ..graph import Node, Value
from .rewrite import Fusing, Row
from .step import BEFORE_ROWS, STEP_BACKWARD


def _input_grad(f: Fusing, node: Node) -> Value | None:
    """act'(z) and the sums for the norm, in the epilogue of the input gradient before it"""
    before, mask = f.maker(node.inputs["da"], "dropout"), {}
    da = node.inputs["da"]
    drops = before is not None and "rng" in before.inputs and da.shape[-1] % 4 == 0
    if drops and f.reader(da, "norm_act_grad"):
        mask, da = {"rng": before.inputs["rng"]}, before.inputs["x"]
    else:
        before = None
    grad = f.maker(da, "conv_dx", "linear_dx")
    if f.is_exact(da):
        return None
    alone = grad is not None and f.reader(da, "dropout" if before else "norm_act_grad")
    if not alone or len(da.shape) != 4 or not grad.keeps_size:
        return None
    attrs = grad.attrs or {"stride": (1, 1), "padding": (0,) * 4}
    f.forget(node, "da")
    for role, value in {"dy": grad.inputs["dy"], "weight": grad.inputs["weight"], **mask}.items():
        f.give(node, role, value)
    node.op = "conv_input_grad"
    node.attrs |= attrs | (before.attrs if before else {})
    f.take(node, grad, *([before] if before else []))
    return node.outputs["dz"]


def _added_dx(f: Fusing, node: Node) -> Value | None:
    """What other consumers of x send to its gradient is added by the pass that makes it"""
    a, b = node.inputs["a"], node.inputs["b"]
    if a is b or a.shape != b.shape:
        return None
    for dx, other in ((a, b), (b, a)):
        norm = f.maker(dx, "norm_dx")
        if norm is None or f.reader(dx, "add") is not node:
            continue
        role = next(r for r, v in norm.outputs.items() if v is dx)
        places = ("add1", "add1_second") if role == "dx1" else ("add2",)
        place = next((p for p in places if p not in norm.inputs), None)
        if place is None or _reaches(f, other, norm):
            continue
        f.give(norm, place, other)
        f.write(norm, node.out, node, role=role)
        return node.out
    return None


def _two_summands(f: Fusing, node: Node) -> Value | None:
    """Of a sum that dx gets, each summand is added by itself"""
    total = f.maker(node.inputs.get("add1"), "add")
    if total is None or "add1_second" in node.inputs or "rows" in node.outputs:
        return None
    a, b = total.inputs["a"], total.inputs["b"]
    alike = a is not b and a.shape == b.shape == total.out.shape
    if not alike or f.reader(total.out, node.op) is not node:
        return None
    f.swap(node, "add1", a)
    f.give(node, "add1_second", b)
    f.take(node, total)
    return node.out


def _reaches(f: Fusing, value: Value, node: Node) -> bool:
    """Whether a value depends on another result of a node."""
    others, stack, seen = set(node.outputs.values()), [value], set()
    while stack:
        v = stack.pop()
        if v in others:
            return True
        maker = f.producers.get(v)
        if maker is not None and maker not in seen:
            seen.add(maker)
            stack.extend(maker.inputs.values())
    return False


def _for_biases(f: Fusing, node: Node) -> bool:
    """Whether sums [N, C] are only added up further, over images."""
    readers = f.consumers.get(node.out, [])
    return not any(r is None or r.op != "sum" or r.attrs["axes"] != (0,) for r in readers)


def _embedding_sums(f: Fusing, node: Node) -> Value | None:
    """The sums of dx over pixels follow from the norm's sums, where nothing is added to it"""
    if node.attrs["axes"] != (1, 2) or len(node.out.shape) != 2:
        return None
    norm = f.maker(node.inputs["x"], "norm_dx")
    if norm is None or len(norm.many("x")) > 1 or "add1" in norm.inputs:
        return None
    if f.mode == "step" and _for_biases(f, node) and len(f.consumers[node.out]) > 1:
        return None  # the norm's launch adds to one bias alone
    table = f.maker(norm.inputs["coeff"], "norm_grad_table")
    convs = ("conv_fused", "conv_upsampled", "conv_of_upsampled")
    conv = f.maker(norm.inputs["x0"], *convs)
    if table is None or "emb" in table.outputs or conv is None or "partials" not in conv.outputs:
        return None
    f.give(table, "input_partials", conv.outputs["partials"])
    table.outputs["emb"] = node.out
    f.take(table, node)
    return node.out


def _rows_of_dx(f: Fusing, node: Node) -> Value | None:
    """The sums of dx over pixels, taken while it is written"""
    if node.attrs["axes"] != (1, 2) or len(node.out.shape) != 2:
        return None
    ops = ("norm_dx", "skip_dx", "attention_grad", "avg_pool_grad")
    norm = f.maker(node.inputs["x"], *ops)
    if norm is None or "rows" in norm.outputs or norm.out is not node.inputs["x"]:
        return None
    if norm.op == "attention_grad" and "qkv" not in norm.outputs:
        return None
    if not _for_biases(f, node):
        return None  # rows are sums over any pixels: they say nothing of one image
    norm.outputs["rows"] = node.out
    f.take(norm, node)
    return node.out


def _skip_dx(f: Fusing, node: Node) -> Value | None:
    """The input gradient of a 1x1 skip, in the pass that makes the norm's dx"""
    places = ["add1", "add2"][: len(node.many("x"))]
    found = {}
    for place in places:
        for role in (place, f"{place}_second"):
            linear = f.maker(node.inputs.get(role), "linear_dx")
            if place not in found and linear and f.reader(linear.out, "norm_dx") is node:
                found[place] = role, linear
    if len(found) < len(places) or "dy" in node.inputs or f.is_exact(node.inputs["dz"]):
        return None
    linears = [linear for _, linear in found.values()]
    weight = _whole_weight(f, [linear.inputs["weight"] for linear in linears])
    dys = {linear.inputs["dy"] for linear in linears}
    if weight is None or len(dys) > 1 or len(linears[0].out.shape) != 4:
        return None
    for role, _ in found.values():
        f.forget(node, role)
    if "add1_second" in node.inputs:
        f.give(node, "add1", node.inputs["add1_second"])
        f.forget(node, "add1_second")
    f.give(node, "dy", dys.pop())
    f.give(node, "weight", weight)
    node.op = "skip_dx"
    f.take(node, *linears)
    return node.out


def _whole_weight(f: Fusing, columns: list[Value]) -> Value | None:
    """The matrix of which these are the columns, one after the other, or None."""
    if len(columns) == 1:
        return columns[0]
    slices = [f.maker(value, "slice") for value in columns]
    if None in slices or len({s.inputs["x"] for s in slices}) > 1:
        return None
    whole, end = slices[0].inputs["x"], 0
    for part in slices:
        if part.attrs["axis"] != 1 or part.attrs["start"] != end:
            return None
        end = part.attrs["stop"]
    return whole if end == whole.shape[1] else None


def _exact_weight_grad(f: Fusing, node: Node) -> Value | None:
    """The gradient of a weight in 16 bits, in the parameter's own dtype"""
    x = node.inputs["x"]
    reshape = f.maker(x, "reshape")  # of a weight that has had another shape
    before = x if reshape is None else reshape.inputs["x"]
    grad = f.maker(before, "conv_dw", "linear_dw")
    if grad is None or f.reader(x, "cast") is not node:
        return None
    if reshape is None:
        f.write(grad, node.out, node)
        return node.out
    if f.reader(before, "reshape") is not reshape:
        return None
    wide = f.graph.value(before.name, before.shape, node.out.dtype)
    f.write(grad, wide)
    f.swap(reshape, "x", wide)
    f.write(reshape, node.out, node)
    return wide


BACKWARD_ROWS = (
    Row("act' and sums in the input gradient", ("norm_act_grad",), _input_grad, "unmeasured"),
    Row("sums of dx from the norm's", ("sum",), _embedding_sums, "unmeasured"),
    Row("other gradients added in dx", ("add",), _added_dx, "unmeasured"),
    Row("both of two other gradients", ("norm_dx",), _two_summands, "unmeasured"),
    Row(
        "gradient of 1x1 skips in dx", ("norm_dx",), _skip_dx,
        "17.5 -> 17.2 ms a step of 128 images, when it was added",
    ),
    *BEFORE_ROWS,
    Row("sums of dx while it is written", ("sum",), _rows_of_dx, "unmeasured"),
    Row("gradients of weights in float32", ("cast",), _exact_weight_grad, "not rounded twice"),
    *STEP_BACKWARD,
)  # fmt: skip
