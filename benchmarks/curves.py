"""How far the losses of runs are from one another.

    python -m benchmarks.curves files=A.csv,B.csv,... [key=value ...]

    files=           CSV files with columns step and loss, of a row a step: metrics.csv of runs with
                     train.log_every=1, or what benchmarks.parity writes
    names=           what to call them; default the files' names
    window=50        steps that a loss is averaged over before it is compared
    plot=            a file for the picture

A loss is mostly the noise that was drawn; runs that draw the same noise in the same order can be
compared step by step.
"""

import csv
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks import harness
from diffusion.errors import ConfigError

DEFAULTS = {"files": (), "names": (), "window": 50, "plot": ""}


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    files, window = [Path(name) for name in settings["files"]], settings["window"]
    names = settings["names"] or tuple(str(path) for path in files)
    if len(files) < 2 or len(names) != len(files):
        raise ConfigError(f"files= has {len(files)} files, names= {len(names)}; expected 2 or more")
    curves = {name: read_losses(path) for name, path in zip(names, files, strict=True)}
    print(compare(curves, window))
    if settings["plot"]:
        draw(curves, window, Path(settings["plot"]), "Loss, same seed and noise")
    return 0


def read_losses(path: Path) -> np.ndarray:
    """The losses of steps 1, 2, 3, ..."""
    try:
        with path.open(newline="") as file:
            rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError):
        raise ConfigError(f"{path} is no CSV file with columns step and loss") from None
    if [step for step, _ in rows] != list(range(1, len(rows) + 1)):
        raise ConfigError(f"{path} does not have a row for every step; train with log_every=1")
    return np.array([loss for _, loss in rows])


def write_losses(path: Path, losses: Sequence[float]) -> None:
    """As `read_losses` reads them. Nine digits are a float32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{step},{loss:.9g}" for step, loss in enumerate(losses, 1)]
    path.write_text("\n".join(["step,loss", *lines, ""]))


def smooth(losses: np.ndarray, window: int) -> np.ndarray:
    """Means over every `window` neighbours, as many as there are (all, if they are fewer)."""
    window = max(1, min(window, len(losses)))
    return np.convolve(losses, np.full(window, 1 / window), mode="valid")


def difference(a: np.ndarray, b: np.ndarray, window: int) -> tuple[float, float]:
    """Mean and largest |a - b| / b of the smoothed losses, over the steps that both have."""
    count = min(len(a), len(b))
    if count == 0:
        raise ConfigError("a run has no steps")
    a, b = smooth(a[:count], window), smooth(b[:count], window)
    relative = np.abs(a - b) / b
    return float(relative.mean()), float(relative.max())


def compare(curves: dict[str, np.ndarray], window: int) -> str:
    """A table of all pairs: smoothed, and step by step."""
    lines = []
    for (one, a), (other, b) in combinations(curves.items(), 2):
        numbers = [f"{100 * x:.3f}" for w in (window, 1) for x in difference(a, b, w)]
        lines.append([f"{one} / {other}", str(min(len(a), len(b))), *numbers])
    header = ["runs", "steps", f"mean % over {window}", "max %", "mean % of a step", "max %"]
    return harness.format_table(header, lines)


def draw(curves: dict[str, np.ndarray], window: int, path: Path, title: str) -> None:
    """The smoothed losses above, and below how far each is from the last."""
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 2), layout="constrained"
    )
    last, reference = next(reversed(curves.items()))
    for (name, losses), style in zip(curves.items(), _styles(len(curves)), strict=True):
        y = smooth(losses, window)
        x = np.arange(len(y)) + (len(losses) - len(y)) / 2 + 1
        above.plot(x, y, label=name, **style)
        if name != last:
            count = min(len(losses), len(reference))
            y, z = (smooth(curve[:count], window) for curve in (losses, reference))
            below.plot(x[: len(y)], 100 * (y - z) / z, label=f"{name} against {last}", **style)
    above.set_yscale("log")
    above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    above.yaxis.set_minor_formatter(NullFormatter())
    above.set_ylabel("loss")
    above.set_title(f"{title}; means over {window} steps", fontsize=10)
    below.axhline(0, color="black", linewidth=0.8)
    below.set_ylabel("difference, %")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _styles(count: int) -> list[dict]:
    """Curves lie upon one another, so the first are wide and the last are dashed."""
    widths = np.linspace(3.5, 1.2, count)
    dashes = ["-", "-", *["--"] * count]
    return [
        {"linewidth": w, "linestyle": d, "alpha": 0.85}
        for w, d in zip(widths, dashes, strict=False)
    ]


if __name__ == "__main__":
    harness.run_entry(main)
