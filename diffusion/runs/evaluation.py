"""An evaluation from a plain dict: load the network, draw, compare with the data, write it down."""

import atexit
import csv
import io
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..data import load_dataset
from ..data.array import is_array, open_arrays
from ..data.held_out import Rows, held_out_setting, split, spread
from ..data.image_set import ImageSet, rescale, with_channels
from ..data.values import Latents, Pixels
from ..errors import ConfigError, check_writable, counted, writing
from ..formats.checkpoint import find_checkpoint, read_state
from ..formats.trained import Trained
from ..runtime.distributed import Processes
from ..sampling.conditioning import conditions_of
from ..sampling.features import EXTRACTOR
from ..sampling.quality import METRICS, Quality, check_metrics, digest_of
from ..sampling.sampler import Sampler
from ..settings import construct, shown
from ..tracking.run_log import write_whole
from ..training.held_out_loss import BANDS, HeldOutLoss
from ..training.image_task import image_options
from .classes import choose_labels
from .draw_settings import DrawSettings, guidance_shown
from .drawing import draw_share

LOSS = "loss"  # the metric that draws nothing
# beside the numbers stands what they depend on: FID changes with every one of these
FIELDS = (
    *("checkpoint", "fid", "kid", "kid_std", "isc", "isc_std", "precision", "recall"),
    *("n", "reference", "reference_data", "n_reference", "height", "width", "features"),
    *("torch_fidelity", "sampler", "steps", "spacing", "eta", "clip", "guidance", "seed", "ema"),
    *("backend", "compute", "torch"),
    *("held_out", *BANDS, "images", "levels", "data"),
)


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(DrawSettings):
    """The configuration; see configs/evaluate.yaml."""

    n: int = 10_000
    metrics: list[str] = field(default_factory=lambda: ["fid", "kid"])
    images: int | None = None
    reference: str | None = None
    features: str = EXTRACTOR
    weights: str | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_metrics(self.metrics, (LOSS, *METRICS))
        if self.weights is not None and not Path(self.weights).is_file():
            raise ConfigError(f"weights={self.weights} does not exist")
        if self.images is not None and self.images < 1:
            raise ConfigError(f"images={self.images}; expected at least 1")

    @property
    def drawn(self) -> list[str]:
        """The metrics of drawn images."""
        return [name for name in self.metrics if name != LOSS]


def evaluate(config: dict[str, Any]) -> dict[str, Any] | None:
    """Evaluate as configured, print the numbers, append them to a CSV file and return its row;
    under torchrun the first process does, the others return None."""
    settings = construct(EvaluateSettings, config, "")
    trained, sampler = settings.load_and_choose()
    device = next(trained.model.parameters()).device
    out = Path(settings.out or (trained.run_dir or Path()) / "evaluations.csv")
    _check_out(out)
    name, real, held_out = _reference(settings, trained)
    processes = Processes(device)
    atexit.register(processes.close)  # the next job of a sweep is in this group
    row, said = _about(settings, trained), []
    quality = None
    if settings.drawn:  # before the minutes of drawing: whether the extractor is there
        quality = Quality(
            real.learned,
            settings.drawn,
            settings.n,
            device,
            processes,
            features=settings.features,
            weights=settings.weights,
        )
    if LOSS in settings.metrics:
        began = time.monotonic()
        row |= _loss(settings, trained, held_out, processes, device)
        seconds = time.monotonic() - began
        of = counted(row["images"], "images")
        said.append(f"held_out {row['held_out']:.5g} of {of} in {seconds:.1f} s")
    if quality is not None:
        values = _quality(settings, trained, sampler, quality, held_out or spread(real))
        row |= values | _about_drawn(settings, sampler, trained)
        row |= {"reference": name, "reference_data": digest_of(real.learned)}
        row |= {"n_reference": len(real), "torch_fidelity": quality.network.version}
        numbers = ", ".join(f"{key} {value:.5g}" for key, value in values.items())
        said.append(f"{numbers}; {counted(settings.n, 'images')} against {len(real)} of {name}")
    if not processes.is_first:
        return None
    with writing(out):
        _append(out, row)
    print(f"{settings.ckpt}: {'; '.join(said)}; {out}")
    return row


def _loss(
    settings: EvaluateSettings,
    trained: Trained,
    held_out: Rows | None,
    processes: Processes,
    device: torch.device,
) -> dict[str, Any]:
    if held_out is None:
        raise ConfigError(
            f"{settings.ckpt} has trained on all of its images (dataset.held_out=0): give"
            " reference=FOLDER, or a .zip, .packed or .bin, of others for the loss"
        )
    if trained.model.num_classes is not None and held_out.labels is None:
        raise ConfigError(
            f"the model has {counted(trained.model.num_classes, 'classes')}, and the images for"
            " the loss have"
            " none; give a reference with a sub-folder per class, a .packed with labels, or a file"
            " with the array that dataset.labels names"
        )
    losses = HeldOutLoss(
        held_out,
        trained.process,
        trained.model.backend,
        device,
        processes,
        most=settings.images or _as_in_training(settings, trained),
        batch_size=settings.batch_size,
    )(trained.model)
    return losses.row()


def _quality(
    settings: EvaluateSettings,
    trained: Trained,
    sampler: Sampler,
    quality: Quality,
    samples: Rows,  # whose conditions are given
) -> dict[str, float]:
    labels = choose_labels(None, settings.n, trained)
    if trained.is_given:
        labels = conditions_of(samples, 0, settings.n, labels, trained.condition)
    return quality(draw_share(settings, trained, sampler, labels))


def _reference(settings: EvaluateSettings, trained: Trained) -> tuple[str, ImageSet, Rows | None]:
    """(name, images to compare with, what of them the loss is of): the set that the network was
    trained on and what it held out, or a file or folder, all of it, as large as the drawn ones."""
    _check_kind(settings, trained)
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
        rescale(data, trained.values, trained.condition)
        _, held_out = split(_with_labels(data, trained), held_out_setting(config["dataset"]))
        return data.name, data, held_out
    if trained.is_given:
        raise ConfigError(
            f"reference={settings.reference} says nothing of the condition that {trained.name} was"
            " trained with; leave it out, for the data of the run"
        )
    path = Path(settings.reference)
    if isinstance(trained.values, Latents) and settings.drawn:  # which are compared decoded
        factor, channels = trained.values.factor, 3
        height, width = height * factor, width * factor
    if path.suffix in (".packed", ".bin"):
        data = load_dataset("packed", path=str(path), size=[height, width])
    elif is_array(path):
        options = {"size": [height, width], "channels": channels} | _as_the_run(settings, path)
        data = load_dataset("array", path=str(path), **options)
    else:
        classes = LOSS in settings.metrics and trained.model.num_classes is not None
        options = {"path": str(path), "size": [height, width], "classes": classes}
        data = load_dataset("folder", **options, channels=channels)
    data.check()
    if not settings.drawn or not isinstance(trained.values, Latents):
        rescale(data, trained.values)
    if data.values == Pixels():
        data.images = with_channels(data.images, channels)
    return str(path), data, spread(_with_labels(data, trained))


def _as_the_run(settings: EvaluateSettings, path: Path) -> dict[str, Any]:
    """Which arrays of the file are meant, if the run was trained on such a file."""
    try:
        _, config = read_state(find_checkpoint(settings.ckpt))
    except ConfigError:  # weights of another program
        return {}
    options = config.get("dataset", {})
    if options.get("name") != "array":
        return {}
    names = open_arrays(path)
    return {key: options[key] for key in ("key", "labels") if options.get(key) in names}


def _check_kind(settings: EvaluateSettings, trained: Trained) -> None:
    """ConfigError for metrics that what the network draws does not have."""
    values = trained.values
    if not settings.drawn or values == Pixels():
        return
    if not isinstance(values, Latents):
        raise ConfigError(
            f"metrics={','.join(settings.drawn)} are of images of 8 bits; the network was trained"
            f" on {values}: give metrics=[{LOSS}]"
        )
    if settings.reference is None or LOSS in settings.metrics:
        raise ConfigError(
            f"metrics={','.join(settings.drawn)} of latents compare what is decoded: give"
            f" reference=FOLDER of the images, and {LOSS} in another call"
        )


def _with_labels(data: ImageSet, trained: Trained) -> ImageSet:
    """Labels as the model wants them. ConfigError: it has classes, and there are none."""
    classes = trained.model.num_classes
    if classes is None:
        data.labels = None
    elif data.labels is not None and int(data.labels.max()) >= classes:
        raise ConfigError(
            f"{data.name} has {counted(int(data.labels.max()) + 1, 'classes')}, and the model"
            f" {classes}"
        )
    return data


def _as_in_training(settings: EvaluateSettings, trained: Trained) -> int:
    """How many held-out images the run evaluates: the figure is then that of its held_out.csv."""
    usual = 256
    if trained.run_dir is None:
        return usual
    _, config = read_state(find_checkpoint(settings.ckpt))
    return config["train"].get("eval_images", usual)


def _about(settings: EvaluateSettings, trained: Trained) -> dict[str, Any]:
    backend, (height, width, _) = trained.model.backend, trained.image_shape
    return {
        "checkpoint": trained.name,
        **{"height": height, "width": width, "ema": _ema(settings, trained)},
        **{"backend": backend.name, "compute": backend.precision, "torch": torch.__version__},
    }


def _about_drawn(settings: EvaluateSettings, sampler: Sampler, trained: Trained) -> dict[str, Any]:
    return {
        **{"n": settings.n, "features": settings.features},
        **{"sampler": settings.sampler, "steps": sampler.num_steps, "spacing": sampler.spacing},
        **{key: shown(getattr(settings, key)) for key in ("eta", "seed")},
        "guidance": guidance_shown(settings),
        "clip": shown(sampler.clip),
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
    if not set(_columns(out)) <= set(FIELDS):
        raise ConfigError(f"out={out} has other columns; give another file")
    check_writable(out)


def _columns(out: Path) -> tuple[str, ...]:
    if not out.is_file():
        return ()
    with open(out, newline="") as file:
        return tuple(next(csv.reader(file), ()))


def _append(out: Path, row: dict[str, Any]) -> None:
    """A file with fewer columns, as earlier versions wrote it, gets the others."""
    out.parent.mkdir(parents=True, exist_ok=True)
    before: list[dict[str, Any]] = []
    if out.is_file():
        with open(out, newline="") as file:
            before = list(csv.DictReader(file))
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, FIELDS)
    table.writeheader()
    table.writerows([*before, row])
    write_whole(out, text.getvalue())
