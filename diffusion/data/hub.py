"""MNIST, Fashion-MNIST and CIFAR-10: original files or class folders, else through Hugging Face.

Local files are looked for under `path`: idx files, gzipped or not (MNIST and Fashion-MNIST), the
binary version of CIFAR-10, or a folder of images per class. The Python version of CIFAR-10 is a
pickle, and nothing is unpickled here.
"""

import gzip
import logging
import os
import socket
import urllib.parse
import urllib.request
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..errors import ConfigError
from .image_set import ImageSet, parse_size
from .images import enlarged_note, load_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Source:
    name: str
    repository: str  # at Hugging Face
    side: int  # of the original images
    channels: int
    class_names: tuple[str, ...]
    folders: tuple[str, ...]  # where the original files lie under `path`


_MNIST = _Source(
    "mnist", "ylecun/mnist", 28, 1, tuple("0123456789"), (".", "raw", "MNIST/raw", "mnist")
)
_FASHION_MNIST = _Source(
    "fashion_mnist",
    "zalando-datasets/fashion_mnist",
    28,
    1,
    (
        *("tshirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle_boot"),
    ),
    (".", "raw", "FashionMNIST/raw", "fashion_mnist"),
)
_CIFAR10 = _Source(
    "cifar10",
    "uoft-cs/cifar10",
    32,
    3,
    (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    (".", "cifar-10-batches-bin"),
)


def mnist(
    path: str | None = None, size: int | tuple[int, int] | None = None, split: str | None = None
) -> ImageSet:
    """Handwritten digits, 1 channel, 28x28. With size=32 they are padded with black to 32x32, which
    halves five times; to any other size they are resampled. `split`: train or test; None takes
    train, or what there is."""
    return _load(_MNIST, path, size, split)


def fashion_mnist(
    path: str | None = None, size: int | tuple[int, int] | None = None, split: str | None = None
) -> ImageSet:
    """Articles of clothing, 1 channel; sizes and splits as for `mnist`."""
    return _load(_FASHION_MNIST, path, size, split)


def cifar10(
    path: str | None = None, size: int | tuple[int, int] | None = None, split: str | None = None
) -> ImageSet:
    """Ten kinds of object, 32x32, 3 channels; splits as for `mnist`."""
    return _load(_CIFAR10, path, size, split)


def _load(
    source: _Source,
    path: str | None,
    size: int | tuple[int, int] | None,  # None: as it is
    split: str | None,
) -> ImageSet:
    if split not in (None, "train", "test"):
        raise ConfigError(f"split={split} is unknown; choose train or test")
    if path is None:
        images, labels = _from_hub(source, split or "train")
    else:
        root = Path(path).expanduser()
        if not root.is_dir():
            raise ConfigError(f"{path} is no folder; {_both_ways(source)}")
        read = _read_cifar if source is _CIFAR10 else _read_idx
        splits = (split,) if split else ("train", "test")
        found = next(filter(None, (read(source, root, name) for name in splits)), None)
        if found is None:
            other = {"train": "test", "test": "train"}.get(split)
            if other and not (root / split).is_dir() and read(source, root, other):
                raise ConfigError(f"{root} has no split={split} but {other}; use split={other}")
            return _from_folders(source, root, size, splits)
        images, labels = found
    if len(images) != len(labels) or len(images) == 0 or labels.max() >= len(source.class_names):
        raise ConfigError(
            f"{source.name}: {len(images)} images and {len(labels)} labels do not go together"
        )
    had = images.shape[1:3]
    wanted = had if size is None else parse_size(size)
    padded = (had, wanted) == ((28, 28), (32, 32))
    notes = ()
    if (had[0] < wanted[0] or had[1] < wanted[1]) and not padded:
        notes = (enlarged_note([had] * len(images), len(images), wanted),)
    return ImageSet(
        torch.from_numpy(_resize(images, wanted)),
        torch.from_numpy(labels.astype(np.int64)),
        source.class_names,
        name=source.name,
        notes=notes,
    )


def _both_ways(source: _Source) -> str:
    files = "the binary version" if source is _CIFAR10 else "the original idx files"
    return (
        f"set dataset.path to a folder with {files} or one folder of images per class, or install"
        f" Hugging Face datasets (pip install datasets), go online and leave dataset.path unset"
    )


def _from_folders(
    source: _Source,
    root: Path,
    size: int | tuple[int, int] | None,
    splits: tuple[str, ...],
) -> ImageSet:
    """A folder per class, directly or under train/ and test/."""
    folder = next((root / split for split in splits if (root / split).is_dir()), root)
    try:
        data = load_folder(str(folder), size, source.channels)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_both_ways(source)}") from None
    if data.labels is None:
        raise ConfigError(f"{folder} has no class folders; {_both_ways(source)}")
    data.name = source.name
    return data


def _read_idx(source: _Source, root: Path, split: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Images [M, 28, 28, 1] and labels [M] of a split, or None if its files are not there."""
    prefix = "train" if split == "train" else "t10k"
    files = [_find(source, root, f"{prefix}-{kind}") for kind in ("images-idx3", "labels-idx1")]
    if None in files:
        return None
    log.info("%s: %s split from %s", source.name, split, files[0].parent)
    return _idx_array(files[0], 3)[..., None], _idx_array(files[1], 1)


def _find(source: _Source, root: Path, stem: str) -> Path | None:
    dotted = stem.replace("-idx", ".idx")
    names = [f"{name}-ubyte{end}" for name in (stem, dotted) for end in ("", ".gz")]
    paths = (root / folder / name for folder in source.folders for name in names)
    return next((path for path in paths if path.is_file()), None)


def _idx_array(path: Path, ndim: int) -> np.ndarray:
    """idx: two zero bytes, the type (8: uint8), the rank, the sides as big-endian int32, values."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    magic, expected = data[:4], bytes((0, 0, 8, ndim))
    if magic != expected or len(data) < 4 + 4 * ndim:
        raise ConfigError(
            f"{path} starts with {magic.hex()}, not with the idx magic {expected.hex()}"
        )
    shape = np.frombuffer(data, ">i4", ndim, 4).tolist()
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * ndim)
    if values.size != np.prod(shape):
        raise ConfigError(f"{path} should hold {shape} values, and has {values.size}: truncated")
    return values.reshape(shape)


def _read_cifar(source: _Source, root: Path, split: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The binary version: records of one label byte and 3 x 32 x 32 bytes."""
    pattern = "data_batch_*.bin" if split == "train" else "test_batch.bin"
    for folder in source.folders:
        files = sorted((root / folder).glob(pattern))
        if not files:
            continue
        records = []
        for path in files:
            data = np.fromfile(path, dtype=np.uint8)
            if data.size == 0 or data.size % 3073:
                raise ConfigError(f"{path} has {data.size} bytes, no multiple of a record's 3073")
            records.append(data.reshape(-1, 3073))
        record = np.concatenate(records)
        images = record[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(images), record[:, 0]
    return None


def _from_hub(source: _Source, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Through Hugging Face `datasets`, from the network or its cache."""
    try:
        table = _table(source.repository, None, split)
        columns = table.column_names
        pictures = table["image" if "image" in columns else "img"]
        mode = "L" if source.channels == 1 else "RGB"
        images = np.stack([np.asarray(picture.convert(mode)) for picture in pictures])
        labels = np.array(table["label"])
    except Exception as error:
        # no package, no network, no cache: the library has an error for each
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{source.name} is not available from Hugging Face ({reason}); {_both_ways(source)}"
        ) from None
    return images.reshape(*images.shape[:3], source.channels), labels


def load_from_hub(repository: str, subset: str | None, split: str) -> Any:
    """A table of `datasets`, from the network or its cache. ConfigError: there is none."""
    try:
        return _table(repository, subset, split)
    except Exception as error:
        # no package, no network, no cache, no such split: the library has an error for each
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{repository} is not available from Hugging Face: {reason} (it takes pip install"
            " datasets, and a network or its cache)"
        ) from None


def _table(repository: str, subset: str | None, split: str) -> Any:
    if not Path(repository).is_dir() and not _hub_answers():
        # straight to the cache, instead of half a minute of retries
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import datasets

    options = {} if subset is None else {"name": subset}
    return datasets.load_dataset(repository, split=split, **options)


def _hub_answers() -> bool:
    """Whether the hub accepts a connection; assumed behind a proxy, where only trying tells."""
    if urllib.request.getproxies() or find_spec("huggingface_hub") is None:
        return True
    from huggingface_hub import constants

    url = urllib.parse.urlsplit(constants.ENDPOINT)
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname, port), timeout=5).close()
    except OSError:
        return False
    return True


def _resize(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """[M, H, W, C] at the wanted size: as it is, 28 padded to 32, or resampled."""
    height, width, channels = images.shape[1:]
    if (height, width) == size:
        return images.copy()
    if (height, width) == (28, 28) and size == (32, 32):
        return np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)))
    out = np.empty((len(images), *size, channels), dtype=np.uint8)
    for source, target in zip(images, out, strict=True):
        image = Image.fromarray(source[..., 0] if channels == 1 else source)
        resized = image.resize(size[::-1], Image.Resampling.LANCZOS)
        target[:] = np.asarray(resized).reshape(target.shape)
    return out
