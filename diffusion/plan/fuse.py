"""What is computed in one launch, as a table of rewrites, decided before anything runs.

A row has a root op, a guard, a rewrite and the figure that earns it. `prepare` applies the rows
that change what the network is made of, before it is differentiated, so that backward follows from
them; `fuse` those that join a node to its neighbours. A rewrite looks at its root and either
changes the graph and names the value that is made in another way now, or leaves everything and
gives None.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .canonical import once
from .differentiate import Backward
from .graph import Graph, Node, Value, numbered


@dataclass(frozen=True)
class Row:
    name: str
    root: tuple[str, ...]  # ops where the pattern begins
    rewrite: Callable[["Fusing", Node], Value | None]
    earns: str  # the figure, measured on an H200 in bf16, or "unmeasured"
    when: tuple[str, ...] = ("train", "sample")


class Fusing:
    """A graph that is being rewritten, and who makes and reads each value of it. Where a node is in
    the order does not matter: it is sorted afterwards."""

    def __init__(self, graph: Graph, mode: str, tf32: bool = True) -> None:
        self.graph, self.mode, self.tf32 = graph, mode, tf32
        self.producers = graph.producers()
        self.consumers = graph.consumers()
        self.gone: set[Node] = set()
        self.new: dict[Node, list[Node]] = {}  # by the node that they stand in front of

    def is_exact(self, y: Value) -> bool:
        """Whether the products of y are in float32, which the fused kernels do not have."""
        return y.dtype == torch.float32 and not self.tf32

    def maker(self, value: Value | None, *ops: str) -> Node | None:
        """The node that makes a value, if it is one of these ops."""
        node = self.producers.get(value)
        return node if node is not None and node.op in ops else None

    def reader(self, value: Value, *ops: str) -> Node | None:
        """The only node that reads a value, if it is one of these ops."""
        readers = [r for r in self.consumers.get(value, []) if r not in self.gone]
        alone = len(readers) == 1 and readers[0] is not None
        return readers[0] if alone and readers[0].op in ops else None

    def take(self, node: Node, *ended: Node) -> None:
        """Forget nodes whose work `node` does now."""
        for other in ended:
            self.gone.add(other)
            for value in set(other.inputs.values()):
                if other in self.consumers[value]:
                    self.consumers[value].remove(other)
        for value in node.outputs.values():
            self.producers[value] = node
        self.connect(node)

    def connect(self, node: Node) -> None:
        for value in set(node.inputs.values()):
            readers = self.consumers.setdefault(value, [])
            if node not in readers:
                readers.append(node)

    def give(self, node: Node, role: str, value: Value) -> None:
        """Another input of a node."""
        node.inputs[role] = value
        self.connect(node)

    def forget(self, node: Node, role: str) -> None:
        value = node.inputs.pop(role)
        if value not in node.inputs.values():
            self.consumers[value].remove(node)

    def insert(self, before: Node, op: str, inputs: dict, outputs: dict, **attrs) -> Node:
        """A new node in front of another."""
        layout = attrs.pop("layout", "")
        node = self.graph.node(op, inputs, outputs, before.source, layout, **attrs)
        self.graph.nodes.pop()
        self.new.setdefault(before, []).append(node)
        self.take(node)
        return node

    def done(self) -> None:
        nodes = []
        for node in self.graph.nodes:
            nodes += [n for n in self.new.get(node, []) if n not in self.gone]
            nodes += [] if node in self.gone else [node]
        self.graph.nodes = nodes


# --- before differentiating -----------------------------------------------------------------------


def _packed_qkv(f: Fusing, node: Node) -> Value | None:
    """attention(x Wq, x Wk, x Wv) -> attention(x [Wq, Wk, Wv])"""
    if "qkv" in node.inputs:
        return None
    makers = [f.maker(node.inputs[role], "linear") for role in "qkv"]
    if None in makers or len({m.inputs["x"] for m in makers}) > 1:
        return None
    if any(f.reader(m.out, "attention") is None for m in makers):
        return None
    if len({"bias" in m.inputs for m in makers}) > 1:
        return None
    x, first = makers[0].inputs["x"], makers[0]
    weights = [m.inputs["weight"] for m in makers]
    c3, ci = sum(w.shape[0] for w in weights), weights[0].shape[1]
    inputs = {"x": x, "weight": _stacked(f, first, weights, (c3, ci))}
    if "bias" in first.inputs:
        inputs["bias"] = _stacked(f, first, [m.inputs["bias"] for m in makers], (c3,))
    out = node.inputs["q"]
    shape = *out.shape[:-1], c3
    outputs = {"y": (shape, out.dtype)}
    qkv = f.insert(first, "linear", inputs, outputs, layout=out.layout).out
    for role in "qkv":
        f.forget(node, role)
    f.take(node, *makers)
    f.give(node, "qkv", qkv)
    node.attrs["order"] = "qkv_heads"
    return node.out


def _stacked(f: Fusing, before: Node, parts: list[Value], shape: tuple[int, ...]) -> Value:
    inputs, outputs = numbered("x", parts), {"y": (shape, parts[0].dtype)}
    return f.insert(before, "cat", inputs, outputs, axis=0).out


def _halves(f: Fusing, value: Value) -> list[Value] | None:
    """The two tensors of which a value is the concatenation along its channels, or None."""
    cat = f.maker(value, "cat")
    if cat is None or len(value.shape) != 4 or cat.attrs["axis"] != 3:
        return None
    parts = cat.many("x")
    return parts if len(parts) == 2 else None


def _norm_of_concat(f: Fusing, node: Node) -> Value | None:
    """norm(cat(x1, x2)): the table from the sums of both, the pass over both"""
    if len(node.many("x")) > 1 or (parts := _halves(f, node.inputs["x0"])) is None:
        return None
    table = f.maker(node.inputs["table"], "norm_table")
    moments = f.maker(table.inputs["partials0"], "moments")
    n, k, two, _ = moments.out.shape
    for i, part in enumerate(parts):
        spec = {"y": ((n, k, two, part.shape[3]), moments.out.dtype)}
        made = f.insert(moments, "moments", {"x": part}, spec)
        if i == 0:
            f.forget(table, "partials0")
        f.give(table, f"partials{i}", made.out)
    table.attrs["pixels"] *= 2
    f.forget(node, "x0")
    for i, part in enumerate(parts):
        f.give(node, f"x{i}", part)
    return node.out


def _pointwise_of_concat(f: Fusing, node: Node) -> Value | None:
    """cat(x1, x2) W -> x1 W1 + x2 W2"""
    parts = _halves(f, node.inputs["x"])
    if parts is None:
        return None
    weight, y, start, terms = node.inputs["weight"], node.out, 0, []
    for part in parts:
        stop = start + part.shape[3]
        spec = {"y": ((weight.shape[0], stop - start), weight.dtype)}
        ends = {"axis": 1, "start": start, "stop": stop}
        columns = f.insert(node, "slice", {"x": weight}, spec, **ends).out
        inputs = {"x": part, "weight": columns}
        if start == 0 and "bias" in node.inputs:
            inputs["bias"] = node.inputs["bias"]
        made = f.insert(node, "linear", inputs, {"y": (y.shape, y.dtype)}, layout=y.layout)
        terms.append(made.out)
        start = stop
    total = f.insert(node, "add", {"a": terms[0], "b": terms[1]}, {"y": (y.shape, y.dtype)})
    f.producers.pop(total.out)
    total.outputs = {"y": y}
    f.take(total, node)
    return y


def _moments_of_upsampled(f: Fusing, node: Node) -> Value | None:
    """What is upsampled has the mean and the variance of what it was made of"""
    up = f.maker(node.inputs["x"], "upsample")
    table = f.reader(node.out, "norm_table")
    if up is None or table is None:
        return None
    small = up.inputs["x"]
    at = table.many("partials").index(node.out)
    pixels = list(table.attrs["pixels"])
    pixels[at] = small.shape[1] * small.shape[2]
    table.attrs["pixels"] = tuple(pixels)
    f.forget(node, "x")
    f.give(node, "x", small)
    return node.out


PREPARING = (
    Row("q, k and v are one product", ("attention",), _packed_qkv, "unmeasured"),
    Row("a norm reads the halves of a concat", ("norm_apply",), _norm_of_concat, "unmeasured"),
    Row("1x1 filters read the halves of a concat", ("linear",), _pointwise_of_concat, "unmeasured"),
    Row("sums before upsampling", ("moments",), _moments_of_upsampled, "unmeasured"),
)  # fmt: skip


# --- the forward pass -----------------------------------------------------------------------------


def _fused_conv(f: Fusing, node: Node) -> Node | None:
    """The node, as a convolution with an epilogue, if its kernels have one."""
    if node.op == "conv_fused":
        return node
    if f.is_exact(node.out):
        return None
    if node.op == "conv":
        r, s = node.inputs["weight"].shape[2:]
        same = (r // 2, r // 2, s // 2, s // 2)
        if node.attrs["stride"] != (1, 1) or node.attrs["padding"] != same or not r % 2 * s % 2:
            return None
    elif node.op != "linear" or len(node.out.shape) != 4:
        return None
    return node


def _becomes_fused(node: Node) -> None:
    if node.op == "conv_fused":
        return
    attrs = dict(node.attrs) if node.op == "conv" else {"stride": (1, 1), "padding": (0,) * 4}
    node.op, node.attrs = "conv_fused", attrs


def _epilogue_add(f: Fusing, node: Node) -> Value | None:
    """conv + b, where b is of the embedding, another tensor, or a 1x1 convolution of one"""
    a, b = node.inputs["a"], node.inputs["b"]
    if a is b or a.dtype != b.dtype or node.out.dtype != a.dtype:
        return None
    for y, other in ((a, b), (b, a)):
        conv = f.maker(y, "conv", "linear", "conv_fused")
        if conv is None or f.reader(y, "add") is None or _fused_conv(f, conv) is None:
            continue
        if y.shape != node.out.shape or "partials" in conv.outputs:
            continue
        small = conv.op == "linear"
        partner = f.maker(other, "conv", "conv_fused")
        if small and partner is not None and _fused_conv(f, partner) and f.reader(other, "add"):
            continue  # the larger one takes the smaller
        if other.shape == node.out.shape:
            if not _take_term(f, node, conv, other):
                continue
        elif (emb := _embedding_of(f, node, other)) is not None and "emb" not in conv.inputs:
            f.give(conv, "emb", emb)
        else:
            continue
        _becomes_fused(conv)
        f.producers.pop(y)
        conv.outputs["y"] = node.out
        f.take(conv, node)
        return node.out
    return None


def _take_term(f: Fusing, node: Node, conv: Node, other: Value) -> bool:
    """Add `other` in the epilogue: as 1x1 terms where it is that, or as it is."""
    linear = f.maker(other, "linear")
    alone = linear is not None and f.reader(other, "add") is node
    if alone and len(linear.out.shape) == 4 and len(conv.many("extra")) < 2:
        if "bias" in linear.inputs and "extra_bias" in conv.inputs:
            return False
        number = len(conv.many("extra"))
        if "bias" in linear.inputs:
            f.give(conv, "extra_bias", linear.inputs["bias"])
        f.give(conv, f"extra{number}", linear.inputs["x"])
        f.give(conv, f"columns{number}", linear.inputs["weight"])
        f.take(conv, linear)
        return True
    if "residual" in conv.inputs:
        return False
    f.give(conv, "residual", other)
    return True


def _embedding_of(f: Fusing, node: Node, value: Value) -> Value | None:
    """emb [N, C] of a summand [N, 1, 1, C], or None."""
    n, c = node.out.shape[0], node.out.shape[-1]
    reshape = f.maker(value, "reshape")
    if reshape is None or value.shape != (n, 1, 1, c) or reshape.inputs["x"].shape != (n, c):
        return None
    cast = f.maker(reshape.inputs["x"], "cast")  # which the epilogue spares: it adds in float32
    return reshape.inputs["x"] if cast is None else cast.inputs["x"]


_FEW = 16  # channels; fewer of them, whose pixels TMA cannot address, are padded


def _few_inputs(f: Fusing, node: Node) -> Value | None:
    """A convolution of an image with three channels reads one with 16"""
    x, weight = node.inputs["x"], node.inputs["weight"]
    if not _is_few(x, x.shape[3]) or _fused_conv(f, node) is None:
        return None
    cast = f.maker(x, "cast")
    source = x if cast is None else cast.inputs["x"]
    spec = {"y": ((*x.shape[:3], _FEW), x.dtype)}
    wide = f.insert(node, "pad_channels", {"x": source}, spec, layout=x.layout, width=_FEW)
    pads = ((0, 0), (0, _FEW - x.shape[3]), (0, 0), (0, 0))
    spec = {"y": ((weight.shape[0], _FEW, *weight.shape[2:]), weight.dtype)}
    filters = f.insert(node, "pad", {"x": weight}, spec, pads=pads)
    for role, value in (("x", wide.out), ("weight", filters.out)):
        f.forget(node, role)
        f.give(node, role, value)
    return node.out


def _few_outputs(f: Fusing, node: Node) -> Value | None:
    """A convolution to three channels writes 16, of which the others are zeros"""
    y = node.out
    if not _is_few(y, y.shape[3]) or _fused_conv(f, node) is None:
        return None
    readers = [r for r in f.consumers.get(y, ()) if r is not None]
    if any(r.op not in ("cast", "layout") for r in readers):
        return None  # others want pixels side by side
    wide = f.graph.value(f"{y.name}.wide", (*y.shape[:3], _FEW), y.dtype, layout=y.layout)
    columns = f.graph.node(
        "columns", {"x": wide}, {"y": (y.shape, y.dtype)}, node.source, start=0, stop=y.shape[3]
    )
    columns.outputs = {"y": y}
    f.new.setdefault(node, []).append(f.graph.nodes.pop())
    node.outputs = {"y": wide}
    _becomes_fused(node)
    node.attrs["width"] = _FEW
    f.take(node)
    f.take(columns)
    return wide


def _is_few(value: Value, channels: int) -> bool:
    size = value.dtype.itemsize
    return size <= 4 and channels < _FEW and channels * size % 16 != 0


def _terms_together(f: Fusing, node: Node) -> Value | None:
    """(x1 W1 + x2 W2) + conv -> conv + (x1 W1 + x2 W2), one term after the other"""
    a, b = node.inputs["a"], node.inputs["b"]
    for sum_, other in ((a, b), (b, a)):
        inner = f.maker(sum_, "add")
        if inner is None or f.reader(sum_, "add") is not node or sum_.shape != other.shape:
            continue
        terms = [f.maker(v, "linear") for v in inner.inputs.values()]
        conv = f.maker(other, "conv", "conv_fused")
        if None in terms or conv is None or _fused_conv(f, conv) is None:
            continue
        left, right = inner.inputs["a"], inner.inputs["b"]
        for each in (inner, node):
            for role in ("a", "b"):
                f.forget(each, role)
        for each, role, value in (
            *((inner, "a", other), (inner, "b", left)),
            *((node, "a", sum_), (node, "b", right)),
        ):
            f.give(each, role, value)
        return node.out
    return None


def _partials(f: Fusing, node: Node) -> Value | None:
    """The sums of a convolution's result, taken while it is written"""
    conv = f.maker(node.inputs["x"], "conv", "linear", "conv_fused")
    if conv is None or _fused_conv(f, conv) is None or "partials" in conv.outputs:
        return None
    _becomes_fused(conv)
    conv.outputs["partials"] = node.out
    f.take(conv, node)
    return conv.out


def _dropped_pass(f: Fusing, node: Node) -> Value | None:
    """dropout in the pass of the norm before it"""
    norm = f.maker(node.inputs["x"], "norm_apply")
    if norm is None or "rng" not in node.inputs or f.reader(norm.out, "dropout") is not node:
        return None
    if "rng" in norm.inputs or node.out.shape[-1] % 4:  # a draw is of four channels
        return None
    f.give(norm, "rng", node.inputs["rng"])
    norm.attrs |= node.attrs
    f.producers.pop(norm.out)
    norm.outputs = {"y": node.out}
    f.take(norm, node)
    return node.out


def _table_and_pass(f: Fusing, node: Node) -> Value | None:
    """The table of a norm is made by the launch that applies it"""
    table = f.maker(node.inputs["table"], "norm_table")
    if table is None or table.out.shape[0] != node.out.shape[0]:
        return None
    f.forget(node, "table")
    for role, value in table.inputs.items():
        f.give(node, role, value)
    node.op = "norm"
    node.attrs |= table.attrs
    node.outputs["table"] = table.out
    f.take(node, table)
    return node.out


# --- the backward pass ----------------------------------------------------------------------------


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
    if not alone or len(da.shape) != 4 or grad.attrs.get("stride", (1, 1)) != (1, 1):
        return None
    if grad.op == "conv_dx":
        r, s = grad.inputs["weight"].shape[2:]
        if grad.attrs["padding"] != (r // 2, r // 2, s // 2, s // 2):
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
        if place is None:
            continue
        if _reaches(f, other, norm):
            continue
        f.give(norm, place, other)
        f.producers.pop(dx)
        norm.outputs[role] = node.out
        f.take(norm, node)
        return node.out
    return None


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


def _embedding_sums(f: Fusing, node: Node) -> Value | None:
    """The sums of dx over pixels follow from the norm's sums, where nothing is added to it"""
    if node.attrs["axes"] != (1, 2) or len(node.out.shape) != 2:
        return None
    norm = f.maker(node.inputs["x"], "norm_dx")
    if norm is None or len(norm.many("x")) > 1 or "add1" in norm.inputs:
        return None
    table = f.maker(norm.inputs["coeff"], "norm_grad_table")
    conv = f.maker(norm.inputs["x0"], "conv_fused")
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
    norm = f.maker(node.inputs["x"], "norm_dx", "skip_dx")
    if norm is None or "rows" in norm.outputs or norm.outputs["dx1"] is not node.inputs["x"]:
        return None
    readers = f.consumers.get(node.out, [])
    if any(r is None or r.op != "sum" or r.attrs["axes"] != (0,) for r in readers):
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
    grad = f.maker(node.inputs["x"], "conv_dw", "linear_dw")
    if grad is None or f.reader(grad.out, "cast") is not node:
        return None
    f.producers.pop(grad.out)
    grad.outputs = {"y": node.out}
    f.take(grad, node)
    return node.out


FORWARD_ROWS = (
    Row("few channels of an image padded", ("conv",), _few_inputs, "unmeasured", ("sample",)),
    Row("few channels of a result padded", ("conv",), _few_outputs, "unmeasured", ("sample",)),
    Row("1x1 terms one after the other", ("add",), _terms_together, "see the next"),
    Row(
        "embedding, residual and 1x1 skip in the epilogue", ("add",), _epilogue_add,
        "unmeasured alone",
    ),
    Row("sums in the epilogue", ("moments",), _partials, "unmeasured"),
    Row("dropout in the norm's pass", ("dropout",), _dropped_pass, "unmeasured", ("train",)),
    Row(
        "table and pass of a norm in one launch", ("norm_apply",), _table_and_pass,
        "2.0 % of a step of 32 images, none of 128",
    ),
)  # fmt: skip
BACKWARD_ROWS = (
    Row("act' and sums in the input gradient", ("norm_act_grad",), _input_grad, "unmeasured"),
    Row("sums of dx from the norm's", ("sum",), _embedding_sums, "unmeasured"),
    Row("other gradients added in dx", ("add",), _added_dx, "unmeasured"),
    Row(
        "gradient of 1x1 skips in dx", ("norm_dx",), _skip_dx,
        "17.5 -> 17.2 ms a step of 128 images",
    ),
    Row("sums of dx while it is written", ("sum",), _rows_of_dx, "unmeasured"),
    Row("gradients of weights in float32", ("cast",), _exact_weight_grad, "not rounded twice"),
)  # fmt: skip


def prepare(graph: Graph, mode: str) -> dict[Value, list[str]]:
    """Apply the rows of `PREPARING`, in place; why each value is made as it is."""
    why = _apply(graph, PREPARING, mode)
    once(graph)  # the sums of a tensor serve every norm that reads it
    graph.prune()
    return why


def fuse(graph: Graph, backward: Backward | None, tf32: bool = True) -> dict[Value, list[str]]:
    """Apply the other rows, in place; why each value is made as it is. Without `tf32` convolutions
    of float32 are left to kernels that multiply in float32."""
    if backward is None:
        return _apply(graph, FORWARD_ROWS, "sample", tf32)
    mode = "train"
    # each pass for itself: nothing of backward moves into forward
    nodes, outputs, constants = graph.nodes, graph.outputs, graph.constants
    forward, behind = nodes[: backward.start], nodes[backward.start :]
    read = {v for node in behind for v in node.inputs.values()}
    graph.nodes, graph.outputs = forward, [*outputs, *read]
    why = _apply(graph, FORWARD_ROWS, mode, tf32)
    forward = graph.nodes
    graph.nodes, graph.outputs = behind, list(backward.grads.values())
    why |= _apply(graph, BACKWARD_ROWS, mode, tf32, forward)
    behind = graph.nodes
    graph.nodes, graph.outputs, graph.constants = [*forward, *behind], outputs, constants
    backward.start = len(forward)
    return why


def _apply(
    graph: Graph,
    rows: tuple[Row, ...],
    mode: str,
    tf32: bool = True,
    before: list[Node] | None = None,
) -> dict[Value, list[str]]:
    why: dict[Value, list[str]] = {}
    for row in rows:
        if mode not in row.when:
            continue
        f = Fusing(graph, mode, tf32)
        for node in before or ():
            for value in node.outputs.values():
                f.producers.setdefault(value, node)
        for node in list(graph.nodes):
            if node in f.gone or node.op not in row.root:
                continue
            value = row.rewrite(f, node)
            if value is not None:
                why.setdefault(value, []).append(f"{row.name} ({row.earns})")
        f.done()
        graph.sort()
        graph.prune()
    return why
