"""Norms: one launch each, or deferred until their readers are known."""

from triton_kernels.conv.upsampled import upsampled_spec
from triton_kernels.registry.spec import ConvSpec, NormSpec, dtype_name

from ..graph import Node, Value
from .resample import upsampled_filters
from .state import NORM, TERMS, Joining, factor_of, norm_attrs, norm_inputs

_WHOLE_PARTS = 256  # pixels of an image whose parts a norm adds, which else are added before it
_FEW_TILES = 128  # whose sums every program may add up again
_VERY_FEW_TILES = 2  # likewise, of a tensor of any size


def norm(j: Joining, node: Node) -> None:
    x1, x2 = node.inputs["x0"], node.inputs.get("x1")
    if len(node.out.shape) != 4 or "rng" in node.inputs or len(node.many("x")) > 2:
        return j.other(node)
    j.need(x2, *(node.inputs.get(role) for role in NORM))
    n, h, w, c = node.out.shape
    elements, pixels = node.out.numel, h * w
    if x1 in j.parts and pixels > _WHOLE_PARTS:
        j.need(x1)
    upsampled = j.late(x1, "upsample")
    if not upsampled and not j.late(x1, "avg_pool") and x1 not in j.parts:
        j.need(x1)
    waits = x1 in j.parts
    unmeasured = any(value in j.measured for value in node.many("partials"))
    whole = (waits or j.reads_whole(elements, pixels)) and unmeasured
    if whole and j.joins("norm_single_cta", _spec(node)):
        return _norm_single_cta(j, node)
    for value in node.many("partials"):
        j.measure(value, node)
    if upsampled:
        return _norm_upsampled(j, node)
    j.need(x1)
    tiles = sum(j.dry[value].shape[1] for value in node.many("partials"))
    few = _FEW_TILES if elements <= j.k.SMALL_NORM else _VERY_FEW_TILES
    if tiles <= few:  # every program of a projection may add them up
        film = any(role in node.inputs for role in ("scale", "shift"))
        if node.attrs["activation"] != "identity" or x2 is not None or film:
            return _norm_of_sums(j, node)
        j.cheap.add(node.out)
    # whoever reads it may make it on the way
    j.put_off(node, _norm_of_sums)
    return None


def _norm_of_sums(j: Joining, node: Node) -> None:
    """In a launch of its own: nobody makes it on the way."""
    tiles = tuple(j.dry[value].shape[1] for value in node.many("partials"))
    if j.joins("norm_single_cta", _spec(node, tiles)):
        return _norm_single_cta(j, node)
    j.emit("norm_of_sums", node.inputs, {"y": node.out}, node, **node.attrs)
    return None


def _spec(node: Node, tiles: tuple[int, ...] = ()) -> NormSpec:
    n, *image = node.out.shape
    groups = node.attrs["groups"]
    return NormSpec(n, dtype_name(node.out.dtype), *image, groups=groups, tiles=tiles)


def _norm_single_cta(j: Joining, node: Node) -> None:
    x1, inputs = node.inputs["x0"], norm_inputs(node, "")
    inputs["x1"], outputs = node.inputs.get("x1"), {"y": node.out}
    attrs = norm_attrs(node)
    if x1 in j.parts:
        conv = j.parts.pop(x1)
        inputs |= {
            role if role == "parts" else f"sum_{role}": value
            for role, value in j.sum_inputs(conv).items()
        }
        if j.others_read(x1, node):
            outputs["x"] = x1
        attrs |= {"shape": x1.shape} | factor_of(conv)
        j.graph.reason(node.out, "a norm that adds the parts of its convolution")
    elif pool := j.late(x1, "avg_pool"):
        inputs["x0"], outputs["x"] = pool.inputs["x"], x1
        attrs["pool"] = True
    else:
        j.need(x1)  # which may be about to be upsampled
        inputs["x0"] = x1
    j.emit("norm_single_cta", inputs, outputs, node, **attrs)


def _norm_upsampled(j: Joining, node: Node) -> None:
    """norm(cat(upsample(x1), x2)), and perhaps the convolution behind it."""
    large, x2 = node.inputs["x0"], node.inputs.get("x1")
    small = j.late(large, "upsample").inputs["x"]
    j.forget(large)
    conv = j.first_reader(node.out)
    attrs = dict(node.attrs)
    outputs = {"y": node.out, "large": large}
    if x2 is not None and conv is not None and _serves_upsampled(j, node, conv, small, x2):
        attrs["corners"] = True  # of each block of pixels the convolution reads one
        last = _adds_small(j, large, small, x2)
        if last is not None:
            del outputs["large"]
            up = {"factor": (2, 2)}
            j.put_off(Node("upsample", {"x": small}, {"y": large}, up, node.source))
    else:
        conv = None
    inputs = {k: v for k, v in node.inputs.items() if k != "x0"} | {"x0": small}
    j.emit("norm_upsampled", inputs, outputs, node, **attrs)
    if conv is None:
        return
    j.done.add(conv)
    j.need(conv.inputs.get("emb"))
    given = {role: conv.inputs[role] for role in ("bias", "emb") if role in conv.inputs}
    given |= {"a": node.out} | upsampled_filters(j, conv, small.shape[3])
    j.emit("conv_upsampled", given, conv.outputs, conv)
    j.graph.reason(conv.out, "multiplied on the small image")


def _serves_upsampled(j: Joining, norm: Node, conv: Node, small: Value, x2: Value) -> bool:
    """Whether the convolution of a norm of something upsampled multiplies on the small image."""
    if conv.op != "conv_fused" or j.others_read(norm.out, conv) or not conv.keeps_size:
        return False
    terms = [role for role in TERMS if role in conv.inputs and role != "emb"]
    if not j.ready(conv, "emb"):
        return False
    if terms or conv.inputs["x"] is not norm.out or "partials" not in conv.outputs:
        return False
    co, _, *size = j.filters(conv).shape
    # with a 1x1 skip, that is: a block that keeps its channels reads all of them upsampled
    skips = any(large_reader.op == "conv_fused" for large_reader in j.readers(norm.inputs["x0"]))
    channels = small.shape[3], x2.shape[3]
    spec = upsampled_spec(j.dry[small], *channels, co, factor="factor" in conv.attrs)
    return size == [3, 3] and skips and j.joins("conv_upsampled", spec)


def _adds_small(j: Joining, large: Value, small: Value, x2: Value) -> Node | None:
    """The convolution that adds a 1x1 term of an upsampled tensor and upsamples it."""
    conv = next((r for r in j.readers(large) if r.op == "conv_fused"), None)
    if conv is None:
        return None
    n, h, w, co = conv.out.shape
    r, s = j.filters(conv).shape[2:]
    extra, k = (small.shape[3], x2.shape[3]), conv.inputs["x"].shape[3]
    dtype = dtype_name(conv.out.dtype)
    how = {"extra": extra, "factor": "factor" in conv.attrs, "upsampled": True}
    spec = ConvSpec(n, dtype, h, w, k, co, r, s, **how)
    return conv if j.joins("norm_conv", spec) else None
