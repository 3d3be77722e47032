"""The kernels of a planned network, under the names that `reference.fused` defines.

A norm is several of them, or one:

    norm_table, apply           statistics of a norm, as a table, and the pass that applies it
    norm_grad_table, norm_dx    the same of its gradient
    norm_apply, norm_backward   either pair; in one launch where images have few partial sums
    norm_of_sums                the first pair in sampling, in one launch where that pays
    channel_norm_forward, ..._backward   norms over the channels of each pixel
    norm_single_cta             in sampling: a program holds whole groups of an image and needs no
                                sums; also of what `conv_split` has stored

Of convolutions some are for sampling alone:

    conv_few     images or tiles are so few that latency is the limit
    conv_split   stores split-K parts, which the norm that follows adds, or `sum_parts`, where whole
                 tiles would leave multiprocessors idle
    conv_norm, norm_conv   with the norm behind or before it in one launch

`OPS` are the ops that one launch or several can compute: `diffusion.plan` asks them which it should
be (`Op.why_apart`).
"""
# ruff: noqa: F401  (a plan finds these names here)

import torch
from torch import Tensor

from .attention import (
    attention_backward,
    attention_fwd as attention_forward,
    cross_attention_bwd as cross_attention_backward,
    cross_attention_fwd as cross_attention_forward,
)
from .attention.launch import ATTENTION_GRAD, CROSS_ATTENTION_GRAD
from .attention.linear import linear_attention_backward, linear_attention_forward
from .attention.norm_attention import PROJECTED, projected_attention
from .conv.conv2d import conv2d_input_grad, conv_down, conv_down_input_grad
from .conv.conv_norm import CONV_NORM, NextNorm, conv_norm
from .conv.few import conv_few
from .conv.fused import conv_forward, conv_input_grad, conv_plain_input_grad
from .conv.norm_conv import NORM_CONV, norm_conv
from .conv.plain.pad_channels import pad_channels
from .conv.plain.reorder import reorder
from .conv.plain.split_k_sum import resample_parts, sum_parts
from .conv.skip_dx import skip_backward, skip_dx
from .conv.split import CONV_SPLIT, conv_split
from .conv.upsampled import (
    UPSAMPLED,
    UPSAMPLED_GRAD,
    conv_of_upsampled,
    conv_of_upsampled_input_grad,
    conv_upsampled,
    conv_upsampled_input_grad,
)
from .conv.upsampled_filters import upsampled_filters
from .conv.weight_grad import conv_weight_grad
from .conv.wgrad_group import conv_weight_grads
from .conv1d.conv1d import conv_stage, head, project
from .elementwise.op import elementwise
from .embedding.begin_step import begin_step
from .embedding.linear_grads import linear_grads
from .embedding.sinusoids import sinusoids
from .gated.product import gated_backward, gated_forward
from .norm.channel_norm import channel_norm_backward, channel_norm_forward
from .norm.from_partials import SMALL_NORM, norm_of_sums
from .norm.inline_statistics import norm_apply, norm_apply_upsampled, norm_backward
from .norm.passes import apply, norm_dx
from .norm.single_cta import NORM_SINGLE_CTA, norm_single_cta
from .norm.sums import activation_grad, tensor_partials
from .norm.tables import norm_grad_table, norm_table
from .reductions.column_sum import column_rows
from .reductions.row_sums import RowSums, bias_grad, row_place
from .resample.fir import fir
from .resample.op import gather, gather_sums, spread, spread_add

OPS = {
    op.name: op
    for op in (
        ATTENTION_GRAD,
        CROSS_ATTENTION_GRAD,
        CONV_NORM,
        CONV_SPLIT,
        NORM_CONV,
        NORM_SINGLE_CTA,
        PROJECTED,
        UPSAMPLED,
        UPSAMPLED_GRAD,
    )
}


def tensor_rows(x: Tensor, sums: RowSums | None) -> Tensor:
    """Rows [rows, C] in a place of `sums`, or a tensor of their own, whose sum is that of x
    [..., C] over all but the channels."""
    return column_rows(x, row_place(True if sums is None else sums, x))


def avg_pool(
    x: Tensor, sums: bool = False, tf32: bool = False
) -> tuple[Tensor, Tensor | None]:  # [N, H, W, C] -> [N, H / 2, W / 2, C]
    """(2x2 means; with `sums` their partials, float32 [N, K, 2, C], or None)"""
    return gather_sums(x, 0.25, sums, tf32)


def avg_pool_grad(
    dy: Tensor,
    add: Tensor | None = None,  # [N, H, W, C]
    sums: RowSums | bool = False,  # True: rows in a tensor of their own; False: none
    tf32: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(its input gradient for even sizes, plus `add`; rows [rows, C] in a place of `sums`, whose
    sum is that of it over samples and pixels, or None)"""
    n, h, w, c = dy.shape
    return spread_add(dy, (n, 2 * h, 2 * w, c), 0.25, add, sums, tf32)


def upsample(x: Tensor, tf32: bool = False) -> Tensor:  # [N, H, W, C] -> [N, 2H, 2W, C]
    """Each pixel becomes a 2x2 block."""
    n, h, w, c = x.shape
    return spread(x, (n, 2 * h, 2 * w, c), 1.0, tf32)


def upsample_grad(dy: Tensor, tf32: bool = False) -> Tensor:  # [N, 2H, 2W, C] -> [N, H, W, C]
    """Its input gradient: the sum over each 2x2 block."""
    return gather(dy, 1.0, tf32)
