"""Rows of convolutions, linear layers and attention, and of their gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor

from triton_kernels.attention.tiles import MAX_HEAD_DIM

from ..graph import Node, Value, many
from ..ops import MEMORY, PARTS
from .pytorch import leaf
from .table import Inputs, Launcher, as_filters, bias_of, launches, mask_of, rounding, terms

# --- convolutions and linear layers ---------------------------------------------------------------


def _conv2d(
    run: Launcher,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0,) * 4,
    tf32: bool = True,
) -> Tensor:
    """The public op, of any shape; other strides along the rows than across them are PyTorch's."""
    y0, y1, x0, x1 = padding
    if (y0, x0) != (y1, x1):
        x, y0, x0 = F.pad(x, (0, 0, x0, x1, y0, y1)), 0, 0
    if stride[0] != stride[1]:
        bias = None if bias is None else bias.to(x.dtype)
        y = F.conv2d(x.permute(0, 3, 1, 2), weight.to(x.dtype), bias, stride, (y0, x0))
        return y.permute(0, 2, 3, 1).contiguous()
    weight, bias = run.filters(weight), None if bias is None else bias.contiguous()
    options = {"stride": stride[0], "padding": (y0, x0), "allow_tf32": tf32}
    return run.public.conv2d(x.contiguous(), weight, bias, **options)


def _rows(x: Tensor) -> Tensor:
    """[..., C] as an image of one row."""
    return x if x.ndim == 4 else x.reshape(1, 1, -1, x.shape[-1])


@launches("conv")
def _conv(run, node, given):
    operands = given["x"], given["weight"], given.get("bias")
    return _conv2d(run, *operands, **node.attrs, tf32=node.tf32)


@launches("linear")
def _linear(run, node, given):
    x, weight = given["x"], given["weight"]
    if x.ndim == 4 and node.tf32:
        return run.kernels.conv_forward(x, run.filters(weight), bias_of(given), **rounding(node))[0]
    y = _conv2d(run, _rows(x), as_filters(weight), given.get("bias"), tf32=node.tf32)
    return y.view(node.out.shape)


@launches("conv_fused", makes=("y", "partials"))
def _conv_fused(run, node, given):
    return run.kernels.conv_forward(
        given["x"],
        run.filters(given["weight"]),
        bias_of(given),
        **terms(node, given),
        stats="partials" in node.outputs,
        width=node.attrs.get("width"),
    )


@launches("conv_down")
def _conv_down(run, node, given):
    tensors = given["x"], run.filters(given["weight"]), given["bias"]
    return run.kernels.conv_down(*tensors, node.attrs["padding"])


# --- their gradients ------------------------------------------------------------------------------


def _cut(node: Node) -> tuple[tuple[int, int, int, int], tuple[int, int], tuple[int, int]]:
    """How a gradient of `_conv2d` sees its image: the rows and columns of zeros that are put around
    it, and stride and padding of the product."""
    stride, (y0, y1, x0, x1) = node.attrs["stride"], node.attrs["padding"]
    if (y0, x0) != (y1, x1):
        return (y0, y1, x0, x1), stride, (0, 0)
    return (0,) * 4, stride, (y0, x0)


@launches("conv_dx", "linear_dx")
def _product_dx(run, node, given):
    dy, weight = given["dy"], given["weight"]
    if dy.ndim == 4 and node.keeps_size:
        return run.of(node).conv_plain_input_grad(dy, run.filters(weight))
    if node.op == "linear_dx" and weight.numel() > dy.numel():  # a copy would take longer than it
        rows = _rows(dy).contiguous()
        operands = rows, run.filters(weight.to(dy.dtype)), rows.shape[1:3], 1, (0, 0)
        return run.of(node).conv2d_input_grad(*operands).view(node.out.shape)
    if node.op == "linear_dx":
        y = _conv2d(run, _rows(dy), as_filters(weight.T), None, tf32=node.tf32)
        return y.view(node.out.shape)
    n, h, w, ci = node.out.shape
    (y0, y1, x0, x1), stride, padding = _cut(node)
    size = y0 + h + y1, x0 + w + x1
    if stride[0] == stride[1]:
        operands = dy.contiguous(), run.filters(weight), size
        dx = run.of(node).conv2d_input_grad(*operands, stride[0], padding)
    else:  # which our kernels do not have
        operands = (n, ci, *size), weight.to(dy.dtype), dy.permute(0, 3, 1, 2)
        dx = torch.nn.grad.conv2d_input(*operands, stride, padding).permute(0, 2, 3, 1)
    return dx[:, y0 : y0 + h, x0 : x0 + w].contiguous()


@launches("conv_input_grad", makes=("dz", "partials"))
def _conv_input_grad(run, node, given):
    dz, partials = run.kernels.conv_input_grad(
        _rows(given["dy"]),
        run.filters(given["weight"]),
        inputs=tuple(map(_rows, many(given, "x"))),
        table=given["table"],
        activation=node.attrs["activation"],
        mask=mask_of(node, given),
    )
    return dz.view(node.out.shape), partials


@launches("conv_down_dx")
def _conv_down_dx(run, node, given):
    tensors, add = (given["dy"], run.filters(given["weight"])), given.get("add")
    return run.kernels.conv_down_input_grad(*tensors, node.attrs["padding"], add)


@launches("conv_dw", "linear_dw")
def _weight_grad(run, node, given):
    """Of a `UNet`'s step they are launched in groups, by `Launcher.weights`."""
    x, dy, out = _of_gradient(given["x"], given["dy"], node.out, given.into.get("y"))
    adds = {"accumulate": run.accumulates} if given.into else {}
    if node.keeps_size:
        run.of(node).conv_weight_grads((x, dy, out), **adds)
        return out.reshape(node.out.shape)
    (y0, y1, x0, x1), stride, padding = _cut(node)
    x = F.pad(x, (0, 0, x0, x1, y0, y1)) if any((y0, y1, x0, x1)) else x
    if stride[0] == stride[1]:
        run.of(node).conv_weight_grad(x, dy, out, stride=stride[0], padding=padding, **adds)
    else:
        images = x.permute(0, 3, 1, 2), out.shape, dy.permute(0, 3, 1, 2)
        out = torch.nn.grad.conv2d_weight(*images, stride, padding)
    return out.reshape(node.out.shape)


@launches("weight_grads")
def _weight_grads(run, node, given):
    pairs = zip(many(given, "x"), many(given, "dy"), node.outputs.items(), strict=True)
    group = [_of_gradient(x, dy, y, given.into.get(role)) for x, dy, (role, y) in pairs]
    placed = [of for of, role in zip(group, node.outputs, strict=True) if role in given.into]
    others = [of for of, role in zip(group, node.outputs, strict=True) if role not in given.into]
    if placed:
        run.of(node).conv_weight_grads(*placed, accumulate=run.accumulates)
    if others:
        run.of(node).conv_weight_grads(*others)
    made = zip(node.outputs.items(), group, strict=True)
    return {role: out.reshape(value.shape) for (role, value), (*_, out) in made}


def _of_gradient(
    x: Tensor, dy: Tensor, made: Value, place: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The operands of a weight gradient, and its place, or a tensor for it."""
    x, dy = _rows(x).contiguous(), _rows(dy).contiguous()
    if place is not None:
        return x, dy, as_filters(place)
    co, ci, *size = made.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty((co, *(size or (1, 1)), ci), dtype=wide, device=x.device)
    return x, dy, out.permute(0, 3, 1, 2)


# --- attention ------------------------------------------------------------------------------------


def is_of_kernels(node: Node) -> bool:
    """Whether attention, or its gradient, has the scale of the kernels, 1 / sqrt(d), and no wider
    heads, also for the GPU (`fuse.by_pytorch`); others are PyTorch's."""
    if node.attrs.get("by_pytorch"):
        return False
    o = node.inputs.get("o", node.out)  # [..., heads d]
    d = o.shape[-1] // node.attrs["heads"]
    return abs(node.attrs["scale"] ** 2 * d - 1) < 2e-6 and d <= MAX_HEAD_DIM


def is_of_itself(given: Inputs) -> bool:
    """Whether keys are of the same positions as queries, and all are seen."""
    if "qkv" in given:
        return True
    return "k" in given and "mask" not in given and given["k"].shape == given["q"].shape


def _packed(given: Inputs) -> Tensor:  # [N, T, 3C]
    qkv = given["qkv"] if "qkv" in given else torch.cat([given[role] for role in "qkv"], -1)
    return qkv.flatten(1, -2)


def _apart(given: Inputs) -> tuple[Tensor, Tensor]:  # [N, T, C], [N, L, 2C]
    kv = given["kv"] if "kv" in given else torch.cat((given["k"], given["v"]), -1)
    return given["q"].flatten(1, -2), kv.flatten(1, -2)


@launches("attention", makes=("y", "state"))
def _attention(run, node, given):
    heads, k = node.attrs["heads"], run.of(node)
    if not is_of_kernels(node):
        o, state = _attend(node, given), None
    elif is_of_itself(given):
        order = node.attrs.get("order", "qkv_heads")
        o, state = k.attention_forward(_packed(given), heads, order, **rounding(node))
    else:
        o, state = k.cross_attention_forward(*_apart(given), given.get("mask"), heads)
    if state is None and "state" in node.outputs:  # whose backward pass needs none
        state = o.new_zeros(node.outputs["state"].shape)
    return o.view(node.out.shape), state


@launches("attention_grad")
def _attention_grad(run, node, given):
    heads, k = node.attrs["heads"], run.of(node)
    if not is_of_kernels(node):
        return _attention_grad_by_autograd(run, node, given)
    if not is_of_itself(given):
        q, kv = _apart(given)
        dy, o = (given[role].reshape(q.shape) for role in ("dy", "o"))
        tensors = dy, q, kv, given.get("mask"), o, given["state"]
        dq, dkv = k.cross_attention_backward(*tensors, heads)
        if "kv" in given:
            return _shaped(given, {"q": dq, "kv": dkv})
        return _shaped(given, {"q": dq} | dict(zip("kv", dkv.chunk(2, -1), strict=True)))
    qkv, order = _packed(given), node.attrs.get("order", "qkv_heads")
    dy, o = (given[role].reshape(*qkv.shape[:-1], -1) for role in ("dy", "o"))
    tensors = dy, qkv, o, given["state"]
    sums, options = run.rows_of(node), rounding(node)
    dqkv, rows = k.attention_backward(*tensors, heads, order, sums, **options)
    if "qkv" in given:
        return _shaped(given, {"qkv": dqkv}) | {"rows": rows}
    return _shaped(given, dict(zip("qkv", dqkv.chunk(3, -1), strict=True)))


def _shaped(given: Inputs, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """In the shapes of what they are gradients of, each in one piece of memory."""
    return {role: grad.reshape(given[role].shape).contiguous() for role, grad in grads.items()}


def _by_heads(node: Node, given: Inputs) -> list[Tensor]:
    """q, k and v [N, T or L, heads, d], as they lie."""
    heads = node.attrs["heads"]
    if "qkv" not in given:
        k, v = given["kv"].chunk(2, -1) if "kv" in given else (given["k"], given["v"])
        parts = given["q"], k, v
        return [x.flatten(1, -2).unflatten(-1, (heads, -1)) for x in parts]
    qkv = given["qkv"].flatten(1, -2)
    if node.attrs.get("order", "qkv_heads") == "qkv_heads":
        return list(qkv.unflatten(-1, (3, heads, -1)).unbind(2))
    return list(qkv.unflatten(-1, (heads, 3, -1)).unbind(3))


def _attend(node: Node, given: Inputs) -> Tensor:  # [N, T, C]
    """By PyTorch, of any scale and heads."""
    q, k, v = (x.transpose(1, 2) for x in _by_heads(node, given))
    mask = given.get("mask")  # [N, L]
    seen = None if mask is None else mask[:, None, None]
    scale = node.attrs["scale"]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return o.transpose(1, 2).flatten(2)


def _attention_grad_by_autograd(run: Launcher, node: Node, given: Inputs) -> dict[str, Tensor]:
    with torch.enable_grad():
        leaves = {role: leaf(given[role]) for role in PARTS if role in given}
        o = _attend(node, given | leaves)
    grads = torch.autograd.grad(o, list(leaves.values()), given["dy"].reshape(o.shape))
    made = dict(zip(leaves, grads, strict=True))
    if "rows" in node.outputs:
        made["rows"] = run.kernels.tensor_rows(made["qkv"], run.sums)
    return made


# --- linear attention -----------------------------------------------------------------------------


def _memory(given: Inputs, heads: int) -> tuple[Tensor, Tensor] | None:
    """Keys and values [M, heads, d], if there are any."""
    if MEMORY[0] not in given:
        return None
    return tuple(given[role].unflatten(-1, (heads, -1)) for role in MEMORY)


@launches("linear_attention", makes=("y", "context", "lse"))
def _linear_attention(run, node, given):
    a = node.attrs
    memory = _memory(given, a["heads"])
    tensors = *_by_heads(node, given), memory, a["scale"]
    o, context, lse = run.of(node).linear_attention_forward(*tensors)
    return o.reshape(node.out.shape), context, lse


@launches("linear_attention_grad")
def _linear_attention_grad(run, node, given):
    a = node.attrs
    images, memory = _by_heads(node, given), _memory(given, a["heads"])
    made = {role: torch.empty_like(given[role]) for role in PARTS if role in given}
    grads = _by_heads(node, Inputs(made))
    dy = given["dy"].contiguous().reshape(images[0].shape)
    kept = given["context"], given["lse"]
    backward = run.of(node).linear_attention_backward
    of_memory = backward(dy, *images, memory, a["scale"], *kept, grads)
    if of_memory is None:
        return made
    return made | dict(zip(MEMORY, (x.flatten(1) for x in of_memory), strict=True))
