"""Rows that change the network's ops before it is differentiated."""

from ..graph import Node, Value, numbered
from .embeddings import pass_of_an_embedding, products_of_an_embedding, rows_of_16_bytes
from .products import side_by_side_product
from .rewrite import NOT_IN_A_STEP, Fusing, Row


def _packed_qkv(f: Fusing, node: Node) -> Value | None:
    """attention(x Wq, x Wk, x Wv) -> attention(x [Wq, Wk, Wv])"""
    if "mask" in node.inputs or not _packed(f, node, "qkv"):
        return None
    node.attrs["order"] = "qkv_heads"
    return node.out


def _packed_kv(f: Fusing, node: Node) -> Value | None:
    """attention(q, x Wk, x Wv) -> attention(q, x [Wk, Wv])"""
    return node.out if _packed(f, node, "kv") else None


def _packed(f: Fusing, node: Node, roles: str) -> bool:
    """Let one product make what these roles of attention read, side by side, if it can."""
    if not set(roles) <= set(node.inputs):
        return False
    makers = [f.maker(node.inputs[role], "linear") for role in roles]
    if None in makers or len({m.inputs["x"] for m in makers}) > 1:
        return False
    if any(f.reader(m.out, "attention") is None for m in makers):
        return False
    if len({("bias" in m.inputs, m.of_matrices) for m in makers}) > 1:
        return False
    together = side_by_side_product(f, makers)
    for role in roles:
        del node.inputs[role]
    node.inputs[roles] = together
    f.take(node, *makers)
    return True


def _halves(f: Fusing, value: Value) -> list[Value] | None:
    """The two tensors of which a value is the concatenation along its channels, or None."""
    cat = f.maker(value, "cat")
    if cat is None or len(value.shape) != 4 or cat.attrs["axis"] != 3:
        return None
    parts = cat.many("x")
    return parts if len(parts) == 2 else None


def _halves_cast(f: Fusing, node: Node) -> list[Value] | None:
    """The same of a concatenation that is cast for linear layers alone, each cast."""
    x = node.inputs["x"]
    cast = f.maker(x, "cast")
    parts = None if cast is None else _halves(f, cast.inputs["x"])
    if parts is None or any(r is None or r.op != "linear" for r in f.readers(x)):
        return None
    made = []
    for part in parts:
        before = f.unwidened(part)
        if before.dtype != x.dtype:
            before = f.insert(node, "cast", {"x": part}, {"y": (part.shape, x.dtype)}).out
        made.append(before)
    return made


def _norm_of_concat(f: Fusing, node: Node) -> Value | None:
    """norm(cat(x1, x2)): the table from the sums of both, the pass over both"""
    if len(node.many("x")) > 1 or (parts := _halves(f, node.inputs["x0"])) is None:
        return None
    table = f.maker(node.inputs["table"], "norm_table")
    if table is None:
        return None
    moments = f.maker(table.inputs["partials0"], "moments")
    n, k, two, _ = moments.out.shape
    for i, part in enumerate(parts):
        spec = {"y": ((n, k, two, part.shape[3]), moments.out.dtype)}
        table.inputs[f"partials{i}"] = f.insert(moments, "moments", {"x": part}, spec).out
    table.attrs["pixels"] *= 2
    node.inputs |= numbered("x", parts)
    f.take(table)
    f.take(node)
    return node.out


def _pointwise_of_concat(f: Fusing, node: Node) -> Value | None:
    """cat(x1, x2) W -> x1 W1 + x2 W2"""
    parts = _halves(f, node.inputs["x"]) or _halves_cast(f, node)
    if parts is None:
        return None
    weight, y, start, terms = node.inputs["weight"], node.out, 0, []
    if f.copies_less_of(node.inputs["x"], weight):
        return None
    for part in parts:
        stop = start + part.shape[3]
        spec = {"y": ((weight.shape[0], stop - start), weight.dtype)}
        ends = {"axis": 1, "start": start, "stop": stop}
        columns = f.insert(node, "slice", {"x": weight}, spec, **ends).out
        inputs = {"x": part, "weight": columns}
        if start == 0 and "bias" in node.inputs:
            inputs["bias"] = node.inputs["bias"]
        made = f.insert(node, "linear", inputs, {"y": (y.shape, y.dtype)})
        made.of_matrices = node.of_matrices
        terms.append(made.out)
        start = stop
    total = f.insert(node, "add", {"a": terms[0], "b": terms[1]}, {"y": (y.shape, y.dtype)})
    f.write(total, y, node)
    return y


def _upsampled_in_16_bits(f: Fusing, node: Node) -> Value | None:
    """upsample(float32(x)) -> float32(upsample(x)), and the other way round where that is cast to
    16 bits: the same numbers"""
    if node.op == "upsample":
        made, small = "cast", f.unwidened(node.inputs["x"])
        if small is node.inputs["x"]:
            return None
        part = f.insert(node, "upsample", {"x": small}, {"y": (node.out.shape, small.dtype)})
        part.attrs, node.attrs = node.attrs, {}
    else:
        made, up = "upsample", f.maker(node.inputs["x"], "upsample")
        if up is None or f.reader(up.out, "cast") is not node:
            return None
        small, dtype = up.inputs["x"], node.out.dtype
        if small.dtype.itemsize <= dtype.itemsize:
            return None
        part = f.insert(node, "cast", {"x": small}, {"y": (small.shape, dtype)})
        node.attrs = up.attrs
    node.op, node.inputs = made, {"x": part.out}
    f.take(node)
    return part.out


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
    node.inputs["x"] = small
    f.take(node)
    return node.out


def _norm_of_filters(f: Fusing, node: Node) -> Value | None:
    """norm(W), over all axes but the first, reads filters as they lie, and writes them as products
    read them"""
    before = f.maker(node.inputs["x"], "reshape")
    behind = f.reader(node.out, "reshape")
    if before is None or behind is None or set(node.inputs) != {"x"}:
        return None
    w = before.inputs["x"]
    if len(w.shape) != 4 or behind.out.shape != w.shape or w.shape[2:] == (1, 1):
        return None
    if node.out.shape != (w.shape[0], w.numel // w.shape[0]):
        return None
    node.inputs["x"] = w
    node.attrs = node.attrs | {"of_filters": True}
    f.write(node, behind.out, behind)
    return node.out


PREPARING = (
    Row(
        "q, k and v are one product", ("attention",), _packed_qkv,
        "16.6 % of an evaluation of stable_diffusion at 1 image (H200), 1.3 of ddpm_cifar10 at 128",
    ),
    Row(
        "k and v are one product", ("attention",), _packed_kv,
        "1.3 % of an evaluation of stable_diffusion at 1 image (H200)",
    ),
    Row(
        "products of an embedding are one", ("linear",), products_of_an_embedding,
        "with the padded channels: 2.4 % of a step of EDM's DDPM++ at 64 images", NOT_IN_A_STEP
    ),
    Row(
        "rows of filters at multiples of 16 bytes", ("linear",), rows_of_16_bytes,
        "a policy's step of 64 chunks: 3.07 -> 2.51 ms, with FiLM in the passes of norms",
        ("train",)
    ),
    Row(
        "upsampled in 16 bits", ("upsample", "cast"), _upsampled_in_16_bits,
        "1.3 % of a step of DiffAE's UNet at 16 images of 128x128, 2.1 of that of "
        "denoising-diffusion-pytorch at 64 of 64x64 (predicted)", NOT_IN_A_STEP
    ),
    Row(
        "a norm reads the halves of a concat", ("norm_apply",), _norm_of_concat,
        "9.2 % of a pass of 32 images",
    ),
    Row(
        "1x1 filters read the halves of a concat", ("linear",), _pointwise_of_concat,
        "2.1 % of a pass of 32 images",
    ),
    Row(
        "sums before upsampling", ("moments",), _moments_of_upsampled,
        "0.2 % of a pass of 32 images; upsampling in the norm's pass needs it",
    ),
    Row(
        "filters are normed as they lie", ("channel_norm",), _norm_of_filters,
        "up to six copies of the filters of a step of EDM2", NOT_IN_A_STEP
    ),
    Row(
        "an embedding's products in the activation's pass", ("act", "add"), pass_of_an_embedding,
        "3.9 % of a step of EDM2-S at 32 images (predicted)", NOT_IN_A_STEP
    ),
)  # fmt: skip
