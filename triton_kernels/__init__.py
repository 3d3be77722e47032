"""Triton kernels for training and sampling diffusion UNets.

Names of dimensions, used in every file:

    N        samples (images) in the batch
    H, W     rows and columns of the input image     P, Q   rows and columns of the output image
    C        channels                                CI, CO channels in and out of a convolution
    R, S     rows and columns of a convolution's filter
    G        groups of a GroupNorm                   T      positions of an attention, or timesteps
    d        channels of one attention head          M      images in a data set

Layout: activations are always contiguous [N, H, W, C] ("NHWC"). Launchers check this and never copy
silently. Convolution weights have PyTorch's shape [CO, CI, R, S] in channels_last memory, which
kernels read as [CO, R, S, CI]. 1-D data is the same with H = 1.

Every function below is an op of torch.library, torch.ops.triton_kernels.NAME; see
`runtime.library`. `triton_kernels.reference` has the same names and signatures in plain PyTorch.
"""

import os

from . import fused_ops  # noqa: F401  every op is then in the registry, by whose names it is called
from .attention import attention, cross_attention
from .conv.conv2d import conv2d
from .denoise.loss import denoise_loss
from .denoise.q_sample import gather_images, q_sample
from .denoise.step import denoise_step
from .noise.draw import draw_flips, draw_timesteps, normal
from .noise.dropout import dropout
from .noise.loss_aware import draw_weighted_timesteps, record_losses
from .norm.channel_norm import channel_norm
from .norm.group_norm import GroupNorm, group_norm
from .optimizer.adamw import adamw_step, grad_norm
from .resample.op import avg_pool2d, upsample_nearest2d

# A product and a sum are one instruction, rounded once. Triton 3.9 warns where nobody has said so,
# and 3.10 is to leave them apart.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

__all__ = [
    "GroupNorm",
    "adamw_step",
    "attention",
    "avg_pool2d",
    "channel_norm",
    "conv2d",
    "cross_attention",
    "denoise_loss",
    "denoise_step",
    "draw_flips",
    "draw_timesteps",
    "draw_weighted_timesteps",
    "dropout",
    "gather_images",
    "grad_norm",
    "group_norm",
    "normal",
    "q_sample",
    "record_losses",
    "upsample_nearest2d",
]
