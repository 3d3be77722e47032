"""The networks that plans are tested on, small: the framework's, and diffusers' as it comes."""

import torch
from torch import nn

from diffusion.models.unet1d import UNet1d
from tests.diffusion.diffusers_models import THEIRS, ours, perturbed, theirs

T = torch.tensor([3, 400])
IMAGE = {"size": (8, 8), "labels": None}

OURS = {
    "unet.cu's": {"max_period": 1000, "zero_init": False},
    "convolutions resample, legacy order of heads": {
        "conv_resample": True,
        "use_new_attention_order": False,
    },
    "padding 0": {"conv_resample": True, "downsample_padding": 0, "freq_shift": 1},
    "film, residual blocks resample": {"use_scale_shift_norm": True, "resblock_updown": True},
    "classes": {"num_classes": 3, "num_head_channels": -1, "attention_resolutions": [1, 2]},
    "dropout, dropped labels": {
        "dropout": 0.3,
        "num_classes": 3,
        "label_dropout": 0.5,
        "resblock_updown": True,
        "training": True,
    },
}
MORE_OF_THEIRS = {
    "attention at every size, two layers": {
        "layers_per_block": 2,
        "down_block_types": ("AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D"),
        "act_fn": "gelu",
    },
    "no attention, fourier": {
        "down_block_types": ("DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D"),
        "add_attention": False,
        "time_embedding_type": "fourier",
    },
}
POLICIES = {
    "film": {"cond_predict_scale": True},
    "bias alone, no condition": {"cond_predict_scale": False, "global_cond_dim": None},
}
NAMES = [
    *(f"ours: {name}" for name in OURS),
    *(f"diffusers: {name}" for name in THEIRS | MORE_OF_THEIRS),
    *(f"policy: {name}" for name in POLICIES),
]


def network(name: str) -> tuple[nn.Module, tuple, dict]:
    """A module and its arguments."""
    whose, _, which = name.partition(": ")
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    if whose == "ours":
        options = dict(OURS[which])
        training = options.pop("training", False)
        model = ours(options).model.train(training)
        labels = (torch.tensor([0, 2]),) if "num_classes" in options else ()
        return model, (x, T, *labels), {"rng": torch.tensor([5, 6])} if training else {}
    if whose == "diffusers":
        options = (THEIRS | MORE_OF_THEIRS)[which]
        if "sample_size" in options:
            x = torch.randn(2, 3, *options["sample_size"])
        labels = {"class_labels": torch.tensor([0, 2])} if "num_class_embeds" in options else {}
        return theirs(**options), (x, T), labels
    options = {"global_cond_dim": 5} | POLICIES[which]
    model = UNet1d(2, diffusion_step_embed_dim=16, down_dims=(16, 32), **options)
    cond = () if options["global_cond_dim"] is None else (torch.randn(2, 5),)
    return perturbed(model), (torch.randn(2, 8, 2), T, *cond), {}
