"""Denoisers of x_t with a condition's channels behind its own, as denoisers of x_t alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.conditions import Conditions
from ..process.objective import Denoiser
from .chain import GuidedOutput, TabulatedDenoiser, tabulated


@dataclass(frozen=True)
class Beside:
    """A plain denoiser, and one with tables (see `TabulatedDenoiser`), the first of which holds the
    condition's channels."""

    denoiser: Denoiser | TabulatedDenoiser  # of C + K channels
    dtype: torch.dtype | None = None  # that one without tables is given x in

    def __call__(self, x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        x, others = conditions.beside(x)
        return self.denoiser(x, t, others)

    def tabulate(
        self, timesteps: Tensor, conditions: Conditions | None, n: int
    ) -> tuple[Tensor, ...]:
        """ValueError: there is no condition, or not one a sample."""
        image = None if conditions is None else getattr(conditions, "image", None)
        if image is None or len(image) != n:
            given = "missing" if image is None else f"of shape {list(image.shape)}"
            raise ValueError(f"the condition is {given}; the network takes [{n}, H, W, K]")
        _, others = conditions.beside(image[..., :0])
        inner = tabulated(self.denoiser, self.dtype)
        return image.float(), *inner.tabulate(timesteps, others, n)

    def at_row(self, x: Tensor, row: Tensor, tables: tuple[Tensor, ...]) -> Tensor | GuidedOutput:
        image, *others = tables
        inner = tabulated(self.denoiser, self.dtype)
        return inner.at_row(torch.cat((x, image.to(x.dtype)), dim=-1), row, tuple(others))
