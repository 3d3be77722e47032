"""What this machine has and which kernels run on it: a page to read, and a JSON file to send in.

Each part that fails says why, and the others go on: this is asked where something is wrong.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import triton

from triton_kernels import canary
from triton_kernels.registry import rows
from triton_kernels.runtime.device import describe, switched_off

from .. import __version__
from ..errors import ConfigError, counted, writing
from ..presets import preset
from ..runtime.distributed import choose_device
from ..runtime.host import free_memory, processors
from ..runtime.precompile import compile_ahead
from ..settings import construct
from ..training.train_step import TrainStep
from .precompile_worker import training_step

_PACKAGES = ("triton-diffusion", "numpy", "hydra-core", "safetensors", "diffusers")
_VARIABLES = ("TRITON_", "CUDA_", "TORCH_", "OMP_", "PYTORCH_", "NVIDIA_")  # that matter
_WARM_UP, _STEPS = 5, 10  # the first steps compile and capture


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """The configuration; see configs/doctor.yaml."""

    step: bool = True
    compile: bool = False
    batch: int = 32
    out: str | None = "doctor.json"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch={self.batch}; expected at least 1")


def doctor(config: dict[str, Any]) -> dict[str, Any]:
    """Look, print and write. Returns what is in the file; ConfigError: it cannot be written."""
    settings = construct(DoctorSettings, config, "")
    device = choose_device(settings.device)
    parts: dict[str, Callable[[], Any]] = {
        "software": _software,
        "host": _host,
        "gpu": lambda: _gpu(device),
        "kernels": lambda: _kernels(device),
    }
    if settings.step:
        parts["step"] = lambda: _step(settings, device)
    report: dict[str, Any] = {}
    for name, look in parts.items():
        try:
            report[name] = look()
        except Exception as error:  # whatever is wrong is what somebody wants to know
            first = next(iter(str(error).strip().splitlines()), "")
            report[name] = {"failed": f"{type(error).__name__}: {first}"}
        print("\n".join(_lines(name, report[name])), flush=True)
    if settings.out is not None:
        path = Path(settings.out)
        with writing(path):
            path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"attach {path} to a report of a fault")
    return report


def _software() -> dict[str, Any]:
    found = {
        "this code": __version__,
        "its commit": _commit(),
        "python": platform.python_version(),
    }
    found |= {"torch": torch.__version__}
    found |= {"cuda of torch": torch.version.cuda, "triton": triton.__version__}
    found["driver"] = _driver()
    for package in _PACKAGES:
        label = "installed triton-diffusion" if package == "triton-diffusion" else package
        try:
            found[label] = version(package)
        except PackageNotFoundError:
            found[label] = None
    return found


def _commit() -> str | None:
    return _said("git", "-C", str(Path(__file__).parents[2]), "rev-parse", "--short", "HEAD")


def _driver() -> str | None:
    return _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _said(*command: str) -> str | None:
    """The first line of a program's output; None if there is no such program, or it fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return done.stdout.strip().partition("\n")[0] or None if done.returncode == 0 else None


def _host() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processors": processors(),
        "load": round(os.getloadavg()[0], 1),
        "free memory, GB": round(free_memory() / 2**30, 1),
        "threads of torch": torch.get_num_threads(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }


def _gpu(device: torch.device) -> dict[str, Any] | str:
    if device.type != "cuda":
        return "PyTorch sees none; backend=torch computes everything, on this CPU"
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": properties.name,
        "number of them": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "shared memory of a program, KB": properties.shared_memory_per_block_optin // 1024,
        "L2, MB": properties.L2_cache_size // 2**20,
        "memory, GB": round(total / 2**30, 1),
        "free memory, GB": round(free / 2**30, 1),
    }


def _kernels(device: torch.device) -> dict[str, Any] | str:
    if device.type != "cuda":
        return "they need a GPU: not tried"
    began = time.perf_counter()
    canary.kernels_off(device)  # raises if none is right
    seconds = time.perf_counter() - began
    gpu, off = describe(device), switched_off()
    families: dict[str, str] = {}
    for family, what in canary.KERNELS.items():
        has = getattr(gpu, family) or family in off
        families[what] = f"off: {off[family]}" if family in off else "on" if has else "not for it"
    table = rows.table(gpu)
    return {
        **families,
        "tried in, seconds": round(seconds, 2),
        "rows of measurements": sum(len(n) for shapes in table.values() for n in shapes.values()),
        "rows of the user": len(rows.read(rows.cache_path(gpu))),
        "file of rows": rows.file_name(gpu),
    }


def _step(settings: DoctorSettings, device: torch.device) -> dict[str, Any]:
    """A training step in milliseconds, of unet64 on a GPU."""
    on_gpu = device.type == "cuda"
    name = "unet64" if on_gpu else "unet_tiny"
    side, batch = (64, settings.batch) if on_gpu else (32, min(settings.batch, 8))
    job = {
        "model": preset("model", name),
        "diffusion": {},
        "optim": {},
        "train": {"batch_size": batch, "precision": "bf16" if on_gpu else "fp32"},
        "images": {"shape": [2 * batch, side, side, 3], "dtype": "uint8"},
        "labels": None,
        "flip": True,
    }
    found: dict[str, Any] = {"of": f"{name}, {counted(batch, 'images')} of {side}x{side}"}
    if on_gpu:
        step = training_step(job, device)
        compile_ahead("train", job, job, device)
        found["ours, ms"] = _milliseconds(step, device)
        found["gradient is finite"] = bool(step.norm.isfinite().item())
        step.release()
    if settings.compile or not on_gpu:
        step = training_step(job, device, "torch")
        if settings.compile:
            step.network = torch.compile(step.network, dynamic=False)
        how = "torch.compile of the layers" if settings.compile else "PyTorch's layers"
        found[f"{how}, ms"] = _milliseconds(step, device)
    return found


def _milliseconds(step: TrainStep, device: torch.device) -> float:
    times = []
    for k in range(_WARM_UP + _STEPS):
        began = time.perf_counter()
        step(k)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(times[_WARM_UP:]), 2)


def _lines(name: str, found: Any) -> list[str]:
    if not isinstance(found, dict):
        return [f"{name}: {found}"]
    lines = [f"{name}:"]
    for key, value in found.items():
        if isinstance(value, dict):
            value = " ".join(f"{k}={v}" for k, v in value.items()) or "nothing"
        lines.append(f"  {key}: {'none' if value is None else value}")
    return lines
