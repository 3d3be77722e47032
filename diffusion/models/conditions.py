"""What a network is told of a sample beside its timestep, where that is more than a class.

All of it but the class is 0 where it is not given: training drops it with a probability
(`model.condition_dropout`), as it drops labels, and guidance goes away from what the network says
then (Ho and Salimans, 2022, algorithm 1).

References:
    Classifier-Free Diffusion Guidance (Ho and Salimans, 2022), https://arxiv.org/abs/2207.12598
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from triton_kernels import reference
from triton_kernels.noise.philox import LABEL_DROP


@dataclass(frozen=True, eq=False)
class Conditions:
    """Of N samples; what is None is not there."""

    labels: Tensor | None = None  # int64 [N]
    image: Tensor | None = None  # float32 [N, H, W, K]: channels behind those of x_t
    vector: Tensor | None = None  # float32 [N, D + 1], of `with_presence`: added to the embedding
    # floating-point [N, 1 + L, D], of `with_null_token`: attended to
    context: Tensor | None = None
    present: Tensor | None = None  # float32 [N, 1 + L]: 1 for those tokens that are there

    def __len__(self) -> int:
        return next(len(part) for part in self._parts().values())

    def __getitem__(self, index: Tensor) -> "Conditions":  # int64 [M]
        """Those of some samples."""
        return self.each(lambda part: part[index.to(part.device)])

    def to(self, device: torch.device) -> "Conditions":
        return self.each(lambda part: part.to(device))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Conditions":
        """The same with every part changed."""
        return replace(self, **{name: change(part) for name, part in self._parts().items()})

    def none(self) -> "Conditions":
        """As many with nothing given but labels."""
        return replace(self.each(torch.zeros_like), labels=self.labels)

    def dropped(self, rng: Tensor, probability: float, *, first: int = 0) -> "Conditions":
        """All but the labels of a sample is not given with this probability. Which samples is a
        function of (seed, step, first + n); they are those whose labels are dropped as well, if the
        probability is the same. No host synchronisation."""
        if probability == 0:
            return self
        keeps = ~_dropped(rng, len(self), probability, first)
        kept = self.each(lambda part: part * keeps.view(-1, *[1] * (part.ndim - 1)).to(part.dtype))
        return replace(kept, labels=self.labels)

    def beside(self, x: Tensor) -> tuple[Tensor, "Tensor | Conditions | None"]:
        """(x [N, H, W, C] with the channels of `image` behind its own, what else there is)."""
        if self.image is not None:
            x = torch.cat((x, self.image.to(x.dtype)), dim=-1)
        return x, replace(self, image=None).shortest()

    def of_embedding(self) -> "Conditions":
        """What is added to the timestep's embedding."""
        return Conditions(self.labels, vector=self.vector)

    def shortest(self) -> "Tensor | Conditions | None":
        """As networks take them that know of labels alone, if there is nothing else."""
        return self.labels if set(self._parts()) <= {"labels"} else self

    def _parts(self) -> dict[str, Tensor]:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in parts.items() if part is not None}


def drop_labels(
    labels: Tensor,  # int64 [N]
    rng: Tensor,  # int64 [2]: seed, step
    probability: float,
    null_label: int,
    *,
    first: int = 0,  # the global index of sample 0
) -> Tensor:  # int64 [N]
    """The labels, each replaced by `null_label` with the given probability; which ones is a
    function of (seed, step, first + n). No host synchronisation."""
    return labels.masked_fill(_dropped(rng, len(labels), probability, first), null_label)


def _dropped(rng: Tensor, count: int, probability: float, first: int) -> Tensor:  # bool [count]
    """Which samples are told nothing, of one draw: the same for labels and for all else."""
    words = reference.random_words(rng, count, 1, LABEL_DROP, first=first)[:, 0]
    return words < round(probability * 2**32)


def with_presence(vectors: Tensor) -> Tensor:  # [N, D] -> [N, D + 1]
    """With a 1 behind each, so that none, which is 0, is another than a vector of zeros."""
    return torch.cat((vectors, torch.ones_like(vectors[:, :1])), dim=1)


def with_null_token(
    tokens: Tensor,  # [N, L, D]
    lengths: Tensor,  # int64 [N], at most L
) -> tuple[Tensor, Tensor]:  # [N, 1 + L, D] of the same dtype, float32 [N, 1 + L]
    """`context` and `present`: a token of zeros in front, which is attended to even where nothing
    is given, and behind a sequence's length zeros."""
    tokens = F.pad(tokens, (0, 0, 1, 0))
    place = torch.arange(tokens.shape[1], device=tokens.device)
    present = (place <= lengths[:, None]).float()
    # a file may have anything behind a sequence's end
    return torch.where(present[..., None] > 0, tokens, 0), present


def attended(present: Tensor) -> Tensor:  # [N, 1 + L] -> bool [N, 1 + L]
    """The tokens that a sample attends to: the first, where nothing is given."""
    return (present > 0) | (torch.arange(present.shape[1], device=present.device) == 0)


Given = Tensor | Conditions | None  # labels int64 [N], or more


def parts_of(given: Given) -> Conditions:
    """What is given, if it is labels alone as well."""
    return given if isinstance(given, Conditions) else Conditions(given)


def zeros_given(
    count: int,
    labels: Tensor | None,  # int64 [count]
    size: tuple[int, int],  # (H, W)
    model: Any,  # a `Network`
    tokens: int = 1,  # of a context
) -> Given:
    """What the model wants to be given, as zeros, for who needs its shapes alone."""
    channels, numbers, dim = model.condition_channels, model.vector_dim, model.context_dim
    return Conditions(
        labels,
        torch.zeros(count, *size, channels) if channels else None,
        torch.zeros(count, numbers + 1) if numbers else None,
        torch.zeros(count, 1 + tokens, dim) if dim else None,
        torch.zeros(count, 1 + tokens) if dim else None,
    ).shortest()


def as_tables(given: Given) -> tuple[Tensor, ...]:
    """Tensors alone, for a chain that copies them: none, the labels, or in front of the parts one
    whose length says which they are."""
    if given is None or isinstance(given, Tensor):
        return () if given is None else (given,)
    parts = {field.name: getattr(given, field.name) for field in fields(given)}
    found = [part for part in parts.values() if part is not None]
    which = sum(2**i for i, part in enumerate(parts.values()) if part is not None)
    return found[0].new_zeros(which), *found


def from_tables(tables: Sequence[Tensor]) -> Given:
    """What `as_tables` was given."""
    if len(tables) < 2:
        return tables[0] if tables else None
    which, *parts = tables
    names = [field.name for i, field in enumerate(fields(Conditions)) if len(which) >> i & 1]
    return Conditions(**dict(zip(names, parts, strict=True)))


def joined(first: Given, second: Given) -> Given:
    """Two batches as one."""
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.cat((first, second))
    parts = {
        field.name: torch.cat((getattr(first, field.name), getattr(second, field.name)))
        for field in fields(first)
        if getattr(first, field.name) is not None
    }
    return Conditions(**parts)


def learned_and_given(images: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Images [N, H, W, C + K], of which the last K are given: [N, H, W, C], [N, H, W, K]."""
    learned = images.shape[-1] - channels
    return images[..., :learned].contiguous(), images[..., learned:].contiguous()
