"""Folders and zips of image files, in whatever shape people have them, as one uint8 array.

Any depth of sub-folders, any size, JPEG, PNG, WebP, AVIF, BMP, GIF (first frame), TIFF or PNM;
gray, palette, CMYK, 16 bits, alpha, EXIF orientation. An image is cropped at its centre to the
wanted aspect ratio, then resized with an antialiasing filter; one of the wanted size is taken bit
for bit. Without a size the images are taken as they are, and have to be of one.
"""

import json
import logging
import math
import os
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError, features

from ..errors import ConfigError, counted, first_of, is_of_system
from ..runtime.progress import Progress
from .image_set import ImageSet, check_memory, parse_size

EXTENSIONS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif"),
    *(".tif", ".tiff", ".pbm", ".pgm", ".ppm", ".pnm"),
    # of Pillow 11.3 and newer, if it was built with the library
    *((".avif",) if "avif" in features.modules and features.check("avif") else ()),
)
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_MAX_SKIPPED = 0.01  # more corrupt files, if not a single one, are no accident
_MOST_PIXELS = 150_000_000  # of one image; decoded, that is 0.45 GB in each of up to 16 threads
# Pillow warns of an attack from 89 million on, which a camera or a microscope has
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
_ORIENTATION = 0x0112  # of EXIF: from 5 on height and width are exchanged
_CHUNK = 1024  # files in flight; the decoded ones wait in memory for their turn

log = logging.getLogger(__name__)


@dataclass
class ImageFiles:
    """The image files of a folder or zip, in the order of their names."""

    path: Path
    names: list[str]  # relative, with forward slashes
    labels: list[int] | None
    class_names: tuple[str, ...] | None
    open: Callable[[str], BinaryIO]
    notes: tuple[str, ...] = ()  # on files that are not there, or are left out


def list_images(path: str | Path, classes: bool = True) -> ImageFiles:
    """Find the images under `path`, a folder or a .zip.

    Labels come from a StyleGAN / EDM `dataset.json` at its root; where there is none, from the
    first level of sub-folders if there are at least two and no image lies beside them. A single
    folder that everything in a zip lies in counts as its root. `classes=False`: no labels.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a folder of images, or a .zip")
    if is_of_system(path):
        raise ConfigError(f"{path} is a folder of the system; give a folder of images, or a .zip")
    if path.is_dir():
        every, opener = _walk(path), lambda name: open(path / name, "rb")
    elif not path.is_file():
        raise ConfigError(f"{path} is no file and no folder; give a folder of images, or a .zip")
    elif zipfile.is_zipfile(path):
        archive = zipfile.ZipFile(path)
        every, opener = archive.namelist(), archive.open
    elif path.suffix.lower() == ".zip":
        raise ConfigError(f"{path} is no zip, or truncated: it has no list of its files at its end")
    else:
        raise ConfigError(f"{path} is a file; give a folder of images, or a .zip")
    names = sorted(name for name in every if _is_image(name))
    others = _other_endings(every, names)
    if not names:
        raise ConfigError(
            f"{path} holds no image; looked for files in {', '.join(EXTENSIONS)}"
            + (f", and found {others}" if others else "")
        )
    notes = (f"{path}: left out {others}; read are {', '.join(EXTENSIONS)}",) if others else ()
    files = ImageFiles(path, names, None, None, opener, notes)
    root = "" if path.is_dir() else _common_folder(names)
    inside = [name.removeprefix(root) for name in names]
    if classes and f"{root}dataset.json" in every:
        with opener(f"{root}dataset.json") as file:
            files.labels, absent = _json_labels(file, path, inside)
            files.notes += absent
    elif classes:
        tops = sorted({name.partition("/")[0] for name in inside})
        if len(tops) > 1 and all("/" in name for name in inside):
            number = {top: i for i, top in enumerate(tops)}
            files.labels = [number[name.partition("/")[0]] for name in inside]
            files.class_names = tuple(tops)
            files.notes += _empty_note(path, root, every, tops)
    return files


def _empty_note(path: Path, root: str, every: list[str], classes: list[str]) -> tuple[str, ...]:
    """On folders beside those of the classes that have no image, as where one was not copied."""
    inside = [name.removeprefix(root) for name in every]
    if path.is_dir():
        inside += [f"{folder.name}/" for folder in path.iterdir() if folder.is_dir()]
    folders = {name.partition("/")[0] for name in inside if "/" in name}
    empty = sorted(name for name in folders - set(classes) if not _is_hidden(name))
    if not empty:
        return ()
    are = "is" if len(empty) == 1 else "are"
    found = f"{counted(len(empty), 'folders')} without an image {are}"
    return (f"{path}: {found} no class: {first_of(empty)}",)


def _common_folder(names: list[str]) -> str:
    """What a zip of a folder has before every name, "" or "FOLDER/". Not where images lie directly
    in it: it may be the first of StyleGAN's 00000, 00001, ..."""
    tops = {name.partition("/")[0] for name in names}
    deep = all(name.count("/") > 1 for name in names)
    return f"{tops.pop()}/" if len(tops) == 1 and deep else ""


def _walk(root: Path) -> list[str]:
    """Every file; not pipes, sockets and devices, which wait for somebody to write."""
    names, seen = [], set()
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen or is_of_system(real):  # a link back up, or out
            folders.clear()
            continue
        seen.add(real)
        relative = Path(folder).relative_to(root)
        names += [
            (relative / file).as_posix()
            for file in files
            if os.path.isfile(os.path.join(folder, file))
        ]
    return names


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not _is_hidden(name)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _other_endings(every: Sequence[str], images: Sequence[str]) -> str:
    """The files that are not read, "3 files (2 .heic, 1 .part)"; "" if there are none."""
    read = set(images)
    others = (PurePosixPath(n) for n in every if not (n in read or n[-1:] == "/" or _is_hidden(n)))
    found = Counter(
        other.suffix.lower() or "without an ending"
        for other in others
        if other.name != "dataset.json"
    )
    kinds = first_of([f"{n} {ending}" for ending, n in found.most_common()])
    return f"{counted(found.total(), 'files')} ({kinds})" if found else ""


def _json_labels(
    file: BinaryIO, path: Path, names: list[str]
) -> tuple[list[int] | None, tuple[str, ...]]:
    """`{"labels": [["00000/img00000000.png", 3], ...]}`; null means that there are none. And a note
    on labels of images that are not there."""
    where = f"{path}: dataset.json"
    try:
        table = json.load(file)["labels"]
        if table is None:
            return None, ()
        number = dict(table)
        labels = [number[name] for name in names]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{where} does not give every image a label ({error!r})") from None
    if not all(type(label) is int and 0 <= label < 2**31 for label in labels):
        raise ConfigError(f"{where} has labels that are no class numbers (0, 1, 2, ...)")
    absent = sorted(map(str, set(number) - set(names)))
    if not absent:
        return labels, ()
    return labels, (
        f"{where} has labels of {counted(len(absent), 'images')} more than are there, such as"
        f" {absent[0]}",
    )


def decode_image(
    file: BinaryIO,
    size: tuple[int, int],  # (H, W)
    channels: int,
    background: str = "white",
) -> tuple[np.ndarray, tuple[int, int]]:  # uint8 [H, W, C], and (H, W) that it had
    """Read one image. Alpha is kept for 4 channels, else laid over `background`."""
    mode = _MODES[channels]
    with Image.open(file) as image:
        _check_pixels(image)
        # a JPEG can be decoded at 1/2, 1/4 or 1/8; keep twice the wanted size for the filter below
        image.draft(None, (2 * max(size), 2 * max(size)))
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith(("I", "F")):
            image = _to_8_bits(image)
        if mode == "RGBA":
            image = image.convert(mode)
        elif image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, background), image)
        if image.mode in ("CMYK", "LAB"):  # Pillow has no direct way from here to gray
            image = image.convert("RGB")
        return _fit(image.convert(mode), size), (image.height, image.width)


def _check_pixels(image: Image.Image) -> None:
    if image.width * image.height > _MOST_PIXELS:
        raise ValueError(
            f"it has {image.width} x {image.height} pixels; the most is {_MOST_PIXELS:,}"
        )


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Gray of 16 bits or more, which Pillow would clip at 255. Floats are 0..1 or 0..255."""
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it has values that are not finite")
    if image.mode.startswith("F"):
        values = values * 255 if values.max() <= 1 else values
    elif image.mode != "I" or values.max() > 255:
        values = values / 257
    return Image.fromarray(np.rint(values).clip(0, 255).astype(np.uint8))


def _fit(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """Centre crop to the aspect ratio of `size`, then LANCZOS, after a box filter if far larger."""
    (height, width), (w, h) = size, image.size
    if (w, h) != (width, height):
        scale = min(w / width, h / height)
        x, y = (w - width * scale) / 2, (h - height * scale) / 2
        box = (max(x, 0), max(y, 0), min(w - x, w), min(h - y, h))
        image = image.resize((width, height), Image.Resampling.LANCZOS, box, reducing_gap=3.0)
    return np.asarray(image).reshape(height, width, -1)


class Decoder:
    """Decodes the images of a list, by threads; notes which could not be, and which were smaller
    than they are wanted."""

    def __init__(
        self,
        files: ImageFiles,
        size: int | tuple[int, int] | None,  # None: that of all images
        channels: int,
        background: str,
    ) -> None:
        if channels not in _MODES:
            raise ConfigError(f"channels={channels} is wrong; 1 (gray), 3 (RGB) or 4 (RGBA)")
        try:
            ImageColor.getrgb(background)
        except (ValueError, AttributeError):
            raise ConfigError(
                f"background={background} is no colour; give a name such as white, or #rrggbb"
            ) from None
        self.files, self.channels, self.background = files, channels, background
        self.size = _common_size(files) if size is None else parse_size(size)
        self.skipped: list[str] = []  # names of those that could not be decoded
        self.smaller: list[tuple[int, int]] = []  # (H, W) of those that were enlarged
        self.last: tuple[str, tuple[int, int]] | None = None  # that was read: its name and (H, W)

    def __len__(self) -> int:
        return len(self.files.names)

    def read(self, start: int, stop: int) -> Iterator[np.ndarray | Exception]:
        """Images start .. stop - 1, uint8 [H, W, C], or why one cannot be decoded. ConfigError as
        soon as more than 1% of all files, and more than one, are corrupt; or all are."""
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            for first in range(start, stop, _CHUNK):
                names = self.files.names[first : min(first + _CHUNK, stop)]
                for name, found in zip(names, pool.map(self._decode, names), strict=True):
                    if isinstance(found, Exception):
                        self.skipped.append(name)
                        self.check_skipped(len(self.skipped), name, found)
                        yield found
                        continue
                    image, had = found
                    self.last = name, had
                    if had[0] < self.size[0] or had[1] < self.size[1]:
                        self.smaller.append(had)
                    yield image

    def check_skipped(self, skipped: int, last: str, error: Exception | str) -> None:
        """ConfigError if so many that cannot be decoded are no accident."""
        total = len(self)
        if skipped > max(1, _MAX_SKIPPED * total) or skipped == total:
            raise ConfigError(_too_many(self.files, skipped, last, error))

    def _decode(self, name: str) -> tuple[np.ndarray, tuple[int, int]] | Exception:
        try:
            with self.files.open(name) as file:
                return decode_image(file, self.size, self.channels, self.background)
        except Exception as error:  # a broken file makes Pillow raise nearly anything
            return error


def enlarged_note(smaller: Sequence[tuple[int, int]], total: int, size: tuple[int, int]) -> str:
    """A line on images that were smaller than they are wanted, of `total` that could be decoded."""
    height, width = min(smaller, key=math.prod)
    wanted, had = f"{size[0]}x{size[1]}", f"{height}x{width}"
    if len(smaller) == 1:
        return (
            f"1 of {total} images is smaller than {wanted} and was enlarged from {had}, which makes"
            " it soft; give a smaller size, or leave it out"
        )
    return (
        f"{len(smaller)} of {total} images are smaller than {wanted} and were enlarged, the"
        f" smallest from {had}, which makes them soft; give a smaller size, or leave them out"
    )


def skipped_note(files: ImageFiles, skipped: Sequence[str]) -> str:
    """A line on images that could not be decoded."""
    some = first_of(skipped, 20)
    return f"{files.path}: skipped {len(skipped)} corrupt of {len(files.names)}: {some}"


def read_together(
    first: Decoder, *others: Decoder
) -> Iterator[tuple[list[np.ndarray], int | None]]:
    """The images of one place in all lists, and the first list's label, where all can be decoded;
    with a bar, and a warning of those that cannot."""
    decoders, files, count = (first, *others), first.files, len(first)
    found = zip(*(decoder.read(0, count) for decoder in decoders), strict=True)
    with Progress(count, unit="img", what=files.path.name, leave=False) as progress:
        for i, images in enumerate(found):
            if all(isinstance(image, np.ndarray) for image in images):
                yield list(images), None if files.labels is None else files.labels[i]
            progress.reach(i + 1)
    for decoder in decoders:
        if decoder.skipped:
            log.warning("%s", skipped_note(decoder.files, decoder.skipped))


def _common_size(files: ImageFiles) -> tuple[int, int]:
    """(H, W) of all images, from their headers. ConfigError: they are of several sizes."""

    def size_of(name: str) -> tuple[int, int] | Exception:
        try:
            with files.open(name) as file, Image.open(file) as image:
                _check_pixels(image)
                sides = (image.height, image.width)
                return sides[::-1] if image.getexif().get(_ORIENTATION, 1) >= 5 else sides
        except Exception as error:  # which is said when it is decoded
            return error

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        sizes = list(pool.map(size_of, files.names))
    found = Counter(size for size in sizes if isinstance(size, tuple))
    if not found:
        raise ConfigError(_too_many(files, len(sizes), files.names[-1], sizes[-1]))
    if len(found) > 1:
        few = ", ".join(f"{n} of {h}x{w}" for (h, w), n in found.most_common(3))
        raise ConfigError(
            f"{files.path} holds images of {len(found)} sizes ({few}{', ...' * (len(found) > 3)});"
            " give size=SIDE or [height, width], to which they are cropped and resized"
        )
    return next(iter(found))


def _too_many(files: ImageFiles, skipped: int, last: str, error: Exception | str) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UnidentifiedImageError):  # it says which object was given to Pillow
        reason = "it does not begin as an image does"
    return (
        f"{files.path}: {skipped} of {len(files.names)} images cannot be decoded, more than"
        f" the 1 % that are left out; the last is {last} ({reason})"
    )


def load_folder(
    path: str | None = None,
    size: int | tuple[int, int] | None = None,  # None: that of all images
    channels: int = 3,
    classes: bool = True,  # sub-folders (or dataset.json) give labels
    background: str = "white",  # behind alpha
) -> ImageSet:
    """Every image under `path`, a folder or a zip, in memory."""
    if path is None:
        raise ConfigError("dataset.path is not set; give a folder of images, or a .zip")
    return decoded(list_images(path, classes), size, channels, background)


def decoded(
    files: ImageFiles, size: int | tuple[int, int] | None, channels: int, background: str
) -> ImageSet:
    """All images of a list, in memory."""
    decoder = Decoder(files, size, channels, background)
    shape = (len(decoder), *decoder.size, channels)
    check_memory(f"dataset.size={size}", shape)
    images, labels = np.empty(shape, dtype=np.uint8), []
    for (image,), label in read_together(decoder):
        images[len(labels)] = image
        labels.append(label)
    return set_of(files, decoder, images, labels, skipped=tuple(decoder.skipped))


def set_of(
    files: ImageFiles, decoder: Decoder, images: np.ndarray, labels: list[int], **more: Any
) -> ImageSet:
    """The set of what has been decoded, as many images as labels."""
    small = decoder.smaller
    notes = (enlarged_note(small, len(labels), decoder.size),) if small else ()
    return ImageSet(
        torch.from_numpy(images[: len(labels)]),
        None if files.labels is None else torch.tensor(labels),
        files.class_names,
        name=files.path.name,
        notes=(*files.notes, *notes),
        **more,
    )
