"""An evaluation from a plain dict: load the network, draw, compare with the data, write it down."""

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import load_dataset
from ..data.image_set import with_channels
from ..errors import ConfigError, check_writable, writing
from ..formats.checkpoint import find_checkpoint, read_state
from ..formats.trained import Trained
from ..runtime.distributed import own_rank
from ..sampling.quality import EXTRACTOR, check_extractor, check_metrics, measure, require_fidelity
from ..sampling.sampler import Sampler
from ..settings import construct, shown
from ..training.image_task import image_options
from .sampling import DrawSettings, choose_labels, draw_all

# beside the numbers stands what they depend on: FID changes with every one of these
FIELDS = (
    *("checkpoint", "fid", "kid", "kid_std", "isc", "isc_std", "precision", "recall"),
    *("n", "reference", "n_reference", "height", "width", "features", "torch_fidelity"),
    *("sampler", "steps", "spacing", "eta", "clip", "guidance", "seed", "ema"),
    *("backend", "compute", "torch"),
)


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(DrawSettings):
    """The configuration; see configs/evaluate.yaml."""

    n: int = 10_000
    metrics: list[str] = field(default_factory=lambda: ["fid", "kid"])
    reference: str | None = None
    features: str = EXTRACTOR
    weights: str | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_metrics(self.metrics)
        if self.weights is not None and not Path(self.weights).is_file():
            raise ConfigError(f"weights={self.weights} does not exist")


def evaluate(config: dict[str, Any]) -> dict[str, Any] | None:
    """Draw and compare as configured, print the numbers, append them to a CSV file and return its
    row; under torchrun the first process does, the others return None."""
    settings = construct(EvaluateSettings, config, "")
    fidelity = require_fidelity(settings.features)
    trained, sampler = settings.load_and_choose()
    device = next(trained.model.parameters()).device
    out = Path(settings.out or (trained.run_dir or Path()) / "evaluations.csv")
    _check_out(out)
    name, real = _reference(settings, trained)
    if own_rank() == 0:  # before the drawing
        check_extractor(settings.features, settings.weights, device)
    images = draw_all(settings, trained, sampler, choose_labels(None, settings.n, trained))
    if images is None:
        return None
    values = measure(
        images,
        real,
        settings.metrics,
        device,
        features=settings.features,
        weights=settings.weights,
    )
    row = values | {
        **_about(settings, trained, sampler),
        "reference": name,
        "n_reference": len(real),
        "torch_fidelity": fidelity,
    }
    with writing(out):
        _append(out, row)
    numbers = ", ".join(f"{key} {value:.5g}" for key, value in values.items())
    print(f"{settings.ckpt}: {numbers}; {settings.n} images against {len(real)} of {name}; {out}")
    return row


def _reference(settings: EvaluateSettings, trained: Trained) -> tuple[str, Tensor]:
    """(name, uint8 [M, H, W, C]) of the images to compare with: those that the network was trained
    on, or a file's or folder's, as large as the drawn ones."""
    height, width, channels = trained.image_shape
    if settings.reference is None:
        if trained.run_dir is None:
            raise ConfigError(
                f"{settings.ckpt} does not say what it was trained on: give reference=FOLDER, or a"
                " .zip, .packed or .bin"
            )
        _, config = read_state(find_checkpoint(settings.ckpt))
        options, _ = image_options(config["dataset"])
        data = load_dataset(**options)
        data.check()
        return data.name, data.images
    path = Path(settings.reference)
    if path.suffix in (".packed", ".bin"):
        data = load_dataset("packed", path=str(path), size=[height, width])
    else:
        options = {"path": str(path), "size": [height, width], "classes": False}
        data = load_dataset("folder", **options, channels=channels)
    data.check()
    return str(path), with_channels(data.images, channels)


def _about(settings: EvaluateSettings, trained: Trained, sampler: Sampler) -> dict[str, Any]:
    backend, (height, width, _) = trained.model.backend, trained.image_shape
    return {
        "checkpoint": trained.name,
        **{"n": settings.n, "height": height, "width": width, "features": settings.features},
        **{"sampler": settings.sampler, "steps": sampler.num_steps, "spacing": sampler.spacing},
        **{key: shown(getattr(settings, key)) for key in ("eta", "guidance", "seed")},
        "clip": shown(sampler.clip),
        "ema": _ema(settings, trained),
        **{"backend": backend.name, "compute": backend.precision, "torch": torch.__version__},
    }


def _ema(settings: EvaluateSettings, trained: Trained) -> str:
    """The decay of the average, where it is known."""
    if settings.ema is not True or trained.run_dir is None:
        return shown(settings.ema)
    _, config = read_state(find_checkpoint(settings.ckpt))
    return shown(config.get("optim", {}).get("ema_decay", True))


def _check_out(out: Path) -> None:
    if out.suffix != ".csv":
        raise ConfigError(f"out={out}; expected a .csv, which is appended to")
    if out.is_file():
        with open(out, newline="") as file:
            if tuple(next(csv.reader(file), ())) != FIELDS:
                raise ConfigError(f"out={out} has other columns; give another file")
    check_writable(out)


def _append(out: Path, row: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    new = not out.exists()
    with open(out, "a", newline="") as file:
        table = csv.DictWriter(file, FIELDS)
        if new:
            table.writeheader()
        table.writerow(row)
