"""Runs side by side as one page of HTML that needs nothing else: what differs first, curves that
say their values where one points, samples of the same seeds beside each other.

The page loads nothing: styles, script, data and pictures are in it. It can be mailed, and opened
without a network.
"""

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from ..settings import shown
from ..tracking.environment import read_environments
from ..tracking.run_log import read_rows
from .page_script import SCRIPT, STYLE

COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"),  # Okabe and Ito
    *("#7a4fbf", "#8c564b", "#5f6b2d", "#7f7f7f"),
)
_POINTS = 600  # of a curve at most: rows of a longer one are averaged
_FRAMES = 8  # looks of a run at most
_WIDEST = 560  # pixels of a picture; a larger one is made smaller
# of metrics.csv, in the order of the page; the rest of it is said by the axes
_CURVES = ("loss", "grad_norm", "lr", "images_per_s", "gpu_gib", "skipped_steps")
# what makes pictures of the same place in two grids pictures of other noise, or drawn otherwise
_OF_PICTURES = ("train.seed", "train.sample_count", "train.sample_steps", "dataset.name")


def page(
    rows: Sequence[dict[str, str]],  # of `report.table`
    changed: Sequence[str],  # the columns that are settings
    runs: Sequence[Any],  # `report.Run`, in the order of the rows
    notes: Sequence[str],  # on figures that do not compare
) -> str:
    """The whole page."""
    data = [_run(row["run"], i, run) for i, (row, run) in enumerate(zip(rows, runs, strict=True))]
    title = f"{len(runs)} runs" if len(runs) > 1 else rows[0]["run"]
    other = [k for k in _OF_PICTURES if len({shown(run.config.get(k)) for run in runs}) > 1]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        "<h2>What differs, and what came of it</h2>",
        _table(rows, changed, data),
        *(f'<p class="note">{html.escape(note)}</p>' for note in notes),
        '<h2>Curves</h2><div id="curves"></div>',
    ]
    if any("sigma" in name for run in data for name in run["curves"]):
        parts.append('<h2>Held-out loss by noise, at the end</h2><div id="bands"></div>')
    if any(run["frames"] for run in data):
        said = "Pictures in the same place are of the same noise."
        if other:
            differ = "differs" if len(other) == 1 else "differ"
            said = f"Not the same noise or sampling in all runs: {', '.join(other)} {differ}."
        parts.append(f'<h2>Samples</h2><p>{html.escape(said)}</p><div id="samples"></div>')
    parts.append("<h2>Settings and machines</h2>")
    parts += [_details(row["run"], run) for row, run in zip(rows, runs, strict=True)]
    text = json.dumps(data, allow_nan=False).replace("</", "<\\/")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><main>\n" + "\n".join(parts) + "\n</main>"
        f'<script type="application/json" id="data">{text}</script><script>{SCRIPT}</script>'
        "</body></html>\n"
    )


def _table(
    rows: Sequence[dict[str, str]], changed: Sequence[str], data: list[dict[str, Any]]
) -> str:
    """The settings that differ stand left of the results."""
    names = list(rows[0])
    kinds = {name: ' class="set"' if name in changed else "" for name in names}
    head = "".join(f"<th{kinds[name]}>{html.escape(name)}</th>" for name in names)
    lines = []
    for row, run in zip(rows, data, strict=True):
        cells = []
        for name in names:
            text = html.escape(row[name])
            dot = f'<i style="background:{run["colour"]}"></i>' if name == "run" else ""
            cells.append(f'<td{kinds[name]} title="{text}">{dot}{text}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _run(name: str, number: int, run: Any) -> dict[str, Any]:
    """What the script draws of a run."""
    metrics = read_rows(run.folder / "metrics.csv")
    curves = {key: _curve(metrics, key) for key in _CURVES}
    for table in ("held_out.csv", "scores.csv"):
        found = read_rows(run.folder / table)
        for key in found[-1] if found else ():
            if key not in ("step", "images", "levels", "data"):
                curves[key] = _curve(found, key)
    return {
        "name": name,
        "colour": COLOURS[number % len(COLOURS)],
        "dash": number // len(COLOURS),  # of more runs than colours
        "curves": {key: curve for key, curve in curves.items() if curve["x"]},
        "clock": _clock(metrics),
        "frames": _frames(run.folder / "samples"),
    }


def _curve(rows: Sequence[dict[str, str]], key: str) -> dict[str, list[float]]:
    """Steps and values, of a long table means over several rows; rows without a number are left
    out."""
    points = [(int(row["step"]), _number(row.get(key))) for row in rows]
    points = [(step, value) for step, value in points if value is not None]
    size = -(-len(points) // _POINTS) if points else 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return {
        "x": [part[-1][0] for part in parts],
        "y": [float(f"{sum(v for _, v in part) / len(part):.6g}") for part in parts],
    }


def _clock(rows: Sequence[dict[str, str]]) -> dict[str, list[float]]:
    """How far some steps are in images and seconds, for the other axes."""
    size = max(1, len(rows) // _POINTS)
    chosen = [*rows[size - 1 : -1 : size], *rows[-1:]]
    return {
        key: [_number(row[key]) or 0 for row in chosen] for key in ("step", "images", "seconds")
    }


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def _frames(folder: Path) -> list[dict[str, Any]]:
    """Looks at the run, from the first to the last: their steps, and pictures as data."""
    found = sorted(folder.glob("step_*.png"))
    last = len(found) - 1
    count = min(_FRAMES, len(found))
    chosen = sorted({round(i * last / max(count - 1, 1)) for i in range(count)})
    frames = []
    for path in (found[i] for i in chosen):
        try:
            source = _embedded(path)
        except OSError:  # half a picture, of a machine that failed
            continue
        frames.append({"step": int(path.stem.removeprefix("step_")), "source": source})
    return frames


def _embedded(path: Path) -> str:
    """A picture as a data URL, in the smaller of two formats."""
    with Image.open(path) as picture:
        image = picture.convert("RGB")
    if image.width > _WIDEST:
        height = max(1, round(image.height * _WIDEST / image.width))
        image = image.resize((_WIDEST, height), Image.Resampling.LANCZOS)
    coded = []
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 90})):
        content = io.BytesIO()
        image.save(content, kind, **options)
        coded.append((content.tell(), kind, content.getvalue()))
    _, kind, content = min(coded)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _details(name: str, run: Any) -> str:
    """All settings, and what the run was trained with."""
    settings = "\n".join(f"{key}: {shown(value)}" for key, value in run.config.items())
    machines = yaml.safe_dump(read_environments(run.folder) or ["not written down"], width=100)
    return (
        f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(settings)}</pre>"
        f"<pre>{html.escape(machines)}</pre></details>"
    )
