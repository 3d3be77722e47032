"""How far a run is: the interval between two rows of its log, and the lines on the terminal."""

import time
from typing import Any

import torch
from torch import Tensor

from ..runtime.progress import duration


class Interval:
    """The steps since the last row of the log. A checkpoint takes `state` along, so that a run that
    is resumed within an interval writes the row that an unbroken one writes."""

    def __init__(
        self,
        step: int,  # updates done when this process begins
        skipped: int,  # of them, those that were left out
        device: torch.device,
        stored: dict[str, Any] | None = None,  # `state` of the process before, if it left one
    ) -> None:
        stored = stored or {"start": step, "skipped": skipped, "loss": 0.0, "seconds": 0.0}
        self.start, self.skipped = stored["start"], stored["skipped"]  # done, left out before it
        self.loss_sum = torch.full((1,), stored["loss"], device=device)  # float32, since its start
        self._run_began = time.perf_counter() - stored["seconds"]
        self.bad_steps = 0  # how many updates in a row were left out, up to its start
        self._time(step)

    def state(self) -> dict[str, Any]:
        """For a checkpoint's state.json: exact numbers."""
        loss, seconds = self.loss_sum.item(), self.run_seconds
        return {"start": self.start, "skipped": self.skipped, "loss": loss, "seconds": seconds}

    def restart(self, done: int, skipped: int) -> None:
        """A row was written after `done` updates."""
        all_bad = skipped - self.skipped == done - self.start
        self.bad_steps = self.bad_steps + done - self.start if all_bad else 0
        self.start, self.skipped = done, skipped
        self.loss_sum.zero_()
        self._time(done)

    def mean_loss(self, done: int) -> float:
        return self.loss_sum.item() / (done - self.start)

    def steps_a_second(self, done: int) -> float:
        """Of this process, without its pauses."""
        return (done - self._timed_from) / (time.perf_counter() - self._began - self.paused)

    @property
    def run_seconds(self) -> float:
        """How long the run has been trained, over all its processes."""
        return time.perf_counter() - self._run_began

    def _time(self, step: int) -> None:
        self._timed_from, self._began = step, time.perf_counter()
        self.paused = 0.0  # seconds of drawing and saving


def progress_line(row: dict[str, Any], steps: int, batch_size: int, noun: str) -> str:
    """A row of the log for a terminal that shows no bar."""
    rate = row["images_per_s"]
    left = (steps - row["step"]) * batch_size / rate
    return (
        f"step {row['step']}/{steps}  loss {in_digits(row['loss'], 4)}"
        f"  grad norm {in_digits(row['grad_norm'], 3)}"
        f"  {rate:.{0 if rate >= 10 else 1}f} {noun}/s  ETA {duration(left)}"
    )


def in_digits(value: float, digits: int) -> str:
    """With so many behind the point; of a run that diverges in another notation."""
    return f"{value:.{digits}f}" if abs(value) < 10**digits else f"{value:.{digits}g}"


def is_finite(values: Tensor) -> bool:
    """Whether all of them are, without a tensor of their size."""
    return all(end.isfinite().item() for end in values.aminmax())
