"""What tools/prepare.py puts into one file: decoded images, latents of them, or another file's
samples. Each is a `parts.Source`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError
from .autoencoder import Autoencoder, autoencoder_digest
from .image_set import ImageSet
from .images import Decoder
from .stored_images import StoredImages
from .values import Latents, Pixels, Values

_ENCODED = 8  # images at once: the encoder has feature maps of their full size


class DecodedImages:
    """The images of files, as they are decoded."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.image_size = decoder.size
        self.shape = (*decoder.size, decoder.channels)
        self.values: Values = Pixels()
        self.labels, self.class_names = decoder.files.labels, decoder.files.class_names

    def __len__(self) -> int:
        return len(self._decoder)

    def read(self, start: int, stop: int) -> Iterator[np.ndarray | Exception]:
        return self._decoder.read(start, stop)

    def remarks(self) -> dict[str, Any]:
        """The names of skipped files, and (H, W) of enlarged ones."""
        found = {"skipped": self._decoder.skipped, "smaller": self._decoder.smaller}
        self._decoder.skipped, self._decoder.smaller = [], []
        return found

    def check(self, remarks: list[dict[str, Any]]) -> None:
        skipped = [name for found in remarks for name in found["skipped"]]
        if skipped:
            self._decoder.check_skipped(len(skipped), skipped[-1], "it was skipped")


class EncodedImages:
    """The moments of their codes in an autoencoder, float32 [h, w, 2 C]."""

    def __init__(self, images: DecodedImages, folder: str, device: torch.device) -> None:
        encoder = Autoencoder(folder, device)
        self.image_size = images.image_size
        height, width, channels = images.shape
        if channels != encoder.image_channels:
            raise ConfigError(
                f"encode={folder} encodes images of {encoder.image_channels} channels; set"
                f" channels={encoder.image_channels}, not {channels}"
            )
        if height % encoder.factor or width % encoder.factor:
            raise ConfigError(
                f"encode={folder} takes sides that are multiples of {encoder.factor}; the images"
                f" are {height}x{width}: give another size"
            )
        self._images, self._encoder = images, encoder
        sides = (height // encoder.factor, width // encoder.factor)
        self.shape = (*sides, 2 * encoder.channels)
        self.values: Values = Latents(
            str(encoder.folder.resolve()),
            autoencoder_digest(folder),
            tuple(encoder.mean),
            tuple(encoder.deviation),
            encoder.factor,
        )
        self.labels, self.class_names = images.labels, images.class_names
        self.remarks, self.check = images.remarks, images.check

    def __len__(self) -> int:
        return len(self._images)

    def read(self, start: int, stop: int) -> Iterator[np.ndarray | Exception]:
        waiting: list[np.ndarray | Exception] = []
        for image in self._images.read(start, stop):
            waiting.append(image)
            if len(waiting) == _ENCODED:
                yield from self._encoded(waiting)
                waiting = []
        yield from self._encoded(waiting)

    def _encoded(self, found: list[np.ndarray | Exception]) -> Iterator[np.ndarray | Exception]:
        images = [image for image in found if isinstance(image, np.ndarray)]
        moments = iter(())
        if images:
            moments = iter(self._encoder.encode(torch.from_numpy(np.stack(images))).numpy())
        for image in found:
            yield next(moments) if isinstance(image, np.ndarray) else image


class StoredSamples:
    """The samples of a set that is there, with its numbers as they are."""

    def __init__(self, data: ImageSet) -> None:
        self._data, self.image_size = data, data.size
        self.shape, self.values = tuple(data.images.shape[1:]), data.values
        self.labels = None if data.labels is None else data.labels.tolist()
        self.class_names = data.class_names

    def __len__(self) -> int:
        return len(self._data)

    def read(self, start: int, stop: int) -> Iterator[np.ndarray | Exception]:
        self._data.check(np.arange(start, stop))
        images = self._data.images
        for first in range(start, stop, 16):
            index = slice(first, min(first + 16, stop))
            if isinstance(images, StoredImages):
                rows = images.raw(index)
            else:
                rows = images[index].numpy()
            yield from rows if isinstance(self.values, Pixels) else rows.astype(np.float32)

    def remarks(self) -> dict[str, Any]:
        return {}

    def check(self, remarks: list[dict[str, Any]]) -> None:
        pass
