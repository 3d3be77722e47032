"""The bytes of data sets in one file: the project's own .packed, and unet.cu's .bin.

.packed, little endian:

    0       8 bytes  b"TDPACKED"          8   uint32 version     12  uint32 kind of number
    16      uint64   N, H, W, C, L (labels: N or 0), K (bytes of JSON)
    64      32 bytes SHA-256 of the rest of the first 4096 bytes and of all behind the images
    4096    [N, H, W, C], of kind 0 uint8, of kind 1 float32
    then    int64    [L], then K bytes of JSON
    then    8 bytes  [N], the first of the SHA-256 of each image

What is not an image is checked when the file is opened, an image when it is first read: opening
takes no longer for it. Version 1 had no digests, neither at 64 nor at the end. In versions 1 and 2
numbers are uint8 and JSON is a list of class names, if there are any; version 3 has an object with
class_names and values, which says what the numbers mean (`values.values_from_state`). It is written
where version 2 does not do.

.bin (clu0/unet.cu): 256 int32, of which the first five are 20240620, N, C, H, W; then float32
[N, C, H, W], x / 127.5 - 1. Neither labels nor class names.
"""

import hashlib
import json
import struct
from typing import BinaryIO, Protocol

import numpy as np

from ..errors import ConfigError
from .image_digests import image_digest
from .values import Pixels, Values

MAGIC, DATA_OFFSET = b"TDPACKED", 4096
WITHOUT_DIGESTS, OF_BYTES, OF_VALUES = 1, 2, 3  # versions
UINT8, FLOAT32 = 0, 1  # kinds of number
UNET_CU_DATA, UNET_CU_WEIGHTS = 20240620, 12345678  # the first int32 of unet.cu's files
UNET_CU_HEADER_BYTES = 256 * 4
HEADER = struct.Struct("<8sII6Q")


class Format(Protocol):
    """How images are written. Each takes `item_bytes` behind `offset`."""

    offset: int
    item_bytes: int

    def encode(self, image: np.ndarray) -> bytes:
        """One image [H, W, C]. ValueError: another shape or type."""

    def digest(self, content: bytes) -> bytes:
        """What is to be known of an encoded image at the end."""

    def finish(
        self,
        file: BinaryIO,  # at the end of the images
        count: int,
        labels: list[int],  # of all, or none
        class_names: tuple[str, ...] | None,
        digests: bytes,  # of all images, in order
    ) -> None:
        """Write what is not an image."""


class _Images:
    """What both formats take."""

    def __init__(self, shape: tuple[int, int, int], values: Values) -> None:
        self.shape, self.values = shape, values
        self.dtype = np.dtype(np.uint8 if isinstance(values, Pixels) else np.float32)

    def check(self, image: np.ndarray) -> None:
        if image.shape != self.shape or image.dtype != self.dtype:
            raise ValueError(
                f"an image is {image.dtype} {list(image.shape)}; expected {self.dtype}"
                f" {list(self.shape)}"
            )


class PackedFormat(_Images):
    """.packed."""

    offset = DATA_OFFSET

    def __init__(self, shape: tuple[int, int, int], values: Values) -> None:
        super().__init__(shape, values)
        self.item_bytes = int(np.prod(shape)) * self.dtype.itemsize

    def encode(self, image: np.ndarray) -> bytes:
        self.check(image)
        return image.astype(self.dtype.newbyteorder("<"), copy=False).tobytes()

    def digest(self, content: bytes) -> bytes:
        return image_digest(content)

    def finish(
        self,
        file: BinaryIO,
        count: int,
        labels: list[int],
        class_names: tuple[str, ...] | None,
        digests: bytes,
    ) -> None:
        version, kind = OF_BYTES, UINT8
        names = json.dumps(list(class_names)).encode() if class_names else b""
        if self.values != Pixels():
            version, kind = OF_VALUES, UINT8 if self.dtype == np.uint8 else FLOAT32
            about = {"class_names": class_names, "values": self.values.state()}
            names = json.dumps(about).encode()
        tail = np.array(labels, dtype="<i8").tobytes() + names + digests
        file.write(tail)
        file.seek(0)
        counts = (count, *self.shape, len(labels), len(names))
        header = HEADER.pack(MAGIC, version, kind, *counts).ljust(DATA_OFFSET, b"\0")
        digest = digest_of_rest(header, tail)
        file.write(header[: HEADER.size] + digest + header[HEADER.size + len(digest) :])


def digest_of_rest(header: bytes, tail: bytes) -> bytes:
    """SHA-256 of the first DATA_OFFSET bytes but its own place, and of what follows the images."""
    own_end = HEADER.size + hashlib.sha256().digest_size
    return hashlib.sha256(header[: HEADER.size] + header[own_end:] + tail).digest()


class BinFormat(_Images):
    """unet.cu's .bin."""

    offset = UNET_CU_HEADER_BYTES

    def __init__(self, shape: tuple[int, int, int], values: Values) -> None:
        super().__init__(shape, values)
        if values != Pixels():
            raise ConfigError("unet.cu's .bin holds images of 8 bits; give out=FILE.packed")
        self.item_bytes = 4 * int(np.prod(shape))

    def encode(self, image: np.ndarray) -> bytes:
        self.check(image)
        x = image.transpose(2, 0, 1).astype("<f4") / np.float32(127.5) - np.float32(1)
        return x.tobytes()

    def digest(self, content: bytes) -> bytes:
        return b""

    def finish(
        self,
        file: BinaryIO,
        count: int,
        labels: list[int],
        class_names: tuple[str, ...] | None,
        digests: bytes,
    ) -> None:
        header = np.zeros(256, dtype="<i4")
        height, width, channels = self.shape
        header[:5] = (UNET_CU_DATA, count, channels, height, width)
        file.seek(0)
        file.write(header.tobytes())


FORMATS: dict[str, type[PackedFormat] | type[BinFormat]] = {
    ".packed": PackedFormat,
    ".bin": BinFormat,
}
