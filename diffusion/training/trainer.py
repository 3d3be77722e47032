"""The loop around the training step: progress, logs, samples, checkpoints, signals."""

import logging
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..errors import ConfigError, counted
from ..formats.checkpoint import save_checkpoint
from ..formats.checkpoint_folder import checkpoint_name, latest_checkpoint
from ..runtime.distributed import Processes
from ..runtime.interrupt import Interrupted, signals_received
from ..runtime.progress import duration
from ..runtime.startup import START_UP
from ..sampling.quality import check_metrics
from ..tracking.run_log import Preview, RunLog
from ..tracking.tracker import Tracker, check_tracker
from .held_out_loss import Losses
from .progress import Interval, in_digits, is_finite, progress_line
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
    eval_every: int = 5000  # the loss on what is held out, where something is
    eval_images: int = 256  # of them, at most
    metric: str | None = None  # what `train` returns; None: held_out, or else loss
    save_every: int = 5000
    keep: int = 3  # checkpoints
    deterministic: bool = False  # PyTorch's kernels too; the Triton kernels always are
    cuda_graph: bool = True  # capture the step on a GPU
    recompute: bool = False  # activations in backward: slower, for models that do not fit
    resume: str | None = "auto"  # auto | none | PATH
    init: str | None = None  # PATH of the weights to begin with, see `trained.load_initial`
    sample_count: int = 36
    sample_steps: int = 50
    fid_images: int = 0  # drawn for `fid_metrics` at each look, which needs torch-fidelity
    fid_metrics: list[str] = field(default_factory=lambda: ["fid"])  # fid | kid | isc | prc
    fid_weights: str | None = None  # file of the features' network; None: torch-fidelity's own
    tensorboard: bool = True
    track: str | None = None  # wandb | trackio

    def __post_init__(self) -> None:
        positive = ("steps", "batch_size", "accumulate", "log_every", "keep", "sample_steps")
        positive += ("eval_images",)
        others = ("sample_count", "sample_every", "eval_every", "save_every", "seed", "fid_images")
        for name in (*positive, *others):
            value, low = getattr(self, name), 1 if name in positive else 0
            if value < low:
                raise ConfigError(f"train.{name}={value}; expected a whole number, at least {low}")
        if self.seed >= 2**63:
            raise ConfigError(f"train.seed={self.seed} is too large; expected less than 2^63")
        if self.fid_images == 1:
            raise ConfigError(
                "train.fid_images=1; one image has no spread; expected 0 or at least 2"
            )
        check_metrics(self.fid_metrics, key="train.fid_metrics")
        check_tracker(self.track)
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"train.batch_size={self.batch_size} does not divide into"
                f" train.accumulate={self.accumulate} micro-batches"
            )


class Trainer:
    """Trains and returns the results by name: the mean `loss` of the last logged interval, and what
    was last measured of the averaged weights."""

    def __init__(
        self,
        step: TrainStep,
        preview: Callable[[], Preview] | None,  # from the EMA weights; None: nothing to show
        score: Callable[[], dict[str, float]] | None,  # of further pictures, by all processes
        held_out: Callable[[], Losses] | None,  # of the EMA weights, by all processes
        settings: TrainSettings,
        config: dict[str, Any],  # goes into every checkpoint
        state: dict[str, Any],  # goes into every checkpoint beside the step
        run_dir: Path,
        processes: Processes,
        dataset_size: int,
        noun: str = "images",  # what the data set consists of
    ) -> None:
        self.step, self.preview, self.settings = step, preview, settings
        self.score, self.held_out = score, held_out
        self.config, self.state, self.run_dir = config, state, run_dir
        self.processes, self.dataset_size, self.noun = processes, dataset_size, noun
        self._saved = -1

    def run(self, start: int, before: dict[str, Any]) -> dict[str, float]:
        """Run the updates start, start + 1, ..., settings.steps - 1; `before` is the state of the
        checkpoint that the run goes on from, or empty. ConfigError: training has diverged, or the
        disk is full."""
        settings, first = self.settings, self.processes.is_first
        skipped, device = int(self.step.optimizer.skipped.item()), self.step.flat.param.device
        self._interval = Interval(start, skipped, device, before.get("interval"))
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
                results = self._loop(start, run_log, bar, received)
            if not self._is_good():
                raise ConfigError(self._diverged(f"at step {settings.steps}, the last one"))
            self._save(settings.steps)
            return self.processes.of_first(results)
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
        return RunLog(
            self.run_dir,
            start,
            self._interval.start,
            s.tensorboard,
            tracker,
            # a row between two of them was the last of a shorter run
            evaluated_before=start - bool(s.eval_every and start % s.eval_every),
        )

    def _loop(
        self, start: int, run_log: RunLog | None, bar: tqdm, received: list[int]
    ) -> dict[str, float]:
        s, interval = self.settings, self._interval
        loss, due, good, results = float("nan"), False, True, {}
        for step in range(start, s.steps):
            step_loss, norm = self.step(step)
            interval.loss_sum += step_loss
            done, last = step + 1, step + 1 == s.steps
            bar.update()
            if done == start + 1:
                self._say_first()
            if done == start + _MEASURED_FROM:
                measured = self._now()
            if done == start + _MEASURED_TO:
                self._announce(done, (self._now() - measured) / (_MEASURED_TO - _MEASURED_FROM))
            if done % s.log_every == 0 or last:
                loss = interval.mean_loss(done)
                row = self._row(done, loss, norm.item())
                if run_log is not None:
                    run_log.row(row)
                if done % s.log_every == 0:  # or it is the last one, and a longer run has none here
                    interval.restart(done, row["skipped_steps"])
                said = f"loss {in_digits(loss, 4)}, {row['images_per_s']:.0f} {self.noun}/s"
                bar.set_postfix_str(said)
                if bar.disable and self.processes.is_first:
                    print(progress_line(row, s.steps, s.batch_size, self.noun), flush=True)
                if interval.bad_steps >= _PATIENCE:
                    raise ConfigError(
                        self._diverged(
                            f"in the {counted(interval.bad_steps, 'steps')} before {done}"
                        )
                    )
            pause = time.perf_counter()
            if s.eval_every and (done % s.eval_every == 0 or last) and self.held_out is not None:
                results |= self._evaluate(done, run_log)
            if s.sample_every and (done % s.sample_every == 0 or last):
                results |= self._show(done, run_log)
            due = due or bool(s.save_every) and done % s.save_every == 0
            if due and not last:  # once the gradient is finite again, if it is not
                before, good = good, self._is_good()
                if good:
                    self._save(done)
                elif before and self.processes.is_first:
                    log.warning("not saved at step %d: %s", done, self._kept())
                due = not good
            interval.paused += time.perf_counter() - pause
            if self.processes.vote(bool(received)):
                number = received[0] if received else signal.SIGTERM
                if self._is_good():
                    raise Interrupted(number, self._save(done))
                raise Interrupted(number, self._last_good(), saved=False)
        return results | {"loss": loss}

    def _evaluate(self, done: int, run_log: RunLog | None) -> dict[str, float]:
        with self.processes.alone():
            losses = self.held_out()
        if run_log is not None:
            run_log.held_out(losses.row(), done)
            tqdm.write(f"step {done}: held-out loss {losses.total:.5g}")
        return {"held_out": losses.total}

    def _show(self, done: int, run_log: RunLog | None) -> dict[str, float]:
        """Pictures and scores, which the first process alone may know."""
        scores: dict[str, float] = {}
        if self.score is not None:
            with self.processes.alone():
                scores = self.score()
        if run_log is None:
            return scores
        places = []
        if self.preview is not None:
            with self.processes.alone():
                preview = self.preview()
            scores = preview.scores | scores
            places = [f"samples in {run_log.preview(preview, done)}"]
        if scores:
            run_log.scores(scores, done)
        said = [f"{name} {value:.4g}" for name, value in scores.items()] + places
        if said:
            tqdm.write(f"step {done}: {', '.join(said)}")
        return scores

    def _row(self, done: int, loss: float, norm: float) -> dict[str, Any]:
        s, interval = self.settings, self._interval
        skipped = int(self.step.optimizer.skipped.item())
        new = skipped - interval.skipped
        if new:
            log.warning(
                "skipped for a non-finite gradient: %s before %d", counted(new, "steps"), done
            )
        return {
            "step": done,
            "images": self._images(done),
            "epoch": self._images(done) / self.dataset_size,
            "loss": loss,
            "lr": self.step.optimizer.settings.lr_at(done - 1, s.steps),
            "grad_norm": norm,
            "images_per_s": interval.steps_a_second(done) * s.batch_size,
            "skipped_steps": skipped,
            "seconds": interval.run_seconds,
            "gpu_gib": self._gpu_gib(),
        }

    def _images(self, done: int) -> int:
        """Those that the run has seen after so many steps."""
        return self.step.batches.begins + done * self.settings.batch_size

    def _gpu_gib(self) -> float:
        device = self.step.flat.param.device
        return torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else 0.0

    def _is_good(self) -> bool:
        """Whether the last update was made and all that a checkpoint holds is finite, so that it
        may take the place of an older one."""
        if not (is_finite(self.step.loss) and is_finite(self.step.norm)):
            return False
        flat = self.step.flat
        held = (flat.param, flat.ema, flat.exp_avg, flat.exp_avg_sq, *flat.averages.values())
        return all(is_finite(buffer) for buffer in held)

    def _diverged(self, when: str) -> str:
        again = "try a smaller optim.lr"
        if self._last_good() is not None:
            again += ", and go on from that one or, with train.resume=PATH, from an earlier one"
        return (
            f"the gradient or the model was not finite {when}: training has diverged, and nothing"
            f" was saved since; {self._kept()}; {again}"
        )

    def _kept(self) -> str:
        good = self._last_good()
        return "there is no checkpoint" if good is None else f"the last good checkpoint is {good}"

    def _last_good(self) -> Path | None:
        return latest_checkpoint(self.run_dir / "checkpoints")

    def _say_first(self) -> None:
        """What the time to the first step went into, if this is the process's first run."""
        self._now()
        START_UP.reached("first step")
        line = START_UP.finish()
        if line is not None and self.processes.is_first:
            tqdm.write(line)
            log.info("%s", line)

    def _announce(self, done: int, seconds_a_step: float) -> None:
        if self.processes.is_first:
            left = self.settings.steps - done
            tqdm.write(
                f"{self.settings.batch_size / seconds_a_step:.0f} {self.noun}/s,"
                f" {seconds_a_step * 1000:.1f} ms a step:"
                f" about {duration(left * seconds_a_step)} for the remaining"
                f" {counted(left, 'steps')}"
            )

    def _now(self) -> float:
        if self.step.flat.param.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _save(self, done: int) -> Path:
        checkpoint = self.run_dir / "checkpoints" / checkpoint_name(done)
        if self.processes.is_first and self._saved != done:
            state = {
                **self.state,
                "step": done,
                "images": self._images(done),
                "skipped_steps": int(self.step.optimizer.skipped.item()),
                "interval": self._interval.state(),
            }
            timesteps = self.step.objective.timesteps
            with self.processes.alone():
                checkpoint = save_checkpoint(
                    checkpoint.parent,
                    self.step.flat,
                    state,
                    self.config,
                    self.settings.keep,
                    None if timesteps is None else timesteps.state(),
                )
            log.info("saved %s", checkpoint)
        self._saved = done
        self.processes.wait()
        return checkpoint
