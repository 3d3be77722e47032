r"""Images made from images by a network that was trained without them.

SDEdit (Meng et al., 2022): an image is given the noise of a level on the way, and the chain goes on
from there; `strength` is the share of the chain's steps that are taken. Inpainting (RePaint,
Lugmayr et al., 2022): behind every step, what is known of the image takes the place of what was
drawn, with the noise of the level that the step leads to (eq. 8). With `resample` = U each level is
gone to U times, going back a level by the forward process in between, so that what is drawn finds
what suits the known part (algorithm 1, with jumps of one level). A step that goes back is linear as
well, with noise of its own: one row of the table is both,

    x_t = r (c x_0 + d x_t + e output + sigma z) + q z',   r = signal_t / signal_{t-1},
    q^2 = noise_t^2 - r^2 noise_{t-1}^2

References:
    SDEdit: Guided Image Synthesis and Editing with Stochastic Differential Equations (Meng et al.,
        2022), https://arxiv.org/abs/2108.01073
    RePaint: Inpainting using Denoising Diffusion Probabilistic Models (Lugmayr et al., 2022),
        https://arxiv.org/abs/2201.09865
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError

MOST_VISITS = 100  # of a level


@dataclass(frozen=True, eq=False)
class Edit:
    """What a chain begins from or keeps. Sample i has images[i % M].

    Arguments:
        images: x_0, float32 [M, H, W, C].
        mask: 1 where the image stays as it is, 0 where it is drawn, float32 [M, H, W]; None: it is
            what the chain begins from, and all of it is drawn.
    """

    images: Tensor
    mask: Tensor | None = None

    def of(self, first: int, n: int) -> Tensor:  # int64 [n]
        """Which images samples first .. first + n - 1 have."""
        return (torch.arange(n, device=self.images.device) + first) % len(self.images)

    def known(self, index: Tensor) -> tuple[Tensor, Tensor] | None:
        """Images and masks of these samples, if any of them is to stay."""
        return None if self.mask is None else (self.images[index], self.mask[index])


def kept_steps(strength: float, steps: int) -> int:
    """How many of the steps are taken. ConfigError: a strength outside (0, 1]."""
    if isinstance(strength, bool) or not isinstance(strength, int | float) or not 0 < strength <= 1:
        raise ConfigError(
            f"strength={strength} is not possible; give a number above 0 and at most 1, such as 0.6"
        )
    return max(1, int(strength * steps + 1e-9))


def check_visits(resample: int) -> None:
    """ConfigError: a number of visits that is none."""
    whole = isinstance(resample, int) and not isinstance(resample, bool)
    if not whole or not 1 <= resample <= MOST_VISITS:
        raise ConfigError(
            f"resample={resample} is not possible; give a whole number from 1 to {MOST_VISITS}"
        )


def revisited(
    table: np.ndarray,  # float64 [K, 8], of `Sampler.table`
    levels: np.ndarray,  # float64 [K, 2], signal and noise in front of each row
    behind: np.ndarray,  # float64 [K, 2], and behind it
    visits: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # [K', 8], [K', 2], int64 [K']
    """The table in which each level but 0 is gone to so many times, the levels behind its rows, and
    which row each was. ConfigError: a variance that the network says, whose noise cannot be added
    to that of going back."""
    if table[:, 6:].any():
        raise ConfigError(
            f"resample={visits} is for a fixed variance; give sampler=ddim, or resample=1"
        )
    rows, after, which = [], [], []
    for k, row in enumerate(table):
        if k + 1 < len(table):
            ratio = levels[k, 0] / behind[k, 0]
            back = row.copy()
            back[2:5] *= ratio
            added = max(levels[k, 1] ** 2 - (ratio * behind[k, 1]) ** 2, 0.0)
            back[5] = np.sqrt((ratio * row[5]) ** 2 + added)
            rows += [back] * (visits - 1)
            after += [levels[k]] * (visits - 1)
            which += [k] * (visits - 1)
        rows.append(row)
        after.append(behind[k])
        which.append(k)
    return np.array(rows), np.array(after), np.array(which)
