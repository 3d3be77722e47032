r"""How much the loss of each timestep counts.

Each is a weight on the squared error of x_0, as a function of SNR = signal^2 / noise^2. An error of
1 in the output is an error of b in x_0 = a x_t + b output, so the squared error of the output
weighs b^2 as much, whatever is predicted.

| option             | weight on the error of x_0        |
| min_snr_gamma      | min(SNR, gamma)                   | Hang et al., 2023, section 3.4
| soft_min_snr_gamma | SNR gamma / (SNR + gamma)         | Crowson et al., 2024
| p2_gamma, p2_k     | SNR / (k + SNR)^gamma             | Choi et al., 2022

SNR itself is the weight of epsilon's plain error, which is what P2 begins with.

References:
    Efficient Diffusion Training via Min-SNR Weighting Strategy (Hang et al., 2023),
        https://arxiv.org/abs/2303.09556
    Scalable High-Resolution Pixel-Space Image Synthesis with Hourglass Diffusion Transformers
        (Crowson et al., 2024), https://arxiv.org/abs/2401.11605
    Perception Prioritized Training of Diffusion Models (Choi et al., 2022),
        https://arxiv.org/abs/2204.00227
"""

import math
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from .flow import FlowSchedule
from .schedule import NoiseSchedule


@dataclass(frozen=True)
class Weighting:
    """One of the weights above, or none. ConfigError: more than one, or an impossible number."""

    min_snr_gamma: float | None = None
    soft_min_snr_gamma: float | None = None
    p2_gamma: float | None = None
    p2_k: float | None = None  # None: 1

    def __post_init__(self) -> None:
        for name, usual in (
            ("min_snr_gamma", 5),
            ("soft_min_snr_gamma", 5),
            ("p2_gamma", 1),
            ("p2_k", 1),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(
                    f"diffusion.{name}={value}; expected a number above 0, such as {usual}, or null"
                )
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"diffusion.{given[0]} and diffusion.{given[1]} are both given; a loss has one of"
                " these weights"
            )
        if self.p2_k is not None and self.p2_gamma is None:
            raise ConfigError(f"diffusion.p2_k={self.p2_k} goes with diffusion.p2_gamma, such as 1")

    def of(
        self, schedule: NoiseSchedule | FlowSchedule, prediction: str
    ) -> np.ndarray | None:  # float64 [T]
        """The weight of the output's squared error at each timestep; None: 1 at each."""
        snr, (_, b) = schedule.snr, schedule.x0_from_output(prediction)
        if self.min_snr_gamma is not None:
            return np.minimum(snr, self.min_snr_gamma) * b**2
        if self.soft_min_snr_gamma is not None:
            return snr * self.soft_min_snr_gamma / (snr + self.soft_min_snr_gamma) * b**2
        if self.p2_gamma is not None:
            k = 1.0 if self.p2_k is None else self.p2_k
            return snr / (k + snr) ** self.p2_gamma * b**2
        return None


_KINDS = ("min_snr_gamma", "soft_min_snr_gamma", "p2_gamma")
