"""Images in tars, parquet files and sets of the Hugging Face hub, listed as those of a folder are.

    WebDataset   a tar has the files of a sample one behind the other: 0001.jpg, 0001.cls. The key
                 is the name up to the first dot. A tar is read in place, so it must not be
                 compressed.
    parquet      a column of images, as bytes or as the hub stores them ({"bytes", "path"}), and one
                 of labels. Through pyarrow.
    Hugging Face a set by name, with a column of images and one of labels. Through datasets.

Samples keep their order. Nothing is streamed: an epoch is a permutation of all samples, so where
they do not fit into memory tools/prepare.py makes a file of them.
"""

import glob
import io
import json
import re
import tarfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ConfigError, first_of
from .hub import load_from_hub
from .image_set import ImageSet, nearest
from .images import EXTENSIONS, ImageFiles, decoded

_HUB = "hf:"  # before a name in tools/prepare.py
_LABEL = "cls"  # WebDataset's extension of a class


def webdataset(
    path: str | None = None,
    size: int | tuple[int, int] | None = None,  # None: that of all images
    channels: int = 3,
    label: str | None = _LABEL,  # extension of the labels, or json.KEY; None: no labels
    background: str = "white",
) -> ImageSet:
    """The images in a .tar, a folder of them, or a pattern (shard-{000..009}.tar, *.tar)."""
    if path is None:
        raise ConfigError("dataset.path is not set; give a .tar, a folder of them or a pattern")
    return decoded(list_tars(path, label), size, channels, background)


def parquet(
    path: str | None = None,
    size: int | tuple[int, int] | None = None,  # None: that of all images
    channels: int = 3,
    column: str = "image",
    label: str | None = None,  # None: the column label, if there is one
    classes: bool = True,  # False: no labels
    background: str = "white",
) -> ImageSet:
    """The images in a column of a .parquet, a folder of them, or a pattern."""
    if path is None:
        raise ConfigError("dataset.path is not set; give a .parquet, a folder of them or a pattern")
    return decoded(list_parquet(path, column, label, classes), size, channels, background)


def huggingface(
    repository: str | None = None,
    subset: str | None = None,
    split: str = "train",
    size: int | tuple[int, int] | None = None,  # None: that of all images
    channels: int = 3,
    column: str = "image",
    label: str | None = None,  # None: the column label, if there is one
    classes: bool = True,  # False: no labels
    background: str = "white",
) -> ImageSet:
    """The images of a set of the Hugging Face hub, or of a folder that datasets can read."""
    if repository is None:
        raise ConfigError("dataset.repository is not set; give a name such as uoft-cs/cifar10")
    files = list_huggingface(repository, subset, split, column, label, classes)
    return decoded(files, size, channels, background)


def list_shards(
    src: str,
    *,
    classes: bool,
    subset: str | None,
    split: str,
    column: str,
    label: str | None,
) -> ImageFiles | None:
    """The images of `src` if it names tars, parquet files or, behind hf:, a set of the hub."""
    if src.startswith(_HUB):
        return list_huggingface(src.removeprefix(_HUB), subset, split, column, label, classes)
    if _matches(src, ".tar") or re.search(r"\.(tar\.\w+|tgz)$", src):
        return list_tars(src, (label or _LABEL) if classes else None)
    if _matches(src, ".parquet"):
        return list_parquet(src, column, label, classes)
    return None


def _matches(src: str, suffix: str) -> bool:
    path = Path(src).expanduser()
    if path.is_dir():
        names = {found.suffix for found in path.iterdir() if found.is_file()}
        return names == {suffix}
    return path.suffix == suffix


def _expanded(path: str, suffix: str) -> list[Path]:
    """The files of a pattern or folder, in the order of their names. ConfigError: none."""
    where = Path(path).expanduser()
    if where.is_dir():
        found = sorted(where.glob(f"*{suffix}"))
    elif where.is_file():
        found = [where]
    else:
        found = [Path(name) for part in _braces(str(where)) for name in sorted(glob.glob(part))]
    if not found:
        raise ConfigError(
            f"{path} is no {suffix}, no folder of them, and no pattern that one of them matches"
        )
    return found


def _named(files: Sequence[Path]) -> list[tuple[Path, str]]:
    """The files, and what they are called among each other: by their paths if two of them, in
    several folders, have one name."""
    alike = len({file.name for file in files}) < len(files)
    return [(file, str(file) if alike else file.name) for file in files]


def _braces(pattern: str) -> list[str]:
    """a-{08..10}.tar -> a-08.tar, a-09.tar, a-10.tar."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if found is None:
        return [pattern]
    first, last = found.groups()
    numbers = range(int(first), min(int(last), int(first) + 1_000_000) + 1)
    return [
        rest
        for number in numbers
        for rest in _braces(
            f"{pattern[: found.start()]}{number:0{len(first)}d}{pattern[found.end() :]}"
        )
    ]


def _numbered(
    values: Sequence[Any], where: str, names: Sequence[str] | None = None
) -> tuple[list[int], tuple[str, ...] | None]:
    """Labels as class numbers: whole numbers as they are, texts in the order of the alphabet."""
    if all(isinstance(value, str) for value in values) and names is None:
        names = sorted(set(values))
        number = {name: i for i, name in enumerate(names)}
        return [number[value] for value in values], tuple(names)
    if not all(type(value) is int and 0 <= value < 2**31 for value in values):
        wrong = next(v for v in values if not (type(v) is int and 0 <= v < 2**31))
        raise ConfigError(
            f"{where} has the label {wrong!r}; expected class numbers (0, 1, 2, ...) or names"
        )
    if names and max(values) >= len(names):
        raise ConfigError(f"{where} has the label {max(values)}, but {len(names)} names of classes")
    return list(values), tuple(names) if names else None


# --- tars -----------------------------------------------------------------------------------------


def list_tars(path: str, label: str | None) -> ImageFiles:
    """See `webdataset`."""
    places: dict[str, tuple[Path, int, int]] = {}  # image -> file, offset, bytes
    about: list[tuple[Path, int, int] | None] = []
    others: set[str] = set()  # extensions beside those of images
    wanted = "json" if label is not None and label.startswith("json.") else label
    for shard, called in _named(_expanded(path, ".tar")):
        for key, parts in _samples(shard):
            image = next((e for e in parts if f".{e.rpartition('.')[2]}" in EXTENSIONS), None)
            if image is None:
                continue
            name = f"{called}/{key}.{image}"
            if name in places:
                raise ConfigError(f"{shard} has two samples of the name {key}")
            places[name] = parts[image]
            about.append(parts.get(wanted))
            others.update(f".{e}" for e in parts if e != image)
    if not places:
        raise ConfigError(f"{path} holds no image; looked for files in {', '.join(EXTENSIONS)}")

    def read(place: tuple[Path, int, int]) -> bytes:
        shard, offset, size = place
        with open(shard, "rb") as file:
            file.seek(offset)
            return file.read(size)

    files = ImageFiles(
        Path(path), list(places), None, None, lambda name: io.BytesIO(read(places[name]))
    )
    missing = sum(place is None for place in about)
    if label not in (None, _LABEL) and missing == len(about):  # asked for, and not by default
        kinds = first_of(sorted(others)) or "nothing"
        files.notes = (f"{path}: no sample has a .{wanted}; beside the images lies {kinds}",)
    if label is None or missing == len(about):
        return files
    if missing:
        have = "has" if missing == 1 else "have"
        raise ConfigError(
            f"{path}: {missing} of {len(about)} samples {have} no .{wanted}; give"
            " dataset.label=null (tools/prepare.py: classes=false) to learn none"
        )
    values = [_label(read(place), label, path) for place in about]
    files.labels, files.class_names = _numbered(values, f"{path}: .{label}")
    return files


def _samples(shard: Path) -> list[tuple[str, dict[str, tuple[Path, int, int]]]]:
    """(key, extension -> file, offset, bytes) of each sample, in order."""
    found: list[tuple[str, dict[str, tuple[Path, int, int]]]] = []
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                folder, slash, name = member.name.rpartition("/")
                if not member.isfile() or name.startswith("."):
                    continue
                stem, _, extension = name.partition(".")
                key = f"{folder}{slash}{stem}"
                again = found and found[-1][0] == key and extension.lower() in found[-1][1]
                if not found or found[-1][0] != key or again:
                    found.append((key, {}))
                found[-1][1][extension.lower()] = (shard, member.offset_data, member.size)
            _check_end(shard, archive.offset)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ConfigError(
            f"{shard} cannot be read as a tar ({error}); it must not be compressed, or cut off"
        ) from None
    return found


def _check_end(shard: Path, end: int) -> None:
    """ConfigError if the list of files does not end in a block of zeros, as that of a whole tar
    does: `tarfile` stops without a word where a header is cut off or damaged."""
    with open(shard, "rb") as file:
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ConfigError(
                f"{shard} is cut off or damaged: at byte {end} is neither a file nor the end of the"
                " tar"
            )


def _label(content: bytes, label: str, path: str) -> Any:
    try:
        if label.startswith("json."):
            return json.loads(content)[label.removeprefix("json.")]
        text = content.decode().strip()
        return int(text) if re.fullmatch(r"-?\d+", text) else text
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: a file has no label {label} ({error!r})") from None


# --- parquet --------------------------------------------------------------------------------------


def list_parquet(path: str, column: str, label: str | None, classes: bool) -> ImageFiles:
    """See `parquet`."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{path} is parquet, for which there is no package; pip install"
            " 'triton-diffusion[data]' or pip install pyarrow"
        ) from None
    rows: dict[str, tuple[Any, int, int]] = {}  # name -> reader, row group, row of it
    labels: list[Any] = []
    names = None
    for file, called in _named(_expanded(path, ".parquet")):
        try:
            reader = pyarrow.parquet.ParquetFile(file)
            schema = reader.schema_arrow
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{file} cannot be read as parquet: {error}") from None
        _check_column(str(file), column, schema.names, "column")
        chosen = _label_column(str(file), label, schema.names, classes)
        names = _class_names(schema.metadata, chosen) if chosen else None
        for group in range(reader.num_row_groups):
            for row in range(reader.metadata.row_group(group).num_rows):
                rows[f"{called}/{group}/{row}"] = (reader, group, row)
        if chosen:
            labels += reader.read([chosen]).column(0).to_pylist()
    if not rows:
        raise ConfigError(f"{path} holds no row")
    read = _RowGroups(column)
    files = ImageFiles(Path(path), list(rows), None, None, lambda name: read(*rows[name]))
    if labels:
        files.labels, files.class_names = _numbered(labels, f"{path}: {label or 'label'}", names)
    return files


class _RowGroups:
    """Opens the image of a row; keeps the last groups of rows, which are read as a whole."""

    def __init__(self, column: str) -> None:
        self._column, self._lock = column, threading.Lock()
        self._kept: dict[tuple[int, int], Any] = {}

    def __call__(self, reader: Any, group: int, row: int) -> BinaryIO:
        key = (id(reader), group)
        with self._lock:  # a reader is for one thread at a time
            if key not in self._kept:
                while len(self._kept) > 1:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = reader.read_row_group(group, [self._column]).column(0)
            values = self._kept[key]
        return _opened(values[row].as_py())


def _opened(value: Any) -> BinaryIO:
    """The image of a cell: bytes, or {"bytes", "path"}."""
    if isinstance(value, dict):
        if value.get("bytes") is None and value.get("path"):
            return open(value["path"], "rb")
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise ValueError(f"it is {type(value).__name__}, and no image")
    return io.BytesIO(value)


def _check_column(where: str, column: str, columns: Sequence[str], setting: str) -> None:
    if column not in columns:
        raise ConfigError(f"{setting}={column} is no column of {where}; {nearest(column, columns)}")


def _label_column(
    where: str, label: str | None, columns: Sequence[str], classes: bool
) -> str | None:
    if not classes:
        return None
    if label is None:
        return "label" if "label" in columns else None
    _check_column(where, label, columns, "label")
    return label


def _class_names(metadata: dict[bytes, bytes] | None, label: str) -> list[str] | None:
    """As the hub writes them into a file."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return features[label]["names"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return None


# --- Hugging Face ---------------------------------------------------------------------------------


def list_huggingface(
    repository: str,
    subset: str | None,
    split: str,
    column: str,
    label: str | None,
    classes: bool,
) -> ImageFiles:
    """See `huggingface`."""
    table = load_from_hub(repository, subset, split)
    import datasets

    _check_column(repository, column, table.column_names, "column")
    chosen = _label_column(repository, label, table.column_names, classes)
    if not isinstance(table.features[column], datasets.Image):
        kinds = [name for name, kind in table.features.items() if isinstance(kind, datasets.Image)]
        raise ConfigError(
            f"column={column} of {repository} holds {table.features[column]}; expected images,"
            f" which are in {', '.join(kinds) or 'no column'}"
        )
    images = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    files = ImageFiles(
        Path(repository),
        [str(i) for i in range(len(images))],
        None,
        None,
        lambda name: _opened(images[int(name)][column]),
    )
    if chosen:
        names = getattr(table.features[chosen], "names", None)
        values = list(table[chosen])
        files.labels, files.class_names = _numbered(values, f"{repository}: {chosen}", names)
    return files
