"""The kernels of the planned network in plain PyTorch, under the same names and signatures.

This is what `fused` means: a test holds each kernel against it, and on it the plan of
`diffusion.plan.step` runs on a machine without a GPU. Any floating-point dtype.

    partials   [N, K, 2, C]  sums over each of the K pixel tiles of image n. Forward: (sum of x,
               sum of (x - mean of the tile)^2). Backward: (sum of dz, sum of dz xhat)
    table      [N, 4, C]     (mean, rstd, g, b): xhat = (x - mean) rstd, z = xhat g + b
    coeff      [N, 3, C]     (p, q, r): dx = p dz + q x + r

`conv`, `upsampled`, `norms`, `skip`, `resample`, `sums`, `inputs` and `attention` are what training
and sampling are made of; `parts`, `one_launch_norms` and `conv_and_norm` are of sampling alone,
`channel_norm`, `linear_attention` and `gated` of other people's networks.
"""
# ruff: noqa: F401  (a plan finds these names here)

from ...conv.conv_norm import NextNorm
from ..conv1d import conv_stage, head, project
from .attention import (
    attention_backward,
    attention_forward,
    cross_attention_backward,
    cross_attention_forward,
    projected_attention,
)
from .channel_norm import channel_norm_backward, channel_norm_forward
from .conv import (
    conv2d_input_grad,
    conv_down,
    conv_down_input_grad,
    conv_few,
    conv_forward,
    conv_input_grad,
    conv_plain_input_grad,
    conv_weight_grad,
    conv_weight_grads,
)
from .conv_and_norm import conv_norm, norm_conv
from .elementwise import elementwise
from .gated import gated_backward, gated_forward
from .inputs import begin_step, pad_channels, reorder, sinusoids
from .joined import OPS, SMALL_NORM
from .linear_attention import linear_attention_backward, linear_attention_forward
from .norms import (
    activation_grad,
    apply,
    norm_apply,
    norm_apply_upsampled,
    norm_backward,
    norm_dx,
    norm_grad_table,
    norm_table,
    tensor_partials,
)
from .one_launch_norms import norm_of_sums, norm_single_cta
from .parts import conv_split, resample_parts, sum_parts
from .resample import avg_pool, avg_pool_grad, fir, upsample, upsample_grad
from .skip import skip_backward, skip_dx
from .sums import RowSums, bias_grad, linear_grads, tensor_rows
from .upsampled import (
    conv_of_upsampled,
    conv_of_upsampled_input_grad,
    conv_upsampled,
    conv_upsampled_input_grad,
    upsampled_filters,
)
