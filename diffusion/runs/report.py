"""Runs side by side: what was set otherwise, what came of it; which jobs of a sweep failed, why."""

import csv
import io
import json
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, is_of_system, writing
from ..near_runs import runs_near
from ..settings import construct, flattened, shown
from ..tracking.pictures import draw_loss_curves, twentieth
from ..tracking.run_log import write_whole
from .records import DEPENDS_ON, Record, check_comparable, differences, record_of
from .report_page import page

_JOB = "job.json"  # what a sweep writes of each job
_FAILED = "failed"  # the state of such a job
_WHERE = ("run_dir", "device")  # it was trained, and not what
# of an evaluation: beside kid and isc their deviations are not shown
EVALUATED = ("fid", "kid", "isc", "precision", "recall", "held_out")
_OF_SCORES = ("train.fid_images", "train.sample_steps", "train.sample_count")
# the data that samples are compared with
_OF_SCORES += tuple(
    f"dataset.{key}" for key in ("name", "path", "repository", "split", "key", "size", "channels")
)
_OF_A_RUN = ("checkpoints", "samples")  # folders in which there are no runs
_MOST_FOLDERS = 20_000  # seconds; more is no folder of runs
_PAGE = 100  # columns
_DIGITS = {
    "images_per_s": 4,
    "minutes": 4,
}  # shown of results that vary from call to call; others: 6
_WRITTEN = (".html", ".md", ".csv")


@dataclass(frozen=True)
class ReportSettings:
    """The configuration; see configs/report.yaml."""

    runs: str | list[str]
    out: str | None = None
    sort: str | None = None
    across: list[str] = field(default_factory=list)  # settings of figures that may differ

    def __post_init__(self) -> None:
        if self.out is not None and Path(self.out).suffix not in _WRITTEN:
            raise ConfigError(f"out={self.out}; expected a {' or a '.join(_WRITTEN)}")


@dataclass(frozen=True)
class Run:
    """A run's folder, read."""

    folder: Path
    config: dict[str, Any]  # by dotted key
    results: dict[str, float]  # by column
    state: str = ""  # of a job of a sweep: done, or why not
    records: dict[str, Record] = field(default_factory=dict)  # what results depend on, by column


def report(config: dict[str, Any]) -> list[dict[str, str]]:
    """Print the runs as a table of Markdown and return its rows; with `out` write a page of HTML,
    or the table and the curves of their losses as a PNG beside it. ConfigError: there are no runs,
    no such column, or figures to sort by that do not compare."""
    settings = construct(ReportSettings, config, "")
    if not settings.runs:
        raise ConfigError(f"runs={shown(settings.runs)} is wrong; expected a folder or several")
    given = [settings.runs] if isinstance(settings.runs, str) else settings.runs
    runs, unread = _read_runs([folder for path in given for folder in find_runs(Path(path))])
    _check_across(settings.across, runs)
    rows = table(runs)
    if settings.sort is not None:
        if settings.sort not in rows[0]:
            raise ConfigError(
                f"sort={settings.sort} is no column; choose from {', '.join(rows[0])}"
            )
        check_comparable(settings.sort, _records(settings.sort, rows, runs), settings.across)
        order = sorted(range(len(rows)), key=lambda i: _order(rows[i][settings.sort]))
        rows, runs = [rows[i] for i in order], [runs[i] for i in order]
    text, notes = markdown(rows), [*unread, *incomparable(rows, runs, settings.across)]
    print(text if _width(text) <= _PAGE else min(text, _turned(rows), key=_width), end="")
    for note in notes:
        print(f"note: {note}")
    if settings.out is not None:
        with writing(Path(settings.out)):
            _write(Path(settings.out), text, rows, runs, notes)
    return rows


def _check_across(across: Sequence[str], runs: Sequence[Run]) -> None:
    """ConfigError: nothing depends on such a setting or group."""
    said = {key for run in runs for record in run.records.values() for key in record}
    known = said.union(*DEPENDS_ON.values(), {key.partition(".")[0] for key in said})
    for name in across:
        if name not in known:
            raise ConfigError(
                f"across has {name}, on which no figure depends; choose from"
                f" {', '.join(sorted(known))}"
            )


def _write(
    out: Path,
    text: str,  # the table, in Markdown
    rows: list[dict[str, str]],
    runs: Sequence[Run],
    notes: Sequence[str],
) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".html":
        write_whole(out, page(rows, changed_settings(runs), runs, notes))
        print(out)
        return
    picture = out.with_suffix(".png")
    said = "".join(f"\n{note}\n" for note in notes)
    md = f"{text}{said}\n![Losses of the runs over their steps](<{picture.name}>)\n"
    write_whole(out, md if out.suffix == ".md" else _as_csv(rows))
    curves = {  # one that has diverged would leave the others no height; the table says why
        row["run"]: _losses(run.folder)
        for row, run in zip(rows, runs, strict=True)
        if not run.state.startswith(_FAILED)
    }
    draw_loss_curves(curves, picture)
    print(f"{out} and {picture.name}")


def find_runs(path: Path) -> Iterator[Path]:
    """The folders of runs in a folder, itself among them, and of the jobs of a sweep that failed
    before they were any, in the order of their names. ConfigError: there is none, or the folder
    holds so many folders that it must be another one."""
    if not path.is_dir():
        raise ConfigError(
            f"runs={path} is no folder; {runs_near(path, 'runs', sweeps=True)}expected a run's"
            " folder, or one in which runs are"
        )
    runs, jobs, looked_at = set(), set(), 0
    seen = set()  # with links followed, the same folder may have several paths
    for place, below, files in os.walk(path, followlinks=True):
        folder, looked_at = Path(place), looked_at + 1
        if folder.resolve() in seen:
            below.clear()
            continue
        seen.add(folder.resolve())
        if looked_at > _MOST_FOLDERS:
            raise ConfigError(
                f"runs={path} holds more than {_MOST_FOLDERS:,} folders; give the folder of the"
                " runs, or several"
            )
        below[:] = [name for name in below if not is_of_system(folder / name)]
        below.sort(key=lambda name: (folder / name).is_symlink())  # a run has its own name
        if "metrics.csv" in files and (folder / "config.yaml").is_file():
            runs.add(folder)
            below[:] = [name for name in below if name not in _OF_A_RUN]
        if _JOB in files and "settings" in _job(folder):
            jobs.add(folder)
    found = sorted(runs | jobs, key=_natural)
    if not found:
        raise ConfigError(f"runs={path} holds no run, which has a config.yaml and a metrics.csv")
    yield from found


def _read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs, and a note on each that cannot be read and is left out. ConfigError: none can."""
    runs, unread = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except ConfigError as error:
            unread.append(f"{error}; this run is left out")
            if len(unread) == len(folders):
                raise
    return runs, unread


def read_run(folder: Path) -> Run:
    """What a run was told and what came of it: the last of its metrics and scores, the medians of
    its speed, the last of its evaluations; of a job of a sweep its state. ConfigError: its settings
    or results cannot be read."""
    job, path = _job(folder), folder / "config.yaml"
    try:
        told = yaml.safe_load(path.read_text()) if path.is_file() else job.get("settings")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if told is not None and not isinstance(told, dict):
        raise ConfigError(f"{path} cannot be read: expected groups of settings")
    config = dict(flattened(told or {}))
    try:
        results, records = _results(folder, config)
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise ConfigError(f"results of {folder} cannot be read: {error}") from error
    return Run(folder, config, results, _state(job), records)


def _results(folder: Path, config: dict[str, Any]) -> tuple[dict[str, float], dict[str, Record]]:
    """By column: figures, and what they depend on."""
    metrics = _rows(folder / "metrics.csv")
    results, records = {}, {}
    if metrics:
        last = metrics[-1]
        results["step"] = float(last["step"])
        losses = [float(row["loss"]) for row in metrics[-twentieth(len(metrics)) :]]
        results["loss"] = statistics.fmean(losses)
        results["images_per_s"] = statistics.median(float(row["images_per_s"]) for row in metrics)
        results["minutes"] = float(last["seconds"]) / 60
        records["loss"] = {k: shown(v) for k, v in config.items() if k.startswith("diffusion.")}
    for row in _rows(folder / "held_out.csv")[-1:]:
        results["held_out"] = float(row["held_out"])
        records["held_out"] = record_of("held_out", row)
    for key, value in (_rows(folder / "scores.csv") or [{}])[-1].items():
        if value and key != "step":
            results[key] = float(value)
            records[key] = {k: shown(config[k]) for k in _OF_SCORES if k in config}
    for row in _rows(folder / "evaluations.csv"):  # of each figure the last
        for key in EVALUATED:
            if row.get(key):
                results[key], records[key] = float(row[key]), record_of(key, row)
                if key != "held_out" and row.get("n"):
                    results["images of evaluations"] = float(row["n"])
    return results, records


def _turned(rows: Sequence[dict[str, str]]) -> str:
    """The table with a column for each run, for runs that differ in many settings."""
    keys = [key for key in rows[0] if key != "run"]
    columns = {str(i): row for i, row in enumerate(rows)}  # two runs may have one name
    head = {"run": "run"} | {i: row["run"] for i, row in columns.items()}
    turned = [{"run": key} | {i: row[key] for i, row in columns.items()} for key in keys]
    lines = markdown([head, *turned]).splitlines(keepends=True)
    return "".join((lines[2], lines[1], *lines[3:]))


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))


def incomparable(
    rows: Sequence[dict[str, str]], runs: Sequence[Run], across: Sequence[str] = ()
) -> list[str]:
    """Of each column of results whose figures do not compare, why."""
    columns = dict.fromkeys(key for run in runs for key in run.records)
    found = ((column, differences(_records(column, rows, runs), across)) for column in columns)
    return [f"{column} does not compare: {'; '.join(why)}" for column, why in found if why]


def _records(column: str, rows: Sequence[dict[str, str]], runs: Sequence[Run]) -> dict[str, Record]:
    pairs = zip(rows, runs, strict=True)
    return {row["run"]: run.records[column] for row, run in pairs if column in run.records}


def table(runs: Sequence[Run]) -> list[dict[str, str]]:
    """A row a run: its name, the settings in which the runs differ, and the results; if a job of a
    sweep failed or has not ended, what became of each."""
    changed = changed_settings(runs)
    columns = list(dict.fromkeys(key for run in runs for key in run.results))
    shared = _shared([run.folder for run in runs])
    stated = any(run.state not in ("", "done") for run in runs)
    return [
        {"run": "/".join(run.folder.parts[shared:]) or run.folder.resolve().name}  # of runs=.
        | {key: shown(run.config[key]) if key in run.config else "-" for key in changed}
        | {key: _rounded(key, run.results[key]) if key in run.results else "-" for key in columns}
        | ({"state": run.state or "-"} if stated else {})
        for run in runs
    ]


def _rounded(column: str, value: float) -> str:
    return f"{value:.{_DIGITS.get(column, 6)}g}"


def changed_settings(runs: Sequence[Run]) -> list[str]:
    """The settings in which the runs differ, but for where they were trained."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [key for key in keys if _differs(key, runs)]


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """The rows as a table whose columns stand in line."""
    names = list(rows[0])
    lines = [names, *([row[name].replace("|", "\\|") for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    ruled = [lines[0], ["-" * width for width in widths], *lines[1:]]
    padded = (
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in ruled
    )
    return "".join(f"| {' | '.join(line)} |\n" for line in padded)


def _as_csv(rows: Sequence[dict[str, str]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _job(folder: Path) -> dict[str, Any]:
    """What a sweep wrote of the job; {} if it was none, or it cannot be read."""
    try:
        job = json.loads((folder / _JOB).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return job if isinstance(job, dict) else {}


def _state(job: dict[str, Any]) -> str:
    state = str(job.get("state", ""))
    if state == _FAILED:  # why, without what is to be done about it
        return f"{_FAILED}: {str(job.get('error')).partition(';')[0]}"
    return "not finished" if state in ("running", "stopped") else state


def _natural(folder: Path) -> list[list[tuple[bool, float, str]]]:
    """The order of names in which 2 stands before 10, 0.0002 before 0.001, and these before a
    letter."""
    number = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
    parts = (re.split(f"({number})", part) for part in folder.parts)
    return [
        [(False, float(s), s) if re.fullmatch(number, s) else (True, 0.0, s) for s in part]
        for part in parts
    ]


def _differs(key: str, runs: Sequence[Run]) -> bool:
    return key not in _WHERE and len({shown(run.config.get(key)) for run in runs}) > 1


def _shared(folders: Sequence[Path]) -> int:
    """How many parts at the beginning of the paths are the same, but for the last part."""
    least = min(len(folder.parts) for folder in folders) - 1
    same = (len({folder.parts[i] for folder in folders}) == 1 for i in range(least))
    return next((i for i, equal in enumerate(same) if not equal), least)


def _order(cell: str) -> tuple[bool, float | str]:
    """Numbers as such, what is missing last."""
    try:
        return (False, float(cell))
    except ValueError:
        return (True, cell)


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def _losses(folder: Path) -> tuple[list[int], list[float]]:
    rows = _rows(folder / "metrics.csv")
    return [int(row["step"]) for row in rows], [float(row["loss"]) for row in rows]
