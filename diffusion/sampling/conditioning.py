"""Conditions out of a data set, and in pictures beside what was drawn for them."""

import numpy as np
import torch
from torch import Tensor

from ..data.given import GivenChannels
from ..data.held_out import Rows
from ..models.conditions import Conditions, Given, learned_and_given, with_null_token, with_presence
from ..tracking.pictures import over_white


def conditions_of(
    samples: Rows,
    first: int,
    count: int,
    labels: Tensor | None,
    given: GivenChannels | None,
) -> Given:
    """Those of samples first .. first + count - 1 of a set, which begins again at its end; and
    their labels in the place of `labels`, where the network takes some."""
    index = torch.arange(first, first + count) % len(samples)
    images, known = samples.take(0, min(first + count, len(samples)))
    image = vectors = None
    tokens, rows = (), torch.from_numpy(samples.rows)[index]
    if given is not None:
        _, image = learned_and_given(as_seen(images[index]), given.channels)
    if samples.vectors is not None:
        vectors = with_presence(samples.vectors[rows])
    if samples.context is not None:
        tokens = with_null_token(*samples.context[rows])
    if labels is not None and known is not None:
        labels = known[index].to(labels.device)
    return Conditions(labels, image, vectors, *tokens).shortest()


def as_seen(images: Tensor) -> Tensor:
    """As the network sees them: uint8 as x / 127.5 - 1, and float32 as they are."""
    return images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images


def beside_condition(
    pictures: np.ndarray,  # uint8 [N, H, W, C]
    conditions: Given,  # of N
    given: GivenChannels | None,
) -> np.ndarray:  # uint8 [N, H, W', 3]
    """Each picture with its condition on its left; without a condition the pictures as they are."""
    if given is None or not isinstance(conditions, Conditions) or conditions.image is None:
        return pictures
    shown = given.values.picture(conditions.image[: len(pictures)])
    return np.concatenate((_coloured(shown), _coloured(pictures)), axis=2)


def _coloured(pictures: np.ndarray) -> np.ndarray:
    if pictures.shape[3] == 4:
        return over_white(pictures)
    return pictures[..., :1].repeat(3, axis=3) if pictures.shape[3] < 3 else pictures[..., :3]
