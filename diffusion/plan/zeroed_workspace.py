"""Memory that is zero when an evaluation begins, for launches whose programs meet."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_empty = torch.empty  # tests put a function here that returns other numbers


class Zeros:
    """Words of one tensor, which an evaluation clears when it begins: all at once, and before
    anything that waits for one of them. How many it takes is known from the one before."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], int] = {}  # of evaluations, by their shape
        self.words: Tensor | None = None
        self.taken = 0

    @contextmanager
    def evaluation(self, x: Tensor) -> Iterator[Tensor | None]:
        """Of x, within the block, which first of all clears what it is given here."""
        shape = tuple(x.shape)
        count = self.counts.get(shape, 0)
        self.taken = 0
        self.words = _empty(count, dtype=torch.int64, device=x.device) if count else None
        try:
            yield self.words
        finally:
            self.counts[shape], self.words = self.taken, None

    def __call__(self, count: int, device: torch.device) -> Tensor:  # int64 [count]
        """The next ones, which nobody else has."""
        start, self.taken = self.taken, self.taken + count
        if self.words is None or self.taken > len(self.words):
            return torch.zeros(count, dtype=torch.int64, device=device)
        return self.words[start : self.taken]
