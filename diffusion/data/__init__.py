"""Data sets by name. A loader's signature is the schema of its options in configs/dataset/."""

import inspect
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from .elephants import elephants
from .hub import cifar10, fashion_mnist, mnist
from .image_set import ImageSet, nearest, with_channels
from .images import load_folder
from .order import sample_index
from .packed import load_packed

__all__ = ["ImageSet", "load_dataset", "sample_index"]

_LOADERS: dict[str, Callable[..., ImageSet]] = {
    "elephants": elephants,
    "folder": load_folder,
    "packed": load_packed,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
}


def load_dataset(name: str, **options: Any) -> ImageSet:
    """The set `name` with the options of its loader; one that is None takes the loader's default.

    For every set: `size` (a side or [H, W]) and `channels` (1 or 3: gray and colour are converted
    into each other where the loader does not do it). ConfigError names an unknown set or option and
    the nearest valid one.
    """
    if name not in _LOADERS:
        raise ConfigError(f"dataset={name} is unknown; {nearest(str(name), tuple(_LOADERS))}")
    loader = _LOADERS[name]
    known = tuple(inspect.signature(loader).parameters)
    valid = tuple(dict.fromkeys((*known, "channels")))
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in valid:
            raise ConfigError(f"dataset.{key} is no option of {name}; {nearest(key, valid)}")
    channels = None if "channels" in known else given.pop("channels", None)
    data = loader(**given)
    if channels is not None:
        data.images = with_channels(data.images, channels)
    return data
