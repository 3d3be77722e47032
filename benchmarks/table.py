"""One table of models, GPUs and precisions beside torch.compile, from the rows of all CSV files.

    python -m benchmarks.table [into=docs/performance.md] [summary=README.md] [csv=FILE]
                               [results=FOLDER]

    into=     a Markdown file with the lines <!-- models --> and <!-- end of models -->: the text
              between them is replaced by the table. Default: the table is printed
    summary=  the same for the lines <!-- ratios --> and <!-- end of ratios -->, and the short
              table: ratios alone, one line for each model, GPU and precision
    csv=      writes the table to this file, with the commit, versions and run of both sides
    results=  the folder of the CSV files; default benchmarks/results

The table has training steps (`benchmarks.train_step`, `benchmarks.papers`) and evaluations
(`benchmarks.sampling`, `benchmarks.papers`, and `benchmarks.accelerated` for diffusers' networks),
each captured in one CUDA graph. Lines in which torch.compile is faster stay in it. Rows whose GPU
is called sm_80-on-NAME ran the code of sm_80 on the GPU NAME, and the table calls their GPU that.
"""

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness
from benchmarks.harness import OURS, Row
from diffusion.errors import ConfigError

DEFAULTS = {"into": "", "summary": "", "csv": "", "results": ""}
BEGIN, END = "<!-- models -->", "<!-- end of models -->"
BEGIN_SUMMARY, END_SUMMARY = "<!-- ratios -->", "<!-- end of ratios -->"
_OPS = {"train_step": "training step", "unet_forward": "evaluation"}
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+) ([\w:]+)")  # images, height, width, channels, model
_PROVIDER = re.compile(r"(\w+)-(bf16|tf32|fp32|fp16)( graph)?")
_OTHER_CHIP = re.compile(r"(sm_\d+)-on-(.+)")


class Line(NamedTuple):
    """One model, number of images, GPU and precision; times in microseconds."""

    op: str
    model: str
    size: int
    images: int
    gpu: str
    precision: str
    theirs: Row  # torch.compile's
    ours: Row

    @property
    def ratio(self) -> float:
        return self.theirs.median_us / self.ours.median_us

    @property
    def one_run(self) -> bool:
        """Whether both sides are known to be of one run (old rows have no name of their run)."""
        return bool(self.ours.run) and self.theirs.run == self.ours.run

    @property
    def commit(self) -> str:
        """Of ours, behind that of torch.compile's side if it is another one."""
        sides = dict.fromkeys((self.theirs.commit, self.ours.commit))
        return ", ".join(commit.replace("+changes", "+") for commit in sides)


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    folder = Path(settings["results"] or harness.RESULTS)
    rows = [row for path in sorted(folder.glob("*.csv")) for row in harness.read_rows(path)]
    lines = find_lines(rows)
    if not lines:
        raise ConfigError(f"{folder} has no rows of ours beside torch.compile")
    if settings["csv"]:
        write_csv(Path(settings["csv"]), lines)
    if settings["summary"]:
        write_summary(Path(settings["summary"]), lines)
    if settings["into"]:
        write_into(Path(settings["into"]), lines)
    elif not (settings["csv"] or settings["summary"]):
        print(format_lines(lines))
    return 0


def find_lines(rows: Sequence[Row]) -> list[Line]:
    """The steps and evaluations of which there are rows of both sides."""
    sides: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        shape, provider = _SHAPE.fullmatch(row.shape), _PROVIDER.fullmatch(row.provider)
        if row.op not in _OPS or shape is None or provider is None:
            continue  # another benchmark's
        if row.op == "train_step" and provider[3] is None:
            continue  # launched from Python, without a graph
        images, height, _, _, model = shape.groups()
        key = row.op, model, int(height), int(images), row.gpu, provider[2]
        sides.setdefault(key, {})[provider[1]] = row
    both = ((key, s) for key, s in sides.items() if OURS in s and "compile" in s)
    lines = [Line(*key, side["compile"], side[OURS]) for key, side in both]
    return sorted(lines, key=lambda line: (list(_OPS).index(line.op), *line[1:6]))


def format_lines(lines: Sequence[Line]) -> str:
    """Markdown: a table of steps and one of evaluations, and what their marks mean."""
    header = ["images", "GPU", "precision", "torch.compile, ms", "ours, ms", "ratio", "commit"]
    tables = []
    for op, name in _OPS.items():
        cells = [
            [
                f"`{line.model}`",
                f"{line.images} of {line.size}x{line.size}",
                _gpu(line.gpu),
                line.precision,
                _milliseconds(line.theirs),
                _milliseconds(line.ours),
                _ratio(line),
                line.commit,
            ]
            for line in lines
            if line.op == op
        ]
        if cells:
            tables.append(harness.format_table([name, *header], cells))
    sides = [row for line in lines for row in (line.theirs, line.ours)]
    versions = sorted({(row.torch.split("+")[0], row.triton) for row in sides})
    notes = [f"torch {torch} with triton {triton}" for torch, triton in versions]
    if any(row.commit.endswith("+changes") for row in sides):
        notes.append("`+` after a commit: the commit with changes")
    if not all(line.one_run for line in lines):
        notes.append(_TWO_RUNS)
    text = "; ".join(notes)
    return "\n\n".join([*tables, f"{text[0].upper()}{text[1:]}."])


_TWO_RUNS = "`*`: the two sides may be of two runs"


def format_summary(lines: Sequence[Line]) -> str:
    """Markdown: ratios by model and precision, a column for what was timed on a GPU, and a line
    with the number of losses."""
    columns = [(op, gpu) for op in _OPS for gpu in sorted({_gpu(line.gpu) for line in lines})]
    groups: dict[tuple, dict[tuple[str, str], list[Line]]] = {}
    for line in lines:
        group = groups.setdefault((line.model, line.size, line.precision), {})
        group.setdefault((line.op, _gpu(line.gpu)), []).append(line)
    columns = [column for column in columns if any(column in group for group in groups.values())]
    header = ["model", "image", "precision"]
    header += [f"{_OPS[op]}, {gpu}: ratio (batch)" for op, gpu in columns]
    cells = [
        [f"`{model}`", f"{size}x{size}", precision]
        + [
            ", ".join(f"{_ratio(line)} ({line.images})" for line in group.get(column, []))
            for column in columns
        ]
        for (model, size, precision), group in sorted(groups.items())
    ]
    lost = sum(line.ratio < 1 for line in lines)
    said = f"torch.compile is faster in {lost} of these {len(lines)} ratios."
    if not all(line.one_run for line in lines):
        said += f" {_TWO_RUNS}."
    return f"{harness.format_table(header, cells)}\n\n{said}"


def _milliseconds(row: Row) -> str:
    """With at least three digits."""
    time = row.median_us / 1000
    return f"{time:.0f}" if time >= 100 else f"{time:#.3g}"


def _ratio(line: Line) -> str:
    return f"{line.ratio:.2f}{'' if line.one_run else '*'}"


def write_into(path: Path, lines: Sequence[Line]) -> None:
    """Replace the text between the two marks. ConfigError: the page lacks them."""
    harness.replace_between(path, BEGIN, END, format_lines(lines))


def write_summary(path: Path, lines: Sequence[Line]) -> None:
    """Replace the text between the marks of the short table. ConfigError: the page lacks them."""
    harness.replace_between(path, BEGIN_SUMMARY, END_SUMMARY, format_summary(lines))


def write_csv(path: Path, lines: Sequence[Line]) -> None:
    """The lines with commit, versions and run of both sides. `path` must not be in the folder of
    the results, which is read for the next table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        sides = [f"{side}_{what}" for side in ("compile", "ours") for what in _OF_A_SIDE]
        writer.writerow([*Line._fields[:6], "ratio", "one_run", *sides])
        for line in lines:
            side = (getattr(row, what) for row in (line.theirs, line.ours) for what in _OF_A_SIDE)
            writer.writerow([*line[:6], f"{line.ratio:.3f}", line.one_run, *side])


_OF_A_SIDE = ("median_us", "p20_us", "p80_us", "torch", "triton", "commit", "run")


def _gpu(slug: str) -> str:
    other = _OTHER_CHIP.fullmatch(slug)
    return f"{other[1]} code on {_name(other[2])}" if other else _name(slug)


def _name(slug: str) -> str:
    """ "nvidia-h100-80gb-hbm3" -> "H100"."""
    return slug.removeprefix("nvidia-").removeprefix("geforce-").split("-80gb")[0].upper()


if __name__ == "__main__":
    harness.run_entry(main)
