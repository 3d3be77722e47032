"""Rows of ops by PyTorch's kernels: moving, adding and multiplying a few numbers, and layers that
the framework has no kernels of."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from triton_kernels.reference import ACTIVATION_FUNCTIONS

from ..graph import Node, many
from ..lower.table import call_arguments
from .table import Inputs, Kernels, by_pytorch


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _affine(x: Tensor, scale: float, offset: float) -> Tensor:
    """By one kernel if one does."""
    if offset == 0:
        return x * scale
    return x + offset if scale == 1 else x * scale + offset


# op -> its result, of the node's attributes and of what it reads
_FORMULAS: dict[str, Callable[[Node, Inputs], Tensor]] = {
    "act": lambda node, given: ACTIVATION_FUNCTIONS[node.attrs["activation"]](given["x"]),
    "add": lambda _, given: given["a"] + given["b"],
    "mul": lambda _, given: given["a"] * given["b"],
    "affine": lambda node, given: _affine(given["x"], **node.attrs),
    "sum": lambda node, given: given["x"].sum(node.attrs["axes"]).reshape(node.out.shape),
    "reshape": lambda node, given: given["x"].reshape(node.out.shape),
    "detach": lambda _, given: given["x"],
    "rewritten": lambda _, given: given["x"],
    "columns": lambda node, given: given["x"][..., node.attrs["start"] : node.attrs["stop"]],
    "cast": lambda node, given: given["x"].to(node.out.dtype),
    "embedding": lambda _, given: F.embedding(given["index"], given["weight"]),
}
for _op, _formula in _FORMULAS.items():
    by_pytorch(_op)(lambda run, node, given, formula=_formula: formula(node, given))


@by_pytorch("cat")
def _cat(run, node, given):
    """In the type of its value, which need not be that of what it reads."""
    parts, axis = many(given, "x"), node.attrs["axis"]
    if all(x.dtype == node.out.dtype for x in parts):
        return torch.cat(parts, axis)
    out = torch.empty(node.out.shape, dtype=node.out.dtype, device=parts[0].device)
    return torch.cat(parts, axis, out=out)


@by_pytorch("slice")
def _slice(run, node, given):
    a, x = node.attrs, given["x"]
    part = x.narrow(a["axis"], a["start"], a["stop"] - a["start"])
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    if last and not x.is_contiguous():  # filters, as kernels read them
        return part.contiguous(memory_format=torch.channels_last)
    return part.contiguous()


@by_pytorch("act_grad")
def _act_grad(run, node, given):
    with torch.enable_grad():
        x = leaf(given["x"])
        y = ACTIVATION_FUNCTIONS[node.attrs["activation"]](x)
    return torch.autograd.grad(y, x, given["dy"])[0]


# --- arithmetic -----------------------------------------------------------------------------------


def _called(node: Node, tensors: list[Tensor], **more: Any) -> Tensor:
    a = node.attrs
    return a["target"](*call_arguments(a["arguments"], tensors), **a["options"], **more)


@by_pytorch("arith")
def _arith(run, node, given):
    return _called(node, many(given, "x"))


@by_pytorch("draw")
def _draw(run, node, given):
    where = {"device": given["beside"].device} if "beside" in given else {}
    return _called(node, many(given, "x"), **where).contiguous()


@by_pytorch("arith_grad")
def _arith_grad(run, node, given):
    a = node.attrs
    tensors = many(given, "x")
    with torch.enable_grad():
        for i in a["of"]:
            tensors[i] = leaf(tensors[i])
        y = _called(node, tensors)
    of = [tensors[i] for i in a["of"]]
    grads = torch.autograd.grad(y, of, given["dy"].to(y.dtype), allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(of, grads, strict=True)]
    grads = [_as_it_lies(g, x) for x, g in zip(of, grads, strict=True)]
    return {f"d{i}": grad for i, grad in zip(a["of"], grads, strict=True)}


def _as_it_lies(grad: Tensor, x: Tensor) -> Tensor:
    """In x's order, for the kernel that reads it, unless it repeats numbers."""
    moved = x.is_contiguous() and 0 not in grad.stride()
    return grad.contiguous() if moved else grad


# --- moving numbers -------------------------------------------------------------------------------


@by_pytorch("casts")
def _casts(run, node, given):
    """`parts` has the numbers of what each result is of, side by side if there are several."""
    xs, made, results = list(given.values()), {}, {}
    for (role, value), (first, *others) in zip(
        node.outputs.items(), node.attrs["parts"], strict=True
    ):
        x = xs[first]
        if not others and x.shape != value.shape:  # an axis of one more, or elsewhere
            x = xs[first] = x.view(value.shape)
        if others:
            y = torch.empty(value.shape, dtype=value.dtype, device=x.device)
            at = [first, *others]
            made |= zip(at, y.split([len(xs[i]) for i in at]), strict=True)
        else:
            y = torch.empty_like(x, dtype=value.dtype, memory_format=order_of_kernels(x))
            made[first] = y
        results[role] = y
    copy_all(xs, [made[i] for i in range(len(xs))], run.kernels)
    return results


def order_of_kernels(x: Tensor) -> torch.memory_format:
    """That in which kernels read filters, whatever the module's is; of other parameters theirs."""
    as_read = x.ndim != 4 or x.is_contiguous(memory_format=torch.channels_last)
    return torch.preserve_format if as_read else torch.channels_last


def copy_all(xs: Sequence[Tensor], made: Sequence[Tensor], kernels: Kernels) -> None:
    """Those that lie in memory alike in few launches of PyTorch, each other by a kernel of ours."""
    alike = [x.stride() == y.stride() for x, y in zip(xs, made, strict=True)]
    for x, y, same in zip(xs, made, alike, strict=True):
        if not same:
            kernels.reorder(x, y)
    if any(alike):
        torch._foreach_copy_(list(compress(made, alike)), list(compress(xs, alike)))


def is_reordered(grad: Tensor, parameter: Tensor) -> bool:
    """Whether it is that of filters in the order of kernels, and these are in PyTorch's, to which
    autograd copies it by a slower kernel."""
    if grad.ndim not in (3, 4) or grad.is_contiguous():
        return False
    return parameter.is_contiguous() and grad.shape == parameter.shape


def as_it_lies(grad: Tensor, parameter: Tensor, kernels: Kernels) -> Tensor:
    """The gradient of filters in the order of the parameter; any other as it is."""
    if not is_reordered(grad, parameter):
        return grad
    out = torch.empty_like(parameter, dtype=grad.dtype, device=grad.device)
    kernels.reorder(grad, out)
    return out


@by_pytorch("layout")
def _layout(run, node, given):
    """In the type of its value, which need not be that of what it reads."""
    x = _pieces(given["x"].contiguous(), node)
    if x.dtype != node.out.dtype:
        x = x.to(node.out.dtype, memory_format=torch.contiguous_format)
    return x.reshape(node.out.shape).contiguous()


def _pieces(x: Tensor, node: Node) -> Tensor:
    """What a layout node reads of x."""
    pieces = node.attrs["pieces"]
    sizes, steps = [n for n, _ in pieces], [step for _, step in pieces]
    return x.as_strided(sizes, steps, x.storage_offset() + node.attrs["offset"])


@by_pytorch("layout_grad")
def _layout_grad(run, node, given):
    pieces = node.attrs["pieces"]
    dy = given["dy"].reshape([n for n, _ in pieces])
    repeated = [i for i, (_, step) in enumerate(pieces) if step == 0]
    dy = dy.sum(repeated, keepdim=True) if repeated else dy
    out = dy.new_zeros(node.out.shape)
    sizes = [n if step else 1 for n, step in pieces]
    out.as_strided(sizes, [s for _, s in pieces], node.attrs["offset"]).copy_(dy)
    return out


@by_pytorch("embedding_grad")
def _embedding_grad(run, node, given):
    dy, index = given["dy"], given["index"]
    out = dy.new_zeros(node.out.shape)
    out.index_add_(0, index.reshape(-1), dy.reshape(-1, dy.shape[-1]))
    if node.attrs["unchanged"] >= 0:
        out[node.attrs["unchanged"]] = 0
    return out


@by_pytorch("accumulate")
def _accumulate(run, node, given):
    place = given.into["y"]
    move = place.copy_ if node.attrs["writes"] else place.add_
    move(given["x"].view_as(place))
    return {}
