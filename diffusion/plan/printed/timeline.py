"""A page as a picture: a bar a line, as long as it is predicted to take, or cannot be quicker than;
a row a stream."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..ops import WEIGHT_GRADS
from ..schedule.moves import MAIN
from .page import Line, Page

# streams, by their numbers in the table
_STREAMS = (
    "0: main stream\ncritical path",
    "1: second stream\nweight gradients",
    "2: third stream\nheld gradients, sums",
    "3: embedding",
)
_COLOURS = {  # which differ for all eyes (Okabe and Ito)
    "convolution": "#0072B2",
    "linear": "#CC79A7",
    "attention": "#009E73",
    "norm": "#E69F00",
    "weight gradient": "#56B4E9",
    "other": "#999999",
}
_WIDTH, _DPI = 12, 150  # inches, and pixels of each
_LETTERS, _LINE = 150, 0.14  # of a line of the title as wide as that; its height in inches
_SHORT = 0.002  # of the whole time: shorter bars touch, and longer ones have a white edge
_NAMED = 0.03  # of the whole time: a span so long has room for its name
_GAP = 0.001  # of the whole time, between spans

Span = tuple[float, float]


def check_picture(path: Path) -> None:
    """ConfigError if a picture cannot be of the kind that the name ends in."""
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ConfigError(f"out={path} is no picture; it ends in .{', .'.join(sorted(kinds))}")


def draw(page: Page, path: Path, title: str = "") -> None:
    """Write the picture, of the kind that the name ends in."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    spans = times(page)
    end = max((end for _, end in spans), default=0.0) or 1.0
    scale, unit = (1e-3, "ms") if end >= 1000 else (1.0, "us")
    used = sorted({line.stream for line in page.lines if not _is_skipped(line)} | {MAIN})
    said = [*textwrap.wrap(title, _LETTERS), *textwrap.wrap(str(page.memory), _LETTERS)]
    height = 1.92 + _LINE * len(said) + 0.75 * len(used)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = {stream: row for row, stream in enumerate(used)}
    for family, colour in _COLOURS.items():
        bars = [
            (line, start, end - start)
            for line, (start, end) in zip(page.lines, spans, strict=True)
            if not _is_skipped(line) and _family(line) == family
        ]
        if not bars:
            continue
        lines, starts, lengths = zip(*bars, strict=True)
        axes.barh(
            [rows[line.stream] for line in lines],
            [scale * length for length in lengths],
            left=[scale * start for start in starts],
            height=0.8,
            color=colour,
            label=f"{family} {scale * sum(lengths):,.{1 if unit == 'us' else 2}f} {unit}",
            edgecolor=["white" if length > _SHORT * end else colour for length in lengths],
            linewidth=0.3,
        )
    _write_spans(axes, _runs(page, spans, "pass_"), -0.95, scale, end, weight="bold")
    _write_spans(axes, _runs(page, spans, "image"), -0.6, scale, end, color="0.35", fontsize=8)
    axes.set_ylim(len(used) - 0.4, -1.15)
    axes.set_xlim(0, 1.005 * scale * end)
    axes.set_yticks(range(len(used)), [_STREAMS[stream] for stream in used])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(
        f"{unit}: as predicted where costs were fitted, else the least that is possible"
    )
    figure.suptitle("\n".join(said), x=0.01, ha="left", fontsize=9)
    figure.legend(ncols=len(_COLOURS), loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=_DPI)


def times(page: Page) -> list[Span]:
    """When each line begins and ends, if each takes its `us`, one after the other on its stream,
    and waits for what it has to. What stands beside the main stream and waits for nothing named
    begins no earlier than what the main stream has been given before it."""
    ends, found = dict.fromkeys(range(len(_STREAMS)), 0.0), []
    for line in page.lines:
        start = max([ends[line.stream], *(found[i][1] for i in line.waits)])
        if line.stream != MAIN and not line.waits:
            start = max(start, ends[MAIN])
        found.append((start, start if _is_skipped(line) else start + line.us))
        ends[line.stream] = found[-1][1]
    return found


def _is_skipped(line: Line) -> bool:
    """Whether a call does not launch it."""
    return line.pass_ == "parameters" or line.is_view


def _family(line: Line) -> str:
    """What of `_COLOURS` a line is. A convolution with a norm in it is a convolution, and a norm's
    gradient with a 1x1 convolution in it a norm."""
    op = line.op
    if op in WEIGHT_GRADS:
        return "weight gradient"
    if "attention" in op:
        return "attention"
    if op in ("moments", "skip_dx", "skip_backward") or "norm" in op and not line.flops:
        return "norm"
    if op.startswith(("linear", "project", "begin", "finish")):
        return "linear"
    return "convolution" if line.flops else "other"


# --- what is written over the bars ----------------------------------------------------------------


def _runs(page: Page, spans: Sequence[Span], what: str) -> Iterator[tuple[str, Span]]:
    """When the main stream is in which pass, or at images of which size: what neighbours have in
    common, and from where to where they are."""
    pairs = [
        (name, span)
        for line, span in zip(page.lines, spans, strict=True)
        if line.stream == MAIN and not _is_skipped(line) and (name := getattr(line, what))
    ]
    for name, run in groupby(pairs, key=lambda pair: pair[0]):
        (_, first), *rest = run
        yield name, (first[0], rest[-1][1][1] if rest else first[1])


def _write_spans(
    axes: Any, named: Iterator[tuple[str, Span]], y: float, scale: float, whole: float, **style: Any
) -> None:
    """Names over the spans that they are of, and lines between these."""
    for name, (start, end) in named:
        if end - start < _NAMED * whole:
            continue
        ends = scale * (start + _GAP * whole), scale * (end - _GAP * whole)
        axes.plot(ends, [y + 0.12] * 2, color="0.6", linewidth=1)
        axes.text(scale * (start + end) / 2, y, name, ha="center", va="center", **style)
