"""Images that stay where they are, on disk, and are brought into shape when they are asked for."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .values import Units, Values

_PART = 64 * 2**20  # bytes that are read at once
_MEASURED = 4 * 2**30  # bytes that mean and deviation are taken from, at most
_SEEN = {"nhwc": (0, 1, 2, 3), "nchw": (0, 2, 3, 1)}  # axes of a stored array, as they are wanted

log = logging.getLogger(__name__)


class StoredImages:
    """An array [M, ...] as a tensor [M, H, W, C] that can be indexed by images, and moved as a
    whole; `Batches` takes it for one."""

    def __init__(
        self,
        rows: Any,  # numpy's array, in memory or mapped, or zarr's
        layout: str,
        path: Path,  # for messages
        units: Units | None = None,  # of the channels taken; None: numbers as they are
        channels: Sequence[int] | None = None,  # those that are taken, in this order; None: all
    ) -> None:
        self._rows, self.layout, self.path, self._units = rows, layout, path, units
        self.channels = None if channels is None else list(channels)
        count, *axes = rows.shape
        seen = [*axes, 1] if layout == "nhw" else [axes[i - 1] for i in _SEEN[layout][1:]]
        if channels is not None:
            seen[2] = len(channels)
        self.shape = torch.Size((count, *seen))
        self.stored_dtype = np.dtype(rows.dtype)
        is_bytes = self.stored_dtype == np.uint8 and units is None
        self.dtype = torch.uint8 if is_bytes else torch.float32

    def scaled(self, values: Values) -> "StoredImages":
        """The same images as the network is to see them."""
        units = values if isinstance(values, Units) else None
        return StoredImages(self._rows, self.layout, self.path, units, self.channels)

    def taking(self, channels: Sequence[int]) -> "StoredImages":
        """Some of the stored channels, in this order, with their numbers as they are stored."""
        return StoredImages(self._rows, self.layout, self.path, None, channels)

    def first_channels(self, count: int) -> "StoredImages":
        """The first of those that are taken, as the network is to see them."""
        units, taken = self._units, range(self.shape[3]) if self.channels is None else self.channels
        if units is not None:
            units = replace(units, mean=units.mean[:count], deviation=units.deviation[:count])
        return StoredImages(self._rows, self.layout, self.path, units, taken[:count])

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return 4

    @property
    def nbytes(self) -> int:
        """As they are handed out."""
        return self.shape.numel() * self.dtype.itemsize

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """Some of them, as the network is to see them: uint8 or float32 [B, H, W, C]. ConfigError:
        a number that is not finite."""
        rows = self.raw(index)
        if self._units is not None:
            rows = self._units.normalise(rows)
        if self.dtype == torch.float32:
            rows = rows.astype(np.float32, copy=False)
        return torch.from_numpy(np.ascontiguousarray(rows))

    def raw(self, index: Tensor | slice) -> np.ndarray:
        """Some of them with their numbers as they are stored, [B, H, W, C]."""
        if isinstance(index, Tensor):
            index = index.numpy()
        select = getattr(self._rows, "oindex", self._rows)  # of zarr, whose [] is not numpy's
        rows = np.asarray(select[index])
        if rows.dtype.kind == "f" and not np.isfinite(rows).all():
            bad = int((~np.isfinite(rows)).reshape(len(rows), -1).any(axis=1).argmax())
            number = (np.arange(len(self))[index] if isinstance(index, slice) else index)[bad]
            raise ConfigError(
                f"{self.path} has numbers that are not finite, first in image {number}; replace"
                " them, or leave such images out"
            )
        rows = rows[..., None] if self.layout == "nhw" else rows.transpose(_SEEN[self.layout])
        return rows if self.channels is None else rows[..., self.channels]

    def parts(self, step: int = 1) -> Iterator[Tensor]:
        """The numbers of all images, or of every `step`-th, in parts that fit into memory: int64
        [B]."""
        size = self.shape[1:].numel() * self.stored_dtype.itemsize
        yield from torch.arange(0, len(self), step).split(max(1, _PART // size))

    def to(self, device: torch.device) -> Tensor:
        """All of them there."""
        out = torch.empty(self.shape, dtype=self.dtype, device=device)
        for index in self.parts():
            out[int(index[0]) : int(index[-1]) + 1] = self[index]
        return out


@dataclass(frozen=True)
class Measured:
    """Of each channel, float64 [C]."""

    mean: np.ndarray
    deviation: np.ndarray  # 1 of a constant one
    least: np.ndarray
    most: np.ndarray

    def limit(self, mean: Sequence[float], deviation: Sequence[float]) -> float:
        """The largest distance of a number from the mean, in deviations; at least 1."""
        apart = np.maximum(self.most - np.asarray(mean), np.asarray(mean) - self.least)
        return max(1.0, float((apart / np.asarray(deviation)).max()))


def measured(images: StoredImages) -> Measured:
    """Mean, deviation and range of each channel. Of more than a few GiB those of images at even
    distances."""
    size = images.shape.numel() * images.stored_dtype.itemsize
    step = -(-size // _MEASURED)
    if step > 1:
        log.info("%s: mean and deviation are measured on every %d-th image", images.path, step)
    # sums of differences from the first image's mean: of numbers far from 0 nothing is lost
    pivot = images.raw(slice(0, 1)).astype(np.float64).mean(axis=(0, 1, 2))
    count, total, squares = 0, np.zeros_like(pivot), np.zeros_like(pivot)
    least, most = np.full_like(pivot, np.inf), np.full_like(pivot, -np.inf)
    for index in images.parts(step):
        rows = images.raw(index).astype(np.float64) - pivot
        count += rows[..., 0].size
        total += rows.sum(axis=(0, 1, 2))
        squares += (rows**2).sum(axis=(0, 1, 2))
        least = np.minimum(least, rows.min(axis=(0, 1, 2)))
        most = np.maximum(most, rows.max(axis=(0, 1, 2)))
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
    constant = deviation <= 1e-7 * np.maximum(np.abs(pivot), 1e-30)
    return Measured(pivot + mean, np.where(constant, 1.0, deviation), pivot + least, pivot + most)
