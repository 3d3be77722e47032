"""Rows for a training step (`plan.step`), whose kernels write gradients directly into one flat
buffer: further fusions in forward and backward."""

from ..graph import Node, Value
from .rewrite import Fusing, Row

HALF = (2, 2)  # pixels of a block, or steps
NORM_DX = ("norm_dx", "skip_dx")

# --- forward --------------------------------------------------------------------------------------


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


STEP_FORWARD = (
    Row("a convolution that halves the image", ("conv",), _conv_down, "unmeasured", ("step",)),
    Row(
        "upsampling in the norm's pass", ("norm",), _norm_of_upsampled,
        "unmeasured", ("step",),
    ),
    Row(
        "multiplied on the small image", ("conv_fused",), _conv_upsampled,
        "1.3 % of a step of 32 images, 2.9 of 128", ("step",),
    ),
)  # fmt: skip

# --- backward -------------------------------------------------------------------------------------


def _few_channels(f: Fusing, node: Node) -> Value | None:
    """A gradient with three channels, or an image, is read with 16"""
    changed = False
    for role in ("dy", "x"):
        value = node.inputs.get(role)
        if value is None or len(value.shape) != 4 or role == "x" and node.op != "conv_dw":
            if node.op != "sum" or value is None or value in f.producers:
                continue
        width = f.padded_width(value)
        padded = None if width is None else _padded(f, node, value, width)
        if padded is not None:
            f.swap(node, role, padded)
            changed = True
    if changed and node.op == "sum":  # of which those of the channels that count are read
        wide = f.graph.value(node.out.name, (node.out.shape[0], width), node.out.dtype)
        for reader in list(f.consumers.get(node.out, [])):
            if reader is not None:
                f.swap(reader, "x", wide)
        f.write(node, wide)
    return node.out if changed else None


def _padded(f: Fusing, node: Node, value: Value, width: int) -> Value | None:
    """The value with zeros behind its channels, which forward or another node may have made."""
    cast = f.maker(value, "cast")
    source = value if cast is None else cast.inputs["x"]
    for other in f.made_by("pad_channels"):
        if other.inputs["x"] is source:
            return other.out
    if value in f.graph.inputs or value in f.producers:
        return None  # forward would have made it
    spec = {"y": ((*value.shape[:3], width), value.dtype)}
    made = f.insert(node, "pad_channels", {"x": value}, spec, layout=value.layout, width=width)
    return made.out


def _pool_grad(f: Fusing, node: Node) -> Value | None:
    """A quarter of the gradient goes to each of 2x2 pixels"""
    quarter = f.maker(node.inputs["x"], "affine")
    if quarter is None or quarter.attrs != {"scale": 0.25, "offset": 0}:
        return None
    if node.attrs["factor"] != HALF or f.is_exact(node.out):
        return None
    dy = quarter.inputs["x"]
    f.forget(node, "x")
    f.give(node, "dy", dy)
    node.op, node.attrs = "avg_pool_grad", {}
    f.take(node, *([quarter] if not f.consumers.get(quarter.out) else []))
    return node.out


def _down_dx(f: Fusing, node: Node) -> Value | None:
    """The input gradient of a convolution that halves the image"""
    padding = node.attrs["padding"]
    if node.attrs["stride"] != HALF or f.is_exact(node.out):
        return None
    n, h, w, _ = node.out.shape
    if padding not in ((1, 1, 1, 1), (0, 1, 0, 1)) or node.inputs["weight"].shape[2:] != (3, 3):
        return None
    if h % 2 or w % 2:
        return None
    node.op, node.attrs = "conv_down_dx", {"padding": padding[0]}
    f.take(node)
    return node.out


def _added_resampled(f: Fusing, node: Node) -> Value | None:
    """What other consumers send is added by what resamples the gradient"""
    a, b = node.inputs["a"], node.inputs["b"]
    if a is b or a.shape != b.shape:
        return None
    for dx, other in ((a, b), (b, a)):
        made = f.maker(dx, "avg_pool_grad", "conv_down_dx")
        if made is None or "add" in made.inputs or f.reader(dx, "add") is not node:
            continue
        f.give(made, "add", other)
        f.write(made, node.out, node)
        return node.out
    return None


def _pooled_dx(f: Fusing, node: Node) -> Value | None:
    """The gradient of what was upsampled is added up over 2x2 pixels while it is written"""
    large = node.inputs["x"]
    norm = f.maker(large, *NORM_DX)
    if norm is None or norm.outputs["dx1"] is not large or f.reader(large, "sum_pool") is not node:
        return None
    source = f.maker(norm.inputs["x0"], "upsample", "norm_of_upsampled")
    if source is None or node.attrs["window"] != HALF or "rows" in norm.outputs:
        return None
    small = source.inputs["x" if source.op == "upsample" else "x0"]
    if small.shape != node.out.shape:
        return None
    f.swap(norm, "x0", small)
    norm.attrs["upsample1"] = True
    f.write(norm, node.out, node, role="dx1")
    return node.out


def _small_input_grad(f: Fusing, node: Node) -> Value | None:
    """The input gradient behind upsampling is multiplied on the small image"""
    xs = node.many("x")
    norm = f.maker(xs[0], "norm_of_upsampled")
    if norm is None or len(xs) != 2 or "rng" in node.inputs:
        return None
    conv = next((c for c in f.made_by("conv_upsampled") if c.inputs["a"] is norm.out), None)
    dx = f.reader(node.outputs["dz"], *NORM_DX)
    if conv is None or dx is None or not dx.attrs.get("upsample1"):
        return None
    if dx.op != "skip_dx":
        return None
    f.forget(node, "weight")
    small = norm.inputs["x0"]
    f.swap(node, "x0", small)
    for role, value in (
        ("taps", conv.inputs["taps"]),
        ("rest", conv.inputs["rest"]),
        ("second", norm.outputs["second"]),
    ):
        f.give(node, role, value)
    dz, partials = node.outputs["dz"], node.outputs["partials"]
    dz1 = f.graph.value(dz.name, small.shape, dz.dtype, layout=dz.layout)
    dz2 = f.graph.value(dz.name, xs[1].shape, dz.dtype, layout=dz.layout)
    f.producers.pop(dz)
    f.forget(dx, "dz")
    node.op, node.attrs = "conv_upsampled_dx", {"activation": node.attrs["activation"]}
    node.outputs = {"dz1": dz1, "dz2": dz2, "partials": partials}
    f.give(dx, "dz", dz1)
    f.give(dx, "dz2", dz2)
    f.take(node)
    return dz1


def _small_plain_grad(f: Fusing, node: Node) -> Value | None:
    """Likewise where it was upsampled alone"""
    grad = f.maker(node.inputs["x"], "conv_dx")
    if grad is None or node.attrs["window"] != HALF:
        return None
    if f.reader(grad.out, "sum_pool") is not node:
        return None
    weight = grad.inputs["weight"]
    cast = f.maker(weight, "cast")
    exact = weight if cast is None else cast.inputs["x"]
    filters = [n for n in f.made_by("upsampled_filters") if n.inputs["weight"] is exact]
    if not filters:
        return None
    f.forget(node, "x")
    for role, value in (("dy", grad.inputs["dy"]), *filters[0].outputs.items()):
        f.give(node, role, value)
    node.op, node.attrs = "conv_of_upsampled_dx", {}
    f.take(node, grad)
    return node.out


def _coefficients(f: Fusing, node: Node) -> Value | None:
    """The coefficients of a norm's backward are made by the launch of dx"""
    table = f.maker(node.inputs["coeff"], "norm_grad_table")
    if table is None or f.reader(node.inputs["coeff"], node.op) is not node:
        return None
    given = dict(table.inputs)
    if node.op == "norm_dx" and len(node.many("x")) > 1:
        return None
    if node.op == "skip_dx":
        if "scale" in given or "shift" in given or "emb" in table.outputs:
            return None
        given = {role: given[role] for role in ("partials", "table")}
    if "add2" in node.inputs or "add1_second" in node.inputs and node.op == "skip_dx":
        return None
    f.forget(node, "coeff")
    for role, value in given.items():
        f.give(node, role, value)
    node.op = node.op.replace("_dx", "_backward")
    node.attrs |= table.attrs
    node.outputs |= {role: value for role, value in table.outputs.items() if role != "coeff"}
    f.take(node, table)
    return node.out


def _bias_sums(f: Fusing, node: Node) -> Value | None:
    """Gradients of biases are added up together, behind all others"""
    rows = node.inputs["x"]
    maker = f.producers.get(rows)
    if node.attrs["axes"] != (0,) or maker is None or len(rows.shape) != 2:
        return None
    role = next(r for r, v in maker.outputs.items() if v is rows)
    if role == "emb" and "input_bias" not in maker.outputs:
        maker.outputs["input_bias"] = node.out
        f.take(maker, node)
        if not f.consumers.get(rows):
            del maker.outputs["emb"]
        return node.out
    if maker.op == "sum" and len(maker.inputs["x"].shape) == 4:
        readers = f.consumers.get(rows, [])
        if any(r is None or r.op not in ("sum", "bias_grad") for r in readers):
            return None
        maker.op, maker.attrs = "row_sums", {}
    elif role != "rows" and maker.op != "row_sums":
        return None
    f.forget(node, "x")
    f.give(node, "rows", rows)
    node.op, node.attrs = "bias_grad", {}
    f.take(node)
    return node.out


BEFORE_ROWS = (  # of gradients, before `fuse.backward`'s sums of dx
    Row(
        "few channels of a gradient padded", ("conv_input_grad", "conv_dw", "sum"),
        _few_channels, "unmeasured", ("step",),
    ),
    Row("a quarter to each of 2x2 pixels", ("upsample",), _pool_grad, "unmeasured", ("step",)),
    Row("dx of what halves the image", ("conv_dx",), _down_dx, "unmeasured", ("step",)),
    Row("added while it is resampled", ("add",), _added_resampled, "unmeasured", ("step",)),
    Row("dx added up over 2x2 pixels", ("sum_pool",), _pooled_dx, "unmeasured", ("step",)),
    Row(
        "dx multiplied on the small image", ("conv_input_grad",), _small_input_grad,
        "with the forward pass, see there", ("step",),
    ),
    Row(
        "dx of a convolution alone on the small image", ("sum_pool",), _small_plain_grad,
        "with the forward pass, see there", ("step",),
    ),
)  # fmt: skip
STEP_BACKWARD = (
    Row(
        "coefficients in the launch of dx", NORM_DX, _coefficients,
        "0.85 % of a step of 32 images, 0.6 of 128", ("step",),
    ),
    Row("sums for biases together", ("sum",), _bias_sums, "unmeasured", ("step",)),
)  # fmt: skip
