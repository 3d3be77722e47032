"""What a run writes down while it goes: metrics.csv, scores.csv, TensorBoard events, pictures; and
what it tells a tracker."""

import csv
import importlib.util
import io
import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..errors import ConfigError
from .pictures import draw_film, draw_loss_curve, save_grid
from .tracker import Tracker

FIELDS = (
    "step",  # updates done
    "images",  # training images seen
    "epoch",
    "loss",  # mean since the row before
    "lr",
    "grad_norm",  # of the last step, before clipping
    "images_per_s",  # since the row before, in the process that wrote this one
    "skipped_steps",  # updates left out because of a non-finite gradient, in all
    "seconds",  # of training, over all processes that the run was resumed in
    "gpu_gib",  # the most memory that this process had taken; 0: there is no GPU
)
# all others are the same in a run that was resumed
WALL_CLOCK = ("images_per_s", "seconds", "gpu_gib")
# by TensorBoard and trackers
_SHOWN = ("loss", "lr", "grad_norm", "images_per_s", "skipped_steps", "gpu_gib")
_FRAMES = 12  # pictures in the film strip


@dataclass(frozen=True)
class Preview:
    """What a run shows of itself from time to time."""

    picture: Image.Image
    scores: dict[str, float] = field(default_factory=dict)  # columns of scores.csv
    rows: int = 0  # of images, of the same seeds each time, in the picture; 0: it is no grid


def last_result(run_dir: Path, name: str) -> float:
    """The last `loss`, `held_out` or score of that name that a run has written down; nan if there
    is none."""
    files = {"loss": "metrics.csv", "held_out": "held_out.csv"}
    rows = [row for row in read_rows(run_dir / files.get(name, "scores.csv")) if row.get(name)]
    return float(rows[-1][name]) if rows else float("nan")


def read_rows(path: Path) -> list[dict[str, str]]:
    """The whole rows of a table of a run; [] if there is none. ConfigError: it is no text."""
    try:
        with open(path, newline="") as file:
            return [row for row in csv.DictReader(file) if _is_whole(row)]
    except OSError:
        return []
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is damaged: {error}; put it aside to go on without") from error


def diverged_at(run_dir: Path) -> int | None:
    """The first of the last rows of the metrics that have no finite loss; None if the last has one,
    or there are no rows."""
    try:
        rows = read_rows(run_dir / "metrics.csv")
    except ValueError:
        return None
    found = None
    for row in reversed(rows):
        if math.isfinite(float(row["loss"])):
            break
        found = int(row["step"])
    return found


def write_whole(path: Path, text: str) -> None:
    """Write a file, or leave the one that is there as it is: on a full disk neither is lost."""
    partial = path.with_name(f".writing_{path.name}")
    try:
        with open(partial, "w", newline="") as file:
            file.write(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Within the block the package's log goes to a file, and its warnings to the terminal too."""
    package = logging.getLogger("diffusion")
    to_file, to_terminal = logging.FileHandler(path), logging.StreamHandler()
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    to_terminal.setFormatter(logging.Formatter("warning: %(message)s"))
    to_terminal.setLevel(logging.WARNING)
    before = package.level
    package.setLevel(logging.INFO)
    for handler in (to_file, to_terminal):
        package.addHandler(handler)
    try:
        yield
    finally:
        package.setLevel(before)
        for handler in (to_file, to_terminal):
            package.removeHandler(handler)
            handler.close()


class RunLog:
    """Opens the logs of a run; on a resume at `step` what was logged after it is dropped."""

    def __init__(
        self,
        run_dir: Path,
        step: int,
        row_before: int,  # the step whose row the next one follows; those behind it are dropped
        tensorboard: bool = True,
        tracker: Tracker | None = None,
        evaluated_before: int | None = None,  # as row_before, of held_out.csv; None: `step`
    ) -> None:
        self.run_dir, self.step, self._tracker = run_dir, step, tracker
        self.metrics = run_dir / "metrics.csv"
        self._metrics = _Table(self.metrics, FIELDS, row_before)
        self._scores: _Table | None = None
        self._held_out: _Table | None = None
        self._evaluated_before = step if evaluated_before is None else evaluated_before
        self._purge_step = row_before + 1 if tensorboard else None
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "train.tensorboard=true, but tensorboard is not installed; install it, or set"
                " train.tensorboard=false"
            )

    @cached_property
    def _board(self) -> Any:
        """TensorBoard's writer, made when there is something to write, for it takes half a second
        to import; None: there is none."""
        if self._purge_step is None:
            return None
        from torch.utils.tensorboard import SummaryWriter

        self._hook = threading.excepthook
        threading.excepthook = _quiet_board(self._hook)
        return SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=self._purge_step)

    def row(self, values: dict[str, float]) -> None:
        """Append one row of FIELDS."""
        self._metrics.append(values)
        shown = {f"train/{name}": values[name] for name in _SHOWN}
        if self._board is not None:
            for name, value in shown.items():
                self._board.add_scalar(name, value, values["step"])
        if self._tracker is not None:
            self._tracker.log(shown, values["step"])

    def held_out(self, values: dict[str, Any], step: int) -> None:
        """Append a row to held_out.csv; the numbers with a fraction are shown."""
        if self._held_out is None:
            path, fields = self.run_dir / "held_out.csv", ("step", *values)
            self._held_out = _Table(path, fields, self._evaluated_before)
        self._held_out.append({"step": step, **values})
        shown = {f"held_out/{k}": v for k, v in values.items() if isinstance(v, float)}
        if self._board is not None:
            for name, value in shown.items():
                self._board.add_scalar(name, value, step)
        if self._tracker is not None:
            self._tracker.log(shown, step)

    def preview(self, preview: Preview, step: int) -> Path:
        """Save the picture, and bring film strip and loss curve up to date; returns its path."""
        folder = self.run_dir / "samples"
        folder.mkdir(exist_ok=True)
        path = folder / f"step_{step:08d}.png"
        save_grid(preview.picture, preview.rows, path)
        if preview.rows:
            draw_film(folder, self.run_dir / "film.png", _FRAMES)
        if self._board is not None:
            pixels = np.asarray(preview.picture)
            self._board.add_image("samples", pixels, step, dataformats="HWC")
        if self._tracker is not None:
            self._tracker.show(preview.picture, step)
        self.curve()
        return path

    def scores(self, scores: dict[str, float], step: int) -> None:
        """Append a row to scores.csv."""
        if self._scores is None:
            self._scores = _Table(self.run_dir / "scores.csv", ("step", *scores), self.step)
        self._scores.append({"step": step, **scores})
        if self._board is not None:
            for name, value in scores.items():
                self._board.add_scalar(f"scores/{name}", value, step)
        if self._tracker is not None:
            self._tracker.log({f"scores/{k}": v for k, v in scores.items()}, step)

    def curve(self) -> None:
        """Draw loss.png."""
        draw_loss_curve(self.metrics, self.run_dir / "loss.png")

    def close(self) -> None:
        """Flush and close everything."""
        self._metrics.close()
        for table in (self._scores, self._held_out):
            if table is not None:
                table.close()
        if vars(self).get("_board") is not None:
            self._board.close()
            threading.excepthook = self._hook
        if self._tracker is not None:
            self._tracker.close()


def _quiet_board(otherwise: Callable[[Any], object]) -> Callable[[Any], None]:
    """What is shown of an exception in a thread: of TensorBoard's writer, whose disk is full, one
    line. The run notices by itself when it writes something."""

    def shown(raised: Any) -> None:
        board = "_AsyncWriterThread" in type(raised.thread).__name__
        if board and isinstance(raised.exc_value, OSError):
            warnings.warn(f"TensorBoard's events are not written: {raised.exc_value}", stacklevel=1)
        else:
            otherwise(raised)

    return shown


def _is_whole(row: dict[str | None, Any]) -> bool:
    """Whether a row has all its values: a machine that fails leaves half a one, or zeros in it."""
    if None in row or None in row.values() or not row.get("step", "").isdecimal():
        return False
    return all(_is_number(row[name]) for name in FIELDS if row.get(name))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class _Table:
    """A CSV file that is continued behind `step`. Columns that it has from a version with others
    stay."""

    def __init__(self, path: Path, fields: Sequence[str], step: int) -> None:
        kept = [row for row in read_rows(path) if int(row["step"]) <= step]
        fields = tuple(dict.fromkeys((*fields, *(kept[0] if kept else ()))))
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, fields)
        table.writeheader()
        table.writerows(kept)
        write_whole(path, text.getvalue())
        self._file = open(path, "a", newline="")  # noqa: SIM115 (closed in close)
        self._csv = csv.DictWriter(self._file, fields)

    def append(self, values: dict[str, Any]) -> None:
        self._csv.writerow(
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in values.items()}
        )
        self._file.flush()

    def close(self) -> None:
        self._file.close()
