"""Which samples of a set are not trained on, and what is left of the set then.

The rule: of n samples the k that come first in the order of Philox under a fixed key, as
`order.epoch_permutation` sorts them. It depends on n and on the order of the set alone, neither on
`train.seed` nor on the machine; a smaller hold-out is the beginning of a larger one.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .batches import Samples
from .context import Context
from .given import GivenChannels
from .order import epoch_permutation
from .stored_images import StoredImages
from .values import Values

_KEY = 0x48454C44  # of the order; far from the seeds that people choose


@dataclass
class Rows:
    """Some samples of a set, which stay where they are: `images` are still those of all."""

    data: Samples
    rows: np.ndarray  # int64 [K]: sample i is number rows[i] of the set

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def images(self) -> Tensor | StoredImages:  # [M, ...], of the whole set
        return self.data.images

    @property
    def values(self) -> Values | None:
        """What the numbers of images mean."""
        return getattr(self.data, "values", None)

    @property
    def condition(self) -> GivenChannels | None:
        """What the last channels of images are, if they are given."""
        return getattr(self.data, "condition", None)

    @property
    def vectors(self) -> Tensor | None:  # [M, D], of the whole set
        """What each sample is given beside, if anything."""
        return getattr(self.data, "vectors", None)

    @property
    def context(self) -> Context | None:  # of the whole set
        """The sequence that each sample is given, if there is one."""
        return getattr(self.data, "context", None)

    @property
    def labels(self) -> Tensor | None:  # [M, ...], of the whole set
        return self.data.labels

    def check(self, index: np.ndarray | None = None) -> None:
        """ConfigError if one of these images (numbers in the whole set; None: those of `rows`) is
        damaged, where that can be known."""
        check = getattr(self.data, "check", None)
        if check is not None:
            check(self.rows if index is None else index)

    def take(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """(images [N, ...], labels [N, ...] | None) of samples start .. stop - 1."""
        index = self.rows[start:stop]
        self.check(index)
        chosen, labels = torch.from_numpy(index), self.data.labels
        return self.data.images[chosen], None if labels is None else labels[chosen]

    @cached_property
    def digest(self) -> str:
        """Of the images, their number and order: 16 hexadecimal digits. Two results on samples of
        one digest are of the same data."""
        found = hashlib.sha256()
        for start in range(0, len(self), 256):
            images, _ = self.take(start, start + 256)
            found.update(f"{images.dtype} {list(images.shape)}".encode())
            found.update(images.contiguous().numpy())
        if self.vectors is not None:
            found.update(self.vectors[torch.from_numpy(self.rows)].contiguous().numpy())
        if self.context is not None:
            for index in torch.from_numpy(self.rows).split(256):
                tokens, lengths = self.context[index]
                found.update(lengths.numpy())
                for sequence, length in zip(tokens, lengths, strict=True):
                    found.update(sequence[:length].numpy())
        return found.hexdigest()[:16]


def spread(data: Samples) -> Rows:
    """Every sample, in the order of the rule, so that the first of them are of the whole set."""
    return Rows(data, epoch_permutation(_KEY, 0, len(data)).copy())


def split(data: Samples, held_out: float) -> tuple[Samples | Rows, Rows | None]:
    """(what to train on, what is held out): the set itself and None if `held_out` is 0; below 1 it
    is a share, otherwise a number of samples. ConfigError: nothing would be left on one side."""
    if held_out == 0:
        return data, None
    n = len(data)
    count = round(n * held_out) if held_out < 1 else int(held_out)
    if not 1 <= count < n:
        raise ConfigError(
            f"dataset.held_out={held_out} is {count} of the {n} samples; expected at least 1, and"
            " fewer than all"
        )
    order = epoch_permutation(_KEY, 0, n)
    return Rows(data, np.sort(order[count:])), Rows(data, order[:count].copy())


def held_out_setting(dataset: dict[str, Any]) -> float:
    """`dataset.held_out` of a set of images; 0 if it is not set. ConfigError: it is neither a share
    nor a number of images."""
    value = dataset.get("held_out")
    if value is None:
        return 0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or value < 0 or value >= 1 and value != int(value) or value == float("inf"):
        raise ConfigError(
            f"dataset.held_out={value} is wrong; expected a share below 1, or a number of images"
        )
    return value
