"""A small network with classes."""

import torch

from diffusion.models.unet import UNet

CLASSES = 3

TINY = {
    "model_channels": 8,
    "num_res_blocks": 1,
    "attention_resolutions": (),
    "channel_mult": (1, 2),
    "num_groups": 4,
    "num_classes": CLASSES,
}


def tiny(**options) -> UNet:
    torch.manual_seed(0)
    given = {"image_size": 8, "in_channels": 1, "out_channels": 1, "zero_init": False}
    return UNet(**{**given, **TINY, **options})
