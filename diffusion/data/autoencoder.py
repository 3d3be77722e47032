"""An AutoencoderKL of diffusers (Rombach et al., 2022): images into codes, and codes into images.

A code is drawn from a normal distribution whose mean and log variance the encoder gives. What is
stored are these moments, so that every epoch draws codes anew, and they are stored as the network
is to see them: (mean - m) / d and log variance - 2 ln d, with m and d of each channel as the
autoencoder's configuration has them (shift and 1 / scaling_factor, or latents_mean and
latents_std / scaling_factor).
"""

import hashlib
import json
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError

_AT_ONCE = 8  # images at once: an autoencoder has feature maps of their full size
_MOST_LAYERS = 100  # of a level; published ones have 2, and thousands would take minutes to build
_LOG_VARIANCE = (-30.0, 20.0)  # its limits, as diffusers has them
_INSTALL = "pip install 'triton-diffusion[latents]' or pip install diffusers"


def missing_autoencoder(folder: str | Path) -> str | None:
    """Why the autoencoder cannot be had here, if it cannot."""
    if find_spec("diffusers") is None:
        return f"diffusers is not installed; {_INSTALL}"
    if not (Path(folder).expanduser() / "config.json").is_file():
        return f"{folder} is no folder of a diffusers autoencoder: it has no config.json"
    return None


class Autoencoder:
    """An autoencoder of diffusers on a device, in float32."""

    def __init__(self, folder: str | Path, device: torch.device) -> None:
        self.folder = Path(folder).expanduser()
        missing = missing_autoencoder(self.folder)
        if missing:
            raise ConfigError(missing)
        try:
            found = json.loads((self.folder / "config.json").read_text())
            name, layers = found.get("_class_name"), found.get("layers_per_block", 1)
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{self.folder / 'config.json'} is damaged: {error}") from None
        if name != "AutoencoderKL":
            raise ConfigError(f"{self.folder} holds {name}; expected an AutoencoderKL")
        if type(layers) is not int or not 1 <= layers <= _MOST_LAYERS:
            raise ConfigError(
                f"{self.folder} has layers_per_block={layers}; expected a whole number from 1 to"
                f" {_MOST_LAYERS}"
            )
        from diffusers import AutoencoderKL

        try:
            # without accelerate the default of the second says so in six lines, and is False
            self._vae = AutoencoderKL.from_pretrained(
                self.folder, torch_dtype=torch.float32, low_cpu_mem_usage=False
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ConfigError(f"{self.folder} cannot be read as an autoencoder: {reason}") from None
        self._vae.eval().requires_grad_(False).to(device)
        self.device, config = device, self._vae.config
        self.channels: int = config.latent_channels
        self.image_channels: int = config.in_channels
        self.factor: int = 2 ** (len(config.block_out_channels) - 1)  # pixels of a code's side
        self.mean = self._each(config.latents_mean or config.shift_factor or 0.0)
        scale = config.scaling_factor or 1.0
        self.deviation = [d / scale for d in self._each(config.latents_std or 1.0)]

    def _each(self, value: Any) -> list[float]:
        return list(value) if isinstance(value, list | tuple) else [float(value)] * self.channels

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """uint8 [N, H, W, C] -> float32 [N, h, w, 2 * channels], see above."""
        x = images.to(self.device).permute(0, 3, 1, 2).float() / 127.5 - 1
        moments = self._vae.encode(x).latent_dist.parameters.permute(0, 2, 3, 1)
        mean, log_variance = moments.chunk(2, dim=-1)
        deviation = moments.new_tensor(self.deviation)
        mean = (mean - moments.new_tensor(self.mean)) / deviation
        log_variance = log_variance.clamp(*_LOG_VARIANCE) - 2 * deviation.log()
        return torch.cat((mean, log_variance), dim=-1).cpu()

    def codes(self, images: Tensor) -> Tensor:
        """uint8 [N, H, W, C] -> the means of their codes as a network sees them, float32 [N, h, w,
        channels]. ConfigError: the images do not suit it."""
        _, height, width, channels = images.shape
        if channels != self.image_channels or height % self.factor or width % self.factor:
            raise ConfigError(
                f"{self.folder} encodes images of {self.image_channels} channels and sides that are"
                f" multiples of {self.factor}; these are {height}x{width}x{channels}"
            )
        moments = torch.cat([self.encode(part) for part in images.split(_AT_ONCE)])
        return moments[..., : self.channels].contiguous()

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        """Codes [N, h, w, channels] as the decoder takes them -> images [N, H, W, C] in [-1, 1]."""
        if z.shape[3] != self.channels:
            raise ConfigError(
                f"{self.folder} decodes {self.channels} channels; the model draws {z.shape[3]}"
            )
        parts = z.float().permute(0, 3, 1, 2).split(_AT_ONCE)
        images = [self._vae.decode(part.contiguous()).sample.permute(0, 2, 3, 1) for part in parts]
        return torch.cat(images)


@lru_cache(maxsize=1)
def load_autoencoder(folder: str, device: torch.device) -> Autoencoder:
    """The one in this folder, which is kept for the next call."""
    return Autoencoder(folder, device)


def decode(folder: str, z: Tensor) -> Tensor:
    """`Autoencoder.decode` of the one in this folder."""
    return load_autoencoder(folder, z.device).decode(z)


def autoencoder_digest(folder: str | Path) -> str:
    """SHA-256 of its configuration and weights, in hexadecimal."""
    found = hashlib.sha256()
    names = ("*.json", "*.safetensors", "*.bin")
    files = {path for name in names for path in Path(folder).expanduser().glob(name)}
    for path in sorted(files):
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def draw_codes(
    moments: Tensor,  # float32 [N, H, W, 2 C]: mean, log variance
    noise: Tensor,  # float32 [N, H, W, C]
) -> Tensor:  # float32 [N, H, W, C]
    """A sample of each code's distribution."""
    mean, log_variance = moments.chunk(2, dim=-1)
    return mean + torch.exp(0.5 * log_variance) * noise
