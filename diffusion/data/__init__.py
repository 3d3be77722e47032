"""Data sets by name. A loader's signature is the schema of its options in configs/dataset/."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import ConfigError
from ..registration import check_name
from ..settings import typed
from .array import load_array, load_context, load_vectors
from .elephants import TRUNKS, elephants
from .hub import cifar10, fashion_mnist, mnist
from .image_set import ImageSet, nearest, parse_size, with_channels
from .images import list_images, load_folder
from .order import sample_index
from .packed import load_packed
from .pairs import load_pairs
from .shards import huggingface, parquet, webdataset

__all__ = [
    "ImageSet",
    "expected_classes",
    "expected_condition",
    "expected_size",
    "load_dataset",
    "register_dataset",
    "sample_index",
]

L = TypeVar("L", bound=Callable[..., ImageSet])

_LOADERS: dict[str, Callable[..., ImageSet]] = {
    "array": load_array,
    "elephants": elephants,
    "folder": load_folder,
    "packed": load_packed,
    "pairs": load_pairs,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "webdataset": webdataset,
    "parquet": parquet,
    "huggingface": huggingface,
}


_GIVEN = ("vectors", "context")  # options of every set, for files beside it


def _of_every_set(
    channels: int | None = None, vectors: str | None = None, context: str | None = None
) -> None:
    """The schema of what a loader may leave to `load_dataset`."""


def register_dataset(name: str) -> Callable[[L], L]:
    """As `diffusion.register_dataset`, which says what the function has to be."""

    def register(loader: L) -> L:
        if "size" not in inspect.signature(loader).parameters:
            raise ValueError(f"data set {name}: its function has no argument size")
        check_name("data set", name, loader, _LOADERS)
        _LOADERS[name] = loader
        return loader

    return register


def load_dataset(name: str, **options: Any) -> ImageSet:
    """The set `name` with the options of its loader; one that is None takes the loader's default.

    For every set: `size` (a side or [H, W]), `channels` (1 or 3: gray and colour are converted
    into each other where the loader does not do it), and `vectors` and `context` (files of one for
    each image, see `load_vectors` and `load_context`). ConfigError names an unknown set or option
    and the nearest valid one.
    """
    vectors, context = options.pop("vectors", None), options.pop("context", None)
    loader, given, channels = _checked(name, options)
    data = loader(**given)
    if channels is not None:
        data.images = with_channels(data.images, channels)
    if vectors is not None:
        data.vectors = load_vectors(str(vectors), len(data))
    if context is not None:
        data.context = load_context(str(context), len(data))
    return data


def expected_size(name: str, **options: Any) -> tuple[int, int] | None:
    """(H, W) that `load_dataset` will give, if that needs no data: a model can be held against it
    before a picture is drawn or decoded. Raises ConfigError for the same options."""
    loader, given, _ = _checked(name, options)
    size = given.get("size", inspect.signature(loader).parameters["size"].default)
    return None if size is None else parse_size(size)


def expected_condition(name: str, **options: Any) -> int:
    """The number of channels that are given, as far as the options say so."""
    _, given, _ = _checked(name, options)
    if name == "pairs":
        return given.get("condition_channels", 3)
    return len(given.get("condition", ())) if name == "array" else 0


def expected_classes(name: str, **options: Any) -> int | None:
    """The number of classes, 0 without labels, if no picture has to be drawn or decoded to know."""
    _, given, _ = _checked(name, options)
    if name == "elephants":
        return len(TRUNKS)
    if name not in ("folder", "pairs") or "path" not in given:
        return None
    labels = list_images(given["path"], given.get("classes", True)).labels
    return 0 if labels is None else max(labels) + 1


def _checked(
    name: str, options: dict[str, Any]
) -> tuple[Callable[..., ImageSet], dict[str, Any], int | None]:
    """The loader, its options, and the channels to convert to behind it."""
    if name not in _LOADERS:
        raise ConfigError(
            f"dataset={name} is unknown; {nearest(str(name), tuple(_LOADERS))}, or register it by"
            " plugin=FILE"
        )
    loader = _LOADERS[name]
    known = tuple(inspect.signature(loader).parameters)
    valid = tuple(dict.fromkeys((*known, "channels", *_GIVEN)))
    given = {k: value for k, value in options.items() if value is not None and k not in _GIVEN}
    for key in given:
        if key not in valid:
            raise ConfigError(f"dataset.{key} is no option of {name}; {nearest(key, valid)}")
    typed(_of_every_set, {key: options.get(key) for key in ("channels", *_GIVEN)}, "dataset")
    given = typed(loader, given, "dataset")
    if (channels := given.get("channels", 1)) < 1:
        raise ConfigError(f"dataset.channels={channels}; expected a whole number, at least 1")
    channels = None if "channels" in known else given.pop("channels", None)
    if channels not in (None, 1, 3):
        raise ConfigError(f"dataset.channels={channels} is wrong for {name}; choose 1 or 3")
    return loader, given, channels
