"""Pictures for people: grids of samples and the loss curve."""

import csv
import math
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

_GAP = 2  # pixels between the images of a grid
_SMALL = 64  # images are enlarged by a whole factor until a side has at least so many pixels


def to_uint8(x: Tensor) -> np.ndarray:
    """Images [N, H, W, C] in [-1, 1], clamped, as uint8."""
    return ((x.float().clamp(-1, 1) + 1) * 127.5).round().byte().cpu().numpy()


def grid(images: np.ndarray, columns: int | None = None) -> Image.Image:
    """Arrange uint8 images [N, H, W, C] row by row; gray if C is 1, else the first 3 are RGB."""
    n, h, w, c = images.shape
    images = images[..., :1].repeat(3, axis=-1) if c < 3 else images[..., :3]
    zoom = max(1, math.ceil(_SMALL / min(h, w)))
    images = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
    columns = columns or math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    step_y, step_x = h * zoom + _GAP, w * zoom + _GAP
    canvas = np.full((rows * step_y + _GAP, columns * step_x + _GAP, 3), 255, dtype=np.uint8)
    for i, image in enumerate(images):
        y, x = _GAP + i // columns * step_y, _GAP + i % columns * step_x
        canvas[y : y + h * zoom, x : x + w * zoom] = image
    return Image.fromarray(canvas)


def draw_loss_curve(metrics: Path, out: Path) -> None:
    """Plot loss over steps from a run's metrics.csv, with a running mean, as PNG."""
    from matplotlib.figure import Figure  # slow to import, and needed rarely

    with open(metrics) as file:
        rows = list(csv.DictReader(file))
    if not rows:
        return
    steps = np.array([int(row["step"]) for row in rows])
    loss = np.array([float(row["loss"]) for row in rows])
    window = max(1, len(loss) // 20)
    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, loss, color="#9ecae1", linewidth=1, label="loss")
    if window > 1:
        mean = np.convolve(loss, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], mean, color="#08519c", label=f"mean of {window} rows")
    if (loss > 0).all():
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss", title=out.parent.name)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(out)
