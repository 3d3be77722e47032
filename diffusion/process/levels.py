"""How many levels of noise there are, and where: what every kind of schedule asks."""

import numpy as np

from ..errors import ConfigError

_MOST_STEPS = 1_000_000  # of which every number is held in memory, several times


def karras_sigmas(
    sigma_min: float, sigma_max: float, count: int, rho: float = 7.0
) -> np.ndarray:  # float64 [count], ascending
    ends = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    sigmas = np.linspace(*ends, count)[::-1] ** rho
    sigmas[0], sigmas[-1] = sigma_min, sigma_max  # without rounding; of a single step: sigma_max
    return sigmas


def count_of(key: str, value: int | str, *, least: int = 1, name: str | None = None) -> int:
    """`value` as an integer >= least; text of digits is accepted, since settings arrive as text."""
    name = value if name is None else name
    text = value.strip() if isinstance(value, str) else value
    whole = text.isdecimal() if isinstance(text, str) else isinstance(text, int | np.integer)
    if not whole or isinstance(text, bool) or not least <= int(text) <= _MOST_STEPS:
        raise ConfigError(
            f"{key}={name} is not possible; give a whole number from {least} to {_MOST_STEPS:,}"
        )
    return int(text)
