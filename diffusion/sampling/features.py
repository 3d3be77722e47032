"""The features of images that FID and its relatives compare, by a network of torch-fidelity; and
those of a reference, which are kept on the disk."""

import hashlib
import logging
import os
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import ConfigError
from ..runtime.distributed import Processes

EXTRACTOR = "inception-v3-compat"  # of the literature
_PREPARED = "uint8 in RGB, gray copied into all three; resized by the network"  # part of the key
_WITHOUT = "the held-out loss (metrics=[loss]; in training dataset.held_out) needs none"

log = logging.getLogger(__name__)


class _Images(Dataset):
    """As torch-fidelity wants them: uint8 [3, H, W], gray copied into all three."""

    def __init__(self, images: Tensor) -> None:  # uint8 [N, H, W, 1 or 3]
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        image = self.images[index : index + 1][0]  # as a slice also of images on disk
        return image.permute(2, 0, 1).expand(3, -1, -1).contiguous()


def require_fidelity(features: str) -> str:
    """The version of torch-fidelity. ConfigError unless it is installed, loads (with torchvision,
    which does not where it was built for another PyTorch) and has the extractor."""
    if find_spec("torch_fidelity") is None:
        raise ConfigError(
            "FID and KID need torch-fidelity: pip install -c constraints.txt -e '.[quality]';"
            f" {_WITHOUT}"
        )
    try:
        from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY as known  # slow to load
    except Exception as error:  # of many kinds: torchvision's operators, a library, a name
        raise ConfigError(
            f"torch-fidelity does not load ({_in_a_line(error)}); torchvision has to be of the"
            f" release that goes with PyTorch {torch.__version__}; {_WITHOUT}"
        ) from error
    if features not in known:
        raise ConfigError(f"features={features} is unknown; choose one of {', '.join(known)}")
    return version("torch-fidelity")


class FeatureNetwork:
    """A network of torch-fidelity, built once. ConfigError: it cannot be, or has not the layers.

    Arguments:
        name: An extractor that torch-fidelity knows.
        metrics: What its layers are for: fid, kid, isc, prc.
        device: Where it runs.
        weights: Its file; None: what torch-fidelity fetches, once.
    """

    def __init__(
        self, name: str, metrics: list[str], device: torch.device, weights: str | None = None
    ) -> None:
        self.version = require_fidelity(name)
        from torch_fidelity.utils import create_feature_extractor, resolve_feature_layer_for_metric

        self.name, self._cuda = name, device.type == "cuda"
        try:
            self.layers: dict[str, str] = {
                metric: resolve_feature_layer_for_metric(metric, feature_extractor=name)
                for metric in metrics
            }
            self._network = create_feature_extractor(
                name,
                sorted(set(self.layers.values())),
                cuda=self._cuda,
                feature_extractor_weights_path=weights,
                verbose=False,
            )
            self(torch.zeros(2, 8, 8, 3, dtype=torch.uint8))
        except OSError as error:
            raise ConfigError(
                f"the weights of {name} are not available ({_in_a_line(error)}); fetch them on a"
                f" machine with a network and give weights=FILE; {_WITHOUT}"
            ) from error
        except Exception as error:  # what torch.load and load_state_dict say of another file
            given = "" if weights is None else f" with weights={weights}"
            raise ConfigError(
                f"features={name} cannot be used{given}: {_in_a_line(error)}"
            ) from error
        own = "own" if weights is None else _file_digest(weights)
        self.identity = f"{name} {own}, torch-fidelity {self.version}, {_PREPARED}"

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Of uint8 [N, H, W, 1 or 3] the features by layer, [N, D] in the host's memory."""
        from torch_fidelity.utils import get_featuresdict_from_dataset

        return get_featuresdict_from_dataset(
            _Images(images), self._network, 64, self._cuda, save_cpu_ram=True, verbose=False
        )

    def among(self, processes: Processes, images: Tensor) -> dict[str, Tensor] | None:
        """The same, of which each process computes a share; None for all but the first."""
        n = len(images)
        share = -(-n // processes.count)
        index = torch.arange(processes.rank * share, (processes.rank + 1) * share) % n
        own = self(images if processes.count == 1 else images[index])
        return gathered(processes, own, n)


def gathered(
    processes: Processes, own: dict[str, Tensor], n: int
) -> dict[str, Tensor] | None:  # [n, D] each
    """The features of all processes' shares, of which n are wanted; None for all but the first."""
    found = {layer: processes.gather(values) for layer, values in own.items()}
    return {layer: x[:n] for layer, x in found.items()} if processes.is_first else None


class Reference:
    """What drawn images are compared with: its features, and their means and covariances.

    They are looked up in `folder` under a digest of the images, of how they are prepared and of the
    network; what is not there is computed by all processes, and kept. FID alone asks for means and
    covariances, so no features are kept for it.
    """

    def __init__(
        self, images: Tensor, digest: str, network: FeatureNetwork, folder: Path | None = None
    ) -> None:
        self.images, self.digest, self._network = images, digest, network
        key = f"{digest} {list(images.shape)} {images.dtype}, {network.identity}"
        name = hashlib.sha256(key.encode()).hexdigest()[:24]
        self._path = (cache_folder() if folder is None else folder) / f"{network.name}-{name}"
        self._features: dict[str, Tensor] | None = None
        self._statistics: dict[str, np.ndarray] | None = None

    def prepare(self, processes: Processes) -> None:
        """Look up or compute what the network's metrics need; every process has to call it."""
        wanted = not set(self._network.layers) <= {"fid", "isc"}
        ready = self._statistics is not None or self._looked_up(processes, wanted)
        if processes.of_first(ready):
            return
        found = self._network.among(processes, self.images)
        if found is None:
            return
        self._features = found
        self._statistics = self._statistics_of(found)
        self._keep(wanted)

    def features(self, layer: str) -> Tensor:  # [M, D]
        return self._features[layer]

    @property
    def statistics(self) -> dict[str, np.ndarray]:
        """mu [D] and sigma [D, D], float64, as torch-fidelity has them."""
        return self._statistics

    def _statistics_of(self, features: dict[str, Tensor]) -> dict[str, np.ndarray]:
        from torch_fidelity.metric_fid import fid_features_to_statistics

        layer = self._network.layers.get("fid")
        return {} if layer is None else fid_features_to_statistics(features[layer])

    def _looked_up(self, processes: Processes, wanted: bool) -> bool:
        if not processes.is_first:
            return False
        try:
            if "fid" in self._network.layers:
                stored = load_file(self._path.with_suffix(".statistics"))
                self._statistics = {name: values.numpy() for name, values in stored.items()}
            else:
                self._statistics = {}
            if wanted:
                stored = load_file(self._path.with_suffix(".features"))
                self._features = {layer: stored[layer] for layer in self._layers()}
        except (OSError, SafetensorError, KeyError):  # not there, or damaged
            self._statistics = self._features = None
            return False
        return True

    def _keep(self, wanted: bool) -> None:
        held = {name: torch.from_numpy(x) for name, x in self._statistics.items()}
        try:
            if held:
                _save(held, self._path.with_suffix(".statistics"))
            if wanted:
                _save({k: self._features[k] for k in self._layers()}, self._path, ".features")
        except (OSError, SafetensorError) as error:  # a full disk: they are computed anew
            warnings.warn(f"{self._path} is not kept: {_in_a_line(error)}", stacklevel=2)
        else:
            log.info("features of the reference are saved as %s", self._path)

    def _layers(self) -> list[str]:
        return sorted({x for m, x in self._network.layers.items() if m in ("kid", "prc")})


def cache_folder() -> Path:
    """Where features of references are kept: in the folder that TRITON_DIFFUSION_CACHE names, or
    in the user's."""
    given = os.environ.get("TRITON_DIFFUSION_CACHE")
    return Path(given or Path.home() / ".cache" / "triton_diffusion").expanduser() / "features"


def _save(tensors: dict[str, Tensor], path: Path, suffix: str | None = None) -> None:
    path = path if suffix is None else path.with_suffix(suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".writing_{os.getpid()}_{path.name}")
    try:
        save_file({name: x.contiguous() for name, x in tensors.items()}, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _file_digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _in_a_line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
