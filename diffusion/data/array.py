"""Arrays of measured data: .npy, .npz and zarr, of any number of channels from 1 to 64.

Nothing is read before it is needed: a .npy and what a .npz holds uncompressed are mapped, a zarr is
read by chunks. Numbers of 8 bits are images, unless they are to be standardised; any others become
float32, each channel with mean 0 and deviation 1, which `Units` undoes in drawing.
"""

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import ConfigError, counted
from .context import EXPECTED as SEQUENCES, LENGTHS, Context, checked_context
from .given import GivenChannels, side_by_side
from .image_set import ImageSet, check_memory, nearest, parse_size
from .stored_images import StoredImages, measured
from .values import LAYOUTS, Pixels, Units, Values

MOST_CHANNELS = 64
_EXPECTED = "give a .npy, a .npz or a zarr"


class Rows(Protocol):
    """What numpy's and zarr's arrays have in common."""

    shape: tuple[int, ...]
    dtype: np.dtype


def load_array(
    path: str | None = None,
    key: str | None = None,  # of the array in a .npz or a zarr group; None: the only one
    labels: str | None = None,  # of the array of classes beside it, or a .npy; None: no labels
    layout: str | None = None,  # nhwc, nchw or nhw; None: as the shape says
    size: int | tuple[int, int] | None = None,  # None: what the array has
    channels: int | None = None,  # None: what the array has
    standardise: bool | None = None,  # None: all but uint8
    mean: list[float] | None = None,  # of each channel, in the data's units; None: measured
    deviation: list[float] | None = None,
    condition: list[int] | None = None,  # numbers of the channels that are given; None: none
) -> ImageSet:
    """Open an array [M, H, W, C], [M, C, H, W] or [M, H, W] as a data set. ConfigError: it is not
    there, damaged, of another kind or shape, or not what the options say."""
    if path is None:
        raise ConfigError(f"dataset.path is not set; {_EXPECTED}")
    path = Path(path).expanduser()
    arrays = open_arrays(path)
    rows = _chosen(path, arrays, key, labels)
    if rows.dtype.kind not in "fiu":
        raise ConfigError(f"{path} holds {rows.dtype}; expected uint8 or float32")
    layout = _layout(path, rows.shape, layout)
    images = StoredImages(rows, layout, path)
    _, *sides, depth = images.shape
    if size is not None and list(parse_size(size)) != sides:
        raise ConfigError(
            f"dataset.size={size} differs from the {sides[0]}x{sides[1]} of {path}, and an array is"
            " not resampled; give dataset.size=null"
        )
    if channels is not None and channels != depth:
        raise ConfigError(
            f"dataset.channels={channels} differs from the {depth} of {path}; give"
            " dataset.channels=null"
        )
    _check_scale("mean", mean, images), _check_scale("deviation", deviation, images)
    learned = _learned_channels(images, condition)
    numbers = tuple(condition or ())
    groups = [learned] if condition is None else [learned, condition]
    values, *given = [
        _values(images.taking(group), standardise, _some(mean, group), _some(deviation, group))
        for group in groups
    ]
    of_all = side_by_side(values, *given) if given else values
    return ImageSet(
        (images.taking([*learned, *condition]) if given else images).scaled(of_all),
        None if labels is None else _labels(path, arrays, labels, len(images)),
        name=path.stem,
        values=values,
        condition=GivenChannels(len(numbers), *given, numbers=numbers) if given else None,
    )


def _learned_channels(images: StoredImages, condition: list[int] | None) -> list[int]:
    """Those that are not given. ConfigError: a number that is none, or twice, or all."""
    depth, path = images.shape[3], images.path
    given = condition or []
    if condition is not None and (not given or len(set(given)) < len(given)):
        raise ConfigError(
            f"dataset.condition={condition}; expected numbers of channels, each once, or null"
        )
    wrong = [channel for channel in given if not 0 <= channel < depth]
    if wrong or len(given) == depth:
        why = f"{wrong[0]} is none" if wrong else "nothing is left to learn"
        raise ConfigError(
            f"dataset.condition={condition}: of the channels of {path} {why}; they are 0 to"
            f" {depth - 1}"
        )
    return [channel for channel in range(depth) if channel not in given]


def _some(values: list[float] | None, channels: list[int]) -> list[float] | None:
    return None if values is None else [values[channel] for channel in channels]


# --- files ----------------------------------------------------------------------------------------


def load_vectors(path: str, count: int) -> torch.Tensor:
    """A vector an image, float32 [count, D], of the only array of a file. ConfigError: it is not
    there, or not that."""
    where = Path(path).expanduser()
    rows = _chosen(where, open_arrays(where), None, None)
    if rows.ndim != 2 or len(rows) != count or rows.shape[1] == 0 or rows.dtype.kind not in "fiu":
        raise ConfigError(
            f"dataset.vectors={path} is {rows.dtype} of shape {list(rows.shape)}; expected numbers"
            f" [{count}, D], a vector for each image in the order of the set"
        )
    vectors = torch.from_numpy(np.asarray(rows[:]).astype(np.float32))
    if not torch.isfinite(vectors).all():
        bad = int((~torch.isfinite(vectors)).any(dim=1).int().argmax())
        raise ConfigError(f"dataset.vectors={path} has numbers that are not finite, first in {bad}")
    return vectors


def is_array(path: Path) -> bool:
    """Whether `load_array` is what reads it."""
    return path.suffix in (".npy", ".npz", ".zarr") or _is_zarr(path)


def load_context(path: str, count: int | None = None, option: str = "dataset.context") -> Context:
    """The sequences of a file; those of a set have to be `count`. ConfigError: it is not there, or
    not that."""
    arrays = dict(open_arrays(Path(path).expanduser()))
    lengths = arrays.pop(LENGTHS, None)
    if len(arrays) != 1:
        found = ", ".join([*arrays, *([] if lengths is None else [LENGTHS])])
        raise ConfigError(f"{option}={path} holds {found or 'nothing'}; expected {SEQUENCES}")
    (rows,) = arrays.values()
    if count is None and rows.ndim == 2 and lengths is None:
        rows = np.asarray(rows[:])[None]
    return checked_context(rows, lengths, f"{option}={path}", count)


def _is_zarr(path: Path) -> bool:
    return any((path / name).is_file() for name in ("zarr.json", ".zarray", ".zgroup"))


def open_arrays(path: Path) -> dict[str, Rows]:
    """The arrays of a file by name; a single one is called "". ConfigError: there is none."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; {_EXPECTED}")
    try:
        if path.is_dir():
            return _open_zarr(path)
        if zipfile.is_zipfile(path):
            return dict(_open_npz(path))
        if path.suffix == ".npz":
            raise ValueError("it is no archive of arrays, or cut off")
        with open(path, "rb") as file:
            if file.read(len(np.lib.format.MAGIC_PREFIX)) != np.lib.format.MAGIC_PREFIX:
                raise ValueError("it does not begin as a .npy does")  # numpy advises to unpickle it
        return {"": np.load(path, mmap_mode="r", allow_pickle=False)}
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read as an array ({error}); {_EXPECTED}") from None


def _open_npz(path: Path) -> Iterator[tuple[str, Rows]]:
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                continue
            name = member.filename.removesuffix(".npy")
            if member.compress_type == zipfile.ZIP_STORED:
                # a local header: 30 bytes, the last four of which say how long name and extra are
                file.seek(member.header_offset + 26)
                lengths = np.frombuffer(file.read(4), "<u2")
                file.seek(member.header_offset + 30 + int(lengths.sum()))
                yield name, _mapped(path, file)
                continue
            with archive.open(member) as compressed:
                shape, _, dtype = _header(compressed)
            check_memory(f"{path}: {name}, which is compressed,", shape, dtype.itemsize)
            with archive.open(member) as compressed:
                yield name, np.lib.format.read_array(compressed, allow_pickle=False)


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def _mapped(path: Path, file: Any) -> np.ndarray:
    shape, fortran, dtype = _header(file)
    if dtype.hasobject:
        raise ValueError("it holds objects of Python, and nothing is unpickled here")
    order = "F" if fortran else "C"
    return np.memmap(path, dtype, mode="r", offset=file.tell(), shape=shape, order=order)


def _open_zarr(path: Path) -> dict[str, Rows]:
    if not _is_zarr(path):
        raise ConfigError(f"{path} is a folder, and no zarr; {_EXPECTED}")
    try:
        import zarr
    except ImportError:
        raise ConfigError(
            f"{path} is a zarr, for which there is no package; pip install 'triton-diffusion[data]'"
            " or pip install zarr"
        ) from None
    try:
        found = zarr.open(str(path), mode="r")
    except Exception as error:  # it has errors of its own
        raise ValueError(str(error)) from None
    if hasattr(found, "shape"):
        return {"": found}
    return dict(found.arrays())


def _chosen(path: Path, arrays: dict[str, Rows], key: str | None, labels: str | None) -> Rows:
    if key is not None and key not in arrays:
        known = [name for name in arrays if name]
        if not known:
            raise ConfigError(f"dataset.key={key}, but {path} is a single array; leave it out")
        raise ConfigError(f"dataset.key={key} is no array of {path}; {nearest(key, known)}")
    others = [name for name in arrays if name != labels]
    if key is None and len(others) != 1:
        raise ConfigError(
            f"{path} holds {len(others)} arrays ({', '.join(others[:8])}); say which one is learned"
            " by dataset.key"
        )
    return arrays[others[0] if key is None else key]


def _labels(path: Path, arrays: dict[str, Rows], name: str, count: int) -> torch.Tensor:
    """int64 [M]."""
    if name in arrays and name:
        where, found = f"{path}: {name}", arrays[name]
    elif Path(name).expanduser().is_file():
        where, found = name, open_arrays(Path(name).expanduser()).get("")
    else:
        known = ", ".join(other for other in arrays if other) or "a single array"
        raise ConfigError(
            f"dataset.labels={name} is no array of {path} ({known}) and no .npy beside it"
        )
    if found is None or found.shape not in ((count,), (count, 1)) or found.dtype.kind not in "iu":
        what = "no single array" if found is None else f"{found.dtype} {list(found.shape)}"
        raise ConfigError(f"{where} is {what}; expected whole numbers [{count}]")
    values = np.asarray(found[:]).reshape(-1).astype(np.int64)
    if values.min() < 0 or values.max() >= 2**31:
        raise ConfigError(f"{where} has labels that are no class numbers (0, 1, 2, ...)")
    return torch.from_numpy(values)


# --- what the numbers are -------------------------------------------------------------------------


def _layout(path: Path, shape: tuple[int, ...], layout: str | None) -> str:
    """The order of the axes. ConfigError: there are too few or too many, or channels are."""
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(f"dataset.layout={layout} is unknown; choose one of {', '.join(LAYOUTS)}")
    if len(shape) not in ((3, 4) if layout is None else (len(layout),)) or 0 in shape:
        what = f"{len(layout)} axes" if layout else "[M, H, W, C], [M, C, H, W] or [M, H, W]"
        raise ConfigError(f"{path} has the shape {list(shape)}; expected {what}, none of them 0")
    if layout is None and len(shape) == 3:
        layout = "nhw"
    if layout is None:
        # images are square, or have fewer channels than pixels a side
        _, first, second, last = shape
        is_square = (first == second) != (second == last)
        if not is_square and (first == last or min(first, last) >= second):
            raise ConfigError(
                f"{path} has the shape {list(shape)}, which does not say where its channels are;"
                " give dataset.layout=nhwc or nchw"
            )
        channels_first = second == last if is_square else first < last
        layout = "nchw" if channels_first else "nhwc"
    depth = {"nhw": 1, "nhwc": shape[-1], "nchw": shape[1]}[layout]
    if depth > MOST_CHANNELS:
        raise ConfigError(
            f"{path} has the shape {list(shape)}, with layout={layout}"
            f" {counted(depth, 'channels')}; the most"
            f" is {MOST_CHANNELS} (dataset.layout says which axis they are)"
        )
    return layout


def _check_scale(name: str, given: list[float] | None, images: StoredImages) -> None:
    depth = images.shape[3]
    if given is not None and len(given) != depth:
        raise ConfigError(
            f"dataset.{name} has {counted(len(given), 'numbers')}; {images.path} has"
            f" {counted(depth, 'channels')}"
        )


def _values(
    images: StoredImages,
    standardise: bool | None,
    mean: list[float] | None,
    deviation: list[float] | None,
) -> Values:
    is_bytes, depth = images.stored_dtype == np.uint8, images.shape[3]
    if standardise is None:
        standardise = not is_bytes or mean is not None or deviation is not None
    for name, given in (("mean", mean), ("deviation", deviation)):
        if given is not None and not standardise:
            raise ConfigError(f"dataset.{name} is given, and dataset.standardise=false; leave one")
    if deviation is not None and min(deviation) <= 0:
        raise ConfigError(f"dataset.deviation={deviation}; expected numbers above 0")
    dtype = "uint8" if is_bytes else "float32"
    if not standardise:
        if is_bytes:
            return Pixels(images.layout)
        return Units((0.0,) * depth, (1.0,) * depth, images.layout)
    limit = None
    if mean is None or deviation is None:
        found = measured(images)
        mean = found.mean if mean is None else mean
        deviation = found.deviation if deviation is None else deviation
        limit = found.limit(mean, deviation)
    numbers = (tuple(map(float, values)) for values in (mean, deviation))
    return Units(*numbers, images.layout, dtype, limit)
