"""Which tiles are fastest on this GPU for the training step of a model.

Where nobody has measured a shape, tiles are those of the most similar shape or of a cost model.
Here every candidate of such a shape is compiled, by many processes, and then timed, if its result
agrees with that of the tile that is taken now. A row is kept as soon as a shape is done, so that
the same command goes on where it was stopped. Without a GPU it says what would be measured.
"""

import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from triton_kernels.registry import rows
from triton_kernels.registry.chips import chip
from triton_kernels.registry.search import Search, search
from triton_kernels.runtime.device import Device, describe
from triton_kernels.runtime.launch_recorder import rehearsal

from ..errors import ConfigError, counted, writing
from ..factory import MODELS
from ..runtime.distributed import choose_device
from ..runtime.precompile import compile_ahead
from ..runtime.progress import Progress
from ..settings import construct, shown
from .precompile_worker import training_step

log = logging.getLogger(__name__)

_SHIPPED = "triton_kernels/measured"
_SHOWN = 5  # of the largest gains


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """The configuration; see configs/tune.yaml."""

    model: dict[str, Any]
    diffusion: dict[str, Any]
    batch: int = 128
    size: int = 64
    channels: int = 3
    precision: str = "bf16"
    minutes: float = 5.0
    again: bool = False
    out: str | None = None
    device: str = "auto"
    gpu: str = "h100"

    def __post_init__(self) -> None:
        for name in ("batch", "size", "channels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least 1")
        if not self.minutes > 0:
            raise ConfigError(f"minutes={self.minutes}; expected a number above 0")
        name = self.model.get("name")
        if not isinstance(name, str) or name not in MODELS:
            raise ConfigError(
                f"model.name={shown(name)}; tuning is for images, expected one of"
                f" {', '.join(MODELS)}"
            )

    @property
    def job(self) -> dict[str, Any]:
        """As `precompile_worker.training_step` takes it."""
        model = self.model | {"zero_init": False}  # zeros would agree with anything of zeros
        classes = model.get("num_classes")
        if not isinstance(classes, int):  # auto is of a data set, and there is none
            model["num_classes"] = classes = None
        count = 2 * self.batch
        return {
            "model": model,
            "diffusion": self.diffusion,
            "optim": {},
            "train": {"batch_size": self.batch, "precision": self.precision},
            "images": {"shape": [count, self.size, self.size, self.channels], "dtype": "uint8"},
            "labels": None if classes is None else {"shape": [count], "dtype": "int64"},
            "flip": True,
            "again": self.again,
        }


def tune(config: dict[str, Any]) -> None:
    """Measure what has no rows, show how far it is and what was gained. ConfigError: what is wrong
    with the settings, or no kernel runs here."""
    settings = construct(TuneSettings, config, "")
    device = choose_device(settings.device)
    if device.type != "cuda":
        try:
            gpu = chip(settings.gpu).gpu
        except ValueError as error:
            raise ConfigError(str(error)) from None
        found = to_measure(settings, gpu)
        print("there is no GPU here, and nothing is measured")
        print(f"{counted(settings.batch, 'images')} a step with gpu={settings.gpu}: {found}")
        return
    gpu = describe(device)
    print(f"{torch.cuda.get_device_name(device)}, sm_{gpu.arch} with {gpu.num_sms}: ", end="")
    step = training_step(settings.job, device)  # which tries the kernels first
    found = to_measure(settings, describe(device))
    print(found, flush=True)
    path = Path(settings.out) if settings.out else rows.cache_path(gpu)
    with writing(path):
        rows.save([], path)  # before minutes of work
    if found.shapes == 0:
        return
    end = time.monotonic() + 60 * settings.minutes
    compile_ahead("tune", settings.job, settings.job | {"left": found.shapes}, device)
    measured, complete = _measure(settings, gpu, step, path, found.shapes, end)
    _report(measured)
    print(f"{counted(len(measured.rows), 'rows')} in {path}, used from now on")
    if not complete:
        print(f"minutes={settings.minutes:g} have passed; the same command measures the rest")
    name = rows.file_name(gpu)
    print(f"to share them: send in that file as {_SHIPPED}/{name}, with the lines it has there")


class Found:
    """How much there is to do."""

    def __init__(self, shapes: int, known: int, kernels: int) -> None:
        self.shapes, self.known, self.kernels = shapes, known, kernels

    def __str__(self) -> str:
        if self.shapes == 0:
            return f"all {self.known} shapes have rows; again=true measures them anew"
        return (
            f"{self.shapes} of {self.shapes + self.known} shapes have no row;"
            f" {self.kernels} kernels to compile, unless they are in the cache, and to time"
        )


def to_measure(settings: TuneSettings, gpu: Device) -> Found:
    """What of the step has no rows on this GPU, by a rehearsal."""
    host = torch.device("cpu")
    logging.disable(logging.WARNING)  # of what runs layer by layer, which is said when it does
    try:
        with rehearsal(gpu) as launches, search(timed=False, wanted=_wanted(settings, gpu)) as met:
            training_step(settings.job, host)(0)
    finally:
        logging.disable(logging.NOTSET)
    return Found(met.shapes, met.passed, len(launches))


def _wanted(settings: TuneSettings, gpu: Device):
    return None if settings.again else partial(rows.unmeasured, gpu)


def _measure(
    settings: TuneSettings, gpu: Device, step: Any, path: Path, shapes: int, end: float
) -> tuple[Search, bool]:
    """What was found, and whether that is all there was."""
    wanted, complete = _wanted(settings, gpu), True

    def in_time(op: str, n: int, shape: dict[str, Any]) -> bool:
        nonlocal complete
        if wanted is not None and not wanted(op, n, shape):
            return False
        complete = complete and time.monotonic() < end
        return complete

    with Progress(shapes, unit="shape") as progress:

        def keep(found: Search) -> None:
            rows.save(found.rows[-1:], path)
            progress.reach(len(found.rows))

        with search(wanted=in_time, done=keep) as found:
            try:
                step(0)
                torch.cuda.synchronize()
            except KeyboardInterrupt:
                complete = False
    return found, complete


def _report(found: Search) -> None:
    """The sum of what was gained, and where it was most."""
    times = {rows.described(row): row["us"] for row in found.times}
    pairs = []
    for best, default in _best(found):
        before, after = (times.get(rows.described(row)) for row in (default, best))
        if before and after:
            pairs.append((before, after, best))
    if not pairs:
        return
    before, after = (sum(pair[i] for pair in pairs) for i in (0, 1))
    print(f"one call of each shape: {before / 1000:.2f} -> {after / 1000:.2f} ms")
    for was, now, row in sorted(pairs, key=lambda pair: pair[1] - pair[0])[:_SHOWN]:
        print(f"  {was:7.1f} -> {now:7.1f} us  {rows.described(row)}")
    if found.rejected:
        print(f"{len(found.rejected)} candidates had wrong results and are excluded")


def _best(found: Search) -> list[tuple[dict, dict]]:
    """(the best, the default) of each shape of which one was right."""
    defaults = {_shape(row): row for row in found.defaults}
    return [(row, defaults[_shape(row)]) for row in found.rows]


def _shape(row: dict[str, Any]) -> str:
    return rows.described({k: v for k, v in row.items() if k not in ("kernel", "config")})
