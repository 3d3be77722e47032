"""Pictures for people: grids of samples, the loss curve, chunks of actions."""

import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

_GAP = 2  # pixels between the images of a grid
_PLOTTED_DIMS = 6  # dimensions of an action in a plot
_ROWS = "rows"  # the key under which a grid's PNG has their number
_SMALL = 64  # images are enlarged by a whole factor until a side has at least so many pixels


def to_uint8(x: Tensor) -> np.ndarray:
    """Images [N, H, W, C] in [-1, 1], clamped, as uint8."""
    return ((x.float().clamp(-1, 1) + 1) * 127.5).round().byte().cpu().numpy()


def grid(images: np.ndarray, columns: int | None = None) -> Image.Image:
    """Arrange uint8 images [N, H, W, C] row by row; gray if C is 1, over white by their alpha if C
    is 4, else the first 3 are RGB."""
    n, h, w, c = images.shape
    if c == 4:
        images = over_white(images)
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


def save_grid(picture: Image.Image, rows: int, path: Path) -> None:
    """As PNG, which says how many rows the grid has; 0: it is none."""
    about = PngInfo()
    if rows:
        about.add_text(_ROWS, str(rows))
    picture.save(path, pnginfo=about)


def grid_rows(images: int) -> int:
    """How many rows `grid` arranges so many images in."""
    return math.ceil(images / math.ceil(math.sqrt(images)))


def draw_film(folder: Path, out: Path, frames: int) -> None:
    """The first rows of the grids in `folder` (step_NUMBER.png, by `save_grid`), which are of the
    same seeds, one below the other with their steps: how the pictures came about. Of more than
    `frames` some, among them the first and the last."""
    found = sorted(folder.glob("step_*.png"))
    chosen = np.unique(np.linspace(0, len(found) - 1, min(frames, len(found))).round().astype(int))
    strips = []
    for path in (found[i] for i in chosen):
        with Image.open(path) as picture:
            rows = int(getattr(picture, "text", {}).get(_ROWS, 0))
            if rows:
                height = (picture.height - _GAP) // rows
                first = picture.convert("RGB").crop((0, 0, picture.width, height))
                strips.append((int(path.stem.removeprefix("step_")), first))
    if not strips:
        return
    ink = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    names = [f"step {step:,}" for step, _ in strips]
    margin = 12 + round(max(ink.textlength(name) for name in names))
    width = margin + max(strip.width for _, strip in strips)
    film = Image.new("RGB", (width, sum(strip.height for _, strip in strips) + _GAP), "white")
    ink, y = ImageDraw.Draw(film), 0
    for name, (_, strip) in zip(names, strips, strict=True):
        film.paste(strip, (margin, y))
        ink.text((margin - 6, y + strip.height // 2), name, fill="black", anchor="rm")
        y += strip.height
    partial = out.with_name(f".writing_{out.name}")
    film.save(partial)
    os.replace(partial, out)


def over_white(images: np.ndarray) -> np.ndarray:
    """RGBA uint8 [N, H, W, 4] as it looks on white paper, uint8 [N, H, W, 3]."""
    color, alpha = images[..., :3].astype(np.float32), images[..., 3:].astype(np.float32) / 255
    return (255 + (color - 255) * alpha).round().astype(np.uint8)


def twentieth(rows: int) -> int:
    """How many rows of a run's metrics a mean of the loss is over."""
    return max(1, rows // 20)


def draw_loss_curve(metrics: Path, out: Path) -> None:
    """Plot loss over steps from a run's metrics.csv, with a running mean, as PNG."""
    from matplotlib.figure import Figure  # slow to import, and needed rarely

    with open(metrics) as file:
        rows = list(csv.DictReader(file))
    if not rows:
        return
    steps = np.array([int(row["step"]) for row in rows])
    loss = np.array([float(row["loss"]) for row in rows])
    window = twentieth(len(loss))
    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, loss, _style(loss), color="#9ecae1", linewidth=1, label="loss")
    if window > 1:
        mean = np.convolve(loss, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], mean, color="#08519c", label=f"mean of {window} rows")
    _show_powers(axes, loss)
    _name_axes(axes, "loss")
    axes.set_title(_drawable(out.parent.name), parse_math=False)  # a $ is no formula
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(out)


def _drawable(name: str) -> str:
    """A name with what the font of a picture lacks as \\uXXXX, instead of boxes that are all alike:
    letters of many languages, and bytes that are no letters."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    drawn = get_font(findfont(FontProperties())).get_charmap()
    return "".join(c if ord(c) in drawn else f"\\u{ord(c):04x}" for c in name)


def _style(values: Sequence[float]) -> str:
    """Of a line through these: a single one has no length to be seen by."""
    return "o" if len(values) == 1 else "-"


def _name_axes(axes: Any, of: str) -> None:
    """Steps below, which are whole numbers."""
    axes.set(xlabel="step", ylabel=of)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _show_powers(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers, unless a value is 0 or below; what is not finite, as
    of a run that diverged, is not drawn."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""  # which ticks have one

    if any(value <= 0 for value in values):
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(Plain())
    axes.yaxis.set_minor_formatter(Plain())


def draw_loss_curves(curves: dict[str, tuple[list[int], list[float]]], out: Path) -> None:
    """Plot the losses of several runs over their steps, by name, each as a running mean, as PNG.
    A run without a finite one, which has failed or has only begun, stands neither in it nor in its
    legend."""
    from matplotlib.figure import Figure  # slow to import, and needed rarely

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for name, (steps, loss) in curves.items():
        if not any(map(math.isfinite, loss)):
            continue
        window = twentieth(len(loss))
        mean = np.convolve(loss, np.ones(window) / window, mode="valid")
        style = {"linewidth": 1, "label": _drawable(name).replace("$", r"\$")}
        axes.plot(steps[window - 1 :], mean, _style(mean), **style)
    _show_powers(axes, [value for _, loss in curves.values() for value in loss])
    _name_axes(axes, "loss, a mean over a twentieth of the run")
    axes.grid(alpha=0.3, which="both")
    if axes.lines:
        axes.legend(fontsize=8)
    figure.savefig(out)


def plot_chunks(
    predicted: np.ndarray,  # [N, T, A]
    true: np.ndarray,  # [N, T, A]
    acted: tuple[int, int],  # first and last time step that is acted out
) -> Image.Image:
    """Plot chunks of actions over time: a row a chunk, a column a dimension of the action."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    n, steps, dims = true.shape
    shown = min(dims, _PLOTTED_DIMS)
    figure = Figure(figsize=(1 + 2.4 * shown, 0.8 + 1.6 * n), dpi=80, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(n, shown, sharex=True, sharey="col", squeeze=False)
    time = np.arange(steps)
    for i, row in enumerate(panels):
        for d, axes in enumerate(row):
            axes.axvspan(*acted, color="#f0f0f0")
            axes.plot(time, true[i, :, d], color="black", linewidth=1, label="recorded")
            axes.plot(time, predicted[i, :, d], color="#d94801", marker=".", label="predicted")
            axes.tick_params(labelsize=7)
            if i == 0:
                axes.set_title(f"action {d}", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=8)
    figure.supxlabel("time step of the chunk; shaded: acted out", fontsize=8)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())
