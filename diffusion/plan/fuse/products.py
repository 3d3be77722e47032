"""Products of one value as one, and rows of gradients of concatenations."""

from ..graph import Node, Value, numbered
from .rewrite import Fusing


def halves_of_dx(f: Fusing, node: Node) -> Value | None:
    """The gradients of the halves of a concat are products of their own, with their columns of the
    filters: of one product, or of two that are added"""
    dx = node.inputs["x"]
    add = f.maker(dx, "add")
    whole = [
        f.maker(v, "conv_dx", "linear_dx") for v in ([dx] if add is None else add.inputs.values())
    ]
    halves = f.readers(dx)
    if len(halves) != 2 or not all(r is not None and _is_half(f, r, dx) for r in halves):
        return None
    if not all(p is not None and p.keeps_size and p.out.shape == dx.shape for p in whole):
        return None
    if any(f.copies_less_of(dx, p.inputs["weight"]) for p in whole):
        return None
    if add is not None and any(f.reader(p.out, "add") is not add for p in whole):
        return None
    for half in halves:
        spec = {"y": (half.out.shape, dx.dtype)}
        ends = half.attrs | {"axis": 1}
        parts = [_with_columns(f, half, product, ends, spec) for product in whole]
        if add is None:
            f.write(parts[0], half.out, half)
        else:
            half.op, half.attrs = "add", {}
            half.inputs = {role: part.out for role, part in zip("ab", parts, strict=True)}
            f.take(half)
    return node.out


def _is_half(f: Fusing, node: Node, dx: Value) -> bool:
    """Whether a node reads channels of an image of which kernels can read the images."""
    if node.op != "slice" or len(dx.shape) != 4 or node.attrs["axis"] != 3:
        return False
    return node.out.shape[3] * node.out.dtype.itemsize % 16 == 0 and not f.is_few(node.out)


def _with_columns(f: Fusing, before: Node, product: Node, ends: dict, spec: dict) -> Node:
    """The product, of these columns of its filters."""
    weight = product.inputs["weight"]
    shape = weight.shape[0], ends["stop"] - ends["start"], *weight.shape[2:]
    columns = f.insert(before, "slice", {"x": weight}, {"y": (shape, weight.dtype)}, **ends).out
    made = f.insert(before, product.op, product.inputs | {"weight": columns}, spec, **product.attrs)
    made.of_matrices = product.of_matrices
    return made


def side_by_side_product(f: Fusing, products: list[Node]) -> Value:
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
