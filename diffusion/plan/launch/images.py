"""Rows of images: resampling, padding, dropout and norms that are not split into parts; and of what
is rounded for products in TF32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from triton_kernels.reference import fused
from triton_kernels.registry.spec import MOST_CHANNELS

from .pytorch import as_it_lies, copy_all, order_of_kernels
from .table import by_pytorch, image, launches

_ROW = 64  # numbers of a row of parameters that are rounded
HALF = (2, 2)  # pixels of a block, which the kernels have; PyTorch computes other blocks


@launches("upsample")
def _upsample(run, node, given):
    fy, fx = node.attrs["factor"]
    if (fy, fx) == HALF:
        return run.kernels.upsample(given["x"])
    return given["x"].repeat_interleave(fy, 1).repeat_interleave(fx, 2)


def _blocks(x: Tensor, window: tuple[int, int]) -> Tensor:
    """[N, H, W, C] as [N, H / y, y, W / x, x, C], without what is left over."""
    n, h, w, c = x.shape
    y, z = window
    return x[:, : h // y * y, : w // z * z].reshape(n, h // y, y, w // z, z, c)


@launches("avg_pool", makes=("y", "partials"))
def _avg_pool(run, node, given):
    x, window = given["x"], node.attrs["window"]
    if window == HALF and not (x.shape[1] % 2 or x.shape[2] % 2):
        return run.kernels.avg_pool(x, "partials" in node.outputs)
    return _blocks(x, window).mean((2, 4)), None


@launches("sum_pool")
def _sum_pool(run, node, given):
    if node.attrs["window"] == HALF:
        return run.kernels.upsample_grad(given["x"])
    return _blocks(given["x"], node.attrs["window"]).sum((2, 4))


@launches("fir")
def _fir(run, node, given):
    return run.kernels.fir(given["x"].contiguous(), **node.attrs, size=node.out.shape[1:3])


@launches("avg_pool_grad", makes=("y", "rows"))
def _avg_pool_grad(run, node, given):
    return run.kernels.avg_pool_grad(given["dy"], given.get("add"), run.rows_of(node))


@launches("pad_channels")
def _pad_channels(run, node, given):
    x = given["x"].contiguous()
    return run.kernels.pad_channels(x, node.out.shape[-1], node.out.dtype)


@launches("rounded")
def _rounded(run, node, given):
    """In one launch, over memory in which each parameter begins a row."""
    xs = list(given.values())
    likes = [torch.empty_like(x, memory_format=order_of_kernels(x), device="meta") for x in xs]
    rows = [-(-x.numel() // _ROW) for x in xs]
    whole = torch.empty((sum(rows), _ROW), dtype=node.out.dtype, device=xs[0].device)

    def pieces(whole: Tensor) -> list[Tensor]:
        found = zip(whole.split(rows), likes, strict=True)
        return [piece.as_strided(x.shape, x.stride()) for piece, x in found]

    copy_all(xs, pieces(whole), run.kernels)
    made = run.kernels.pad_channels(whole, _ROW, whole.dtype)
    return dict(zip(node.outputs, pieces(made), strict=True))


@by_pytorch("pad")
def _pad(run, node, given):
    """In a step, which pads filters each time, by a kernel, in their memory."""
    if run.is_step:
        weight, width = given["x"].permute(0, 2, 3, 1), node.out.shape[1]
        return run.kernels.pad_channels(weight, width, node.out.dtype).permute(0, 3, 1, 2)
    return F.pad(given["x"], [n for pair in reversed(node.attrs["pads"]) for n in pair])


@launches("dropout")
def _dropout(run, node, given):
    a, x = node.attrs, given["x"]
    if "rng" in given:
        drawn = a["p"], given["rng"]
        x = image(x).contiguous()
        y = run.public.dropout(x, *drawn, layer=a["layer"], first=given["first"])
        return y.view(node.out.shape)
    if a["p"] == 1:
        mask = torch.zeros_like(x)
    else:
        mask = torch.empty_like(x).bernoulli_(1 - a["p"]).div_(1 - a["p"])
    return {"y": x * mask, "mask": mask}


@launches("elementwise")
def _elementwise(run, node, given):
    # a gradient that PyTorch has made may be sparse
    tensors = [x.to_dense() if x.is_sparse else x.contiguous() for x in given.values()]
    a = node.attrs
    results = zip(a["places"], (v.dtype for v in node.outputs.values()), strict=True)
    ys = run.kernels.elementwise(tensors, a["has"], a["steps"], [*results], node.out.shape)
    return dict(zip(node.outputs, ys, strict=True))


@launches("gated")
def _gated(run, node, given):
    return run.kernels.gated_forward(given["x"].contiguous(), **node.attrs)


@launches("gated_grad")
def _gated_grad(run, node, given):
    dy, x = given["dy"].contiguous(), given["x"].contiguous()
    return run.kernels.gated_backward(dy, x, **node.attrs)


@launches("group_norm")
def _group_norm(run, node, given):
    """Of a graph as it was traced; `norms` splits them."""
    x, a = given["x"], node.attrs
    options = {name: given.get(name) for name in ("scale", "shift")}
    options |= {"eps": a["eps"], "activation": a["activation"]}
    affine = given.get("weight"), given.get("bias")
    return run.public.group_norm(image(x), a["groups"], *affine, **options).view(x.shape)


_OF_NORM = ("weight", "bias", "scale", "shift")


def _of_channels(run, node):
    """The kernels for norms of so many channels."""
    x = node.inputs["x"]
    channels = x.numel // x.shape[0] if node.attrs.get("of_filters") else x.shape[-1]
    return run.kernels if channels <= MOST_CHANNELS else fused


def _in_rows(x: Tensor, like: Tensor) -> Tensor:
    """Filters [CO, CI, R, S] as [CO, -1], in the order in which those of `like` lie."""
    return (x.permute(0, 2, 3, 1) if _is_as_read(like) else x).flatten(1).contiguous()


def _of_rows(rows: Tensor, like: Tensor) -> Tensor:
    """The way back."""
    co, ci, *size = like.shape
    if _is_as_read(like):
        return rows.view(co, *size, ci).permute(0, 3, 1, 2)
    return rows.view(like.shape)


def _is_as_read(x: Tensor) -> bool:
    """Whether filters lie in memory as kernels read them, so that nothing has to be copied."""
    return x.is_contiguous(memory_format=torch.channels_last)


@launches("channel_norm")
def _channel_norm(run, node, given):
    params, x = tuple(given.get(role) for role in _OF_NORM), given["x"]
    options = {"dtype": node.out.dtype, "residual": given.get("residual")} | node.attrs
    made = _of_channels(run, node).channel_norm_forward
    if options.pop("of_filters", False):
        return {"y": run.filters(_of_rows(made(_in_rows(x, x), params, **options), x))}
    return {"y": made(x.contiguous(), params, **options)}


@launches("channel_norm_grad")
def _channel_norm_grad(run, node, given):
    x, dy, params = given["x"], given["dy"], tuple(given.get(role) for role in _OF_NORM)
    needed = tuple(role in node.outputs for role in ("x", *_OF_NORM))
    kept = {role: run.rows_of(node, role) for role in ("rows", "sums")}
    options = node.attrs | {"add": given.get("add")} | kept
    made = _of_channels(run, node).channel_norm_backward
    if options.pop("of_filters", False):
        dy, add = (g if g is None else as_it_lies(g, x, run.kernels) for g in (dy, options["add"]))
        options["add"] = None if add is None else _in_rows(add, x)
        dx, *_ = made(_in_rows(dy, x), _in_rows(x, x), params, needed, **options)
        return {"x": _of_rows(dx, x)}
    made = made(dy.contiguous(), x.contiguous(), params, needed, **options)
    return dict(zip(("x", *_OF_NORM, *kept), made, strict=True))
