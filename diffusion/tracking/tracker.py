"""A run in Weights & Biases or trackio, whose interfaces are alike. Neither is needed otherwise."""

import os
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

from ..errors import ConfigError

TRACKERS = ("wandb", "trackio")
_PROJECT = "triton-diffusion"


def check_tracker(name: str | None) -> None:
    """ConfigError unless the tracker is known and installed; None is no tracker."""
    if name is None:
        return
    if name not in TRACKERS:
        raise ConfigError(
            f"train.track={name} is unknown; choose one of {', '.join(TRACKERS)}, or null"
        )
    if find_spec(name) is None:
        raise ConfigError(f"train.track={name} is not installed: pip install {name}")


class Tracker:
    """A run there, which a resumed run goes on with.

    Its project is what WANDB_PROJECT or TRACKIO_PROJECT says, or triton-diffusion. Its name is the
    run's folder and the time of the beginning; it is kept in that folder.
    """

    def __init__(self, name: str, run_dir: Path, step: int, config: dict[str, Any]) -> None:
        self._module = import_module(name)  # slow to load
        kept = run_dir / f"{name}.txt"
        if not (step and kept.exists()):
            folder = "-".join(part for part in run_dir.parts if part not in ("/", "..", "."))
            kept.write_text(f"{folder[-80:]}-{time.strftime('%Y%m%d-%H%M%S')}\n")
        run = kept.read_text().strip()
        options: dict[str, Any] = {"name": run, "config": config, "resume": "allow"}
        if name == "wandb":
            options |= {"id": run, "dir": str(run_dir)}
        self._module.init(project=os.environ.get(f"{name.upper()}_PROJECT", _PROJECT), **options)

    def log(self, values: dict[str, float], step: int) -> None:
        """Numbers by name."""
        self._module.log(values, step=step)

    def show(self, picture: Image.Image, step: int) -> None:
        """A grid of samples."""
        self._module.log({"samples": self._module.Image(picture)}, step=step)

    def close(self) -> None:
        """Send what is left."""
        self._module.finish()
