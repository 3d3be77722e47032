"""Measured rows: which kernel, in which configuration, was the fastest for a shape.

A row is a line of JSON:

    {"op": "conv_forward", "n": 32, "h": 64, "w": 64, "k": 64, ..., "dtype": "bf16",
     "kernel": "stationary_weights", "config": {"block_m": 128}}

Rows belong to an architecture and a number of multiprocessors (`sm_90-132.jsonl`), which an H100
and an H200 share. The package's rows are in `measured/`. A user's rows, written by `search`, are in
a cache for one GPU and one version of torch and triton; they take precedence.
"""

import fcntl
import json
import logging
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

from ..runtime import device
from ..runtime.device import Device

_SHIPPED = Path(__file__).parents[1] / "measured"

Shape = tuple[tuple[str, Any], ...]
Found = dict[str, Any]  # {"kernel": name, "config": {...}, "at": "file:line"}
Table = dict[str, dict[Shape, dict[int, Found]]]  # by op, shape and batch

_log = logging.getLogger(__name__)


def file_name(gpu: Device) -> str:
    """Of the rows that hold for a GPU."""
    return f"sm_{gpu.arch}-{gpu.num_sms}.jsonl"


def cache_path(gpu: Device) -> Path:
    """Where the user's measurements are kept."""
    home = os.path.expanduser("~")  # "~" if there is none, where Path.home() raises
    root = os.environ.get("TRITON_DIFFUSION_CACHE", f"{home}/.cache/triton_diffusion")
    versions = f"torch{torch.__version__.split('+')[0]}-triton{triton.__version__}"
    return Path(root) / f"{Path(file_name(gpu)).stem}-{versions}.jsonl"


@lru_cache
def table(gpu: Device) -> Table:
    """Of a GPU; without rows if nobody has measured on one with such a chip."""
    found: Table = defaultdict(lambda: defaultdict(dict))
    if gpu.arch == 0:  # the interpreter
        return found
    ops = {name.split("/")[0] for name in device.kernels if "/" in name}
    for path in (_SHIPPED / file_name(gpu), cache_path(gpu)):
        for at, row in _lines(path):
            op, n, kernel, config = (row.pop(name) for name in _FIELDS)
            if op in ops:
                found[op][shape_of(row)][n] = {"kernel": kernel, "config": config, "at": at}
            else:
                warn(at, f"op is {op!r}; there are {', '.join(sorted(ops))}")
    return found


def shape_of(fields: dict[str, Any]) -> Shape:
    """What a measurement depends on, by name: alike whatever the order it is given in."""
    return tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(fields.items()))


def unmeasured(gpu: Device, op: str, n: int, shape: dict[str, Any]) -> bool:
    """Whether nobody has measured this shape at this batch on a GPU with such a chip."""
    return n not in table(gpu).get(op, {}).get(shape_of(shape), {})


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none if there is no such file. A line that is no row is named in the log
    and left out, and so is a file that cannot be read: kernels run without them."""
    return [row for _, row in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row, and where it stands."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        warn(str(path), repr(error))
        return
    for number, line in enumerate(lines, 1):
        at = f"{path}:{number}"
        if line:
            try:
                row = json.loads(line)
            except ValueError as error:
                warn(at, f"{line[:80]!r} is no JSON: {error}")
                continue
            wrong = _malformed(row)
            if wrong is None:
                yield at, row
            else:
                warn(at, wrong)


def _malformed(row: Any) -> str | None:
    """What no row may be, whatever its op."""
    if not isinstance(row, dict):
        return f"{row!r} is no object with the fields {', '.join(_FIELDS)} and those of its op"
    for name, (is_right, expected) in _FIELDS.items():
        if name not in row:
            return f"it has no {name}; expected {expected}"
        if not is_right(row[name]):
            return f"{name} is {row[name]!r}; expected {expected}"
    return None


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "op": (lambda op: isinstance(op, str), "the name of an op"),
    "n": (lambda n: type(n) is int and n >= 0, "a batch, at least 0"),
    "kernel": (lambda name: isinstance(name, str), "the name of a kernel"),
    "config": (lambda config: isinstance(config, dict), "the fields of its configuration"),
}


@cache
def warn(at: str, wrong: str) -> None:
    """Say once what is wrong with a row, or with a file of rows."""
    _log.warning("%s: this measurement is not used: %s", at, wrong)


def save(rows: list[dict[str, Any]], path: Path) -> None:
    """Add rows to a file, which is whole at any time, whoever else adds to it; a row of the same op
    and shape is replaced. Raises OSError where that cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # until it is closed
        by_shape = {_identity(row): row for row in [*read(path), *rows]}
        lines = sorted(json.dumps(row) for row in by_shape.values())
        with tempfile.TemporaryDirectory(dir=path.parent) as aside:
            new = Path(aside) / path.name
            new.write_text("".join(f"{line}\n" for line in lines))
            new.replace(path)
    finally:
        os.close(folder)
    table.cache_clear()


def described(row: dict[str, Any]) -> str:
    """A row as one line, without its time."""
    return " ".join(f"{key}={value}" for key, value in row.items() if key != "us")


def _identity(row: dict[str, Any]) -> str:
    shape = {k: v for k, v in row.items() if k not in ("kernel", "config")}
    return json.dumps(shape, sort_keys=True)
