"""Rewrites after tracing that give each computation one form.

- Common subexpressions are merged, unused nodes are removed, and nodes without inputs are computed
  now.
- Norms over channels, activations and gated products that a module writes itself become one node
  (`norms_by_hand`, `products_by_hand`).
- A norm and the following activation become one node, with the embedding's scale and shift (FiLM).
- Numbers that a product is multiplied with go into filters that a norm makes (`factors`).
- The scale of attention is the usual one where a norm over channels that makes its queries can have
  what it differs by.
- Casts around a norm are removed, since its statistics are in float32 anyway; also one behind the
  dropout that reads it, as under a GPU's autocast.
- A vector of channels that is added to a product is its bias, also if it is wider than the product
  and the sum is rounded back, as `y.add_(bias)` does under autocast. Biases are added in float32
  before a result is rounded, and neither they nor the weights of norms are rounded themselves.
- Channels that are picked for queries, keys and values become filters (`picked_channels`).
- Zeros around an image become the convolution's padding.
- Of what a FIR filter makes, rows and columns that nobody reads are not made.
"""

import torch

from ..graph import Graph, Makers, Node, Value, row_beside, rows_beside
from ..launch.table import launch_reference
from ..views import merged
from .factors import fold_factors, takes_factor
from .norms_by_hand import find_norms
from .picked_channels import pick_filters
from .products_by_hand import find_activations, find_gates


def canonicalise(graph: Graph) -> None:
    """Apply all of them, in place."""
    first = _constants, merge_equal, _casts, _biases, find_norms, find_activations, find_gates
    for rewrite in (*first, _norms, fold_factors, _scales, pick_filters, _padding, _downsampled):
        rewrite(graph)
        graph.prune()
    graph.sort()
    graph.check()


def _constants(graph: Graph) -> None:
    """What is made of constants alone is one."""
    kept = []
    for node in graph.nodes:
        fixed = all(value in graph.constants for value in node.inputs.values())
        if fixed and not node.draws:
            graph.constants.update(launch_reference(node, graph.constants))
        else:
            kept.append(node)
    graph.nodes = kept


def merge_equal(graph: Graph) -> None:
    """Nodes that compute the same become one."""
    seen: dict[tuple, Node] = {}
    same: dict[Value, Value] = {}
    for node in graph.nodes:
        node.inputs = {role: same.get(value, value) for role, value in node.inputs.items()}
        if node.draws:
            continue
        made = tuple((value.shape, value.dtype) for value in node.outputs.values())
        key = node.op, tuple(node.inputs.items()), made, repr(sorted(node.attrs.items()))
        first = seen.setdefault(key, node)
        if first is not node:
            same.update(zip(node.outputs.values(), first.outputs.values(), strict=True))
    graph.substitute(same)


_MOVES = ("upsample", "pad", "slice", "reshape", "layout")  # which compute nothing


def _casts(graph: Graph) -> None:
    """A cast there and back, where nothing was lost, is none, also around what only moves numbers,
    as upsampling does: under autocast a GPU has it in float32."""
    makers, consumers, same = graph.producers(), graph.consumers(), {}
    for node in graph.nodes:
        if node.op not in ("cast", *_MOVES):
            continue
        moves = [node] if node.op in _MOVES else []
        start = node.inputs["x"]
        while (before := makers.of(start, *_MOVES)) and moves and consumers[start] == moves[-1:]:
            moves.append(before)
            start = before.inputs["x"]
        cast = makers.of(start, "cast")
        readers = consumers.get(node.out, []) if moves else [node]
        if cast is None or not readers or not _has_every(cast.out.dtype, cast.inputs["x"].dtype):
            continue
        start = cast.inputs["x"]
        if all(r is not None and r.op == "cast" and r.out.dtype == start.dtype for r in readers):
            for move in reversed(moves):
                move.inputs["x"] = start
                start = graph.value(move.op, move.out.shape, start.dtype)
                move.outputs = {"y": start}
            same |= dict.fromkeys((reader.out for reader in readers), start)
    graph.substitute(same)


def _has_every(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether `wide` has every number of `dtype`: none of two kinds, such as integers in floats."""
    kinds = {(x.is_floating_point, x.is_complex) for x in (wide, dtype)}
    return len(kinds) == 1 and torch.promote_types(wide, dtype) == wide


def _biases(graph: Graph) -> None:
    makers, consumers = graph.producers(), graph.consumers()
    for node in [node for node in graph.nodes if node.op == "add"]:
        _absorb_bias(graph, node, makers, consumers)
    for node in graph.nodes:
        if node.op in _WITH_ROWS:
            for role in {"weight", "bias"}.intersection(node.inputs, _WITH_ROWS[node.op]):
                exact = makers.behind(node.inputs[role], "cast")
                if node.op in _PRODUCTS or exact.dtype == node.inputs[role].dtype:
                    node.inputs[role] = exact


_PRODUCTS = ("conv", "linear")
_NORMS = ("group_norm", "channel_norm")
# by op, which of its inputs are rows of channels, which no kernel needs rounded
_WITH_ROWS = dict.fromkeys(_PRODUCTS, ("bias",)) | dict.fromkeys(_NORMS, ("weight", "bias"))


def _absorb_bias(
    graph: Graph, total: Node, makers: Makers, consumers: dict[Value, list[Node | None]]
) -> None:
    y, row, last = total.inputs["a"], total.inputs["b"], total
    if (cast := makers.of(y, "cast")) is not None and cast.widens and consumers[y] == [total]:
        y, (last, *others) = cast.inputs["x"], consumers[total.out]  # which rounds the sum
        if others or last is None or last.op != "cast":
            return
    else:
        cast = total
    product = makers.of(y, *_PRODUCTS)
    if product is None or "bias" in product.inputs:
        return
    if row.shape != row_beside(y.shape) or last.out.dtype != y.dtype:
        return
    if consumers[y] == [cast] and row is not y:
        product.inputs["bias"] = _flat(graph, row, y.shape[-1:], total)
        graph.replace(last, product)  # behind what it now reads
        makers[last.out] = product


def _norms(graph: Graph) -> None:
    for node in [n for n in graph.nodes if n.op in ("group_norm", "channel_norm")]:
        _absorb_casts_before(graph, node)
        while _absorb_reader(graph, node):
            pass


def _absorb_casts_before(graph: Graph, norm: Node) -> None:
    before = graph.producers().get(norm.inputs["x"])
    # the result is cast back at the end: behind the activation, or at once
    if before is not None and before.widens:
        norm.inputs["x"] = before.inputs["x"]


def _absorb_reader(graph: Graph, norm: Node) -> bool:
    """Take the one node that reads the norm into it, if it is of its formula."""
    reader, *others = graph.consumers().get(norm.out, [None])
    if reader is None or others:
        return False
    plain = norm.attrs["activation"] == "identity"
    if reader.op == "act" and plain:
        norm.attrs["activation"] = reader.attrs["activation"]
    elif reader.op == "cast" and _is_written_as(norm, reader.out.dtype):
        pass
    elif norm.op == "group_norm" and reader.op == "dropout":
        return _cast_before_dropout(graph, norm, reader)
    elif norm.op == "channel_norm" and reader.op == "reshape":
        return _before_reshape(graph, norm, reader)
    elif norm.op == "channel_norm" and plain and _absorb_affine(graph, norm, reader):
        pass
    elif reader.op in ("mul", "add") and plain and _is_film(norm, reader):
        other = reader.inputs["b"]
        n, c = norm.out.shape[0], norm.out.shape[-1]
        flat = _flat(graph, other, (n, c), reader)
        if reader.op == "mul":
            norm.inputs["scale"] = _less_one(graph, flat, reader)
        else:
            norm.inputs["shift"] = flat
    else:
        return False
    graph.replace(reader, norm)  # behind what it now reads
    return True


def _cast_before_dropout(graph: Graph, norm: Node, dropout: Node) -> bool:
    """Let what a dropout keeps be cast before it: the norm's pass drops, too, and rounds once."""
    cast, *others = graph.consumers().get(dropout.out, [None])
    if others or cast is None or cast.op != "cast" or not _is_written_as(norm, cast.out.dtype):
        return False
    if "rng" not in dropout.inputs or dropout.out.shape[-1] % 4:  # no pass of a norm drops so
        return False
    norm.outputs = {"y": graph.value(norm.op, norm.out.shape, cast.out.dtype)}
    dropout.inputs["x"], dropout.outputs = norm.out, {"y": cast.out}
    graph.nodes.remove(cast)
    return True


def _is_written_as(norm: Node, dtype: torch.dtype) -> bool:
    """Whether a norm can give its result in a dtype that its reader wants."""
    if norm.op == "channel_norm":  # whose kernels write any
        return dtype.is_floating_point
    return norm.inputs["x"].dtype == dtype


def _before_reshape(graph: Graph, norm: Node, reshape: Node) -> bool:
    """Let what reads a norm of the rows of heads, which a reshape joins, read it before that: a
    number or a type for all, or a vector of each head's channels."""
    reader, *others = graph.consumers().get(reshape.out, [None])
    if reader is None or others or reader.op not in ("affine", "cast", "mul"):
        return False
    inputs = {"x": norm.out}
    if reader.op == "mul":
        row = _of_each_head(graph, reader, norm.out)
        if row is None or reader.inputs["a"] is not reshape.out:
            return False
        inputs = {"a": norm.out, "b": row}
    spec = {"y": (norm.out.shape, reader.out.dtype)}
    moved = graph.new(reader.op, inputs, spec, reader.source, **reader.attrs)
    graph.nodes.remove(reshape)
    at = graph.nodes.index(reader)
    graph.nodes[at : at + 1] = [moved, reshape]
    reshape.inputs, reshape.outputs = {"x": moved.out}, {"y": reader.out}
    return True


def _of_each_head(graph: Graph, product: Node, rows: Value) -> Value | None:
    """The vector [1, ..., 1, d] of which a product's second factor [1, ..., 1, heads d] has one
    copy for each head."""
    d, other = rows.shape[-1], product.inputs["b"]
    maker = graph.producers().of(other, "layout")
    if maker is None or other.numel != other.shape[-1]:
        return None
    repeated = maker.attrs == {"pieces": ((other.numel // d, 0), (d, 1)), "offset": 0}
    if not repeated or maker.inputs["x"].numel != d:
        return None
    return graph.insert(product, "reshape", maker.inputs["x"], row_beside(rows.shape))


def _absorb_affine(graph: Graph, norm: Node, reader: Node) -> bool:
    """Take a number or a vector of channels that a norm is multiplied with, or a vector that is
    added: its factor, weight or bias."""
    linear = takes_factor(norm)
    if reader.op == "affine" and linear and reader.attrs["offset"] == 0:
        norm.attrs["factor"] *= reader.attrs["scale"]
        return True
    if reader.op not in ("mul", "add") or reader.inputs["a"] is not norm.out:
        return False
    other = reader.inputs["b"]
    if other is norm.out or other.shape != row_beside(norm.out.shape):
        return False
    role = "weight" if reader.op == "mul" else "bias"
    free = role not in norm.inputs and (linear if role == "weight" else True)
    if not free or role == "bias" and {"scale", "shift"} & set(norm.inputs):
        return False
    norm.inputs[role] = _flat(graph, other, norm.out.shape[-1:], reader)
    return True


def _is_film(norm: Node, reader: Node) -> bool:
    if reader.inputs["a"] is not norm.out or reader.inputs["b"] is norm.out:
        return False
    if "shift" in norm.inputs or (reader.op == "mul" and "scale" in norm.inputs):
        return False
    return reader.inputs["b"].shape == rows_beside(norm.out.shape)


def _flat(graph: Graph, value: Value, shape: tuple[int, ...], reader: Node) -> Value:
    before = graph.producers().of(value, "reshape")
    if before is not None and before.inputs["x"].shape == shape:
        return before.inputs["x"]
    return graph.insert(reader, "reshape", value, shape)


def _less_one(graph: Graph, gain: Value, reader: Node) -> Value:
    """scale of gain = 1 + scale, found or computed."""
    makers = graph.producers()
    node = makers.of(makers.behind(gain, "reshape", "cast"), "affine")
    if node is not None and node.attrs == {"scale": 1, "offset": 1}:
        scale = node.inputs["x"]
        return scale if scale.shape == gain.shape else _flat(graph, scale, gain.shape, reader)
    return graph.insert(reader, "affine", gain, gain.shape, scale=1, offset=-1)


def _scales(graph: Graph) -> None:
    """Kernels have the scale 1 / sqrt(d): a norm of each head's queries takes the rest of another,
    as where queries and keys have the length 1."""
    makers, consumers = graph.producers(), graph.consumers()
    for node in [node for node in graph.nodes if node.op == "attention" and "q" in node.inputs]:
        value, alone = node.inputs["q"], True
        while alone and (maker := makers.of(value, "reshape")) is not None:
            alone, value = len(consumers[value]) == 1, maker.inputs["x"]
        norm = makers.of(value, "channel_norm")
        if norm is None or not alone or len(consumers[value]) > 1:
            continue
        if takes_factor(norm) and node.attrs["scale"] > 0:
            usual = (node.inputs["q"].shape[-1] / node.attrs["heads"]) ** -0.5
            norm.attrs["factor"] *= node.attrs["scale"] / usual
            node.attrs["scale"] = usual


def _padding(graph: Graph) -> None:
    """Zeros around an image, where a convolution reads it, are the convolution's padding."""
    makers = graph.producers()
    for node in graph.nodes:
        before = makers.of(node.inputs.get("x"), "pad") if node.op == "conv" else None
        if before is None:
            continue
        (n0, n1), (y0, y1), (x0, x1), (c0, c1) = before.attrs["pads"]
        if any((n0, n1, c0, c1)):
            continue
        own = node.attrs["padding"]
        node.inputs["x"] = before.inputs["x"]
        node.attrs["padding"] = tuple(a + b for a, b in zip(own, (y0, y1, x0, x1), strict=True))


def _downsampled(graph: Graph) -> None:
    """One of so many rows and columns of a filtered image is all that is read of it."""
    makers, readers, gone = graph.producers(), graph.consumers(), set()
    for node in graph.nodes:
        fir = makers.of(node.inputs.get("x"), "fir") if node.op == "layout" else None
        if fir is None or readers[fir.out] != [node] or len(node.out.shape) != 4:
            continue
        (n, p, q, c), (_, rows, columns, _) = node.out.shape, fir.out.shape
        by = -(-rows // max(p, 1))
        steps = rows * columns * c, by * columns * c, by * c, 1
        pieces = merged(tuple(zip((n, p, q, c), steps, strict=True)))
        if (node.attrs["pieces"], node.attrs["offset"]) == (pieces, 0) and by > 1:
            fir.attrs = fir.attrs | {"down": by * fir.attrs["down"]}
            fir.outputs = node.outputs
            gone.add(node)
    graph.nodes = [node for node in graph.nodes if node not in gone]
