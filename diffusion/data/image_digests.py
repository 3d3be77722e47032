"""Digests of the images in a file, each compared when its image is first read."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..errors import ConfigError

DIGEST_BYTES = 8  # of an image: the first of its SHA-256
_AT_ONCE = 4  # threads that compare many images; hashlib releases the interpreter's lock
_MANY = 1000  # images for each of them at least


def image_digest(content: bytes | memoryview) -> bytes:
    """Of an image's bytes; about 1.4 GB/s at 64x64x3, a processor."""
    return hashlib.sha256(content).digest()[:DIGEST_BYTES]


class ImageDigests:
    """What a file's images were when they were written, and which have been compared already."""

    def __init__(
        self,
        path: Path,
        images: np.ndarray,  # [N, H, W, C], as they are read, contiguous
        digests: bytes,  # DIGEST_BYTES an image
    ) -> None:
        self._path, self._images = path, images.reshape(len(images), -1).view(np.uint8)
        self._digests = digests
        self._seen = np.zeros(len(images), dtype=bool)

    def check(self, index: np.ndarray | None = None) -> None:
        """ConfigError names the first of the images (int64 [B]; None: of all) that is not as it was
        written."""
        if index is None:
            index = np.arange(len(self._images))
        index = np.unique(index[~self._seen[index]])
        parts = np.array_split(index, max(1, min(_AT_ONCE, len(index) // _MANY)))
        with ThreadPoolExecutor(len(parts)) as pool:  # which starts a thread only for a task
            across = map if len(parts) == 1 else pool.map
            found = list(across(self._damaged, parts))
        damaged = next((i for i in found if i is not None), None)
        if damaged is not None:
            raise ConfigError(
                f"{self._path} is damaged: image {damaged} is not as it was written; prepare the"
                " file again"
            )
        self._seen[index] = True

    def _damaged(self, index: np.ndarray) -> int | None:
        for i in index.tolist():
            written = self._digests[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)]
            if image_digest(memoryview(self._images[i])) != written:
                return i
        return None
