"""What a run was trained with: versions, commit, hardware; environment.json in its folder."""

import functools
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..runtime.host import free_memory, processors
from .run_log import write_whole

FILE = "environment.json"
_PACKAGES = ("torch", "triton", "numpy", "safetensors")
_SOURCE = Path(__file__).resolve().parents[2]
_NOT_COMPARED = ("time", "from_step", "host")  # where and when, and not what with


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """As plain data: versions of Python and packages, the commit of a checkout and whether it has
    changes, the device, the host."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))}
        | {"triton-diffusion": __version__},  # of the code that runs, not of what is installed
        **_commit(),
        "device": str(device.type),
        "processes": processes,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": processors(),
        "memory_gib": round(_memory() / 2**30, 1),
        "host": platform.node(),
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": gpu.name,
            "gpu_capability": f"{gpu.major}.{gpu.minor}",
            "gpu_processors": gpu.multi_processor_count,
            "gpu_memory_gib": round(gpu.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return found


def note_environment(run_dir: Path, step: int, found: dict[str, Any]) -> dict[str, tuple]:
    """Write it down as that from `step` on; what the run went on with before stays above it.
    Returns what has changed, as (then, now), by name."""
    path = run_dir / FILE
    before = [entry for entry in read_environments(run_dir) if step and entry["from_step"] < step]
    last = before[-1] if before else {}
    changed = {
        key: (last.get(key), found.get(key))
        for key in {**last, **found}
        if last and last.get(key) != found.get(key) and key not in _NOT_COMPARED
    }
    if not last or changed:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        entries = [*before, {"from_step": step, "time": stamp, **found}]
        write_whole(path, json.dumps(entries, indent=2) + "\n")
    return changed


def read_environments(run_dir: Path) -> list[dict[str, Any]]:
    """What `note_environment` wrote; [] if there is none, or it cannot be read."""
    try:
        entries = json.loads((run_dir / FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(entries, list):
        return []
    return [e for e in entries if isinstance(e, dict) and isinstance(e.get("from_step"), int)]


def _version(package: str) -> str | None:
    module = sys.modules.get(package)
    found = getattr(module, "__version__", None)  # says +cpu, +cu128 or git's commit where it is
    try:
        return str(found or version(package))
    except PackageNotFoundError:
        return None


@functools.cache
def _commit() -> dict[str, Any]:
    """Of the checkout that the package is in; {} where it is installed, or there is no git."""
    if not (_SOURCE / ".git").exists():
        return {}
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(_git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_SOURCE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return free_memory()
