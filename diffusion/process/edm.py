r"""EDM's preconditioning and loss (Karras et al., 2022) in terms of a chain.

EDM trains D(y + sigma n) = c_skip (y + sigma n) + c_out F(c_in (y + sigma n), c_noise) for images y
of deviation sigma_data, with

    c_skip = sigma_data^2 / (sigma^2 + sigma_data^2)      c_in    = (sigma^2 + sigma_data^2)^(-1/2)
    c_out  = sigma sigma_data c_in                        c_noise = ln(sigma) / 4

and a loss whose weight, 1 / c_out^2, makes it the mean squared error of F against
(y - c_skip (y + sigma n)) / c_out, with ln(sigma) ~ N(p_mean, p_std^2). Put in x_0 = y / sigma_data
and alpha_bar = 1 / (1 + (sigma / sigma_data)^2):

    what the network is given   c_in (y + sigma n) = sqrt(alpha_bar) x_0 + sqrt(1 - alpha_bar) n
    what it is compared with    F = -(sqrt(alpha_bar) n - sqrt(1 - alpha_bar) x_0) = -v

So EDM is the prediction of v (but for the sign, which the last layer takes) of images in units of
sigma_data, over a chain whose levels are dense in ln(sigma) (`NoiseSchedule.edm`), at timesteps
that are not drawn evenly.

References:
    Elucidating the Design Space of Diffusion-Based Generative Models (Karras et al., 2022),
        table 1 and appendix B.6, https://arxiv.org/abs/2206.00364
"""

from statistics import NormalDist

import numpy as np

DRAWS = 2**20  # equally likely draws of a level: 4.9 deviations to either side of ln(sigma)'s mean


def normal_draws(
    sigmas: np.ndarray,  # [T], ascending
    p_mean: float,
    p_std: float,
) -> np.ndarray:  # int64 [DRAWS]
    """Which level each of DRAWS equally likely draws is, so that ln(sigma) is normal: the nearest
    one in ln(sigma) to that quantile."""
    normal, quantile = NormalDist(p_mean, p_std), (np.arange(DRAWS) + 0.5) / DRAWS
    # the other way round, as the normal's inverse is not in numpy: how many draws lie below the
    # middle of each level and the next
    middles = (np.log(sigmas[1:]) + np.log(sigmas[:-1])) / 2
    return np.searchsorted([normal.cdf(middle) for middle in middles], quantile)


def in_units(
    table: np.ndarray,  # float64 [K, 8], of `Sampler.table`, for x_0 / sigma_data
    sigma_data: float,
    remembers: bool,  # whether column e multiplies x_0' (see `solvers`)
) -> np.ndarray:  # float64 [K, 8]
    """The table of the same chain whose x_0, and last x, are images themselves."""
    a, b, c, d, e, sigma, log_min, log_max = table.T
    e = e / sigma_data if remembers else e
    table = np.stack((a * sigma_data, b * sigma_data, c / sigma_data, d, e, sigma), axis=1)
    table[-1, 2:] *= sigma_data
    return np.concatenate((table, np.stack((log_min, log_max), axis=1)), axis=1)
