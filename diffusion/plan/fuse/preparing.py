"""Rows that change the network's ops before it is differentiated."""

from itertools import pairwise

import torch

from ..graph import Node, Value, numbered, rows_beside
from ..ops import AFTER
from .rewrite import NOT_IN_A_STEP, Fusing, Row

_LARGE = 2**20  # numbers of filters; a launch that pads fewer takes as long as what it saves


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
    together = _together(f, makers)
    for role in roles:
        del node.inputs[role]
    node.inputs[roles] = together
    f.take(node, *makers)
    return True


def _together(f: Fusing, products: list[Node]) -> Value:
    """What these products of one value make, side by side, by one product."""
    first = products[0]
    weights = [p.inputs["weight"] for p in products]
    rows, ci = sum(w.shape[0] for w in weights), weights[0].shape[1]
    inputs = {"x": first.inputs["x"], "weight": _stacked(f, first, weights, (rows, ci))}
    if "bias" in first.inputs:
        inputs["bias"] = _stacked(f, first, [p.inputs["bias"] for p in products], (rows,))
    spec = {"y": ((*first.out.shape[:-1], rows), first.out.dtype)}
    product = f.insert(first, "linear", inputs, spec)
    product.of_matrices = first.of_matrices
    return product.out


def _products_of_an_embedding(f: Fusing, node: Node) -> Value | None:
    """x W1, x W2, ... of vectors -> columns of x [W1, W2, ...]"""
    x = node.inputs["x"]
    if len(x.shape) != 2:
        return None  # columns of an image would be copies
    alike = [r for r in f.readers(x) if r is not None and _is_beside(f, r, node)]
    operands = {p: [p.inputs[role] for role in p.inputs if role != "x"] for p in alike}
    products = [p for p in alike if not any(f.reaches(q, *operands[p]) for q in alike)]
    few = x.shape[0] <= sum(p.out.shape[1] for p in products)  # not the rows of a sequence
    if len(products) < 2 or node not in products or not few:
        return None
    together, start = _together(f, products), 0
    for p in products:
        stop = start + p.out.shape[1]
        spec, ends = {"y": (p.out.shape, p.out.dtype)}, {"axis": 1, "start": start, "stop": stop}
        f.write(f.insert(p, "slice", {"x": together}, spec, **ends), p.out, p)
        start = stop
    return together


def _rows_of_16_bytes(f: Fusing, node: Node) -> Value | None:
    """x W of vectors -> [x, 0] [W, 0], where rows of 16 bits then begin at multiples of 16 bytes"""
    x, weight = node.inputs["x"], node.inputs["weight"]
    ci, size = weight.shape[1], weight.dtype.itemsize
    if size != 2 or not ci * size % 16 or not len(x.shape) == len(weight.shape) == 2:
        return None
    if weight.numel < _LARGE:
        return None
    zeros = -ci % (16 // size)
    for role, value in (("x", x), ("weight", weight)):
        spec = {"y": ((value.shape[0], ci + zeros), value.dtype)}
        made = f.insert(node, "pad", {"x": value}, spec, pads=((0, 0), (0, zeros)))
        node.inputs[role] = made.out
    f.take(node)
    return node.out


def _is_beside(f: Fusing, node: Node, other: Node) -> bool:
    """Whether these products of the same vectors can be one: who uses some of the network's results
    expects no gradients of what the others alone depend on."""

    def what(n: Node) -> tuple:
        results = [f.reaches(n, y) for y in f.graph.outputs] if len(f.graph.outputs) > 1 else []
        return n.op, "bias" in n.inputs, n.of_matrices, n.inputs["x"], n.out.dtype, results

    return node is other or node.op == other.op and what(node) == what(other)


def _stacked(f: Fusing, before: Node, parts: list[Value], shape: tuple[int, ...]) -> Value:
    """These rows, one after the other. Where they are every third of one value, as EDM has q, k and
    v, that is one copy."""
    spec = {"y": (shape, parts[0].dtype)}
    copies = [f.maker(part, "layout") for part in parts]
    if None not in copies and len({(c.inputs["x"], c.attrs["pieces"]) for c in copies}) == 1:
        first, second, *_ = offsets = [copy.attrs["offset"] for copy in copies]
        step = second - first
        if offsets == [first + i * step for i in range(len(offsets))]:
            pieces = ((len(parts), step), *copies[0].attrs["pieces"])
            inputs = {"x": copies[0].inputs["x"]}
            return f.insert(before, "layout", inputs, spec, pieces=pieces, offset=first).out
    return f.insert(before, "cat", numbered("x", parts), spec, axis=0).out


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
    if f.mode == "train" and weight.numel > node.inputs["x"].numel:
        return None  # columns of filters are copies, too
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


def _pass_of_an_embedding(f: Fusing, node: Node) -> Value | None:
    """act(x g + b), or x g + b, with g and b of an embedding: in the pass of a norm before it, or
    one pass as of a norm whose table has mean 0, rstd 1, g and b"""
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
    norm = f.maker(x, "norm_apply")
    if _ends_in(f, norm, product) and offset is not None and node.op == "add":
        norm.inputs |= {
            role: _row(f, node, part, (n, c))
            for role, part in zip(AFTER, (gain, offset), strict=True)
        }
        f.write(norm, node.out, *steps)
        return node.out
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


def _ends_in(f: Fusing, norm: Node | None, product: Node) -> bool:
    """Whether a product alone reads what the pass of a norm writes, which may multiply itself."""
    if f.mode != "train" or norm is None or f.reader(norm.out, "mul") is not product:
        return False
    of_norm = f.maker(norm.inputs["table"], "norm_table")
    return of_norm is not None and norm.inputs.keys().isdisjoint(("rng", *AFTER))


def _of_images(node: Node | None) -> Value | None:
    """What a sum or product reads beside a tensor, if it is a vector of channels of each image."""
    if node is None or len(node.out.shape) < 3:
        return None
    a, b = node.inputs["a"], node.inputs["b"]
    shape, rows = node.out.shape, rows_beside(node.out.shape)
    return b if a.shape == shape and b.shape == rows != shape else None


def _row(f: Fusing, before: Node, value: Value, shape: tuple[int, ...]) -> Value:
    if value.shape != shape:
        spec = {"y": (shape, value.dtype)}
        value = f.insert(before, "reshape", {"x": value}, spec).out
    return value


def _row_of_table(f: Fusing, before: Node, value: Value, shape: tuple[int, ...]) -> Value:
    exact, value = before.out.exact, _row(f, before, value, shape)
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
        "products of an embedding are one", ("linear",), _products_of_an_embedding,
        "with the padded channels: 2.4 % of a step of EDM's DDPM++ at 64 images", NOT_IN_A_STEP
    ),
    Row(
        "rows of filters at multiples of 16 bytes", ("linear",), _rows_of_16_bytes,
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
        "an embedding's products in the activation's pass", ("act", "add"), _pass_of_an_embedding,
        "3.9 % of a step of EDM2-S at 32 images (predicted)", NOT_IN_A_STEP
    ),
)  # fmt: skip
