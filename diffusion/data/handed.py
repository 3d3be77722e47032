"""Arrays that are handed to a trained network: numbers in the units of its data."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import ConfigError
from .array import open_arrays
from .stored_images import StoredImages
from .values import LAYOUTS, Pixels, Values


def as_array(given: Any) -> Any:
    """A tensor or a picture of Pillow as the array that it holds, anything else as it is."""
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        return (given.float() if given.dtype == torch.bfloat16 else given).numpy()
    return np.asarray(given) if isinstance(given, Image.Image) else given


def handed_samples(
    option: str,
    source: str | Path | np.ndarray,  # a .npy, a .npz, a zarr, or the numbers themselves
    shape: tuple[int, int, int],  # H, W, C of a sample
    values: Values,  # what the numbers mean
    whole: Sequence[int] = (),  # which channels of the data set's own array the C are
    of: int = 0,  # how many channels that array has
) -> StoredImages:
    """Samples of this shape, with the axes of the data's file or in another order; one alone counts
    as a file of one. Of several arrays the one that fits. ConfigError: none does, or several do."""
    where = f"{option}={source}"
    if isinstance(source, np.ndarray):
        where, arrays = f"{option}=an array {list(source.shape)}", {"": source}
    else:
        arrays = open_arrays(Path(source).expanduser())
    height, width, channels = shape
    is_pixels, found = isinstance(values, Pixels), {}
    for name, rows in arrays.items():
        if rows.dtype != np.uint8 and (is_pixels or rows.dtype.kind not in "fiub"):
            continue
        for layout, alone in _readings(len(rows.shape), getattr(values, "layout", "nhwc")):
            seen = _seen(rows.shape if not alone else (1, *rows.shape), layout)
            taken = None if seen == (height, width, channels) else whole
            if (taken is None or (whole and seen == (height, width, of))) and 0 not in rows.shape:
                given = np.asarray(rows[:])[None] if alone else rows
                found[name] = StoredImages(given, layout, Path(where), None, taken)
                break
    if len(found) == 1:
        return next(iter(found.values())).scaled(values)
    if found:
        raise ConfigError(
            f"{where} holds {len(found)} arrays that fit ({', '.join(found)}); give a .npy of one"
        )
    has = ", ".join(f"{rows.dtype} of shape {list(rows.shape)}" for rows in arrays.values())
    raise ConfigError(
        f"{where} is {has or 'empty'}; expected {'uint8' if is_pixels else 'float32'} [M, {height},"
        f" {width}, {channels}] or [M, {channels}, {height}, {width}], or one of these"
    )


def _readings(axes: int, layout: str) -> Iterator[tuple[str, bool]]:
    """(order of axes, whether it is one sample) that an array may have, the likelier ones first."""
    orders = sorted(LAYOUTS, key=lambda order: order != layout)
    yield from ((order, False) for order in orders if len(order) == axes)
    yield from ((order, True) for order in orders if len(order) == axes + 1)


def _seen(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """H, W, C."""
    sides = dict(zip(layout, shape, strict=True))
    return sides["h"], sides["w"], sides.get("c", 1)
