"""The loop around the training step: progress, logs, samples, checkpoints, signals."""

import logging
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..errors import ConfigError
from ..formats.checkpoint import save_checkpoint
from ..runtime.distributed import Processes
from ..runtime.interrupt import Interrupted, signals_received
from ..tracking.run_log import Preview, RunLog
from ..tracking.tracker import Tracker, check_tracker
from .train_step import TrainStep

log = logging.getLogger(__name__)

_MEASURED_FROM, _MEASURED_TO = 10, 30  # steps between which the speed of the run is estimated
_PATIENCE = 100  # steps in a row whose gradient may be non-finite before the run is given up


@dataclass(frozen=True)
class TrainSettings:
    """The group `train` of the configuration. Intervals are in steps; 0 means never."""

    steps: int = 100_000
    batch_size: int = 128  # images a step, over all processes
    accumulate: int = 1  # micro-batches a step
    precision: str = "bf16"  # bf16 | tf32 | fp32
    seed: int = 0
    log_every: int = 50
    sample_every: int = 5000
    save_every: int = 5000
    keep: int = 3  # checkpoints
    deterministic: bool = False  # PyTorch's kernels too; the Triton kernels always are
    cuda_graph: bool = True  # capture the step on a GPU
    recompute: bool = False  # activations in backward: slower, for models that do not fit
    resume: str | None = "auto"  # auto | none | PATH
    init: str | None = None  # PATH of the weights to begin with, see `trained.load_initial`
    sample_count: int = 36
    sample_steps: int = 50
    fid_images: int = 0  # drawn for a FID beside each grid, which needs torch-fidelity
    tensorboard: bool = True
    track: str | None = None  # wandb | trackio

    def __post_init__(self) -> None:
        positive = ("steps", "batch_size", "accumulate", "log_every", "keep", "sample_steps")
        others = ("sample_count", "sample_every", "save_every", "seed", "fid_images")
        for name in (*positive, *others):
            value, low = getattr(self, name), 1 if name in positive else 0
            if value < low:
                raise ConfigError(f"train.{name}={value}; expected a whole number, at least {low}")
        if self.seed >= 2**63:
            raise ConfigError(f"train.seed={self.seed} is too large; expected less than 2^63")
        if self.fid_images == 1:
            raise ConfigError("train.fid_images=1; one image has no spread, expected 0 or more")
        check_tracker(self.track)
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"train.batch_size={self.batch_size} does not divide into"
                f" train.accumulate={self.accumulate} micro-batches"
            )


class Trainer:
    """Trains and returns the mean loss of the last logged interval."""

    def __init__(
        self,
        step: TrainStep,
        preview: Callable[[], Preview] | None,  # from the EMA weights; None: nothing to show
        settings: TrainSettings,
        config: dict[str, Any],  # goes into every checkpoint
        state: dict[str, Any],  # goes into every checkpoint beside the step
        run_dir: Path,
        processes: Processes,
        dataset_size: int,
        noun: str = "images",  # what the data set consists of
    ) -> None:
        self.step, self.preview, self.settings = step, preview, settings
        self.config, self.state, self.run_dir = config, state, run_dir
        self.processes, self.dataset_size, self.noun = processes, dataset_size, noun
        self._saved = -1

    def run(self, start: int) -> float:
        """Run the updates start, start + 1, ..., settings.steps - 1."""
        settings, first = self.settings, self.processes.is_first
        run_log = self._open_log(start) if first else None
        bar = tqdm(
            total=settings.steps,
            initial=start,
            unit="step",
            dynamic_ncols=True,
            disable=None if first else True,  # None: shown on a terminal only
        )
        try:
            with signals_received() as received:
                loss = self._loop(start, run_log, bar, received)
            self._save(settings.steps)
            return loss
        finally:
            bar.close()
            if run_log is not None:
                with suppress(OSError):  # a full disk is reported by what cannot do without
                    run_log.curve()
                run_log.close()

    def _open_log(self, start: int) -> RunLog:
        s, tracker = self.settings, None
        if s.track is not None:
            tracker = Tracker(s.track, self.run_dir, start, self.config)
        return RunLog(self.run_dir, start, s.tensorboard, tracker)

    def _loop(self, start: int, run_log: RunLog | None, bar: tqdm, received: list[int]) -> float:
        s = self.settings
        summed = torch.zeros(1, device=self.step.flat.param.device)
        interval = _Interval(start, int(self.step.optimizer.skipped.item()))
        loss = float("nan")
        for step in range(start, s.steps):
            step_loss, norm = self.step(step)
            summed += step_loss
            done, last = step + 1, step + 1 == s.steps
            bar.update()
            if done == start + _MEASURED_FROM:
                measured = self._now()
            if done == start + _MEASURED_TO:
                self._announce(done, (self._now() - measured) / (_MEASURED_TO - _MEASURED_FROM))
            if done % s.log_every == 0 or last:
                loss = summed.item() / (done - interval.start)
                summed.zero_()
                row = self._row(done, loss, norm.item(), interval)
                interval = interval.next(done, row["skipped_steps"])
                if run_log is not None:
                    run_log.row(row)
                bar.set_postfix_str(f"loss {loss:.4f}, {row['images_per_s']:.0f} {self.noun}/s")
                if bar.disable and self.processes.is_first:
                    print(_line(row, s.steps, self.noun), flush=True)
                if interval.bad_steps >= _PATIENCE:
                    raise ConfigError(
                        f"the gradient was not finite in the {interval.bad_steps} steps before"
                        f" {done}: training has diverged; try a smaller optim.lr, and resume from"
                        " an earlier checkpoint"
                    )
            pause = time.perf_counter()
            shown = s.sample_every and (done % s.sample_every == 0 or last)
            if run_log is not None and self.preview is not None and shown:
                self.step.settle()
                preview = self.preview()
                path = run_log.preview(preview, done)
                tqdm.write(f"step {done}: {preview}samples in {path}")
            if s.save_every and done % s.save_every == 0 and not last:
                self._save(done)
            interval.paused += time.perf_counter() - pause
            if self.processes.vote(bool(received)):
                checkpoint = self._save(done)
                raise Interrupted(received[0] if received else signal.SIGTERM, checkpoint)
        return loss

    def _row(self, done: int, loss: float, norm: float, interval: "_Interval") -> dict[str, Any]:
        s = self.settings
        skipped = int(self.step.optimizer.skipped.item())
        new = skipped - interval.skipped
        if new:
            log.warning("%d steps before %d had a non-finite gradient and were left out", new, done)
        return {
            "step": done,
            "images": done * s.batch_size,
            "epoch": done * s.batch_size / self.dataset_size,
            "loss": loss,
            "lr": self.step.optimizer.settings.lr_at(done - 1, s.steps),
            "grad_norm": norm,
            "images_per_s": (done - interval.start) * s.batch_size / interval.seconds,
            "skipped_steps": skipped,
            "seconds": time.perf_counter() - interval.run_began,
        }

    def _announce(self, done: int, seconds_a_step: float) -> None:
        if self.processes.is_first:
            left = self.settings.steps - done
            tqdm.write(
                f"{self.settings.batch_size / seconds_a_step:.0f} {self.noun}/s,"
                f" {seconds_a_step * 1000:.1f} ms a step:"
                f" about {_duration(left * seconds_a_step)} for the remaining {left} steps"
            )

    def _now(self) -> float:
        if self.step.flat.param.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _save(self, done: int) -> Path:
        checkpoint = self.run_dir / "checkpoints" / f"step_{done:08d}"
        self.step.settle()
        if self.processes.is_first and self._saved != done:
            state = {
                **self.state,
                "step": done,
                "images": done * self.settings.batch_size,
                "skipped_steps": int(self.step.optimizer.skipped.item()),
            }
            checkpoint = save_checkpoint(
                checkpoint.parent, self.step.flat, state, self.config, self.settings.keep
            )
            log.info("saved %s", checkpoint)
        self._saved = done
        self.processes.wait()
        return checkpoint


class _Interval:
    """The steps between two rows of the log, and the time they took."""

    def __init__(self, start: int, skipped: int, run_began: float | None = None) -> None:
        self.start, self.skipped = start, skipped  # steps done, and updates left out, before it
        self.began = time.perf_counter()
        self.run_began = self.began if run_began is None else run_began
        self.paused = 0.0  # seconds of drawing and saving
        self.bad_steps = 0  # how many updates in a row were left out, up to its start

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began - self.paused

    def next(self, done: int, skipped: int) -> "_Interval":
        following = _Interval(done, skipped, self.run_began)
        if skipped - self.skipped == done - self.start:
            following.bad_steps = self.bad_steps + done - self.start
        return following


def _line(row: dict[str, Any], steps: int, noun: str) -> str:
    batch_size = row["images"] / row["step"]
    left = (steps - row["step"]) * batch_size / row["images_per_s"]
    return (
        f"step {row['step']}/{steps}  loss {row['loss']:.4f}  grad norm {row['grad_norm']:.3f}"
        f"  {row['images_per_s']:.0f} {noun}/s  ETA {_duration(left)}"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
