"""Calls of the ops on a GPU: `triton_kernels.fused_ops`, and the public ops for strides and rows.

Ops that are missing here are called as on a CPU (`execute`): kernels of `fused_ops` with the
reference's signatures, and PyTorch for moving or adding a few numbers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import triton_kernels
from triton_kernels import fused_ops
from triton_kernels.attention import (
    attention_bwd_rows,
    attention_fwd,
    cross_attention_bwd,
    cross_attention_fwd,
)

from .calls.table import LAUNCHES, Inputs, filters, image
from .execute import launch_reference, results
from .graph import Node, Value

ON_GPU: dict[str, Callable[[ModuleType, Node, Inputs], Any]] = {}
_SUM_PROGRAMS = 128  # that take the sums of a tensor, at least


def on_gpu(op: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        ON_GPU[op] = function
        return function

    return register


def launch_kernels(node: Node, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
    """On the Triton kernels; of float64 on PyTorch's."""
    if any(value.dtype == torch.float64 for value in node.outputs.values()):
        return launch_reference(node, values)
    inputs = {role: values[value] for role, value in node.inputs.items()}
    call = ON_GPU.get(node.op) or LAUNCHES[node.op]
    return results(node, call(fused_ops, node, inputs))


def launcher_of(kernels: ModuleType) -> Callable:
    """What launches a node on this module of kernels, as `execute.run` takes it."""
    return launch_kernels if kernels is fused_ops else partial(launch_reference, kernels=kernels)


def _conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride=(1, 1), padding=(0,) * 4, tf32=True
) -> Tensor:
    """The public op, of any shape."""
    y0, y1, x0, x1 = padding
    if (y0, x0) != (y1, x1):
        x, y0, x0 = torch.nn.functional.pad(x, (0, 0, x0, x1, y0, y1)), 0, 0
    weight, bias = filters(weight), None if bias is None else bias.contiguous()
    options = {"stride": stride[0], "padding": (y0, x0), "allow_tf32": tf32}
    return triton_kernels.conv2d(x.contiguous(), weight, bias, **options)


@on_gpu("conv")
def _conv(k, node, given):
    bias = given.get("bias")
    return _conv2d(given["x"], given["weight"], bias, **node.attrs, tf32=node.tf32)


@on_gpu("linear")
def _linear(k, node, given):
    x, weight = given["x"], given["weight"]
    if x.ndim == 4 and node.tf32:
        return k.conv_forward(x, filters(weight), _bias(given, weight))[0]
    rows = x if x.ndim == 4 else x.reshape(1, 1, -1, x.shape[-1])
    return _conv2d(rows, weight, given.get("bias"), tf32=node.tf32).view(node.out.shape)


def _bias(given: Inputs, weight: Tensor) -> Tensor:
    bias = given.get("bias")
    zeros = {"dtype": torch.float32, "device": weight.device}
    return torch.zeros(weight.shape[0], **zeros) if bias is None else bias


@on_gpu("conv_fused")
def _conv_fused(k, node, given):
    prepared = {"weight": filters(given["weight"]), "bias": _bias(given, given["weight"])}
    return LAUNCHES["conv_fused"](k, node, given | prepared)


@on_gpu("dropout")
def _dropout(k, node, given):
    if "rng" not in given:
        return LAUNCHES["dropout"](k, node, given)
    a = node.attrs
    x = image(given["x"])
    y = triton_kernels.dropout(x, a["p"], given["rng"], layer=a["layer"], first=a["first"])
    return y.view(node.out.shape)


@on_gpu("moments")
def _moments(k, node, given):
    return k.tensor_partials(image(given["x"]).contiguous(), _SUM_PROGRAMS)


@on_gpu("upsample")
def _upsample(k, node, given):
    return _halved(node, "factor", k.upsample, given)


@on_gpu("avg_pool")
def _avg_pool(k, node, given):
    even = not (given["x"].shape[1] % 2 or given["x"].shape[2] % 2)
    return _halved(node, "window", k.avg_pool if even else None, given)


@on_gpu("sum_pool")
def _sum_pool(k, node, given):
    return _halved(node, "window", k.upsample_grad, given)


def _halved(node: Node, role: str, kernel: Callable | None, given: Inputs) -> Tensor:
    """2x2 pixels by the kernel, other blocks by PyTorch."""
    if node.attrs[role] != (2, 2) or kernel is None:
        return LAUNCHES[node.op](fused_ops, node, given)
    return kernel(given["x"])


@on_gpu("attention")
def _attention(k, node, given):
    if not _plain_scale(node):
        return LAUNCHES["attention"](k, node, given)
    if not _of_itself(given):
        heads, (q, kv) = node.attrs["heads"], _apart(given)
        o, lse = cross_attention_fwd(q, kv, given.get("mask"), heads, node.tf32)
        return {"y": o.view(node.out.shape), "state": lse}
    qkv, order = _packed(given), node.attrs.get("order", "qkv_heads")
    o, lse = attention_fwd(qkv, node.attrs["heads"], order, allow_tf32=node.tf32)
    return {"y": o.view(node.out.shape), "state": lse}


def _of_itself(given: Inputs) -> bool:
    """Whether keys are of the same positions as queries, and all are seen."""
    if "qkv" in given:
        return True
    return "k" in given and "mask" not in given and given["k"].shape == given["q"].shape


def _apart(given: Inputs) -> tuple[Tensor, Tensor]:  # [N, T, C], [N, L, 2C]
    kv = given["kv"] if "kv" in given else torch.cat((given["k"], given["v"]), -1)
    return given["q"].flatten(1, -2), kv.flatten(1, -2)


def _packed(given: Inputs) -> Tensor:  # [N, T, 3C]
    if "qkv" in given:
        qkv = given["qkv"]
    else:
        qkv = torch.cat([given[role] for role in "qkv"], -1)
    return qkv.reshape(qkv.shape[0], -1, qkv.shape[-1])


def _plain_scale(node: Node) -> bool:
    values = node.inputs
    d = (values.get("qkv", values.get("q")).shape[-1]) // node.attrs["heads"]
    d = d // 3 if "qkv" in values else d
    return abs(node.attrs["scale"] * d**0.5 - 1) < 1e-6


@on_gpu("attention_grad")
def _attention_grad(k, node, given):
    if not _plain_scale(node):
        return LAUNCHES["attention_grad"](k, node, given)
    heads = node.attrs["heads"]
    if not _of_itself(given):
        return _cross_attention_grad(node, given)
    qkv, order = _packed(given), node.attrs.get("order", "qkv_heads")
    o = given["o"].reshape(*qkv.shape[:-1], -1)
    dy, lse = given["dy"].reshape(o.shape), given["state"]
    place = partial(_rows, qkv.device) if "rows" in node.outputs else None
    dqkv, rows = attention_bwd_rows(dy, qkv, o, lse, heads, order, node.tf32, place)
    if "qkv" in given:
        return {"qkv": dqkv.view(given["qkv"].shape), "rows": rows}
    parts = zip("qkv", dqkv.chunk(3, -1), strict=True)
    return {role: part.reshape(given["q"].shape) for role, part in parts}


def _cross_attention_grad(node: Node, given: Inputs) -> dict[str, Tensor]:
    q, kv = _apart(given)
    dy, o = (given[role].reshape(q.shape) for role in ("dy", "o"))
    tensors = dy, q, kv, given.get("mask"), o, given["state"]
    dq, dkv = cross_attention_bwd(*tensors, node.attrs["heads"], node.tf32)
    made = {"q": dq.view(given["q"].shape)}
    if "kv" in given:
        return made | {"kv": dkv.view(given["kv"].shape)}
    parts = zip("kv", dkv.chunk(2, -1), strict=True)
    return made | {role: part.reshape(given[role].shape) for role, part in parts}


def _rows(device: torch.device, rows: int, columns: int) -> Tensor:
    return torch.empty((rows, columns), dtype=torch.float32, device=device)


# --- backward -------------------------------------------------------------------------------------


def _fused(node: Node) -> bool:
    """Whether a gradient is one of the fused kernels', which have stride 1 and TF32."""
    return node.attrs.get("stride", (1, 1)) == (1, 1) and node.tf32


def _by_autograd(node: Node, x: Tensor, weight: Tensor, dy: Tensor, of_weight: bool) -> Tensor:
    """A gradient of the public op, of any shape."""
    with torch.enable_grad():
        leaf = (filters(weight) if of_weight else x).detach().requires_grad_()
        operands = (x, leaf) if of_weight else (leaf, weight)
        y = _conv2d(*operands, None, **node.attrs, tf32=node.tf32)
    return torch.autograd.grad(y, leaf, dy.contiguous())[0]


@on_gpu("conv_dx")
def _conv_dx(k, node, given):
    dy, weight = given["dy"], given["weight"]
    if _fused(node):
        return k.conv_plain_input_grad(dy, filters(weight))
    x = torch.empty(node.out.shape, dtype=dy.dtype, device=dy.device)
    return _by_autograd(node, x, weight, dy, of_weight=False)


@on_gpu("linear_dx")
def _linear_dx(k, node, given):
    dy, weight = given["dy"], given["weight"]
    if dy.ndim == 4 and node.tf32:
        return k.conv_plain_input_grad(dy, filters(weight))
    rows = dy if dy.ndim == 4 else dy.reshape(1, 1, -1, dy.shape[-1])
    return _conv2d(rows, weight.T, None, tf32=node.tf32).view(node.out.shape)


def _weight_grad(k, node: Node, x: Tensor, dy: Tensor, shape: tuple[int, ...]) -> Tensor:
    co, ci, r, s = shape
    out = torch.empty((co, r, s, ci), dtype=torch.float32, device=x.device).permute(0, 3, 1, 2)
    if _fused(node):
        k.conv_weight_grad(x, dy, out)
        return out
    return _by_autograd(node, x, torch.zeros_like(out, dtype=x.dtype), dy, of_weight=True)


@on_gpu("conv_dw")
def _conv_dw(k, node, given):
    return _weight_grad(k, node, given["x"], given["dy"], node.out.shape)


@on_gpu("linear_dw")
def _linear_dw(k, node, given):
    x, dy = given["x"], given["dy"]
    if x.ndim != 4:
        x, dy = (v.reshape(1, 1, -1, v.shape[-1]) for v in (x, dy))
    shape = (*node.out.shape, 1, 1)
    return _weight_grad(k, node, x.contiguous(), dy.contiguous(), shape).reshape(node.out.shape)


@on_gpu("conv_input_grad")
def _conv_input_grad(k, node, given):
    return LAUNCHES["conv_input_grad"](k, node, given | {"weight": filters(given["weight"])})
