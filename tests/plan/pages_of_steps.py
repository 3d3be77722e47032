"""The kernels on the pages of training steps, and those that such steps launch, as JSON.

python -m tests.plan.pages_of_steps      without TRITON_INTERPRET, as the launches are a GPU's
"""

import json

import torch

from benchmarks.goldens import recorded
from diffusion.plan.__main__ import example
from diffusion.plan.printed.step import step_page
from diffusion.presets import preset
from diffusion.runs.precompile_worker import train
from triton_kernels.registry.chips import chip

STEPS = [("bf16", ""), ("bf16", "4x6"), ("tf32", ""), ("fp32", "4x6")]  # precision, context


def launched(precision: str, context: str) -> list[str]:
    """By two steps of unet_tiny."""
    settings = {
        "model": preset("model", "unet_tiny"),
        "diffusion": {"schedule": "linear"},
        "optim": {"lr": 1e-4},
        "train": {"batch_size": 4, "precision": precision},
        "images": {"shape": [100, 16, 16, 3], "dtype": "uint8"},
        "labels": None,
        "flip": False,
    }
    if context:
        settings["model"]["context_dim"] = 6
        settings["context"] = {"shape": [100, 4, 6], "dtype": "float16"}
    with recorded(chip("h200").gpu) as launches:
        train(settings)
    return [launch.split()[0].strip("_") for launch in launches]


def paged(precision: str, context: str) -> list[str]:
    """A step's."""
    model, (x, _, *given), _ = example("unet_tiny", 4, "16", precision, context=context)
    x = x.permute(0, 2, 3, 1).contiguous()
    page = step_page(model.train(), x, *(given or [None]), chip("h200"))
    return [k for line in page.lines for k in line.launched.kernels if k != "PyTorch"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({" ".join(step): [paged(*step), launched(*step)] for step in STEPS}))
