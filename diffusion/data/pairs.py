"""Pairs of images, one to learn and one that is given, for super-resolution and inpainting.

The two are of one name, in two folders or zips. Both are kept in one array, the given one's
channels behind the other's, so they are mirrored together and gathered at once.
"""

from pathlib import PurePosixPath

import numpy as np

from ..errors import ConfigError, counted
from .given import GivenChannels, enlarged
from .image_set import ImageSet, check_memory, parse_size
from .images import Decoder, ImageFiles, list_images, read_together, set_of


def load_pairs(
    path: str | None = None,  # of the images that are learned
    condition: str | None = None,  # of those that are given; None: the same, for condition_size
    size: int | tuple[int, int] | None = None,  # None: that of all images
    channels: int = 3,
    condition_channels: int = 3,
    condition_size: int | tuple[int, int] | None = None,  # reduced to this first; None: not
    classes: bool = True,  # sub-folders of `path` (or dataset.json) give labels
    background: str = "white",  # behind alpha
) -> ImageSet:
    """Every pair of images, in memory. ConfigError: an image without another, and what `Decoder`
    finds wrong."""
    if path is None:
        raise ConfigError("dataset.path is not set; give a folder of images, or a .zip")
    if condition is None and condition_size is None:
        raise ConfigError(
            "dataset.condition is not set; give a folder of images of the same names, or"
            " dataset.condition_size=SIDE for the images themselves, reduced"
        )
    files = list_images(path, classes)
    given = list_images(path if condition is None else condition, classes=False)
    given = _in_order_of(files, given) if condition is not None else given
    learned = Decoder(files, size, channels, background)
    reduced = None if condition_size is None else parse_size(condition_size)
    if reduced is not None and (reduced[0] > learned.size[0] or reduced[1] > learned.size[1]):
        raise ConfigError(
            f"dataset.condition_size={condition_size} is larger than the images,"
            f" {learned.size[0]}x{learned.size[1]}; give less"
        )
    beside = Decoder(given, reduced or learned.size, condition_channels, background)
    shape = (len(learned), *learned.size, channels + condition_channels)
    check_memory(f"dataset.size={size}", shape)
    images, labels, apart = np.empty(shape, dtype=np.uint8), [], []
    for (image, other), label in read_together(learned, beside):
        if condition is not None and _show_other_parts(learned, beside):
            apart.append((learned.last, beside.last))
        images[len(labels), ..., :channels] = image
        images[len(labels), ..., channels:] = enlarged(other, learned.size)
        labels.append(label)
    skipped = (*learned.skipped, *beside.skipped)
    channels_given = GivenChannels(condition_channels, size=reduced)
    made = set_of(files, learned, images, labels, skipped=skipped, condition=channels_given)
    made.notes += given.notes if condition is not None else ()
    made.notes += (_apart_note(apart, len(labels)),) if apart else ()
    return made


def _show_other_parts(one: Decoder, other: Decoder) -> bool:
    """Whether the last two images were cropped to parts that differ by a pixel of the set or more,
    because their aspect ratios differ."""
    kept = [_kept(decoder.last[1], decoder.size) for decoder in (one, other)]
    return any(abs(a - b) * side >= 1 for a, b, side in zip(*kept, one.size, strict=True))


def _kept(had: tuple[int, int], size: tuple[int, int]) -> tuple[float, float]:
    """The shares of its height and width that an image keeps when it is cropped to a size."""
    high, wide = had[0] / size[0], had[1] / size[1]
    return min(high, wide) / high, min(high, wide) / wide


def _apart_note(apart: list[tuple], total: int) -> str:
    (name, had), (_, other) = apart[0]
    shapes = " and ".join(f"{h}x{w}" for h, w in (had, other))
    return (
        f"the two images of {len(apart)} of {counted(total, 'pairs')} differ in their aspect ratio,"
        f" first those of {name}, {shapes}: what is cropped from one is left in the other"
    )


def _in_order_of(files: ImageFiles, given: ImageFiles) -> ImageFiles:
    """The given images in the order of the others. ConfigError: one is alone."""
    by_stem: dict[str, str] = {}
    for name in given.names:
        stem = _stem(name)
        if stem in by_stem:
            raise ConfigError(f"{given.path} has two images for one: {by_stem[stem]} and {name}")
        by_stem[stem] = name
    stems = [_stem(name) for name in files.names]
    for here, there, missing in (
        (files, given, set(stems) - set(by_stem)),
        (given, files, set(by_stem) - set(stems)),
    ):
        if missing:
            lack = "has none of its name" if len(missing) == 1 else "have none of their name"
            raise ConfigError(
                f"{len(missing)} of {len(here.names)} images of {here.path} {lack}"
                f" in {there.path}, first {min(missing)}; pairs have the same names, but for .png"
                " or .jpg"
            )
    if len(set(stems)) < len(stems):
        twice = next(stem for i, stem in enumerate(stems) if stem in stems[:i])
        raise ConfigError(f"{files.path} has two images of the name {twice}")
    given.names = [by_stem[stem] for stem in stems]
    return given


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))
