"""Rows that change the network's ops before it is differentiated."""

from itertools import pairwise

import torch

from ..graph import Node, Value, numbered, rows_beside
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
    x, first = makers[0].inputs["x"], makers[0]
    weights = [m.inputs["weight"] for m in makers]
    rows, ci = sum(w.shape[0] for w in weights), weights[0].shape[1]
    inputs = {"x": x, "weight": _stacked(f, first, weights, (rows, ci))}
    if "bias" in first.inputs:
        inputs["bias"] = _stacked(f, first, [m.inputs["bias"] for m in makers], (rows,))
    out = node.inputs[roles[0]]
    outputs = {"y": ((*out.shape[:-1], rows), out.dtype)}
    product = f.insert(first, "linear", inputs, outputs)
    product.of_matrices, together = first.of_matrices, product.out
    for role in roles:
        del node.inputs[role]
    node.inputs[roles] = together
    f.take(node, *makers)
    return True


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
        made = f.insert(node, "linear", inputs, {"y": (y.shape, y.dtype)})
        made.of_matrices = node.of_matrices
        terms.append(made.out)
        start = stop
    total = f.insert(node, "add", {"a": terms[0], "b": terms[1]}, {"y": (y.shape, y.dtype)})
    f.write(total, y, node)
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
    node.inputs["x"] = small
    f.take(node)
    return node.out


def _pass_of_an_embedding(f: Fusing, node: Node) -> Value | None:
    """act(x g + b), or x g + b, with g and b of an embedding: one pass, as of a norm whose table
    has mean 0, rstd 1, g and b"""
    if node.op == "add" and f.reader(node.out, "act") is not None:
        return None  # that pass has it all
    y = node.inputs["x"] if node.op == "act" else node.out
    total = f.maker(y, "add")
    offset = _of_images(total)
    product = f.maker(y if offset is None else total.inputs["a"], "mul")
    gain = _of_images(product)
    steps = [product, node] if offset is None or node is total else [product, total, node]
    if gain is None or any(f.reader(a.out, b.op) is not b for a, b in pairwise(steps)):
        return None
    x = product.inputs["a"]
    if not (x.dtype == node.out.dtype and x.shape == node.out.shape) or x.dtype.is_complex:
        return None
    n, c, exact = x.shape[0], x.shape[-1], x.exact
    first = torch.tensor([0, 1], dtype=exact)[:, None].repeat(n, 1, c)
    rows = [f.constant(first, f"mean, rstd of {n}x{c} in {exact}")]
    if offset is None:
        offset = f.constant(torch.zeros(n, 1, c, dtype=exact), f"no b of {n}x{c} in {exact}")
    rows += [_row_of_table(f, node, part, (n, 1, c)) for part in (gain, offset)]
    table = f.insert(node, "cat", numbered("x", rows), {"y": ((n, 4, c), exact)}, axis=1).out
    node.attrs = {"activation": node.attrs["activation"] if node.op == "act" else "identity"}
    node.op, node.inputs = "norm_apply", {"x0": x, "table": table}
    f.take(node, *steps[:-1])
    return node.out


def _of_images(node: Node | None) -> Value | None:
    """What a sum or product reads beside a tensor, if it is a vector of channels of each image."""
    if node is None or len(node.out.shape) < 3:
        return None
    a, b = node.inputs["a"], node.inputs["b"]
    shape, rows = node.out.shape, rows_beside(node.out.shape)
    return b if a.shape == shape and b.shape == rows != shape else None


def _row_of_table(f: Fusing, before: Node, value: Value, shape: tuple[int, ...]) -> Value:
    exact = before.out.exact
    if value.shape != shape:
        spec = {"y": (shape, value.dtype)}
        value = f.insert(before, "reshape", {"x": value}, spec).out
    if value.dtype != exact:
        value = f.insert(before, "cast", {"x": value}, {"y": (shape, exact)}).out
    return value


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
        "an embedding's products in the activation's pass", ("act", "add"), _pass_of_an_embedding,
        "3.9 % of a step of EDM2-S at 32 images (predicted)", NOT_IN_A_STEP
    ),
)  # fmt: skip
