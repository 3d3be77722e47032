"""Calls of the forward pass, except norms."""

import torch
import torch.nn.functional as F
from torch import Tensor

from triton_kernels import reference
from triton_kernels.reference import ACTIVATION_FUNCTIONS

from ..graph import Node
from ..lower.table import call_arguments
from .table import Inputs, image, launches, many


def _padded(x: Tensor, padding: tuple[int, int, int, int]) -> tuple[Tensor, tuple[int, int]]:
    """x with zeros where the padding is not the same on both sides, and the padding of the rest."""
    y0, y1, x0, x1 = padding
    if (y0, x0) == (y1, x1):
        return x, (y0, x0)
    return F.pad(x, (0, 0, x0, x1, y0, y1)), (0, 0)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride, padding) -> Tensor:
    x, padding = _padded(x, padding)
    bias = None if bias is None else bias.to(x.dtype)
    y = F.conv2d(x.permute(0, 3, 1, 2), weight.to(x.dtype), bias, stride, padding)
    return y.permute(0, 2, 3, 1).contiguous()


@launches("conv")
def _conv(k, node, given):
    return convolve(given["x"], given["weight"], given.get("bias"), **node.attrs)


@launches("linear")
def _linear(k, node, given):
    return F.linear(given["x"], given["weight"], given.get("bias"))


@launches("act")
def _act(k, node, given):
    return ACTIVATION_FUNCTIONS[node.attrs["activation"]](given["x"])


@launches("group_norm")
def _group_norm(k, node, given):
    x = given["x"]
    film = {name: given.get(name) for name in ("scale", "shift")}
    a = node.attrs
    y = reference.group_norm(
        image(x),
        a["groups"],
        given.get("weight"),
        given.get("bias"),
        eps=a["eps"],
        activation=a["activation"],
        **film,
    )
    return y.view(x.shape)


def in_dtype(given: Inputs, role: str) -> Tensor | None:
    """An affine parameter of a layer norm in the dtype of its x, as PyTorch's kernel wants it."""
    return None if role not in given else given[role].to(given["x"].dtype)


@launches("layer_norm")
def _layer_norm(k, node, given):
    x, a = given["x"], node.attrs
    affine = in_dtype(given, "weight"), in_dtype(given, "bias")
    made = torch.native_layer_norm(x.contiguous(), x.shape[x.ndim - a["axes"] :], *affine, a["eps"])
    return dict(zip(("y", "mean", "rstd"), made, strict=True))


def _heads(x: Tensor, heads: int) -> Tensor:
    """[N, ..., C] as [N, heads, T, d]"""
    return x.reshape(x.shape[0], -1, heads, x.shape[-1] // heads).transpose(1, 2)


def attend(given: Inputs, heads: int, scale: float, order: str | None = None) -> Tensor:
    if "qkv" in given:
        qkv = given["qkv"]
        n, c3 = qkv.shape[0], qkv.shape[-1]
        d = c3 // 3 // heads
        if order == "qkv_heads":
            q, k, v = qkv.reshape(n, -1, 3, heads, d).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = qkv.reshape(n, -1, heads, 3, d).permute(3, 0, 2, 1, 4)
        shape = (*qkv.shape[:-1], c3 // 3)
    else:
        parts = given["kv"].chunk(2, -1) if "kv" in given else (given["k"], given["v"])
        q, k, v = (_heads(x, heads) for x in (given["q"], *parts))
        shape = given["q"].shape
    mask = given.get("mask")  # [N, L]
    seen = None if mask is None else mask[:, None, None]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return o.transpose(1, 2).reshape(shape)


@launches("attention")
def _attention(k, node, given):
    """The reference needs nothing for its backward pass."""
    made = {"y": attend(given, **node.attrs)}
    if "state" in node.outputs:
        made["state"] = made["y"].new_zeros(node.outputs["state"].shape)
    return made


@launches("cat")
def _cat(k, node, given):
    return torch.cat(many(given, "x"), node.attrs["axis"])


@launches("add")
def _add(k, node, given):
    return given["a"] + given["b"]


@launches("mul")
def _mul(k, node, given):
    return given["a"] * given["b"]


@launches("affine")
def _affine(k, node, given):
    return given["x"] * node.attrs["scale"] + node.attrs["offset"]


@launches("upsample")
def _upsample(k, node, given):
    fy, fx = node.attrs["factor"]
    return given["x"].repeat_interleave(fy, 1).repeat_interleave(fx, 2)


def _blocks(x: Tensor, window: tuple[int, int]) -> Tensor:
    """[N, H, W, C] as [N, H / y, y, W / x, x, C], without what is left over."""
    n, h, w, c = x.shape
    y, z = window
    return x[:, : h // y * y, : w // z * z].reshape(n, h // y, y, w // z, z, c)


@launches("avg_pool")
def _avg_pool(k, node, given):
    return _blocks(given["x"], node.attrs["window"]).mean((2, 4))


@launches("sum_pool")
def _sum_pool(k, node, given):
    return _blocks(given["x"], node.attrs["window"]).sum((2, 4))


@launches("slice")
def _slice(k, node, given):
    a = node.attrs
    return given["x"].narrow(a["axis"], a["start"], a["stop"] - a["start"]).contiguous()


@launches("pad")
def _pad(k, node, given):
    amounts = [n for pair in reversed(node.attrs["pads"]) for n in pair]
    return F.pad(given["x"], amounts)


@launches("dropout")
def _dropout(k, node, given):
    a, x = node.attrs, given["x"]
    if "rng" in given:
        return reference.dropout(x, a["p"], given["rng"], layer=a["layer"], first=a["first"])
    if a["p"] == 1:
        mask = torch.zeros_like(x)
    else:
        mask = torch.empty_like(x).bernoulli_(1 - a["p"]).div_(1 - a["p"])
    return {"y": x * mask, "mask": mask}


@launches("cast")
def _cast(k, node, given):
    return given["x"].to(node.out.dtype)


@launches("casts")
def _casts(k, node, given):
    made = [torch.empty_like(x, dtype=node.out.dtype) for x in given.values()]
    torch._foreach_copy_(made, list(given.values()))
    return dict(zip(node.outputs, made, strict=True))


@launches("embedding")
def _embedding(k, node, given):
    return F.embedding(given["index"], given["weight"])


@launches("reshape")
def _reshape(k, node, given):
    return given["x"].reshape(node.out.shape)


@launches("detach")
def _detach(k, node, given):
    return given["x"]


@launches("columns")
def _columns(k, node, given):
    return given["x"][..., node.attrs["start"] : node.attrs["stop"]]


@launches("pad_channels")
def _pad_channels(k, node, given):
    return k.pad_channels(given["x"], node.out.shape[-1], node.out.dtype)


@launches("layout")
def _layout(k, node, given):
    return _pieces(given["x"].contiguous(), node).reshape(node.out.shape).contiguous()


def _pieces(x: Tensor, node: Node) -> Tensor:
    """What a layout node reads of x."""
    pieces = node.attrs["pieces"]
    sizes, steps = [n for n, _ in pieces], [step for _, step in pieces]
    return x.as_strided(sizes, steps, x.storage_offset() + node.attrs["offset"])


@launches("arith")
def _arith(k, node, given):
    a = node.attrs
    return a["target"](*call_arguments(a["arguments"], list(given.values())), **a["options"])
