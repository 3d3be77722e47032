"""Networks that are not the framework's, for `benchmarks.accelerated`: diffusers', that of
denoising-diffusion-pytorch, and those of the reader's own files.

`diffusion/plan/user_module.py` says what a file of one's own has to have. The loss of its module is
the mean square of what it gives: a tensor, the first of several, or `sample` of an object.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from benchmarks import denoising_diffusion
from benchmarks.harness import check_choice, is_unwritten
from diffusion.plan.user_module import names_function, user_function

_TIMESTEPS, _TOKENS = 1000, 77
Inputs = tuple[Tensor | None, tuple[Tensor, ...]]  # what the output is compared with; arguments


class Network(NamedTuple):
    """One to be timed."""

    library: str  # whose it is
    build: Callable[[torch.device], nn.Module]  # its parameters there, of the current seed
    inputs: Callable[[int, torch.device], Inputs]  # for so many images


def network_of(model: str) -> Network:
    """A name in NETWORKS, perhaps behind its library and a colon, or FILE.py:FUNCTION.
    ConfigError: there is none."""
    if names_function(model):
        return _own(model)
    name = model.rpartition(":")[2]
    check_choice("models", name, (*NETWORKS, "FILE.py:FUNCTION"))
    return NETWORKS[name]


def _built(made: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """In a dry run, parameters that nobody draws."""
    if not is_unwritten(device):
        return made().to(device)
    with torch.device("meta"):
        network = made()
    return network.to_empty(device=device)


def of_diffusers(kind: str, **settings: Any) -> Network:
    """A class of diffusers with these settings."""

    def made() -> nn.Module:
        import diffusers

        return getattr(diffusers, kind)(**settings)

    tokens = settings.get("cross_attention_dim")
    channels, size = 3 if tokens is None else 4, settings["sample_size"]
    inputs = partial(_of_images, (channels, size, size), tokens)
    return Network("diffusers", partial(_built, made), inputs)


def of_lucidrains(**settings: Any) -> Network:
    made = partial(denoising_diffusion.Unet, **settings)
    size = settings["sample_size"]
    inputs = partial(_of_images, (3, size, size), None)
    return Network("lucidrains", partial(_built, made), inputs)


def _of_images(
    shape: tuple[int, int, int], tokens: int | None, batch: int, device: torch.device
) -> Inputs:
    """The noise; noised images and timesteps, and tokens of so many numbers if there are any."""
    generator = torch.Generator(device).manual_seed(1)
    draw = partial(torch.randn, device=device, generator=generator)
    x, noise = (draw((batch, *shape)) for _ in range(2))
    t = torch.arange(batch, device=device) * (_TIMESTEPS // batch)
    if tokens is None:
        return noise, (x, t)
    return noise, (x, t, draw((batch, _TOKENS, tokens)))


def _own(model: str) -> Network:
    made = user_function(model)

    def inputs(batch: int, device: torch.device) -> Inputs:
        torch.manual_seed(1)
        _, arguments = made(batch)
        return None, pytree.tree_map_only(Tensor, lambda x: x.to(device), arguments)

    return Network(
        Path(model.rpartition(":")[0]).stem, lambda device: made(1)[0].to(device), inputs
    )


_PLAIN = ("DownBlock2D",) * 4, ("UpBlock2D",) * 4
NETWORKS = {
    "ddpm_cifar10": of_diffusers(  # google/ddpm-cifar10-32, Ho et al. 2020
        "UNet2DModel",
        sample_size=32,
        block_out_channels=(128, 256, 256, 256),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=None,
        norm_eps=1e-6,
        downsample_padding=0,
        flip_sin_to_cos=False,
        freq_shift=1,
    ),
    "butterflies": of_diffusers(  # the training example of diffusers' documentation
        "UNet2DModel",
        sample_size=128,
        block_out_channels=(128, 128, 256, 256, 512, 512),
        down_block_types=(*_PLAIN[0], "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", *_PLAIN[1]),
    ),
    # 1.5, of latents with 4 channels, beside 77 tokens of 768 numbers
    "stable_diffusion": of_diffusers(
        "UNet2DConditionModel", sample_size=64, cross_attention_dim=768
    ),
    # the example of denoising-diffusion-pytorch, of smaller images
    "denoising_diffusion": of_lucidrains(sample_size=64, dim=64, dim_mults=(1, 2, 4, 8)),
}
