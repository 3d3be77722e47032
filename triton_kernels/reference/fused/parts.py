"""Convolutions of sampling that leave their sum in parts, and what adds these."""

import torch

from ...reductions.conv_parts import SplitConv
from .conv import convolve
from .norms import over_pixels, tensor_partials
from .resample import avg_pool, upsample


def conv_split(x, weight, *, extra=(), stride=1, padding=None):
    """Parts [S, N, CO, P Q] whose sum over S is conv(x) and the 1x1 convolutions of `extra`."""
    main = convolve(x, weight, None, stride, weight.shape[2] // 2 if padding is None else padding)
    parts = [main, *(other @ columns.T for other, columns in extra)]
    return torch.stack([y.flatten(1, 2).mT for y in parts])


def sum_parts(split: SplitConv):
    """(the convolution that was in parts; its partials, or None)"""
    n, h, w, c = split.shape
    y = split.parts.sum(0).mT.reshape(n, h, w, c)
    for bias in (split.bias, split.extra_bias):
        y = y if bias is None else y + bias
    y = y if split.emb is None else y + over_pixels(split.emb)
    y = y if split.residual is None else y + split.residual
    y = y if split.factor is None else split.factor * y
    y = y.to(split.dtype).contiguous()
    return y, tensor_partials(y)


def resample_parts(split: SplitConv, up: bool, *, tf32: bool = False):
    """(the convolution that was in parts; it upsampled or its 2x2 means, which are rounded to TF32
    with `tf32`; its partials, or None)"""
    y, partials = sum_parts(split)
    return y, upsample(y, tf32) if up else avg_pool(y, tf32=tf32)[0], partials
