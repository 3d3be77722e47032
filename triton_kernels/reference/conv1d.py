"""The stages of `conv1d.conv1d` under the same names and signatures, over the ops of `reference`.

The specification of those kernels. What is multiplied is rounded to the dtype of the weights, the
rest is in that of the activation's parts: with float64 everywhere it is exact.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..conv1d.conv1d import PROJECT_BLOCK, Outcome
from ..conv1d.operands import Activation, Stem, Sums
from ..conv1d.weights import Conv, pack_conv, unpack_conv

__all__ = ["PROJECT_BLOCK", "conv_stage", "head", "pack_conv", "project"]


def conv_stage(
    activation: Activation,
    conv: Conv,
    *,
    skip: Tensor | None = None,  # [N, C2, T]
    keep: bool = False,
    batched: bool = False,
    allow_tf32: bool = False,
) -> Outcome:
    """There is one partial sum: the whole."""
    a = make(activation)
    x = a if skip is None else torch.cat((a, skip), dim=1)
    tiles = unpack_conv(conv).mT  # [rows, C, taps and skip]
    taps = tiles[..., : conv.taps]
    if conv.transposed:
        even, odd = taps.chunk(2)  # over x[i] and x[i - 1], and over x[i] and x[i + 1]
        zero = torch.zeros_like(even[..., :1])
        y = torch.stack(
            (
                _conv(x, torch.cat((even.flip(2), zero), dim=2)),
                _conv(x, torch.cat((zero, odd), dim=2)),
            ),
            dim=3,
        ).flatten(2)
    else:
        y = _conv(x, taps, conv.stride)
    side = _conv(x, tiles[..., conv.taps :])[None] if conv.side else None
    return Outcome(y[None], side, a if keep else None)


def head(activation: Activation, weight: Tensor, bias: Tensor) -> Tensor:
    """See `conv1d.conv1d.head`."""
    return (_conv(make(activation), weight[:, :, None]) + bias[:, None]).mT.contiguous()


def project(
    z: Tensor, weight: Tensor, bias: Tensor | None = None, *, allow_tf32: bool = False
) -> Tensor:
    """See `conv1d.conv1d.project`."""
    y = _conv(F.mish(z)[:, :, None], weight[:, : z.shape[1], None])[:, :, 0]
    return y if bias is None else y + bias


def make(activation: Activation) -> Tensor:  # [N, C, T]
    """The activation itself."""
    source, norm, film, residual = activation
    h = _result(source)
    if norm is not None:
        h = reference.group_norm(
            h.mT[:, None].contiguous(), norm.groups, norm.weight, norm.bias, eps=norm.eps,
            activation="mish",
        )[:, 0].mT  # fmt: skip
    if film is not None:
        columns = film.table if film.row is None else film.table.index_select(0, film.row)
        columns = columns if film.cond is None else columns + film.cond
        c = h.shape[1]
        first = columns[:, film.offset : film.offset + c, None]
        if film.scale:
            h = h * first + columns[:, film.offset + c : film.offset + 2 * c, None]
        else:
            h = h + first
    return h if residual is None else h + _result(residual)


def _result(source: Sums | Stem | Tensor) -> Tensor:  # [N, C, T]
    if isinstance(source, Tensor):
        return source
    if isinstance(source, Stem):
        return _conv(source.x.mT, source.weight.permute(2, 0, 1)) + source.bias[:, None]
    return source.partial.sum(0) + source.bias[:, None]


def _conv(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:  # [N, C, T], [CO, C, S]
    """Padded by S // 2, in the dtype of the weights; the result is in that of x."""
    x_nhwc = x.mT[:, None].to(weight.dtype).contiguous()
    y = reference.conv2d(x_nhwc, weight[:, :, None].contiguous(), stride=stride)
    return y[:, 0].mT.to(x.dtype)
