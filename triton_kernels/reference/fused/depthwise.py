"""Depthwise convolution, see `triton_kernels.conv.depthwise`."""

import torch
import torch.nn.functional as F


def depthwise(x, weight, bias, start, dilation, size, turned=False):
    """x [N, H, W, C], each channel convolved with its filter of weight [C, 1, R, S], plus bias."""
    exact = torch.promote_types(x.dtype, torch.float32)
    weight = weight.flip((2, 3)) if turned else weight
    bias = None if bias is None else bias.to(exact)
    z = _with_zeros(x.to(exact), weight.shape[2:], start, dilation, size)
    y = F.conv2d(z, weight.to(exact), bias, dilation=dilation, groups=x.shape[3])
    return y.permute(0, 2, 3, 1).contiguous().to(x.dtype)


def depthwise_weight_grad(x, dy, window, start, dilation, dtype):
    """The gradient of the filters [C, 1, R, S]."""
    exact, c = torch.promote_types(x.dtype, torch.float32), x.shape[3]
    z = _with_zeros(x.to(exact), window, start, dilation, dy.shape[1:3])
    dy = dy.to(exact).permute(0, 3, 1, 2)
    shape = c, 1, *window
    return torch.nn.grad.conv2d_weight(z, shape, dy, dilation=dilation, groups=c).to(dtype)


def _with_zeros(x, window, start, dilation, size):
    """[N, C, H, W], so large that no more zeros are needed."""
    ends = (
        p + (r - 1) * d - before - n
        for p, r, d, before, n in zip(size, window, dilation, start, x.shape[1:3], strict=True)
    )
    below, right = ends
    return F.pad(x.permute(0, 3, 1, 2), (start[1], right, start[0], below))
