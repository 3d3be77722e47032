"""The order of the data: a pure function of (seed, sample counter), so there is no state to save.

Sample g of a run (counted over all steps and all ranks: g = step * global_batch + i) is image

    index(g) = pi_e[g mod n],   e = g // n,   pi_e = argsort(Philox words keyed by (seed, e))

so every epoch is a permutation of its own, each image is seen once before any is seen twice, and a
resumed run, or one on other hardware or with another number of ranks, meets the same images at the
same g.
"""

from functools import lru_cache

import numpy as np
import torch

from triton_kernels.noise.philox import ORDER
from triton_kernels.reference import random_words


@lru_cache(maxsize=2)  # a batch lies in one epoch or straddles two
def epoch_permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order of the `n` images in `epoch`: int64 [n], read-only. Two words of 32 bits may be
    equal; the sort is stable, which settles those by position."""
    words = random_words(torch.tensor((seed, epoch)), 1, n, ORDER)[0].numpy()
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order


def sample_index(
    seed: int,
    samples: np.ndarray,  # int64 [B], global sample counters
    n: int,  # images in the data set
) -> np.ndarray:  # int64 [B]
    """Which image each sample is. A batch larger than the set runs through several epochs."""
    assert n > 0, "an empty data set is refused when it is loaded"
    epoch, position = np.divmod(samples, n)
    index = np.empty_like(samples)
    for e in np.unique(epoch).tolist():
        here = epoch == e
        index[here] = epoch_permutation(seed, e, n)[position[here]]
    return index
