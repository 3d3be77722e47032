"""Calls of the backward pass."""

import torch
from torch import Tensor

from triton_kernels.reference import ACTIVATION_FUNCTIONS

from ..graph import PARTS
from ..lower.table import call_arguments
from .forward import attend, convolve, in_dtype
from .table import launches, many


def _grads(outputs: Tensor, inputs: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs, inputs, dy)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


@launches("conv_dx")
def _conv_dx(k, node, given):
    dy, weight = given["dy"], given["weight"]
    with torch.enable_grad():
        x = dy.new_zeros(node.out.shape).requires_grad_()
        y = convolve(x, weight.detach(), None, **node.attrs)
    return _grads(y, [x], dy)[0].contiguous()


@launches("conv_dw")
def _conv_dw(k, node, given):
    with torch.enable_grad():
        weight = given["x"].new_zeros(node.out.shape).requires_grad_()
        y = convolve(given["x"].detach(), weight, None, **node.attrs)
    return _grads(y, [weight], given["dy"])[0]


@launches("linear_dx")
def _linear_dx(k, node, given):
    return given["dy"] @ given["weight"]


@launches("linear_dw")
def _linear_dw(k, node, given):
    x, dy = given["x"], given["dy"]
    return dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])


@launches("act_grad")
def _act_grad(k, node, given):
    with torch.enable_grad():
        x = _leaf(given["x"])
        y = ACTIVATION_FUNCTIONS[node.attrs["activation"]](x)
    return _grads(y, [x], given["dy"])[0]


@launches("attention_grad")
def _attention_grad(k, node, given):
    with torch.enable_grad():
        leaves = {role: _leaf(given[role]) for role in PARTS if role in given}
        o = attend(given | leaves, **node.attrs)
    grads = _grads(o, list(leaves.values()), given["dy"])
    made = dict(zip(leaves, grads, strict=True))
    if "rows" in node.outputs:
        made["rows"] = made["qkv"].flatten(1, -2).sum(1)
    return made


@launches("sum")
def _sum(k, node, given):
    return given["x"].sum(node.attrs["axes"]).reshape(node.out.shape)


@launches("embedding_grad")
def _embedding_grad(k, node, given):
    dy, index = given["dy"], given["index"]
    out = dy.new_zeros(node.out.shape)
    out.index_add_(0, index.reshape(-1), dy.reshape(-1, dy.shape[-1]))
    if node.attrs["unchanged"] >= 0:
        out[node.attrs["unchanged"]] = 0
    return out


@launches("layout_grad")
def _layout_grad(k, node, given):
    pieces = node.attrs["pieces"]
    dy = given["dy"].reshape([n for n, _ in pieces])
    repeated = [i for i, (_, step) in enumerate(pieces) if step == 0]
    dy = dy.sum(repeated, keepdim=True) if repeated else dy
    out = dy.new_zeros(node.out.shape)
    sizes = [n if step else 1 for n, step in pieces]
    out.as_strided(sizes, [s for _, s in pieces], node.attrs["offset"]).copy_(dy)
    return out


@launches("arith_grad")
def _arith_grad(k, node, given):
    a = node.attrs
    tensors = many(given, "x")
    with torch.enable_grad():
        for i in a["of"]:
            tensors[i] = _leaf(tensors[i])
        y = a["target"](*call_arguments(a["arguments"], tensors), **a["options"])
    grads = _grads(y, [tensors[i] for i in a["of"]], given["dy"].to(y.dtype))
    return {f"d{i}": grad for i, grad in zip(a["of"], grads, strict=True)}


@launches("layer_norm_grad")
def _layer_norm_grad(k, node, given):
    x, (weight, bias) = given["x"], (in_dtype(given, role) for role in ("weight", "bias"))
    over = x.shape[x.ndim - node.attrs["axes"] :]
    roles = ("x", "weight", "bias")
    asked = [role in node.outputs for role in roles]
    stats = given["mean"], given["rstd"]
    operands = given["dy"].to(x.dtype).contiguous(), x.contiguous(), over, *stats, weight, bias
    made = torch.ops.aten.native_layer_norm_backward(*operands, asked)
    return {role: y for role, y in zip(roles, made, strict=True) if y is not None}
