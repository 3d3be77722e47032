"""The ops beside the fastest alternative, from rows of the CSV.

    python -m benchmarks.summary [csv=FILE] [into=docs/ops.md]

    csv=   default benchmarks/results/<gpu>.csv, of which there must be one
    into=  a Markdown file with a line <!-- ops --> and a line <!-- end of ops -->: what is between
           them is replaced. Default: it is printed

Each op and pass at the shapes of unet64 is summed over the calls of a training step; every shape
that we lose has a line of its own.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from benchmarks import harness
from benchmarks.cases import LONGER_ATTENTION, model_cases
from benchmarks.harness import Row
from benchmarks.providers import experiments
from diffusion.errors import ConfigError

DEFAULTS = {"csv": "", "into": ""}
BEGIN, END = "<!-- ops -->", "<!-- end of ops -->"
_BATCHES, _DTYPES = (128, 32), ("bf16", "tf32", "fp32")
_PASSES = {
    "fwd": "forward",
    "dgrad": "input gradient",
    "wgrad": "weight gradient",
    "fwd+bwd": "and backward",
    "step": "step",
}
_NAMES = {
    "group_norm": "GroupNorm and activation",
    "adamw": "AdamW, clip, EMA, bf16 copy",
    "q_sample": "noise",
    "denoise_loss": "loss and its gradient",
    "denoise_step": "reverse step",
}
TIMED = ("conv2d", "group_norm", "attention", "adamw", "q_sample", "denoise_step", "denoise_loss")
_LONGER = {case.shape for case in LONGER_ATTENTION}


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    rows = harness.read_rows(_csv(settings["csv"]))
    if settings["into"]:
        write_into(Path(settings["into"]), rows)
    else:
        print(format_ops(rows))
    return 0


def write_into(path: Path, rows: Sequence[Row]) -> None:
    """Replace what is between the two marks. ConfigError if they are not there."""
    harness.replace_between(path, BEGIN, END, format_ops(rows))


def format_ops(rows: Sequence[Row]) -> str:
    """Markdown: the table of sums, of which runs it is, and the rows we lose."""
    counts = _counts()
    pairs = [pair for pair in harness.ratios(rows) if pair[0].key[:4] in counts]
    groups: dict[tuple[str, str, str], dict[str, list[tuple[Row, Row]]]] = defaultdict(dict)
    for ours, best in sorted(pairs, key=_place):
        group = groups[_label(ours), ours.dtype, _batch(ours)]
        group.setdefault(ours.pass_, []).append((ours, best))
    lines = []
    for (label, dtype, batch), by_pass in groups.items():
        ratio = " / ".join(f"{_ratio_of_sums(p, counts):.2f}" for p in by_pass.values())
        won = " / ".join(f"{sum(map(_is_won, p))} of {len(p)}" for p in by_pass.values())
        passes = " / ".join(_PASSES[p] for p in by_pass)
        lines.append([label, dtype, batch, passes, ratio, won])
    header = ["op", "precision", "batch", "passes", "ratio", "shapes won"]
    blocks = [harness.format_table(header, lines), _runs([row for p in pairs for row in p])]
    lost = sorted((p for p in pairs if not _is_won(p)), key=_ratio)
    if lost:
        title = f"Every row that we lose: {len(lost)} of {len(pairs)}"
        blocks.append(f"<details>\n<summary>{title}</summary>\n\n{_lost(lost)}\n\n</details>")
    return "\n\n".join(blocks) + "\n"


def _lost(pairs: Sequence[tuple[Row, Row]]) -> str:
    lines = [
        [ours.op, ours.shape, ours.dtype, _PASSES[ours.pass_], f"{ours.median_us:.1f}",
         f"{best.median_us:.1f} {best.provider}", f"{_ratio((ours, best)):.2f}"]
        for ours, best in pairs
    ]  # fmt: skip
    header = ["op", "shape", "precision", "pass", "ours, us", "fastest other", "ratio"]
    return harness.format_table(header, lines)


def _runs(rows: Sequence[Row]) -> str:
    """From how many runs the rows are."""
    by_run: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        by_run[row.run or "without a name", row.commit] += 1
    if len(by_run) == 1:
        [(run, commit)] = by_run
        return f"All {len(rows)} rows behind this table are of one run, {run}, of commit {commit}."
    [((run, commit), most), *_] = sorted(by_run.items(), key=lambda item: -item[1])
    return (
        f"Of the {len(rows)} rows behind this table {most} are of one run ({run}, commit {commit}),"
        f" the others of {len(by_run) - 1} more."
    )


@lru_cache(maxsize=1)
def _counts() -> dict[tuple[str, ...], int]:
    """Calls in a training step of unet64, by the first four fields of a row's key."""
    cases = model_cases("unet64", _BATCHES[0])
    cases += [
        (replace(case, n=batch), count)  # the network is walked once
        for batch in _BATCHES[1:]
        for case, count in cases
        if case.op != "adamw"
    ]
    counts = {}
    for case, count in [*cases, *((case, 1) for case in LONGER_ATTENTION)]:
        for dtype in _DTYPES if case.op == "conv2d" else _DTYPES[:1]:
            for e in experiments(case, count, dtype):
                counts[e.op, e.shape, e.dtype, e.pass_] = e.count
    return {key: count for key, count in counts.items() if key[3] in _PASSES}


def _csv(given: str) -> Path:
    if given:
        if not Path(given).is_file():
            raise ConfigError(f"csv={given}: there is no such file")
        return Path(given)
    found = files_of_ops()
    if len(found) != 1:
        raise ConfigError(f"csv= is needed: {harness.RESULTS} has {len(found)} files with ops")
    return found[0]


def files_of_ops() -> list[Path]:
    """The files of results that have rows of ops, and not of whole models alone."""
    files = sorted(harness.RESULTS.glob("*.csv"))
    return [path for path in files if any(row.op in TIMED for row in harness.read_rows(path))]


def _label(row: Row) -> str:
    if row.op == "conv2d":
        image, _, filters = row.shape.split()[:3]
        embedding = " of the embedding" if image.endswith("x1x1") else ""
        return f"conv2d, {filters}{embedding}"
    if row.shape in _LONGER:
        return f"attention, {row.shape.split()[0].split('x')[1]} positions"
    return _NAMES.get(row.op, row.op)


def _batch(row: Row) -> str:
    return row.shape.split("x")[0] if "x" in row.shape else "any"


def _place(pair: tuple[Row, Row]) -> tuple:
    """Where a pair stands: by op, precision, batch, pass."""
    row = pair[0]
    dtypes = (*_DTYPES, row.dtype)
    label = _label(row)
    kind = (TIMED.index(row.op), "embedding" in label, row.shape in _LONGER)
    batch = 0 if _batch(row) == "any" else -int(_batch(row))
    return (
        *kind,
        dtypes.index(row.dtype),
        label != "conv2d, 3x3",
        batch,
        [*_PASSES].index(row.pass_),
    )


def _ratio_of_sums(pairs: Sequence[tuple[Row, Row]], counts: dict) -> float:
    ours, best = (sum(counts[p[0].key[:4]] * p[i].median_us for p in pairs) for i in (0, 1))
    return best / ours


def _ratio(pair: tuple[Row, Row]) -> float:
    return pair[1].median_us / pair[0].median_us


def _is_won(pair: tuple[Row, Row]) -> bool:
    return _ratio(pair) >= 1


if __name__ == "__main__":
    harness.run_entry(main)
