"""What every data set is once it is loaded: images, in memory or on disk, and labels."""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import ConfigError, counted, first_of
from ..runtime.host import free_memory
from .context import Context
from .given import GivenChannels, side_by_side
from .image_digests import ImageDigests
from .stored_images import StoredImages
from .values import Latents, Pixels, Units, Values

_LONGEST_SIDE = 8192  # in pixels


@dataclass
class ImageSet:
    """Images as stored on disk; the training kernels normalise and mirror them."""

    # uint8 or float32 [M, H, W, C], as the training kernels take them; of latents mean and log
    # variance, [M, H, W, 2 C]; with a condition C + K, of which the last K are given
    images: Tensor | StoredImages
    labels: Tensor | None = None  # int64 [M]
    class_names: tuple[str, ...] | None = None
    name: str = ""
    skipped: tuple[str, ...] = ()  # files that could not be decoded
    digests: ImageDigests | None = None  # of a file's images; call `check` when reading them
    values: Values = Pixels()
    notes: tuple[str, ...] = ()  # what was done to the images, for the log
    condition: GivenChannels | None = None  # the last channels of `images`, if they are a condition
    vectors: Tensor | None = None  # float32 [M, D], vector conditions
    context: Context | None = None  # sequence conditions

    def check(self, index: np.ndarray | None = None) -> None:
        """ConfigError if one of these images (int64 [B]; None: of all) is not as it was written."""
        if self.digests is not None:
            self.digests.check(index)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> tuple[int, int]:
        """(H, W)."""
        return self.images.shape[1], self.images.shape[2]

    @property
    def channels(self) -> int:
        """Of what is learned."""
        stored = self.images.shape[3] - (self.condition.channels if self.condition else 0)
        return stored // 2 if isinstance(self.values, Latents) else stored

    @property
    def vector_dim(self) -> int:
        """D of the vectors, 0 if there are none."""
        return 0 if self.vectors is None else self.vectors.shape[1]

    @property
    def context_dim(self) -> int:
        """Numbers of a token, 0 if there are no sequences."""
        return 0 if self.context is None else self.context.dim

    @property
    def learned(self) -> Tensor | StoredImages:
        """`images` [M, H, W, C] without the channels that are given."""
        if self.condition is None:
            return self.images
        if isinstance(self.images, StoredImages):
            return self.images.first_channels(self.channels)
        return self.images[..., : self.channels]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of what is learned."""
        return (*self.size, self.channels)


def rescale(data: ImageSet, known: Values, given: GivenChannels | None = None) -> bool:
    """Give the numbers of a set the scale that a network knows, and those of its condition theirs;
    returns whether it was another: a set that has grown has another mean and deviation.
    ConfigError: they are of another kind."""
    has, condition = data.values, data.condition
    if (condition and (condition.channels, condition.size)) != (
        given and (given.channels, given.size)
    ):
        raise ConfigError(
            f"the network was trained with {given or 'no condition'}, and data set {data.name} has"
            f" {condition or 'none'}"
        )
    if given and given.numbers and given.numbers != condition.numbers:
        raise ConfigError(
            f"the network was given the channels {list(given.numbers)}, and of data set {data.name}"
            f" {list(condition.numbers) or 'images'} are given"
        )
    same = has == known and condition == given
    if isinstance(has, Latents) and isinstance(known, Latents):
        # the same autoencoder may lie somewhere else
        same = replace(known, autoencoder=has.autoencoder) == has
    if same:
        return False
    if type(known) is not type(has) or isinstance(known, Latents):
        raise ConfigError(f"the network was trained on {known}, and data set {data.name} has {has}")
    data.values = replace(known, layout=has.layout)
    if given and condition:
        data.condition = replace(given, numbers=condition.numbers)
    if isinstance(data.images, StoredImages):
        of_all = side_by_side(data.values, given.values) if given else data.values
        data.images = data.images.scaled(of_all)
    return isinstance(known, Units) and replace(has, layout=known.layout) != known


def nearest(value: str, valid: Sequence[str], most: int = 12) -> str:
    """The end of an error message: the closest valid name, and the valid names if they are few."""
    lower = {name.lower(): name for name in reversed(valid)}
    close = difflib.get_close_matches(value.lower(), lower, n=1, cutoff=0.0)
    choices = first_of(valid, most)
    return f"did you mean {lower[close[0]]}? (one of {choices})" if close else f"one of {choices}"


def check_memory(what: str, shape: tuple[int, ...], itemsize: int = 1) -> None:
    """ConfigError if images of this shape, uint8 or of so many bytes a number, do not fit into the
    memory that is free: the system would grant it, and end the process later."""
    wanted, free = math.prod(shape) * itemsize, free_memory()
    if wanted > free:
        raise ConfigError(
            f"{what} needs {wanted / 2**30:.1f} GiB for {counted(shape[0], 'images')}, and"
            f" {free / 2**30:.1f} GiB are free; tools/prepare.py makes a file of any size for"
            " dataset=packed"
        )


def parse_size(size: int | Sequence[int]) -> tuple[int, int]:
    """(H, W) of `size`: one number, or [H, W]."""
    sides = (size, size) if isinstance(size, int) else size
    ok = isinstance(sides, Sequence) and not isinstance(sides, str) and len(sides) == 2
    if not ok or not all(type(side) is int and 1 <= side <= _LONGEST_SIDE for side in sides):
        raise ConfigError(
            f"size={size} is wrong; give one side of 1 to {_LONGEST_SIDE} pixels, or"
            " [height, width]"
        )
    return sides[0], sides[1]


def with_channels(images: Tensor, channels: int) -> Tensor:
    """Gray and colour into each other: uint8 [M, H, W, 1 or 3] -> [M, H, W, channels]."""
    have = images.shape[3]
    if channels == have:
        return images
    if (have, channels) == (1, 3):
        return images.expand(*images.shape[:3], 3).contiguous()
    if (have, channels) == (3, 1):  # Pillow's luma, ITU-R 601
        gray = [np.asarray(Image.fromarray(image).convert("L")) for image in images.numpy()]
        return torch.from_numpy(np.stack(gray)[..., None])
    raise ConfigError(f"channels={channels} is wrong for this set; choose 1 or 3")
