"""Rows of the backward pass: what is added to a gradient when it is written."""

import torch

from triton_kernels.noise.dropout import WORD

from ..graph import Node, Value
from .rewrite import HALF, Fusing, Row

NORM_DX = ("norm_dx", "skip_dx")


def _written_words(f: Fusing, table: Value, dropout: Node, y: Value) -> Value | None:
    """Which elements dropout has kept, as bits, by the pass of the norm of this table that drops
    them. Convolutions in 16 bits read them; None: whoever drops again draws again."""
    norm = f.maker(table, "norm")
    if norm is None or norm.inputs.get("rng") is not dropout.inputs["rng"]:
        return None
    if norm.attrs["layer"] != dropout.attrs["layer"]:
        return None
    if y.dtype.itemsize != 2 or any(x.shape[-1] % 8 for x in norm.many("x")):
        return None
    if "words" not in norm.outputs:
        shape = *y.shape[:-1], -(-y.shape[-1] // WORD)
        norm.outputs["words"] = f.graph.value("words", shape, torch.int64)
    return norm.outputs["words"]


def _input_grad(f: Fusing, node: Node) -> Value | None:
    """act'(z) and the sums for the norm, in the epilogue of the input gradient before it"""
    da, mask = node.inputs["da"], {}
    drops = f.maker(da, "dropout")
    if drops and ("rng" not in drops.inputs or da.shape[-1] % 4 or not f.reader(da, node.op)):
        drops = None
    ended, da = ([drops], drops.inputs["x"]) if drops else ([], da)
    grad = f.maker(da, "conv_dx", "linear_dx")
    if grad is None or len(da.shape) != 4 or not grad.keeps_size or f.is_exact(da):
        return None
    if not f.reader(da, drops.op if drops else node.op):
        return None
    if drops:
        words = _written_words(f, node.inputs["table"], drops, da)
        mask = {"rng": drops.inputs["rng"]} | ({} if words is None else {"words": words})
        node.attrs |= drops.attrs
    del node.inputs["da"]
    node.inputs |= {"dy": grad.inputs["dy"], "weight": grad.inputs["weight"], **mask}
    node.op = "conv_input_grad"
    node.attrs |= grad.attrs or {"stride": (1, 1), "padding": (0,) * 4}
    f.take(node, grad, *ended)
    return node.outputs["dz"]


def _added_dx(f: Fusing, node: Node) -> Value | None:
    """What other consumers of x send to its gradient is added by the pass that makes it"""
    for dx, other in f.summands(node):
        norm = f.maker(dx, "norm_dx")
        if norm is None or f.reader(dx, "add") is not node:
            continue
        role = next(r for r, v in norm.outputs.items() if v is dx)
        places = ("add1", "add1_second") if role == "dx1" else ("add2",)
        place = next((p for p in places if p not in norm.inputs), None)
        if place is None or _reaches(f, other, norm):
            continue
        norm.inputs[place] = other
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
    node.inputs |= {"add1": a, "add1_second": b}
    f.take(node, total)
    return node.out


def _reaches(f: Fusing, value: Value, node: Node) -> bool:
    """Whether a value depends on another result of a node."""
    others, stack, seen = set(node.outputs.values()), [value], set()
    while stack:
        v = stack.pop()
        if v in others:
            return True
        maker = f.maker(v)
        if maker is not None and maker not in seen:
            seen.add(maker)
            stack.extend(maker.inputs.values())
    return False


def _for_biases(f: Fusing, node: Node) -> bool:
    """Whether sums [N, C] are only added up further, over images."""
    readers = f.readers(node.out)
    return not any(r is None or r.op != "sum" or r.attrs["axes"] != (0,) for r in readers)


def _is_of_pixels(node: Node) -> bool:
    """Whether a sum of an image is over its pixels: [N, C]"""
    return node.attrs["axes"] == (1, 2) and len(node.out.shape) == 2


def _embedding_sums(f: Fusing, node: Node) -> Value | None:
    """The sums of dx over pixels follow from the norm's sums, where nothing is added to it"""
    norm = f.maker(node.inputs["x"], "norm_dx") if _is_of_pixels(node) else None
    if norm is None or len(norm.many("x")) > 1 or "add1" in norm.inputs:
        return None
    if f.mode == "step" and _for_biases(f, node) and len(f.readers(node.out)) > 1:
        return None  # the norm's launch adds to one bias alone
    table = f.maker(norm.inputs["coeff"], "norm_grad_table")
    convs = ("conv_fused", "conv_upsampled", "conv_of_upsampled")
    conv = f.maker(norm.inputs["x0"], *convs)
    if table is None or "emb" in table.outputs or conv is None or "partials" not in conv.outputs:
        return None
    table.inputs["input_partials"] = conv.outputs["partials"]
    table.outputs["emb"] = node.out
    f.take(table, node)
    return node.out


def _rows_of_dx(f: Fusing, node: Node) -> Value | None:
    """The sums of dx over pixels, taken while it is written"""
    x = node.inputs["x"]
    made = f.maker(x, *NORM_DX, "attention_grad", "avg_pool_grad") if _is_of_pixels(node) else None
    if made is None or "rows" in made.outputs or made.out is not x:
        return None
    if made.op == "attention_grad" and "qkv" not in made.outputs:
        return None
    if not _for_biases(f, node):
        return None  # rows are sums over any pixels: they say nothing of one image
    made.outputs["rows"] = node.out
    f.take(made, node)
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
        del node.inputs[role]
    if "add1_second" in node.inputs:
        node.inputs["add1"] = node.inputs.pop("add1_second")
    node.inputs |= {"dy": dys.pop(), "weight": weight}
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
    reshape.inputs["x"] = wide
    f.write(reshape, node.out, node)
    return wide


# --- of a training step, whose kernels write gradients into one flat buffer -----------------------


def _few_channels(f: Fusing, node: Node) -> Value | None:
    """A gradient with three channels, or an image, is read with 16"""
    changed = False
    for role in {"conv_dw": ("dy", "x"), "conv_input_grad": ("dy",), "sum": ("x",)}[node.op]:
        value = node.inputs[role]
        if node.op == "sum" and f.maker(value) is not None:
            continue  # of a gradient that backward does not begin with
        width = f.padded_width(value)
        padded = None if width is None else _padded(f, node, value, width)
        if padded is not None:
            node.inputs[role] = padded
            changed = True
    if changed and node.op == "sum":  # of which those of the channels that count are read
        wide = f.graph.value(node.out.name, (node.out.shape[0], width), node.out.dtype)
        for reader in filter(None, f.readers(node.out)):
            reader.inputs["x"] = wide
            f.take(reader)
        f.write(node, wide)
    f.take(node)
    return node.out if changed else None


def _padded(f: Fusing, node: Node, value: Value, width: int) -> Value | None:
    """The value with zeros behind its channels, which forward or another node may have made."""
    cast = f.maker(value, "cast")
    source = value if cast is None else cast.inputs["x"]
    for other in f.made_by("pad_channels"):
        if other.inputs["x"] is source:
            return other.out
    if value in f.graph.inputs or f.maker(value) is not None:
        return None  # forward would have made it
    spec = {"y": ((*value.shape[:3], width), value.dtype)}
    return f.insert(node, "pad_channels", {"x": value}, spec, width=width).out


def _pool_grad(f: Fusing, node: Node) -> Value | None:
    """A quarter of the gradient goes to each of 2x2 pixels"""
    quarter = f.maker(node.inputs["x"], "affine")
    if quarter is None or quarter.attrs != {"scale": 0.25, "offset": 0}:
        return None
    if node.attrs["factor"] != HALF or f.is_exact(node.out):
        return None
    node.op, node.attrs, node.inputs = "avg_pool_grad", {}, {"dy": quarter.inputs["x"]}
    f.take(node)
    return node.out


def _down_dx(f: Fusing, node: Node) -> Value | None:
    """The input gradient of a convolution that halves the image"""
    if not f.halves_image(node, node.out):
        return None
    node.op, node.attrs = "conv_down_dx", {"padding": node.attrs["padding"][0]}
    return node.out


def _added_resampled(f: Fusing, node: Node) -> Value | None:
    """What other consumers send is added by what resamples the gradient"""
    for dx, other in f.summands(node):
        made = f.maker(dx, "avg_pool_grad", "conv_down_dx")
        if made is None or "add" in made.inputs or f.reader(dx, "add") is not node:
            continue
        made.inputs["add"] = other
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
    norm.inputs["x0"] = small
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
    dx = f.reader(node.outputs["dz"], "skip_dx")
    if conv is None or dx is None or not dx.attrs.get("upsample1"):
        return None
    small, dz = norm.inputs["x0"], node.outputs.pop("dz")
    del node.inputs["weight"]
    node.inputs |= {"x0": small, "second": norm.outputs["second"]}
    node.inputs |= {role: conv.inputs[role] for role in ("taps", "rest")}
    halves = {"dz1": small, "dz2": xs[1]}
    halves = {role: f.graph.value(dz.name, x.shape, dz.dtype) for role, x in halves.items()}
    node.op, node.attrs = "conv_upsampled_dx", {"activation": node.attrs["activation"]}
    node.outputs = halves | node.outputs
    dx.inputs |= {"dz": halves["dz1"], "dz2": halves["dz2"]}
    f.take(dx)
    f.take(node)
    return halves["dz1"]


def _small_plain_grad(f: Fusing, node: Node) -> Value | None:
    """Likewise where it was upsampled alone"""
    grad = f.maker(node.inputs["x"], "conv_dx")
    if grad is None or node.attrs["window"] != HALF or f.reader(grad.out, "sum_pool") is not node:
        return None
    weight = grad.inputs["weight"]
    cast = f.maker(weight, "cast")
    exact = weight if cast is None else cast.inputs["x"]
    filters = [n for n in f.made_by("upsampled_filters") if n.inputs["weight"] is exact]
    if not filters:
        return None
    node.inputs = {"dy": grad.inputs["dy"], **filters[0].outputs}
    node.op, node.attrs = "conv_of_upsampled_dx", {}
    f.take(node, grad)
    return node.out


def _coefficients(f: Fusing, node: Node) -> Value | None:
    """The coefficients of a norm's backward are made by the launch of dx"""
    table = f.maker(node.inputs["coeff"], "norm_grad_table")
    if table is None or f.reader(node.inputs["coeff"], node.op) is not node:
        return None
    given = table.inputs
    if node.op == "norm_dx" and len(node.many("x")) > 1:
        return None
    if node.op == "skip_dx":
        if "scale" in given or "shift" in given or "emb" in table.outputs:
            return None
        given = {role: given[role] for role in ("partials", "table")}
    del node.inputs["coeff"]
    node.inputs |= given
    node.op = node.op.replace("_dx", "_backward")
    node.attrs |= table.attrs
    node.outputs |= {role: value for role, value in table.outputs.items() if role != "coeff"}
    f.take(node, table)
    return node.out


def _bias_sums(f: Fusing, node: Node) -> Value | None:
    """Gradients of biases are added up together, behind all others"""
    rows = node.inputs["x"]
    maker = f.maker(rows)
    if node.attrs["axes"] != (0,) or maker is None or len(rows.shape) != 2:
        return None
    role = next(r for r, v in maker.outputs.items() if v is rows)
    if role == "emb" and "input_bias" not in maker.outputs:
        maker.outputs["input_bias"] = node.out
        f.take(maker, node)
        if not f.readers(rows):
            del maker.outputs["emb"]
        return node.out
    if maker.op == "sum" and len(maker.inputs["x"].shape) == 4:
        if any(r is None or r.op not in ("sum", "bias_grad") for r in f.readers(rows)):
            return None
        maker.op, maker.attrs = "row_sums", {}
    elif role != "rows" and maker.op != "row_sums":
        return None
    node.op, node.attrs, node.inputs = "bias_grad", {}, {"rows": rows}
    return node.out


BACKWARD_ROWS = (
    Row(
        "act' and sums in the input gradient", ("norm_act_grad",), _input_grad,
        "17.1 % of a step of 32 images, 17.3 of 128 (H100)"
    ),
    Row(
        "sums of dx from the norm's", ("sum",), _embedding_sums,
        "10.3 % of a step of 32 images, 6.4 of 128 (H100)"
    ),
    Row(
        "other gradients added in dx", ("add",), _added_dx,
        "13.7 % of a step of 32 images, 18.4 of 128 (H100)"
    ),
    Row(
        "both of two other gradients", ("norm_dx",), _two_summands,
        "0.95 % of a step of 32 images, 1.0 of 128 (H100)"
    ),
    Row(
        "gradient of 1x1 skips in dx", ("norm_dx",), _skip_dx,
        "17.5 -> 17.2 ms a step of 128 images, when it was added"
    ),
    # these change what the sums of dx below are of
    Row(
        "few channels of a gradient padded", ("conv_input_grad", "conv_dw", "sum"),
        _few_channels, "0.35 % of a step of 32 images, 1.7 of 128 (H100)", ("step",)
    ),
    Row(
        "a quarter to each of 2x2 pixels", ("upsample",), _pool_grad,
        "0.3 % of a step of 32 images, 2.2 of 128 (H100)", ("step",)
    ),
    Row(
        "dx of what halves the image", ("conv_dx",), _down_dx,
        "4.2 % of a step of ddpm_cifar10 at 64 images", ("step",)
    ),
    Row(
        "added while it is resampled", ("add",), _added_resampled,
        "1.3 % of a step of 32 images, 0.4 of 128 (H100)", ("step",)
    ),
    Row(
        "dx added up over 2x2 pixels", ("sum_pool",), _pooled_dx,
        "2.0 % of a step of 32 images, 4.1 of 128 (H100)", ("step",)
    ),
    Row(
        "dx multiplied on the small image", ("conv_input_grad",), _small_input_grad,
        "with the forward pass, see there", ("step",)
    ),
    Row(
        "dx of a convolution alone on the small image", ("sum_pool",), _small_plain_grad,
        "with the forward pass, see there", ("step",)
    ),
    Row(
        "sums of dx while it is written", ("sum",), _rows_of_dx,
        "5.3 % of a step of 32 images, 6.0 of 128 (H100)"
    ),
    Row("gradients of weights in float32", ("cast",), _exact_weight_grad, "not rounded twice"),
    Row(
        "coefficients in the launch of dx", NORM_DX, _coefficients,
        "0.85 % of a step of 32 images, 0.6 of 128", ("step",)
    ),
    Row(
        "sums for biases together", ("sum",), _bias_sums,
        "with the padded channels: 18.3 % of a step of 32 images, 7.8 of 128 (H100)", ("step",)
    )
)  # fmt: skip
