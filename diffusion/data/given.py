"""What a data set gives to the network beside x_t: channels that are not learned."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from .values import Pixels, Units, Values, values_from_state


@dataclass(frozen=True)
class GivenChannels:
    """The last channels of a set's images, the condition.

    Arguments:
        channels: How many.
        values: What their numbers mean.
        size: (H, W) that pictures are reduced to before they are enlarged to the set's size, for
            super-resolution; None: they are not.
        numbers: Of an array, which of its channels they are; (): the images are other ones.
    """

    channels: int
    values: Values = Pixels()
    size: tuple[int, int] | None = None
    numbers: tuple[int, ...] = ()

    def state(self) -> dict[str, Any]:
        """For a checkpoint's state.json."""
        size = None if self.size is None else list(self.size)
        state = {"channels": self.channels, "values": self.values.state(), "size": size}
        return state | ({"numbers": list(self.numbers)} if self.numbers else {})

    def __str__(self) -> str:
        reduced = "" if self.size is None else f", reduced to {self.size[0]}x{self.size[1]}"
        plural = "s" * (self.channels > 1)
        return f"a condition of {self.channels} channel{plural}{reduced}"


def given_from_state(state: dict[str, Any] | None) -> GivenChannels | None:
    """What `state` returned; None if there was none. ValueError: it is damaged."""
    if state is None:
        return None
    try:
        size = None if state["size"] is None else tuple(state["size"])
        numbers = tuple(state.get("numbers", ()))  # earlier versions did not write them down
        return GivenChannels(state["channels"], values_from_state(state["values"]), size, numbers)
    except (TypeError, KeyError) as error:
        raise ValueError(f"condition {state} ({error!r})") from None


def enlarged(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 [H, W, C] at (H', W'), by Pillow's bicubic filter."""
    if picture.shape[:2] == size:
        return picture
    planes = [
        np.asarray(Image.fromarray(plane).resize(size[::-1], Image.Resampling.BICUBIC))
        for plane in np.moveaxis(picture, 2, 0)
    ]
    return np.stack(planes, axis=2)


def side_by_side(values: Values, given: Values) -> Values:
    """What the numbers of both mean, of images whose last channels are given. ValueError: they are
    of different kinds, which no array is."""
    if isinstance(values, Units) and isinstance(given, Units):
        mean, deviation = values.mean + given.mean, values.deviation + given.deviation
        return replace(values, mean=mean, deviation=deviation)
    if type(values) is not type(given):
        raise ValueError(f"{values} beside {given}")
    return values
