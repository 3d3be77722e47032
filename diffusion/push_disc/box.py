"""A space of numbers between two limits, for where gymnasium is not installed."""

import numpy as np


class Box:
    """As much of gymnasium.spaces.Box as a loop over an environment uses."""

    def __init__(
        self, low: float, high: float, shape: tuple[int, ...], dtype: type = np.float32
    ) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.low, self.high = (np.full(shape, limit, dtype) for limit in (low, high))
        self._random = np.random.default_rng()

    def seed(self, seed: int | None = None) -> None:
        """What is sampled from now on."""
        self._random = np.random.default_rng(seed)

    def sample(self) -> np.ndarray:  # of this shape and dtype
        """A point of the space, all being equally likely."""
        if self.dtype.kind in "iu":
            return self._random.integers(self.low, self.high, dtype=self.dtype, endpoint=True)
        return self._random.uniform(self.low, self.high).astype(self.dtype)

    def contains(self, x: np.ndarray) -> bool:
        """Whether x is a point of the space."""
        x = np.asarray(x)
        fits = x.shape == self.shape and np.can_cast(x.dtype, self.dtype)
        return bool(fits and (x >= self.low).all() and (x <= self.high).all())

    __contains__ = contains
