"""Data sets in one file: the project's own .packed, mapped into memory, and unet.cu's .bin. What
their bytes are, `packed_format` says.

The writer takes one image at a time and renames a finished, synced file into place: a file under
its name is whole. One that a killed process has begun is deleted by the next that writes there.
"""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from ..errors import ConfigError, counted, writing
from ..runtime.file_lock import delete_abandoned, open_locked
from .image_digests import DIGEST_BYTES, ImageDigests
from .image_set import ImageSet, parse_size
from .packed_format import (
    DATA_OFFSET,
    FLOAT32,
    FORMATS,
    HEADER,
    MAGIC,
    OF_BYTES,
    OF_VALUES,
    UINT8,
    UNET_CU_DATA,
    UNET_CU_HEADER_BYTES,
    UNET_CU_WEIGHTS,
    WITHOUT_DIGESTS,
    Format,
    digest_of_rest,
)
from .stored_images import StoredImages
from .values import Pixels, Values, values_from_state

_WRITING = ".writing_"  # before the name of a file that is not finished

log = logging.getLogger(__name__)


class _Writer:
    """Appends images behind a header that is written last, when their number is known."""

    def __init__(self, file: BinaryIO, form: Format) -> None:
        self._file, self._format, self._labels = file, form, []
        self._digests = bytearray()
        file.seek(form.offset)

    def append(self, image: np.ndarray, label: int | None = None) -> None:
        """`image`: [H, W, C]; a label for every image, or for none. ValueError: another shape or
        type."""
        content = self._format.encode(image)
        self._file.write(content)
        self._digests += self._format.digest(content)
        self._labels.append(label)

    def finish(self, class_names: tuple[str, ...] | None) -> None:
        labels = [label for label in self._labels if label is not None]
        assert len(labels) in (0, len(self._labels))
        count = len(self._labels)
        self._format.finish(self._file, count, labels, class_names, bytes(self._digests))


def check_output(path: Path, overwrite: bool) -> None:
    """ConfigError unless a file may be written there and its suffix names a format."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"out={path} must end in .packed (own format) or .bin (unet.cu's)")
    if path.exists() and not overwrite:
        raise ConfigError(f"out={path} exists; set overwrite=true to replace it")


@contextmanager
def packed_writer(
    path: Path,  # .packed or .bin
    size: tuple[int, int],  # (H, W)
    channels: int,
    class_names: tuple[str, ...] | None = None,
    values: Values = Pixels(),  # noqa: B008
) -> Iterator[_Writer]:
    """A writer whose file appears under `path` when the block ends without an error."""
    form = FORMATS[path.suffix]((*size, channels), values)
    partial = path.with_name(f"{_WRITING}{path.name}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix in FORMATS:
            for left in path.parent.glob(f"{_WRITING}*{suffix}"):
                delete_abandoned(left)
        try:
            file = os.fdopen(open_locked(partial), "r+b")
        except BlockingIOError:
            raise ConfigError(f"out={path} is being written by another process") from None
    with file:
        try:
            with writing(path):
                file.truncate(0)
                writer = _Writer(file, form)
                yield writer
                writer.finish(class_names)
                file.flush()
                os.fsync(file.fileno())
                os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def write_packed(path: str | Path, data: ImageSet) -> None:
    """Write a whole set to `path` (.packed or .bin), replacing what is there."""
    path = Path(path)
    check_output(path, overwrite=True)
    data.check()
    labels = [None] * len(data) if data.labels is None else data.labels.tolist()
    channels, stored = data.images.shape[3], data.images
    parts = stored.parts() if isinstance(stored, StoredImages) else torch.arange(len(data)).split(1)
    with packed_writer(path, data.size, channels, data.class_names, data.values) as writer:
        for index in parts:
            rows = stored.raw(index) if isinstance(stored, StoredImages) else stored[index].numpy()
            if not isinstance(data.values, Pixels):
                rows = rows.astype(np.float32)
            for i, image in zip(index.tolist(), rows, strict=True):
                writer.append(image, labels[i])


def load_packed(
    path: str | None = None,
    size: int | tuple[int, int] | None = None,  # None: what the file has
    channels: int | None = None,  # None: what the file has
) -> ImageSet:
    """Open a .packed file (mapped, not read) or a unet.cu .bin (read back into 8 bits)."""
    if path is None:
        raise ConfigError("dataset.path is not set; give a file written by tools/prepare.py")
    path = Path(path).expanduser()
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give one written by tools/prepare.py")
    with open(path, "rb") as file:
        head = file.read(max(HEADER.size, UNET_CU_HEADER_BYTES))
    magic = int.from_bytes(head[:4], "little")
    if head.startswith(MAGIC):
        data = _read_packed(path, head)
    elif magic == UNET_CU_DATA:
        data = _read_bin(path, head)
    else:
        found = "unet.cu weights" if magic == UNET_CU_WEIGHTS else f"the magic number {magic}"
        raise ConfigError(
            f"{path} is no image data: it starts with {found}, not with"
            f" {MAGIC.decode()} (.packed) or {UNET_CU_DATA} (unet.cu .bin)"
        )
    if size is not None and parse_size(size) != data.size:
        raise ConfigError(
            f"size={size} differs from the {data.size[0]}x{data.size[1]} images in {path};"
            " give size=null, or prepare the file again"
        )
    if channels is not None and channels != data.channels:
        raise ConfigError(
            f"channels={channels} differs from the {counted(data.channels, 'channels')} in {path};"
            " give channels=null, or prepare the file again"
        )
    return data


def _check_bytes(path: Path, expected: int, n: int, height: int, width: int, channels: int) -> None:
    found = path.stat().st_size
    if found != expected:
        raise ConfigError(
            f"{path} should have {expected} bytes for {counted(n, 'images')} of"
            f" {height}x{width}x{channels}, and has {found}: it is truncated or damaged"
        )
    if min(n, height, width, channels) < 1:
        raise ConfigError(f"{path} holds no image: {n} of {height}x{width}x{channels}")


def _read_packed(path: Path, head: bytes) -> ImageSet:
    if len(head) < HEADER.size:
        raise ConfigError(
            f"{path} should have {DATA_OFFSET} bytes or more, and has {len(head)}: truncated"
        )
    _, version, kind, n, height, width, channels, num_labels, name_bytes = HEADER.unpack_from(head)
    if version not in (WITHOUT_DIGESTS, OF_BYTES, OF_VALUES):
        raise ConfigError(f"{path} has version {version}; this one reads {OF_VALUES} and before")
    if kind not in (UINT8, FLOAT32):
        raise ConfigError(f"{path} is damaged: there is no kind of number {kind}")
    dtype = np.dtype("<f4" if version == OF_VALUES and kind == FLOAT32 else "u1")
    shape = (n, height, width, channels)
    end = DATA_OFFSET + n * height * width * channels * dtype.itemsize
    digest_bytes = 0 if version == WITHOUT_DIGESTS else DIGEST_BYTES * n
    _check_bytes(path, end + 8 * num_labels + name_bytes + digest_bytes, n, height, width, channels)
    images = np.memmap(path, dtype, mode="c", offset=DATA_OFFSET, shape=shape)
    with open(path, "rb") as file:
        header = file.read(DATA_OFFSET)
        file.seek(end)
        tail = file.read()
    labels = np.frombuffer(tail[: 8 * num_labels], dtype="<i8").astype(np.int64)
    names = tail[8 * num_labels : 8 * num_labels + name_bytes]
    digests = None
    if version != WITHOUT_DIGESTS:
        if header[HEADER.size :][:32] != digest_of_rest(header, tail):
            raise ConfigError(
                f"{path} is damaged: its header, labels, class names or digests are not as they"
                " were written"
            )
        digests = ImageDigests(path, images, tail[len(tail) - digest_bytes :])
    else:
        warnings.warn(
            f"{path} was written without digests: damage to its images is not seen; write it anew"
            " with tools/prepare.py",
            stacklevel=2,
        )
    values: Values = Pixels()
    try:
        about = json.loads(names) if names else None
        if version == OF_VALUES:
            values, about = values_from_state(about["values"]), about["class_names"]
        class_names = tuple(about) if about else None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(f"{path} is damaged: its class names are no JSON") from None
    most = len(class_names) if class_names else np.iinfo(np.int64).max
    if num_labels not in (0, n) or (num_labels and not 0 <= labels.min() <= labels.max() < most):
        raise ConfigError(f"{path} is damaged: its labels do not fit its images")
    is_plain = values == Pixels()
    return ImageSet(
        torch.from_numpy(images) if is_plain else StoredImages(images, "nhwc", path).scaled(values),
        torch.from_numpy(labels) if num_labels else None,
        class_names,
        name=path.stem,
        digests=digests,
        values=values,
    )


def _read_bin(path: Path, head: bytes) -> ImageSet:
    if len(head) < UNET_CU_HEADER_BYTES:
        raise ConfigError(
            f"{path} should have {UNET_CU_HEADER_BYTES} bytes or more, and has {len(head)}:"
            " truncated"
        )
    n, channels, height, width = np.frombuffer(head, dtype="<i4")[1:5].tolist()
    expected = UNET_CU_HEADER_BYTES + 4 * n * channels * height * width
    _check_bytes(path, expected, n, height, width, channels)
    stored = np.memmap(
        path, "<f4", mode="r", offset=UNET_CU_HEADER_BYTES, shape=(n, channels, height, width)
    )
    images = np.empty((n, height, width, channels), dtype=np.uint8)
    off_grid = False
    for start in range(0, n, 256):
        x = (stored[start : start + 256] + np.float32(1)) * np.float32(127.5)
        if not (x.min() > -0.5 and x.max() < 255.5):  # also true of NaN
            raise ConfigError(
                f"{path} holds values outside [-1, 1]; unet.cu's data is x / 127.5 - 1"
            )
        whole = np.rint(x)
        off_grid |= bool(np.abs(x - whole).max() > 1e-2)
        images[start : start + 256] = whole.transpose(0, 2, 3, 1)
    if off_grid:
        log.warning("%s has values between the 256 levels of 8 bits; they are rounded", path)
    return ImageSet(torch.from_numpy(images), name=path.stem)
