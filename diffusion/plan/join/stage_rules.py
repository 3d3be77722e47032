"""Which nodes a stage computes with its convolution, and which its kernels do not support."""

import torch

from ..graph import Node, Value
from .stage_state import PutOff, Stages

_MIN_TILE = 16  # channels in and out of a program: the depth and height of a matrix product
_POSITIONS = 8  # of a tile where there are many channels
_MAX_SLICE = 128  # input channels of a program
_MAX_BLOCK = 64  # output channels of a program
_LAST_GROUPS = 2  # in a slice of the convolution whose sums the head adds, in one program
_MAX_HEAD = 512  # channels in front of the head, which are one program's
_MAX_STEM = 96  # terms of the first convolution, each added by every program that needs it


def conv(w: Stages, node: Node) -> None:
    x, weight = node.inputs["x"], node.inputs["weight"]
    co, ci, r, s = weight.shape
    stride, padding = node.attrs["stride"][1], node.attrs["padding"]
    if r != 1 or s % 2 == 0 or padding != (0, 0, s // 2, s // 2) or stride not in (1, 2):
        w.refuse(node, f"a convolution of {r}x{s} taps, stride {stride} and padding {padding}")
    if x is w.image:
        return _stem(w, node)
    found, y = w.activation(node), node.out
    owner = w.cats.get(x, x)
    doubled = _doubles(w, node)
    if doubled is not None:
        w.done.add(doubled)
        y = doubled.out
    readers = [r for r in w.readers(x) if r is not node]
    side = next((r for r in readers if _is_side(r)), None) if stride == 1 and not doubled else None
    others = [r for r in w.readers(owner) if r not in (node, side)]
    if owner is not x:
        others = [r for r in others if r is not w.producers[x]]
        if any(r is not side for r in readers):
            w.refuse(node, "the residual of a block is a concatenation")
    if owner in w.made:
        w.refuse(node, "two convolutions of one activation")
    packed = _weights(w, node, side, found, doubled is not None)
    if doubled is not None:
        bias = w.emit("slice", {"x": w.bias(node)}, {"y": ((co // 2,), w.bias(node).dtype)}, node,
                      axis=0, start=0, stop=co // 2).out  # fmt: skip
    else:
        bias = w.bias(node)
    n, _, t, c = y.shape
    outputs = {"partial": ((1, n, c, t), y.dtype)}
    if side is not None:
        outputs["side"] = ((1, n, c, t), y.dtype)
    attrs = {key: packed.attrs[key] for key in ("stride", "transposed", "widest")}
    taps = {"taps": 2 if doubled is not None else s, "side": side is not None}
    stage = w.emit(
        "stage", found.inputs | packed.outputs, outputs, node, **found.attrs, **attrs, **taps
    )
    if others:
        stage.outputs["kept"] = owner
        w.made.add(owner)
    w.put_off[y] = PutOff({"partial": stage.outputs["partial"], "bias": bias}, {})
    if side is not None:
        w.done.add(side)
        w.residuals[side.out] = {
            "residual_partial": stage.outputs["side"], "residual_bias": w.bias(side),
        }  # fmt: skip
    return None


def _is_side(reader: Node | None) -> bool:
    return reader is not None and reader.op == "linear" and len(reader.out.shape) == 4


def _stem(w: Stages, node: Node) -> None:
    """The first convolution: whoever reads it makes it."""
    terms = node.inputs["weight"].numel // node.out.shape[-1]
    if terms > _MAX_STEM:
        w.refuse(node, f"a first convolution of {terms} terms; at most {_MAX_STEM}")
    if node.attrs["stride"] != (1, 1):
        w.refuse(node, "a first convolution with a stride")
    given = {"x": w.image, "stem_weight": _stem_weights(w, node), "bias": w.bias(node)}
    w.put_off[node.out] = PutOff(given, {})


def _stem_weights(w: Stages, node: Node) -> Value:
    weight = node.inputs["weight"]
    co, ci, *taps = weight.shape
    shape = (ci, taps[-1] if taps else 1, co)
    return w.emit("stem_weights", {"weight": weight}, {"y": (shape, weight.dtype)}, node).out


def _doubles(w: Stages, conv: Node) -> Node | None:
    """The reshape behind a convolution that is a transposed one: its channels are two positions,
    of which one does not read the position behind it and one not that in front."""
    readers = w.readers(conv.out)
    reader = readers[0] if len(readers) == 1 else None
    if reader is None or reader.op != "reshape":
        return None
    n, _, t, c = conv.out.shape
    numbers, bias = (w.rearranged(v) for v in (conv.inputs["weight"], w.bias(conv)))
    if (
        tuple(reader.out.shape) != (n, 1, 2 * t, c // 2)
        or conv.inputs["weight"].shape[3] != 3
        or conv.attrs["stride"] != (1, 1)
        or numbers is None
        or bias is None
        or numbers[: c // 2, ..., 2].any()
        or numbers[c // 2 :, ..., 0].any()
        or not bias[: c // 2].equal(bias[c // 2 :])
    ):
        w.refuse(reader, "a convolution under another shape")
    return reader


def _weights(w: Stages, conv: Node, side: Node | None, found: PutOff, transposed: bool) -> Node:
    """Cut into about as many pieces as there are multiprocessors. A slice of the input is a group
    of its norm, or several small ones."""
    rows, ci, _, taps = conv.inputs["weight"].shape
    co = rows // 2 if transposed else rows
    tiles = (4 if transposed else taps) + (side is not None)
    halves = 2 if "skip" in found.inputs else 1
    norm = _norm_behind(w, conv)
    groups = found.attrs.get("groups") or (norm.attrs["groups"] if norm is not None else 1)
    at_once = _LAST_GROUPS if norm is not None and _is_last(w, norm) else 1
    channels = min(max(_MIN_TILE, at_once * ci // halves // groups), _MAX_SLICE, ci)
    early, block = w.dtype != torch.float32 or w.tf32, min(_MAX_BLOCK, co)

    def shared_memory() -> int:  # of a program: its weights and shifted copies of its input
        return early * tiles * (block + _POSITIONS) * channels * w.dtype.itemsize

    limit = w.gpu.shared_memory // 2  # two launches overlap
    while block > _MIN_TILE and (
        2 * (ci // channels) * (rows // block) <= w.gpu.num_sms or shared_memory() > limit
    ):
        block //= 2
    if channels < _MIN_TILE or block < _MIN_TILE or ci // halves % channels or co % block:
        w.refuse(conv, f"{ci} channels to {co}, which do not divide into tiles of {_MIN_TILE}")
    given = {"weight": conv.inputs["weight"]}
    if side is not None:
        given["side"] = side.inputs["weight"]
    # float32 splits each tile in registers, which a wide one does not leave room for
    attrs = {"dtype": w.dtype, "channels": channels, "block": block, "widest": 4 if early else 1,
             "stride": conv.attrs["stride"][1], "transposed": transposed}  # fmt: skip
    count = (2 if transposed else taps) + (side is not None)
    packed = (ci // channels, rows // block, count, block, channels), w.dtype
    outputs = {"weight": packed, "by_tap": ((count, rows, ci), w.dtype)}
    return w.emit("stage_weights", given, outputs, conv, **attrs)


def _norm_behind(w: Stages, conv: Node) -> Node | None:
    reader = next(iter(w.readers(conv.out)), None)
    return reader if reader is not None and reader.op == "group_norm" else None


def _is_last(w: Stages, norm: Node) -> bool:
    """Whether the head reads it."""
    return any(_is_side(r) and r.out in w.graph.outputs for r in w.readers(norm.out))


def group_norm(w: Stages, node: Node) -> None:
    a, c = node.attrs, node.out.shape[-1]
    found, groups = w.activation(node), node.attrs["groups"]
    if c < _MIN_TILE or c & (c - 1) or groups & (groups - 1):
        w.refuse(node, f"{c} channels in {groups} groups; powers of two, from {_MIN_TILE} on")
    if c // groups > _MAX_SLICE:
        w.refuse(node, f"{c // groups} channels a group; at most {_MAX_SLICE}")
    if a["activation"] != "mish" or found.attrs or {*node.inputs} != {"x", "weight", "bias"}:
        w.refuse(node, "a norm that is not of a convolution, with Mish behind it")
    if len(w.readers(node.inputs["x"])) > 1:
        w.refuse(node, "a convolution that is read beside its norm")
    affine = {"norm_weight": node.inputs["weight"], "norm_bias": node.inputs["bias"]}
    w.put_off[node.out] = found.with_(affine, groups=groups, eps=a["eps"])


def mul(w: Stages, node: Node) -> None:
    """By the scale of a film."""
    found, columns = w.activation(node, "a"), w.columns.get(node.inputs["b"])
    if columns is None or not _takes_film(found):
        w.refuse(node, "a product that is no scale behind a norm")
    w.put_off[node.out] = found.with_(w.film, columns=columns.start)


def _takes_film(found: PutOff) -> bool:
    return "groups" in found.attrs and "columns" not in found.attrs and not _has_residual(found)


def _has_residual(found: PutOff) -> bool:
    return any(role.startswith("residual") for role in found.inputs)


def add(w: Stages, node: Node) -> None:
    """The shift of a film, or a residual."""
    a, b = node.inputs["a"], node.inputs["b"]
    if b in w.columns:
        found, columns = w.put_off.get(a), w.columns[b]
        if found is not None and _takes_film(found):
            w.put_off[node.out] = found.with_(w.film, columns=columns.start, scale=False)
        elif found is not None and found.attrs.get("columns") == columns.start - node.out.shape[-1]:
            w.put_off[node.out] = found.with_(scale=True)
        else:
            w.refuse(node, "a shift that is not behind its scale")
        return
    if a in w.residuals or a in w.made:
        a, b = b, a
    found = w.put_off.get(a)
    if found is None or "groups" not in found.attrs or _has_residual(found):
        w.refuse(node, "a sum that is no residual behind a norm")
    if b not in w.residuals and b not in w.made:
        what = "the input" if b is w.image else "a tensor that no stage keeps"
        w.refuse(node, f"the residual of a block is {what}")
    w.put_off[node.out] = found.with_(w.residuals.get(b, {"residual": b}))


def linear(w: Stages, node: Node) -> None:
    """1x1 filters: of the image, the end of the network, or of the embedding (see `film`)."""
    if node.out in w.columns:
        return
    if node.inputs["x"] is w.image:
        weight = _stem_weights(w, node)
        given = {"x": w.image, "residual_weight": weight, "residual_bias": w.bias(node)}
        w.residuals[node.out] = given
        return
    if node.out not in w.graph.outputs:
        w.refuse(node, "a 1x1 convolution that is not beside another")
    found, c = w.activation(node), node.inputs["weight"].shape[1]
    if "groups" not in found.attrs or "columns" in found.attrs or _has_residual(found):
        w.refuse(node, "a last convolution that is not of a norm")
    if c > _MAX_HEAD:
        w.refuse(node, f"{c} channels in front of the last convolution; at most {_MAX_HEAD}")
    weight = node.inputs["weight"]
    low = w.emit("cast", {"x": weight}, {"y": (weight.shape, w.dtype)}, node)
    given = found.inputs | {"weight": low.out, "head_bias": w.bias(node)}
    head = w.emit("head", given, {}, node, **found.attrs)
    head.outputs["y"] = node.out
    w.made.add(node.out)


def cat(w: Stages, node: Node) -> None:
    if len(node.out.shape) == 2:
        return  # the embedding's, see `film`
    xs = node.many("x")
    if node.attrs["axis"] != 3 or len(xs) != 2 or xs[1] not in w.made:
        w.refuse(node, "a concatenation that is not of an activation and a kept one")
    found = w.activation(node, "x0")
    if "skip" in found.inputs or len(w.readers(xs[0])) > 1 or xs[0].shape != xs[1].shape:
        w.refuse(node, "a concatenation of different halves")
    w.put_off[node.out] = found.with_({"skip": xs[1]})
    w.cats[node.out] = xs[0]


def part(w: Stages, node: Node) -> None:
    """Of the columns of a film."""
    before = w.columns.get(node.inputs["x"])
    if before is None:
        w.refuse(node)
    if node.op == "slice":
        start = before.start + node.attrs["start"]
        before = slice(start, start + node.out.shape[-1])
    w.columns[node.out] = before


RULES = {
    "conv": conv,
    "group_norm": group_norm,
    "mul": mul,
    "add": add,
    "linear": linear,
    "cat": cat,
    "slice": part,
    "reshape": part,
}
