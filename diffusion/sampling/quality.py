"""How close drawn images are to a data set: FID and its relatives, by torch-fidelity.

    fid    Frechet distance of the features' means and covariances (Heusel et al., 2017)
    kid    squared maximum mean discrepancy of the features (Binkowski et al., 2018)
    isc    Inception score, of the drawn images alone (Salimans et al., 2016)
    prc    precision and recall of the features' manifolds (Kynkaanniemi et al., 2019)

References:
    https://arxiv.org/abs/1706.08500, https://arxiv.org/abs/1801.01401,
    https://arxiv.org/abs/1606.03498, https://arxiv.org/abs/1904.06991
"""

from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import ConfigError

METRICS = ("fid", "kid", "isc", "prc")
EXTRACTOR = "inception-v3-compat"  # of the literature

_COLUMNS = {  # of a row, by torch-fidelity's names
    "frechet_inception_distance": "fid",
    "kernel_inception_distance_mean": "kid",
    "kernel_inception_distance_std": "kid_std",
    "inception_score_mean": "isc",
    "inception_score_std": "isc_std",
    "precision": "precision",
    "recall": "recall",
}
_SUBSET = 1000  # images in one of KID's subsets, if there are as many


class _Images(Dataset):
    """As torch-fidelity wants them: uint8 [3, H, W], gray copied into all three."""

    def __init__(self, images: Tensor) -> None:  # uint8 [N, H, W, 1 or 3]
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index].permute(2, 0, 1).expand(3, -1, -1).contiguous()


def require_fidelity(features: str) -> str:
    """The version of torch-fidelity. ConfigError unless it is installed and has the extractor."""
    if find_spec("torch_fidelity") is None:
        raise ConfigError("FID and KID need torch-fidelity: pip install -e '.[quality]'")
    from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY as known  # slow to load

    if features not in known:
        raise ConfigError(f"features={features} is unknown; choose one of {', '.join(known)}")
    return version("torch-fidelity")


def check_extractor(features: str, weights: str | None, device: torch.device) -> None:
    """ConfigError unless the extractor and its weights are there: to draw takes minutes."""
    blank = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    measure(blank, torch.from_numpy(blank), ["fid"], device, features=features, weights=weights)


def check_metrics(metrics: list[str]) -> None:
    """ConfigError unless all are known, and there is one."""
    for name in metrics:
        if name not in METRICS:
            raise ConfigError(f"metrics has {name}; choose from {', '.join(METRICS)}")
    if not metrics:
        raise ConfigError(f"metrics is empty; choose from {', '.join(METRICS)}")


def measure(
    drawn: np.ndarray,  # uint8 [N, H, W, 1 or 3]
    real: Tensor,  # uint8 [M, H, W, 1 or 3]
    metrics: list[str],
    device: torch.device,
    *,
    features: str = EXTRACTOR,  # an extractor that torch-fidelity knows
    weights: str | None = None,  # its file; None: what torch-fidelity fetches, once
) -> dict[str, float]:
    """The values by name: fid, kid and kid_std, isc and isc_std, precision and recall.

    The extractor resizes images to what it takes, as the TensorFlow network of the literature does.
    ConfigError: the package or its weights are missing, images of 4 channels, fewer than 2 of them.
    """
    require_fidelity(features)
    check_metrics(metrics)
    if drawn.shape[3] not in (1, 3) or real.shape[3] not in (1, 3):
        raise ConfigError(f"images of {drawn.shape[3]} channels have no FID; expected 1 or 3")
    fewest = min(len(drawn), len(real))
    if fewest < 2:
        raise ConfigError(f"{fewest} image has no spread to compare; expected at least 2")
    import torch_fidelity  # an optional dependency, and slow to load

    try:
        found = torch_fidelity.calculate_metrics(
            input1=_Images(torch.from_numpy(drawn)),
            input2=_Images(real),
            **dict.fromkeys(metrics, True),
            cuda=device.type == "cuda",
            feature_extractor=features,
            feature_extractor_weights_path=weights,
            kid_subset_size=min(_SUBSET, fewest),
            save_cpu_ram=True,  # no processes that decode: the images are in memory
            cache=False,
            verbose=False,
        )
    except OSError as error:
        raise ConfigError(
            f"the weights of {features} cannot be had ({error}); fetch them on a machine with a"
            " network and give weights=FILE"
        ) from error
    return {_COLUMNS[name]: float(value) for name, value in found.items() if name in _COLUMNS}
