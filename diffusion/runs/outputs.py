"""What drawn numbers become, and where they go: a picture, a file of arrays or a folder."""

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..data.autoencoder import autoencoder_digest, missing_autoencoder
from ..data.values import Latents, Values
from ..errors import ConfigError, check_writable
from ..formats.trained import Trained
from ..settings import shown
from ..tracking.pictures import grid
from .draw_settings import SampleSettings
from .guiding import GUIDED

_FILES = (".png", ".npz", ".npy")
_NAMED = 40  # letters of a setting, at most, in the name of a picture


def choose_values(decoder: str | None, trained: Trained) -> Values:
    """What drawn numbers become: what the data were, or those of latents by another autoencoder;
    none: the latents themselves. ConfigError: there is no such autoencoder, or nothing to decode.
    """
    values = trained.values
    if not isinstance(values, Latents):
        if decoder is not None:
            raise ConfigError(
                f"decoder={decoder}, but the model was not trained on latents; leave it out"
            )
        return values
    if decoder == "none":
        return values.codes
    if decoder is not None:
        values = replace(values, autoencoder=decoder)
    missing = missing_autoencoder(values.autoencoder)
    if missing:
        raise ConfigError(
            f"{missing}; give decoder=FOLDER, or decoder=none for the latents themselves"
        )
    if autoencoder_digest(values.autoencoder) != values.digest:
        warnings.warn(
            f"{values.autoencoder} is not the autoencoder that encoded the data"
            f" ({values.digest[:8]}), unless only its decoder was trained on",
            stacklevel=2,
        )
    return values


def default_out(settings: SampleSettings, trained: Trained, values: Values) -> Path:
    """Beside the run, named after the weights and how the pictures are drawn with them: what is
    drawn otherwise does not replace them."""
    steps = settings.steps or ""
    steps = "-".join(map(str, steps)) if isinstance(steps, list) else str(steps)
    ema = "" if settings.ema is True else f"_ema{settings.ema or '-false'}"
    name = f"{trained.name}{ema}_{settings.sampler}"
    name += f"-{steps}" if steps[:1].isalpha() else steps
    edited = ("condition", "vector", "context", "decoder", "init", "mask", "strength", "resample")
    for key in ("spacing", "eta", "clip", "label", *GUIDED, *edited):
        value = getattr(settings, key)
        if value != getattr(SampleSettings, key):
            text = shown(value)[-_NAMED:]  # of a path its end
            name += f"_{key}{'' if type(value) in (int, float) else '-'}{text}"
    suffix = ".png" if values.is_image else ".npz"
    name = f"{name}_{settings.seed}{suffix}".replace("/", "-")  # of a class's name
    if trained.run_dir is None:
        return Path(name)
    return trained.run_dir / "samples" / f"sample_{name}"


def is_folder(out: Path) -> bool:
    """Whether one PNG an image goes there. The name of a folder may have a dot if it exists."""
    return not out.suffix or (out.suffix not in _FILES and out.is_dir())


def check_out(out: Path, values: Values, channels: int) -> None:
    if is_folder(out):
        if not values.is_image:
            raise ConfigError(
                f"out={out}: a PNG does not hold measured numbers; expected a .npy, a .npz or, to"
                " look at them, a .png"
            )
        if channels > 4 and not isinstance(values, Latents):
            raise ConfigError(f"out={out}: a PNG has no {channels} channels; expected a .npz")
        if out.is_file():
            raise ConfigError(f"out={out} is a file; expected a folder, a .png (grid) or a .npz")
        check_writable(out / "0.png")
        return
    if out.suffix not in _FILES:
        raise ConfigError(
            f"out={out}; expected a .png (grid), a .npz, a .npy or a folder (one whose name has a"
            " dot has to be there)"
        )
    if out.is_dir():
        raise ConfigError(f"out={out} is a folder; expected a file")
    check_writable(out)


def save(
    images: np.ndarray,  # [N, H, W, C], for a grid uint8
    out: Path,
    labels: np.ndarray | None = None,  # int64 [N]
    shown: Callable[[np.ndarray], np.ndarray] = lambda images: images,  # of those in a grid
) -> None:
    """As a grid, a .npy or guided-diffusion's .npz."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".writing_{out.name}")  # on a full disk, what is there stays
    try:
        if out.suffix == ".png":
            grid(shown(images)).save(aside)
        elif out.suffix == ".npy":
            np.save(aside, images)
        else:
            np.savez(aside, images, *([] if labels is None else [labels]))  # arr_0, arr_1
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)
