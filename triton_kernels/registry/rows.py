"""Measured rows: which kernel, in which configuration, was the fastest for a shape.

A row is a line of JSON:

    {"op": "conv_forward", "n": 32, "h": 64, "w": 64, "k": 64, ..., "dtype": "bf16",
     "kernel": "tile_mma", "config": {"block_m": 256, "filters_with_pixels": false}}

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
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

from ..runtime.device import Device

_SHIPPED = Path(__file__).parents[1] / "measured"

Shape = tuple[tuple[str, Any], ...]
Found = dict[str, Any]  # {"kernel": name, "config": {...}}
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
    for path in (_SHIPPED / file_name(gpu), cache_path(gpu)):
        for row in read(path):
            kept = {key: row.pop(key) for key in ("kernel", "config")}
            op, n = row.pop("op"), row.pop("n")
            found[op][shape_of(row)][n] = kept
    return found


def shape_of(fields: dict[str, Any]) -> Shape:
    """What a measurement depends on, by name: alike whatever the order it is given in."""
    return tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(fields.items()))


def unmeasured(gpu: Device, op: str, n: int, shape: dict[str, Any]) -> bool:
    """Whether nobody has measured this shape at this batch on a GPU with such a chip."""
    return n not in table(gpu).get(op, {}).get(shape_of(shape), {})


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none if there is no such file. One that cannot be read counts as none as
    well: kernels run without it."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line]
        for row in rows:
            if not (
                isinstance(row["op"], str)
                and isinstance(row["n"], int)
                and row["n"] >= 0
                and isinstance(row["kernel"], str)
                and isinstance(row["config"], dict)
            ):
                raise ValueError(f"{row} is no measurement")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        _log.warning("%s is not a table of measurements and is ignored: %r", path, error)
        return []
    return rows


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
