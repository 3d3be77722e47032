"""Curves of `benchmarks.learning`: held-out loss over seconds of training, as files, a table and a
picture."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from benchmarks import harness
from diffusion.errors import ConfigError

OURS = (harness.OURS, "torch")  # the framework, by one of its backends
_NAMES = {  # of the kinds of a provider, in the picture
    harness.OURS: "ours",
    "torch": "ours, reference kernels",
    "compile": "torch.compile",
    "autotune": "torch.compile, max-autotune",
    "eager": "eager PyTorch",
}


@dataclass(frozen=True)
class Point:
    """A row of the CSV."""

    seconds: float  # of training
    step: int
    images: int  # trained on
    held_out: float  # loss
    setup: float  # seconds before training, to build, compile and capture


def read_curve(path: Path) -> list[Point]:
    """As `learn` has written it, perhaps up to where it was killed. ConfigError: it is no such
    file."""
    try:
        with path.open(newline="") as file:
            rows = [Point(**{f.name: f.type(row[f.name]) for f in fields(Point)})
                    for row in csv.DictReader(file)]  # fmt: skip
    except (KeyError, TypeError, ValueError):
        rows = []
    if not rows:
        raise ConfigError(f"{path} has no rows of {','.join(f.name for f in fields(Point))}")
    return rows


def reached(curve: Sequence[Point], loss: float) -> float | None:
    """The seconds after which the loss was first so low, in a straight line between the two
    measurements; None: never."""
    for a, b in zip(curve, curve[1:], strict=False):
        if b.held_out <= loss < a.held_out:
            share = (a.held_out - loss) / (a.held_out - b.held_out)
            return a.seconds + share * (b.seconds - a.seconds)
    return None


def format_curves(curves: dict[str, list[Point]]) -> str:
    """How fast each way was and how far it came, and when ours was there."""
    ours = next((curve for name, curve in curves.items() if name.split("-")[0] in OURS), None)
    lines = []
    for name, curve in curves.items():
        last, there = curve[-1], None
        if ours is not None and curve is not ours:
            there = reached(ours, last.held_out)
        rate = last.images / last.seconds if last.seconds else 0
        lines.append(
            [
                name, f"{rate:.0f}", f"{last.seconds:.1f}", str(last.step), f"{last.held_out:.5f}",
                f"{last.setup:.1f}", f"{there:.1f}" if there else "-",
                f"{last.seconds / there:.2f}" if there else "-",
            ]
        )  # fmt: skip
    header = ["way", "images/s", "seconds", "steps", "held-out loss", "setup s"]
    return harness.format_table([*header, "ours has this loss after s", "times faster"], lines)


def _label(provider: str) -> str:
    kind, _, precision = provider.partition("-")
    return f"{_NAMES[kind]}, {precision}"


def plot(curves: dict[str, list[Point]], path: Path, title: str) -> None:
    """Held-out loss over seconds of training, both logarithmic; step 0 is left out."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, curve in curves.items():
        trained = [point for point in curve if point.seconds > 0]
        x, y = [p.seconds for p in trained], [p.held_out for p in trained]
        axes.plot(x, y, label=_label(name), marker="o", markersize=3, linewidth=1.5)
    axes.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)
    axes.set(xlabel="seconds of training", ylabel="held-out loss")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
