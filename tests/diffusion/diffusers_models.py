"""Small networks of diffusers, and of this project in its directories, that the tests share."""

from pathlib import Path

import torch
from diffusers import UNet2DModel

from diffusion.factory import Process, build_model
from diffusion.formats.diffusers_directory import save_diffusers
from diffusion.formats.trained import Trained
from diffusion.runtime.backend import TORCH_FP32

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of float32: of outputs of about 2; relative, of images after ten steps

PLAIN = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
THEIRS = {
    "as diffusers trains": {},
    "as google/ddpm": {
        "norm_eps": 1e-6,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "downsample_padding": 0,
        "attention_head_dim": None,
    },
    "film, residual blocks resample": {
        "resnet_time_scale_shift": "scale_shift",
        "attn_norm_num_groups": 4,
        "downsample_type": "resnet",
        "upsample_type": "resnet",
        "down_block_types": ("ResnetDownsampleBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "dropout": 0.1,
    },
    "classes, a rectangle, learned variance": {
        "num_class_embeds": 3,
        "sample_size": (8, 12),
        "out_channels": 6,
    },
}
OURS = {  # options of `UNet`; the process
    "unet_cu's": ({"max_period": 1000, "zero_init": False}, {}),
    "film, residual blocks resample": (
        {"use_scale_shift_norm": True, "resblock_updown": True},
        {"schedule": "cosine", "variance": "learned_range"},
    ),
    "guided-diffusion's": (
        {"conv_resample": True, "use_new_attention_order": False},
        {"prediction": "v_prediction", "variance": "fixed_large"},
    ),
    "residual blocks, of which none resamples": (
        {"channel_mult": [1], "attention_resolutions": [1], "resblock_updown": True},
        {},
    ),
    "one head": ({"num_head_channels": -1, "attention_resolutions": [1, 2]}, {"num_timesteps": 50}),
}


def perturbed(model: torch.nn.Module) -> torch.nn.Module:
    """No parameter is zero, or the identity, as it is at the start."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def theirs(**options) -> UNet2DModel:
    torch.manual_seed(0)
    given = {
        "sample_size": 8,
        "layers_per_block": 1,
        "block_out_channels": (8, 12),
        "norm_num_groups": 4,
        "attention_head_dim": 4,
        "down_block_types": PLAIN[0],
        "up_block_types": PLAIN[1],
    }
    return perturbed(UNet2DModel(**given | options))


def ours(options: dict | None = None, process: dict | None = None) -> Trained:
    torch.manual_seed(0)
    settings = {
        "name": "unet",
        "model_channels": 8,
        "channel_mult": [1, 1.5],
        "num_res_blocks": 1,
        "attention_resolutions": [2],
        "num_head_channels": 4,
        "num_groups": 4,
        "conv_resample": False,
        "use_new_attention_order": True,
    } | (options or {})
    made = Process(**(process or {}))
    model = build_model(settings, TORCH_FP32, (8, 8), 3, made.learns_variance, CPU)
    return Trained(perturbed(model), settings, made, (8, 8, 3), None, None, "x")


def written(folder: Path, trained: Trained, **names) -> Path:
    folder.mkdir(exist_ok=True)
    save_diffusers(folder, trained.model, trained.process, **names)
    return folder
