"""Data sets in one file: the project's own .packed, mapped into memory, and unet.cu's .bin.

.packed, little endian:

    0       8 bytes  b"TDPACKED"          8   uint32 version = 2     12  uint32 zero
    16      uint64   N, H, W, C, L (labels: N or 0), K (bytes of the class names)
    64      32 bytes SHA-256 of the rest of the first 4096 bytes and of all behind the images
    4096    uint8    [N, H, W, C]
    then    int64    [L], then K bytes of JSON: a list of class names
    then    8 bytes  [N], the first of the SHA-256 of each image

What is not an image is checked when the file is opened, an image when it is first read: opening
takes no longer for it. Version 1 had no digests, neither at 64 nor at the end.

.bin (clu0/unet.cu): 256 int32, of which the first five are 20240620, N, C, H, W; then float32
[N, C, H, W], x / 127.5 - 1. Neither labels nor class names.

Both writers take one image at a time and rename a finished, synced file into place: a file under
its name is whole. One that a killed process has begun is deleted by the next that writes there.
"""

import hashlib
import json
import logging
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from ..errors import ConfigError, writing
from ..runtime.file_lock import delete_abandoned, open_locked
from .image_digests import DIGEST_BYTES, ImageDigests, image_digest
from .image_set import ImageSet, parse_size

MAGIC, VERSION, DATA_OFFSET = b"TDPACKED", 2, 4096
_WITHOUT_DIGESTS = 1  # the version that had none
UNET_CU_DATA, UNET_CU_WEIGHTS = 20240620, 12345678  # the first int32 of unet.cu's files
UNET_CU_HEADER_BYTES = 256 * 4
_HEADER = struct.Struct("<8sII6Q")
_WRITING = ".writing_"  # before the name of a file that is not finished

log = logging.getLogger(__name__)


class _Writer:
    """Appends images behind a header that is written last, when their number is known."""

    offset: int

    def __init__(self, file: BinaryIO, size: tuple[int, int], channels: int):
        self._file, self._shape, self._labels = file, (*size, channels), []
        file.seek(self.offset)

    def append(self, image: np.ndarray, label: int | None = None) -> None:
        """`image`: uint8 [H, W, C]; a label for every image, or for none. ValueError: another shape
        or type."""
        if image.shape != self._shape or image.dtype != np.uint8:
            raise ValueError(
                f"an image is {image.dtype} {list(image.shape)}; expected uint8 {list(self._shape)}"
            )
        self._file.write(self._encode(image))
        self._labels.append(label)


class _PackedWriter(_Writer):
    offset = DATA_OFFSET

    def __init__(self, file: BinaryIO, size: tuple[int, int], channels: int):
        super().__init__(file, size, channels)
        self._digests = bytearray()

    def _encode(self, image: np.ndarray) -> bytes:
        content = image.tobytes()
        self._digests += image_digest(content)
        return content

    def finish(self, class_names: tuple[str, ...] | None) -> None:
        labels = [label for label in self._labels if label is not None]
        assert len(labels) in (0, len(self._labels))
        names = json.dumps(list(class_names)).encode() if class_names else b""
        tail = np.array(labels, dtype="<i8").tobytes() + names + self._digests
        self._file.write(tail)
        self._file.seek(0)
        counts = (len(self._labels), *self._shape, len(labels), len(names))
        header = _HEADER.pack(MAGIC, VERSION, 0, *counts).ljust(DATA_OFFSET, b"\0")
        digest = _digest_of_rest(header, tail)
        self._file.write(header[: _HEADER.size] + digest + header[_HEADER.size + len(digest) :])


def _digest_of_rest(header: bytes, tail: bytes) -> bytes:
    """SHA-256 of the first DATA_OFFSET bytes but its own place, and of what follows the images."""
    own_end = _HEADER.size + hashlib.sha256().digest_size
    return hashlib.sha256(header[: _HEADER.size] + header[own_end:] + tail).digest()


class _BinWriter(_Writer):
    offset = UNET_CU_HEADER_BYTES

    def _encode(self, image: np.ndarray) -> bytes:
        x = image.transpose(2, 0, 1).astype("<f4") / np.float32(127.5) - np.float32(1)
        return x.tobytes()

    def finish(self, class_names: tuple[str, ...] | None) -> None:
        header = np.zeros(256, dtype="<i4")
        height, width, channels = self._shape
        header[:5] = (UNET_CU_DATA, len(self._labels), channels, height, width)
        self._file.seek(0)
        self._file.write(header.tobytes())


_WRITERS = {".packed": _PackedWriter, ".bin": _BinWriter}


def check_output(path: Path, overwrite: bool) -> None:
    """ConfigError unless a file may be written there and its suffix names a format."""
    if path.suffix not in _WRITERS:
        raise ConfigError(f"out={path} must end in .packed (own format) or .bin (unet.cu's)")
    if path.exists() and not overwrite:
        raise ConfigError(f"out={path} exists; set overwrite=true to replace it")


@contextmanager
def packed_writer(
    path: Path,  # .packed or .bin
    size: tuple[int, int],  # (H, W)
    channels: int,
    class_names: tuple[str, ...] | None = None,
) -> Iterator[_Writer]:
    """A writer whose file appears under `path` when the block ends without an error."""
    partial = path.with_name(f"{_WRITING}{path.name}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix in _WRITERS:
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
                writer = _WRITERS[path.suffix](file, size, channels)
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
    with packed_writer(path, data.size, data.channels, data.class_names) as writer:
        for image, label in zip(data.images.numpy(), labels, strict=True):
            writer.append(image, label)


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
        head = file.read(max(_HEADER.size, UNET_CU_HEADER_BYTES))
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
            f"channels={channels} differs from the {data.channels} channels in {path};"
            " give channels=null, or prepare the file again"
        )
    return data


def _check_bytes(path: Path, expected: int, n: int, height: int, width: int, channels: int) -> None:
    found = path.stat().st_size
    if found != expected:
        raise ConfigError(
            f"{path} should have {expected} bytes for {n} images of"
            f" {height}x{width}x{channels}, and has {found}: it is truncated or damaged"
        )
    if min(n, height, width, channels) < 1:
        raise ConfigError(f"{path} holds no image: {n} of {height}x{width}x{channels}")


def _read_packed(path: Path, head: bytes) -> ImageSet:
    if len(head) < _HEADER.size:
        raise ConfigError(
            f"{path} should have {DATA_OFFSET} bytes or more, and has {len(head)}: truncated"
        )
    _, version, _, n, height, width, channels, num_labels, name_bytes = _HEADER.unpack_from(head)
    if version not in (VERSION, _WITHOUT_DIGESTS):
        raise ConfigError(f"{path} has version {version}; this one reads {VERSION} and before")
    shape = (n, height, width, channels)
    end = DATA_OFFSET + n * height * width * channels
    digest_bytes = DIGEST_BYTES * n if version == VERSION else 0
    _check_bytes(path, end + 8 * num_labels + name_bytes + digest_bytes, n, height, width, channels)
    images = np.memmap(path, np.uint8, mode="c", offset=DATA_OFFSET, shape=shape)
    with open(path, "rb") as file:
        header = file.read(DATA_OFFSET)
        file.seek(end)
        tail = file.read()
    labels = np.frombuffer(tail[: 8 * num_labels], dtype="<i8").astype(np.int64)
    names = tail[8 * num_labels : 8 * num_labels + name_bytes]
    digests = None
    if version == VERSION:
        if header[_HEADER.size :][:32] != _digest_of_rest(header, tail):
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
    try:
        class_names = tuple(json.loads(names)) if names else None
    except ValueError:
        raise ConfigError(f"{path} is damaged: its class names are no JSON") from None
    most = len(class_names) if class_names else np.iinfo(np.int64).max
    if num_labels not in (0, n) or (num_labels and not 0 <= labels.min() <= labels.max() < most):
        raise ConfigError(f"{path} is damaged: its labels do not fit its images")
    return ImageSet(
        torch.from_numpy(images),
        torch.from_numpy(labels) if num_labels else None,
        class_names,
        name=path.stem,
        digests=digests,
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
        log.warning("%s holds values between the 256 levels of 8 bits: rounded", path)
    return ImageSet(torch.from_numpy(images), name=path.stem)
