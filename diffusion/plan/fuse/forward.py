"""Rows of the forward pass: epilogues of convolutions, and norms."""

from ..graph import Node, Value
from .rewrite import HALF, Fusing, Row


def _fused_conv(f: Fusing, node: Node) -> Node | None:
    """The node, as a convolution with an epilogue, if its kernels have one."""
    if node.op == "conv_fused":
        return node
    if f.is_exact(node.out):
        return None
    is_image = node.op == "conv" or node.op == "linear" and len(node.out.shape) == 4
    return node if is_image and node.keeps_size else None


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
        f.write(conv, node.out, node)
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


def _few_inputs(f: Fusing, node: Node) -> Value | None:
    """A convolution of an image with three channels reads one with 16"""
    x, weight = node.inputs["x"], node.inputs["weight"]
    width = f.padded_width(x)
    if width is None or _fused_conv(f, node) is None:
        return None
    cast = f.maker(x, "cast")
    source = x if cast is None else cast.inputs["x"]
    spec = {"y": ((*x.shape[:3], width), x.dtype)}
    wide = f.insert(node, "pad_channels", {"x": source}, spec, width=width)
    pads = ((0, 0), (0, width - x.shape[3]), (0, 0), (0, 0))
    spec = {"y": ((weight.shape[0], width, *weight.shape[2:]), weight.dtype)}
    filters = f.insert(node, "pad", {"x": weight}, spec, pads=pads)
    for role, value in (("x", wide.out), ("weight", filters.out)):
        f.forget(node, role)
        f.give(node, role, value)
    return node.out


def _few_outputs(f: Fusing, node: Node) -> Value | None:
    """A convolution to three channels writes 16, of which the others are zeros"""
    y = node.out
    if not f.is_few(y, y.shape[3]) or _fused_conv(f, node) is None:
        return None
    readers = [r for r in f.consumers.get(y, ()) if r is not None]
    if any(r.op not in ("cast", "layout") for r in readers):
        return None  # others want pixels side by side
    wide = f.graph.value(f"{y.name}.wide", (*y.shape[:3], f.few), y.dtype)
    columns = Node("columns", {"x": wide}, {"y": y}, {"start": 0, "stop": y.shape[3]}, node.source)
    f.new.setdefault(node, []).append(columns)
    node.outputs = {"y": wide}
    _becomes_fused(node)
    node.attrs["width"] = f.few
    f.take(node)
    f.take(columns)
    return wide


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
    f.write(norm, node.out, node)
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


# --- of a training step ---------------------------------------------------------------------------


def _conv_down(f: Fusing, node: Node) -> Value | None:
    """A 3x3 convolution that halves the image"""
    x, weight, padding = node.inputs["x"], node.inputs["weight"], node.attrs["padding"]
    odd = x.shape[1] % 2 or x.shape[2] % 2
    if node.attrs["stride"] != HALF or weight.shape[2:] != (3, 3) or odd or f.is_exact(node.out):
        return None
    if padding not in ((1, 1, 1, 1), (0, 1, 0, 1)) or "bias" not in node.inputs:
        return None
    node.op, node.attrs = "conv_down", {"padding": padding[0]}
    f.take(node)
    return node.out


def _norm_of_upsampled(f: Fusing, node: Node) -> Value | None:
    """What a norm reads is upsampled on its way"""
    up = f.maker(node.inputs["x0"], "upsample")
    if up is None or up.attrs["factor"] != HALF or len(node.many("x")) != 2:
        return None
    if {"rng", "scale", "shift"} & set(node.inputs):
        return None
    large, small = up.out, up.inputs["x"]
    sums = [f.maker(value, "moments") for value in node.many("partials")]
    if any(each is not None and each.inputs["x"] is large for each in sums):
        return None  # which have to be there before the pass
    f.swap(node, "x0", small)
    node.op = "norm_of_upsampled"
    c2 = node.inputs["x1"].shape[3]
    table = node.outputs["table"]
    node.outputs["second"] = f.graph.value("second", (table.shape[0], 4, c2), table.dtype)
    node.outputs["large"] = large
    f.take(node, up)
    return node.out


def _serves(f: Fusing, small: Value, weight: Value, second: int) -> bool:
    co, ci, *size = weight.shape
    return size == [3, 3] and f.serves_upsampled(small, (ci - second, second), co)


def _of_upsampled(f: Fusing, node: Node, op: str, role: str, small: Value, second: int) -> Value:
    """The node as `op`, with filters that are sums of taps."""
    weight = node.inputs["weight"]
    cast = f.maker(weight, "cast")  # the sums are of the float32 filters
    co, ci = weight.shape[:2]
    sums, others = (16, co, ci - second), (co, second, 3, 3)
    specs = {"taps": (sums, weight.dtype), "rest": (others, weight.dtype)}
    exact = weight if cast is None else cast.inputs["x"]
    attrs = {"channels": weight.shape[1] - second, "dtype": weight.dtype}
    norm = f.maker(node.inputs["x"], "norm_of_upsampled")  # in front of which they are made
    made = f.insert(norm or node, "upsampled_filters", {"weight": exact}, specs, **attrs)
    bias = node.inputs["bias"]
    emb = node.inputs.get("emb")
    for name in list(node.inputs):
        f.forget(node, name)
    given = {role: small, "taps": made.outputs["taps"], "rest": made.outputs["rest"], "bias": bias}
    for name, value in (given | ({} if emb is None else {"emb": emb})).items():
        f.give(node, name, value)
    node.op, node.attrs = op, {}
    f.take(node)
    return node.out


def _conv_upsampled(f: Fusing, node: Node) -> Value | None:
    """A convolution multiplies on the small image what was upsampled"""
    if set(node.inputs) - {"x", "weight", "bias", "emb"} or "partials" not in node.outputs:
        return None
    if "width" in node.attrs or "bias" not in node.inputs:
        return None
    x, weight = node.inputs["x"], node.inputs["weight"]
    up = f.maker(x, "upsample")
    if up is not None and up.attrs["factor"] == HALF and "emb" not in node.inputs:
        small = up.inputs["x"]
        if not _serves(f, small, weight, 0):
            return None
        return _of_upsampled(f, node, "conv_of_upsampled", "x", small, 0)
    norm = f.maker(x, "norm_of_upsampled")
    if norm is None:
        return None
    second = norm.inputs["x1"].shape[3]
    if not _serves(f, norm.inputs["x0"], weight, second):
        return None
    return _of_upsampled(f, node, "conv_upsampled", "a", x, second)


FORWARD_ROWS = (
    Row(
        "few channels of an image padded", ("conv",), _few_inputs,
        "2.2 to 3.0 % of an evaluation, 0.3 of a step of 32 images, 1.1 of 128 (H100)",
        ("sample", "step")
    ),
    Row(
        "few channels of a result padded", ("conv",), _few_outputs,
        "0.5 to 1.5 % of an evaluation of 1 to 64 images (H100)",
        ("sample", "step")
    ),
    Row(
        "1x1 terms one after the other", ("add",), _terms_together,
        "2.1 % of a pass of 32 images"
    ),
    Row(
        "embedding, residual and 1x1 skip in the epilogue", ("add",), _epilogue_add,
        "16.0 % of a pass of 32 images"
    ),
    Row("sums in the epilogue", ("moments",), _partials, "4.9 % of a pass of 32 images"),
    Row(
        "dropout in the norm's pass", ("dropout",), _dropped_pass,
        "0.2 % of a step of adm64 at 32 images (H100)", ("train",)
    ),
    Row(
        "table and pass of a norm in one launch", ("norm_apply",), _table_and_pass,
        "0.65 % of a step of 32 images, 0.4 of 128"
    ),
    Row(
        "a convolution that halves the image", ("conv",), _conv_down,
        "unmeasured; only where zeros are behind the image: no padded copy, and TMA", ("step",),
    ),
    Row(
        "upsampling in the norm's pass", ("norm",), _norm_of_upsampled,
        "1.8 % of a step of 32 images, 4.3 of 128 (H100)", ("step",)
    ),
    Row(
        "multiplied on the small image", ("conv_fused",), _conv_upsampled,
        "1.3 % of a step of 32 images, 2.9 of 128", ("step",)
    )
)  # fmt: skip
