"""What a run writes down while it goes: metrics.csv, TensorBoard events, sample grids."""

import csv
import logging
from pathlib import Path

import numpy as np

from .pictures import draw_loss_curve, grid

FIELDS = (
    "step",  # updates done
    "images",  # training images seen
    "epoch",
    "loss",  # mean since the row before
    "lr",
    "grad_norm",  # of the last step, before clipping
    "images_per_s",  # since the row before
    "skipped_steps",  # updates left out because of a non-finite gradient, in all
    "seconds",  # since the process started training
)


def attach_log_file(path: Path) -> logging.Handler:
    """Send the package's log records to a file too. The caller removes the handler."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("diffusion").addHandler(handler)
    return handler


class RunLog:
    """Opens the logs of a run; on a resume at `step` what was logged after it is dropped."""

    def __init__(self, run_dir: Path, step: int, tensorboard: bool = True) -> None:
        self.run_dir = run_dir
        self.metrics = run_dir / "metrics.csv"
        kept = []
        if self.metrics.exists():
            with open(self.metrics) as file:
                kept = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
        self._file = open(self.metrics, "w", newline="")  # noqa: SIM115 (closed in close)
        self._csv = csv.DictWriter(self._file, FIELDS)
        self._csv.writeheader()
        self._csv.writerows(kept)
        self._file.flush()
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def row(self, values: dict[str, float]) -> None:
        """Append one row of FIELDS."""
        self._csv.writerow(
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in values.items()}
        )
        self._file.flush()
        if self._board is not None:
            for name in ("loss", "lr", "grad_norm", "images_per_s"):
                self._board.add_scalar(f"train/{name}", values[name], values["step"])

    def samples(self, images: np.ndarray, step: int) -> Path:
        """Save a grid of uint8 images [N, H, W, C] and bring the loss curve up to date."""
        folder = self.run_dir / "samples"
        folder.mkdir(exist_ok=True)
        picture = grid(images)
        path = folder / f"step_{step:08d}.png"
        picture.save(path)
        if self._board is not None:
            self._board.add_image("samples", np.asarray(picture), step, dataformats="HWC")
        self.curve()
        return path

    def curve(self) -> None:
        """Draw loss.png."""
        draw_loss_curve(self.metrics, self.run_dir / "loss.png")

    def close(self) -> None:
        """Flush and close everything."""
        self._file.close()
        if self._board is not None:
            self._board.close()
