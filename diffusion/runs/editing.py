"""The images that a drawing begins from or keeps in part, from files."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data.images import decode_image, load_folder
from ..errors import ConfigError
from ..formats.trained import Trained
from ..sampling.edit import Edit
from ..settings import shown

STRENGTH = 0.6  # of images that are drawn whole, if nobody says another
Images = str | Path | np.ndarray  # a file, a folder, a .zip, or uint8 [M, H, W, C]


def edited_options(
    init: Images | None, mask: Images | None, strength: float | None, resample: int
) -> dict[str, float | int]:
    """What the sampler is told. ConfigError: settings that go without what they are of."""
    if init is None:
        for key, value in (("mask", mask), ("strength", strength)):
            if value is not None:
                raise ConfigError(f"{key}={shown(value)} goes with init=IMAGE, which is not given")
    if mask is None and resample != 1:
        raise ConfigError(f"resample={shown(resample)} goes with init=IMAGE mask=IMAGE; leave it 1")
    if strength is None:
        strength = STRENGTH if init is not None and mask is None else 1.0
    if init is not None and mask is None and strength == 1:
        raise ConfigError("strength=1 leaves nothing of init; give less, such as 0.6, or a mask")
    return {"strength": strength, "resample": resample}


def load_edit(init: Images | None, mask: Images | None, trained: Trained) -> Edit | None:
    """The images as the network has them, on its device, cut and scaled to its size; None without
    `init`. Of a mask white is drawn and black stays. ConfigError: they are not there, no images, or
    not for this network."""
    if init is None:
        return None
    height, width, channels = trained.image_shape
    if not trained.values.is_image or channels not in (1, 3, 4):
        kind = "pixels" if trained.values.is_image else "other numbers"
        raise ConfigError(
            f"init={_named(init)} is for networks that learned images of 1, 3 or 4 channels;"
            f" {trained.name} learned {channels} channels of {kind}"
        )
    device = next(trained.model.parameters()).device
    images = _load("init", init, (height, width), channels).to(device).float() / 127.5 - 1
    if mask is None:
        return Edit(images)
    masks = _load("mask", mask, (height, width), 1)[..., 0].to(device)
    if len(masks) not in (1, len(images)):
        raise ConfigError(
            f"mask={_named(mask)} has {len(masks)} images; expected 1 or, as init, {len(images)}"
        )
    if not (masks > 0).any():
        raise ConfigError(f"mask={_named(mask)} is black: nothing would be drawn; white is")
    known = 1 - masks.float() / 255
    return Edit(images, known.expand(len(images), -1, -1).contiguous())


def _load(key: str, source: Images, size: tuple[int, int], channels: int) -> Tensor:
    """uint8 [M, H, W, C]."""
    if isinstance(source, np.ndarray):
        expected = (*size, channels)
        if source.dtype != np.uint8 or source.ndim != 4 or source.shape[1:] != expected:
            raise ConfigError(
                f"{key} is {source.dtype} of shape {list(source.shape)}; expected uint8 [M,"
                f" {', '.join(map(str, expected))}]"
            )
        return torch.from_numpy(source)
    path = Path(source)
    if not path.exists():
        raise ConfigError(f"{key}={path} does not exist; give an image, a folder or a .zip")
    if path.is_dir() or path.suffix == ".zip":
        return load_folder(str(path), size, channels, classes=False).images
    try:
        with open(path, "rb") as file:
            image, _ = decode_image(file, size, channels)
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigError(f"{key}={path} is no image that can be decoded: {error}") from error
    return torch.from_numpy(image.copy())[None]


def _named(source: Images) -> str:
    return f"an array {list(source.shape)}" if isinstance(source, np.ndarray) else str(source)
