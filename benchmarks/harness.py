"""The one harness: settings from the command line, rows of the CSV, checks of results. `stopwatch`
has what times."""

import csv
import difflib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import triton
from torch import Tensor

from benchmarks.stopwatch import STEADY
from diffusion.errors import ConfigError
from triton_kernels.registry.chips import CHIPS
from triton_kernels.runtime.cache_keys import settle_cache_folder
from triton_kernels.runtime.device import describe, is_rehearsal

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "benchmarks"
OURS = "triton"  # the provider that the others are compared with
LEAST = "least_copy"  # the op of a row on `Experiment.least`


class Rates(NamedTuple):
    """What a large copy and a large product reach, in `registry.chips`."""

    copies: float | None  # TB/s read and written; here and below None: nobody has measured it
    products: float | None  # TFLOP/s of 16 bits


def rates_of(gpu: str) -> Rates:
    """Those of a GPU by its name, such as nvidia-h200."""
    for name, chip in CHIPS.items():
        if chip.measured and name in gpu.split("-"):
            return Rates(chip.copies / 1e12, chip.products / 1e12)
    return Rates(None, None)


# --- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One measurement. Times are of one call, in microseconds; bytes and flops are what one call
    cannot do without."""

    op: str
    shape: str
    dtype: str
    pass_: str
    provider: str
    median_us: float
    p20_us: float
    p80_us: float
    bytes: int
    flops: int
    gpu: str
    torch: str
    triton: str
    commit: str
    run: str = ""  # rows with the same were measured in one run; empty: before runs had names

    @property
    def is_steady(self) -> bool:
        """Whether its replays took about as long as each other."""
        return self.p80_us <= STEADY * self.p20_us

    @property
    def key(self) -> tuple[str, ...]:
        """What a later measurement replaces."""
        return self.op, self.shape, self.dtype, self.pass_, self.provider, self.gpu

    @property
    def is_ours(self) -> bool:
        return self.provider.split("-")[0] == OURS

    @property
    def tflops(self) -> float:
        """TFLOP/s."""
        return self.flops / self.median_us / 1e6

    @property
    def tbytes(self) -> float:
        """TB/s."""
        return self.bytes / self.median_us / 1e6


COLUMNS = [field.name.rstrip("_") for field in fields(Row)]


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file, of which older ones have no `run`; none if there is no file.
    ConfigError if its columns are others."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames not in (COLUMNS, COLUMNS[:-1]):
            raise ConfigError(
                f"{path} has columns {','.join(reader.fieldnames or [])}; expected"
                f" {','.join(COLUMNS)}"
            )
        return [
            Row(*(field.type(record.get(field.name.rstrip("_"), "")) for field in fields(Row)))
            for record in reader
        ]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write aside and rename, so that a run that is killed leaves the old file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    with aside.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            values = (getattr(row, field.name) for field in fields(Row))
            writer.writerow(f"{v:.3f}" if isinstance(v, float) else v for v in values)
    aside.replace(path)


def merge_rows(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """All rows, a new one in the place of the old one with the same key."""
    merged = {row.key: row for row in old}
    merged.update((row.key, row) for row in new)
    return list(merged.values())


def add_rows(path: Path, rows: Sequence[Row]) -> None:
    """Merge `rows` into the CSV file."""
    write_rows(path, merge_rows(read_rows(path), rows))


def ratios(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """(ours, the fastest of the others) for every measurement that has both."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.shape, row.dtype, row.pass_, row.gpu), []).append(row)
    pairs = []
    for group in groups.values():
        ours = [row for row in group if row.is_ours]
        others = [row for row in group if not row.is_ours]
        if ours and others:
            pairs.append((min(ours, key=_time), min(others, key=_time)))
    return pairs


def _time(row: Row) -> float:
    return row.median_us


def format_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns of even width, numbers to the right."""
    cells = [list(header), *(list(line) for line in lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    numeric = [all(line[i][:1] in "-0123456789" for line in cells[1:]) for i in range(len(header))]

    def show(line: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        )
        return f"| {' | '.join(aligned)} |"

    rule = "|".join(
        "-" * (w + 1) + (":" if right else "-") for w, right in zip(widths, numeric, strict=True)
    )
    return "\n".join([show(cells[0]), f"|{rule}|", *map(show, cells[1:])])


# --- where and with what --------------------------------------------------------------------------


class Provenance(NamedTuple):
    """The last columns of a row."""

    gpu: str
    torch: str
    triton: str
    commit: str
    run: str = ""


_STARTED = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def provenance() -> Provenance:
    """Of this process; the commit comes from git, or from the variable BENCHMARK_COMMIT where the
    sources lie outside of their repository. The run is named after the time when this process
    started, unless the variable BENCHMARK_RUN names one that several processes belong to."""
    name = gpu_name() if torch.cuda.is_available() else "cpu"
    run = os.environ.get("BENCHMARK_RUN") or _STARTED
    return Provenance(slug(name), torch.__version__, triton.__version__, _commit(), run)


def replace_between(path: Path, begin: str, end: str, lines: str) -> None:
    """Put `lines` between the two marks of a page. ConfigError if they are not there."""
    text = path.read_text()
    first, last = text.find(begin), text.find(end)
    if not 0 <= first < last:
        raise ConfigError(f"{path} has no line {begin} before a line {end}")
    path.write_text(f"{text[:first]}{begin}\n{lines}\n{text[last:]}")


def gpu_name() -> str:
    """That of the GPU; sm_80-on-NAME within `tests.kernels.other_chip`, whose times are others."""
    name = torch.cuda.get_device_name()
    major, minor = torch.cuda.get_device_capability()
    arch = describe(torch.device("cuda")).arch
    return name if arch == 10 * major + minor else f"sm_{arch}-on-{name}"


def slug(gpu_name: str) -> str:
    """ "NVIDIA H200" -> "nvidia-h200"."""
    return "-".join(gpu_name.lower().replace("/", " ").split())


def _commit() -> str:
    if given := os.environ.get("BENCHMARK_COMMIT"):
        return given

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def require_cuda() -> torch.device:
    """The GPU, or a ConfigError."""
    if not torch.cuda.is_available():
        raise ConfigError("benchmarks need a CUDA device, and PyTorch sees none")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError("TRITON_INTERPRET=1 is set; the interpreter is not worth timing")
    return torch.device("cuda", torch.cuda.current_device())


def set_precision(dtype: str) -> None:
    """PyTorch's switches for a measurement in bf16, fp16, tf32 or fp32."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = dtype != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = dtype != "fp32"


# --- settings -------------------------------------------------------------------------------------


def parse_settings(arguments: Sequence[str], defaults: dict[str, Any]) -> dict[str, Any]:
    """`key=value` arguments over `defaults`, whose types they take; tuples are a,b,c.

    Raises ConfigError for an unknown key, naming the nearest, and for a value of another type.
    """
    settings = dict(defaults)
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument} is not of the form key=value; keys: {_listed(defaults)}")
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{key} is unknown; {hint}keys: {_listed(defaults)}")
        settings[key] = _convert(key, text, defaults[key])
    return settings


def check_choice(key: str, value: str, valid: Sequence[str]) -> None:
    """Raise ConfigError unless `value` is one of `valid`."""
    if value not in valid:
        raise ConfigError(f"{key}={value} is unknown; choose from {', '.join(valid)}")


def _convert(key: str, text: str, default: Any) -> Any:
    if isinstance(default, tuple):
        kind = int if default and isinstance(default[0], int) else str
        return tuple(_number(key, part, kind) for part in text.split(",") if part)
    return _number(key, text, type(default))


def _number(key: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        what = {int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"{key}={text} is not {what}") from None


def _listed(defaults: dict[str, Any]) -> str:
    def show(value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    return ", ".join(f"{key}={show(value)}" for key, value in defaults.items())


def run_entry(main: Callable[[list[str]], int]) -> NoReturn:
    """Run an entry point; what the user gave wrong becomes one line and exit code 2. --help prints
    what the module of `main` says of itself."""
    if {"--help", "-h"} & set(sys.argv):
        print(sys.modules[main.__module__].__doc__)
        sys.exit()
    settle_cache_folder()
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


# --- checks ---------------------------------------------------------------------------------------


class WrongResult(Exception):
    """A result is too far from the reference; nothing is timed."""


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in Euclidean norms; infinite for a NaN or another shape."""
    if got.shape != want.shape:
        return float("inf")
    got, want = got.detach().to(want.dtype), want.detach()
    error = (got - want).norm(dtype=torch.float64)
    scale = want.norm(dtype=torch.float64).clamp_min(1e-30)
    value = (error / scale).item()
    return value if value == value else float("inf")


def budgets(low: Sequence[Tensor], exact: Sequence[Tensor], floor: float = 1e-5) -> list[float]:
    """What each output may be off: twice the error of the reference at the same precision."""
    return [2 * relative_error(a, b) + floor for a, b in zip(low, exact, strict=True)]


def check(got: Sequence[Tensor], exact: Sequence[Tensor], budget: Sequence[float]) -> None:
    """Raise WrongResult if an output is off by more than its budget."""
    if len(got) != len(exact):
        raise WrongResult(f"{len(got)} outputs; expected {len(exact)}")
    for i, (a, b, limit) in enumerate(zip(got, exact, budget, strict=True)):
        error = relative_error(a, b)
        if error > limit:
            raise WrongResult(f"output {i} is off by {error:.1e}; the budget is {limit:.1e}")


def poison_free_memory(size: int, device: torch.device) -> None:
    """Fill memory that the next allocations are likely to get with NaN, so that an element which
    no program writes does not look right by chance."""
    blocks = [torch.full((size // 4,), torch.nan, device=device) for _ in range(2)]
    del blocks


def is_unwritten(device: torch.device) -> bool:
    """Whether what is on this device stands for what is on a GPU. Within `tests.kernels.other_chip`
    a GPU stands for another, and computes."""
    return is_rehearsal() and device.type == "cpu"


def drawn(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers; in a dry run memory that nobody writes."""
    if is_unwritten(device):
        return torch.empty(shape, device=device, dtype=dtype)
    return torch.randn(shape, device=device).to(dtype)


def drawn_filters(
    device: torch.device, c: int, r: int, s: int, k: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[C, K, R, S] in channels_last memory, of which a product is as large as what it is of."""
    weight = drawn(device, c, r, s, k, dtype=dtype)
    weight = weight if is_unwritten(device) else weight / math.sqrt(r * s * k)
    return weight.permute(0, 3, 1, 2)


def reason(error: BaseException) -> str:
    """One line on what began it all: ending a capture that has failed raises once more."""
    while error.__context__ is not None:
        error = error.__context__
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}"
