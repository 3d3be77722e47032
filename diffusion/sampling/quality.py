"""How close drawn images are to a data set: FID and its relatives, by torch-fidelity.

    fid    Frechet distance of the features' means and covariances (Heusel et al., 2017)
    kid    squared maximum mean discrepancy of the features (Binkowski et al., 2018)
    isc    Inception score, of the drawn images alone (Salimans et al., 2016)
    prc    precision and recall of the features' manifolds (Kynkaanniemi et al., 2019)

References:
    https://arxiv.org/abs/1706.08500, https://arxiv.org/abs/1801.01401,
    https://arxiv.org/abs/1606.03498, https://arxiv.org/abs/1904.06991
"""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, counted
from ..runtime.distributed import Processes
from .features import EXTRACTOR, FeatureNetwork, Reference, gathered

METRICS = ("fid", "kid", "isc", "prc")
COLUMNS = {  # of each metric
    "fid": ("fid",),
    "kid": ("kid", "kid_std"),
    "isc": ("isc", "isc_std"),
    "prc": ("precision", "recall"),
}
_NAMES = {  # torch-fidelity's
    "frechet_inception_distance": "fid",
    "kernel_inception_distance_mean": "kid",
    "kernel_inception_distance_std": "kid_std",
    "inception_score_mean": "isc",
    "inception_score_std": "isc_std",
    "precision": "precision",
    "recall": "recall",
}
_SUBSET = 1000  # images in one of KID's subsets, if there are as many
_SEED = 2020  # of KID's subsets and the order of the Inception score's parts, torch-fidelity's
_NEIGHBOURS = 3  # of precision and recall


def check_metrics(
    metrics: list[str], known: tuple[str, ...] = METRICS, key: str = "metrics"
) -> None:
    """ConfigError unless all are known, and there is one."""
    for name in metrics:
        if name not in known:
            raise ConfigError(f"{key} has {name}; choose from {', '.join(known)}")
    if not metrics:
        raise ConfigError(f"{key}=[] is empty; choose from {', '.join(known)}")


def digest_of(images: Tensor) -> str:
    """Of uint8 [N, H, W, C], their number and order: 16 hexadecimal digits."""
    found = hashlib.sha256(f"{images.dtype} {list(images.shape)}".encode())
    for start in range(0, len(images), 1024):
        found.update(images[start : start + 1024].contiguous().numpy())
    return found.hexdigest()[:16]


class Quality:
    """Compares drawn images with the same real ones whenever it is called. The real ones'
    features are computed at most once, see `Reference`.

    ConfigError, before anything is drawn: the package or its weights are missing, images that are
    no gray or RGB in 8 bits, too few of them.
    """

    def __init__(
        self,
        real: Tensor,  # uint8 [M, H, W, 1 or 3]
        metrics: list[str],
        n: int,  # drawn images
        device: torch.device,
        processes: Processes,
        *,
        features: str = EXTRACTOR,
        weights: str | None = None,
        cache: Path | None = None,  # None: `features.cache_folder`
    ) -> None:
        check_metrics(metrics)
        if real.shape[3] not in (1, 3) or real.dtype != torch.uint8:
            raise ConfigError(
                f"images of {counted(real.shape[3], 'channels')} in"
                f" {str(real.dtype).removeprefix('torch.')} have no FID; expected 1 or 3 in uint8"
            )
        self.metrics, self.n, self.processes = metrics, n, processes
        self._check(min(n, len(real)))
        self.network = FeatureNetwork(features, metrics, device, weights)
        self._real, self._cache = real, cache
        self.reference: Reference | None = None  # made when it is first needed: it reads all

    def __call__(
        self,
        drawn: np.ndarray,  # uint8 [share, H, W, 1 or 3], this process's; n or more of all
    ) -> dict[str, float]:
        """The values by name: fid, kid and kid_std, isc and isc_std, precision and recall. Every
        process has to call it, and has the answer."""
        if self.reference is None:
            self.reference = Reference(self._real, digest_of(self._real), self.network, self._cache)
        if self.metrics != ["isc"]:
            self.reference.prepare(self.processes)
        found = gathered(self.processes, self.network(torch.from_numpy(drawn)), self.n)
        return self.processes.of_first(None if found is None else self._values(found))

    def _check(self, fewest: int) -> None:
        if fewest < 2:
            raise ConfigError(f"{fewest} image has no spread to compare; expected at least 2")
        if "prc" in self.metrics and fewest <= _NEIGHBOURS:
            raise ConfigError(
                f"{fewest} images have no {_NEIGHBOURS} neighbours each, which precision and recall"
                f" need; expected at least {_NEIGHBOURS + 1}"
            )

    def _values(self, found: dict[str, Tensor]) -> dict[str, float]:
        from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
        from torch_fidelity.metric_isc import isc_features_to_metric
        from torch_fidelity.metric_kid import kid_features_to_metric
        from torch_fidelity.metric_prc import prc_features_to_metric

        values: dict[str, float] = {}
        for metric in self.metrics:
            layer = self.network.layers[metric]
            own = found[layer]
            if metric == "fid":
                mine = fid_features_to_statistics(own)
                values |= fid_statistics_to_metric(mine, self.reference.statistics, False)
            elif metric == "isc":
                values |= isc_features_to_metric(own, 10, True, _SEED)
            elif metric == "kid":
                real = self.reference.features(layer)
                size = min(_SUBSET, len(own), len(real))
                options = {"kid_subset_size": size, "rng_seed": _SEED, "verbose": False}
                values |= kid_features_to_metric(own, real, **options)
            else:
                options = {"prc_neighborhood": _NEIGHBOURS, "save_cpu_ram": True, "verbose": False}
                values |= prc_features_to_metric(own, self.reference.features(layer), **options)
        return {_NAMES[name]: float(x) for name, x in values.items() if name in _NAMES}
