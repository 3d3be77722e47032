"""The images that a drawing begins from or keeps in part, from files and arrays."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from ..data.array import is_array
from ..data.autoencoder import load_autoencoder, missing_autoencoder
from ..data.handed import handed_samples
from ..data.images import decode_image, load_folder
from ..data.values import Latents, Pixels, Units
from ..errors import ConfigError, counted
from ..formats.trained import Trained
from ..sampling.conditioning import as_seen
from ..sampling.edit import Edit
from ..settings import shown

STRENGTH = 0.6  # of images that are drawn whole, if nobody says another
_COLOURS = (1, 3, 4)  # channels that a picture can have
# a file, a folder, a .zip, an array in the units of the data, or one of uint8 [M, H, W, C]
Images = str | Path | np.ndarray


def edited_options(
    init: Images | None, mask: Images | None, strength: float | None, resample: int
) -> dict[str, float | int]:
    """What the sampler is told. ConfigError: settings that go without what they are of."""
    if init is None:
        for key, value in (("mask", mask), ("strength", strength)):
            if value is not None:
                raise ConfigError(f"{key}={_named(value)} goes with init=IMAGE, which is not given")
    if mask is None and resample != 1:
        raise ConfigError(f"resample={shown(resample)} goes with init=IMAGE mask=IMAGE; leave it 1")
    if strength is None:
        strength = STRENGTH if init is not None and mask is None else 1.0
    if init is not None and mask is None and strength == 1:
        raise ConfigError("strength=1 leaves nothing of init; give less, such as 0.6, or a mask")
    return {"strength": strength, "resample": resample}


def load_edit(
    init: Images | None,
    mask: Images | None,
    n: int,  # images that are drawn
    trained: Trained,
    decoder: str | None = None,  # of latents, see `choose_values`
) -> Edit | None:
    """The images as the network has them, on its device; None without `init`. Pictures are cut and
    scaled to its size, and encoded if it learned latents; arrays have its size. Of a mask white, 1
    and True are drawn, and black, 0 and False stay. ConfigError: they are not there, are no images,
    or are not for this network."""
    if init is None:
        return None
    device = next(trained.model.parameters()).device
    images, count = _images(init, n, trained, decoder, device)
    if mask is None:
        return Edit(images)
    drawn, masks = _drawn_shares(mask, n, trained)
    if masks not in (1, count):
        raise ConfigError(
            f"mask={_named(mask)} has {counted(masks, 'images')}; expected 1 or, as init, {count}"
        )
    if not (drawn > 0).any():
        raise ConfigError(f"mask={_named(mask)} is black: nothing would be drawn; white is")
    known = (1 - drawn).to(device)
    return Edit(images, known.expand(len(images), -1, -1).contiguous())


def _images(
    init: Images, n: int, trained: Trained, decoder: str | None, device: torch.device
) -> tuple[Tensor, int]:
    """(float32 [M', H, W, C], M) of M images, of which M' <= n are drawn from."""
    values, shape = trained.values, trained.image_shape
    if isinstance(values, Latents):
        return _codes(init, n, trained, decoder, device)
    if _is_of_numbers(init):
        found = handed_samples("init", init, shape, values)
        return as_seen(found[torch.arange(min(n, len(found)))]).to(device), len(found)
    if isinstance(values, Units):
        raise ConfigError(
            f"init={_named(init)} is no array, and {trained.name} learned numbers in units of their"
            " own; give a .npy, .npz or zarr"
        )
    if shape[2] not in _COLOURS:
        raise ConfigError(
            f"init={_named(init)} is for networks that learned images of 1, 3 or 4 channels;"
            f" {trained.name} learned {shape[2]}: give a .npy, .npz or zarr"
        )
    pictures = _pictures("init", init, shape[:2], shape[2])
    return as_seen(pictures[:n]).to(device), len(pictures)


def _codes(
    init: Images, n: int, trained: Trained, decoder: str | None, device: torch.device
) -> tuple[Tensor, int]:
    values, shape = trained.values, trained.image_shape
    if _is_of_numbers(init) and not (isinstance(init, np.ndarray) and init.dtype == np.uint8):
        found = handed_samples("init", init, shape, values.codes)
        return found[torch.arange(min(n, len(found)))].to(device), len(found)
    folder = values.autoencoder if decoder in (None, "none") else decoder
    missing = missing_autoencoder(folder)
    if missing:
        raise ConfigError(
            f"init={_named(init)} has to be encoded, and {missing}; give decoder=FOLDER, or a .npy"
            f" of codes {list(shape)}"
        )
    encoder = load_autoencoder(folder, device)
    height, width = (side * values.factor for side in shape[:2])
    pictures = _pictures("init", init, (height, width), encoder.image_channels)
    return encoder.codes(pictures[:n]).to(device), len(pictures)


def _drawn_shares(mask: Images, n: int, trained: Trained) -> tuple[Tensor, int]:
    """(float32 [M', H, W], M): how much of each pixel is drawn. A code is drawn as much as any of
    its pixels."""
    height, width, _ = trained.image_shape
    factor = trained.values.factor if isinstance(trained.values, Latents) else 1
    sides = (height * factor, width * factor)
    if not _is_of_numbers(mask):
        pictures = _pictures("mask", mask, sides, 1)
        shares, count = pictures[:n, ..., 0].float() / 255, len(pictures)
    else:
        shares, count = _shares_of_numbers(mask, n, sides)
    if factor > 1:
        shares = max_pool2d(shares[:, None], factor)[:, 0]
    return shares, count


def _shares_of_numbers(mask: Images, n: int, sides: tuple[int, int]) -> tuple[Tensor, int]:
    plain = Units((0.0,), (1.0,), "nhw")
    found = handed_samples("mask", mask, (*sides, 1), plain)
    shares = found[torch.arange(min(n, len(found)))][..., 0]
    if found.stored_dtype == np.uint8:
        shares = shares / 255
    if shares.min() < 0 or shares.max() > 1:
        raise ConfigError(
            f"mask={_named(mask)} has numbers from {shares.min():g} to {shares.max():g}; expected"
            " 0 (stays) to 1 (is drawn), or uint8"
        )
    return shares, len(found)


def _is_of_numbers(source: Images) -> bool:
    return isinstance(source, np.ndarray) or is_array(Path(source))


def _pictures(key: str, source: Images, size: tuple[int, int], channels: int) -> Tensor:
    """uint8 [M, H, W, C]."""
    if isinstance(source, np.ndarray):
        found = handed_samples(key, source, (*size, channels), Pixels())
        return found[torch.arange(len(found))]
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


def _named(source: Images | float) -> str:
    return f"an array {list(source.shape)}" if isinstance(source, np.ndarray) else str(source)
