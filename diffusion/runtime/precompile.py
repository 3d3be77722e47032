"""Kernels compiled by many processes, before one process needs them all.

Triton compiles a kernel when it is first launched: minutes, for the hundred and fifty of a network,
one after the other. Each of the processes here rehearses what is about to be run
(`triton_kernels.runtime.launch_recorder`, `ahead_worker`) and compiles a share into Triton's cache
on disk, once for each set of shapes, GPU and version: a file in that cache says that it has been
done. Nothing depends on it, for what has not been compiled here is compiled later.

The environment's TRITON_DIFFUSION_COMPILERS is how many processes there may be; 0: none.
"""

import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
import triton
from torch import Tensor
from tqdm import tqdm

from ..errors import ConfigError
from .host import free_memory, processors

log = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]
_LIMIT, _MOST = "TRITON_DIFFUSION_COMPILERS", 16
_LEAST = 4  # processes; fewer gain little over one that compiles on its way
_MEMORY = 3 * 2**29  # bytes of the host that a process takes, beside the network
TRAINED, DRAWN = 24, 12  # bytes that it takes for each parameter, with moments, averages and copies
_CONTEXT = 600 * 2**20  # bytes of the GPU that it takes by being there
_OF_TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def compile_ahead(
    job: str,  # of `ahead_worker.JOBS`
    settings: dict[str, Any],  # of that job, as JSON has it
    shapes: dict[str, Any],  # what kernels depend on; of a number such as 0.1 whether it is 0
    device: torch.device,
    memory: int = 0,  # bytes of the host that a rehearsal takes for parameters and the like
) -> None:
    """Compile what the job launches, if that has not been done before, and show how far it is.
    Only where Triton compiles for a GPU, and in the first process of a machine."""
    if os.environ.get("LOCAL_RANK", "0") != "0" or not _compiles(device):
        return
    count = min(_processes(memory), _free(device) // 2 // _CONTEXT)
    if count < _LEAST:
        return
    done = _done_file(job, shapes, device)
    try:
        done.parent.mkdir(parents=True, exist_ok=True)
        with done.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the jobs of a sweep may begin together
            if os.fstat(file.fileno()).st_size == 0:
                _run(job, settings, device, count)
                file.write(time.strftime("%F %T\n"))  # once, for a GPU may allow a single process
    except OSError as error:
        log.info("kernels are compiled one by one: %s", error)


def described(x: Tensor | None) -> dict[str, Any] | None:
    """Shape and dtype, as settings of a job have them."""
    return None if x is None else {"shape": list(x.shape), "dtype": str(x.dtype).split(".")[1]}


def _compiles(device: torch.device) -> bool:
    """Whether Triton makes machine code for it."""
    return device.type == "cuda" and not triton.knobs.runtime.interpret


def _processes(memory: int) -> int:
    """How many there may be, and is room for in half of the memory."""
    most = os.environ.get(_LIMIT, str(_MOST))
    if not most.isdecimal():
        raise ConfigError(f"{_LIMIT}={most} in the environment; expected a number, 0 for none")
    return min(int(most), processors(), free_memory() // 2 // (_MEMORY + memory))


def _free(device: torch.device) -> int:
    """Bytes of the GPU's memory."""
    return torch.cuda.mem_get_info(device)[0]


def _done_file(job: str, shapes: dict[str, Any], device: torch.device) -> Path:
    """The file that says that it is done, in Triton's cache, with which it goes."""
    sources = hashlib.sha256()
    for folder in ("triton_kernels", "diffusion"):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            sources.update(path.read_bytes())
    gpu = torch.cuda.get_device_name(device)
    what = [job, _rough(shapes), gpu, torch.__version__, triton.__version__, sources.hexdigest()]
    name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    return Path(triton.knobs.cache.dir) / "compiled_ahead" / name


def _rough(settings: Any) -> Any:
    """Without the size of numbers that have a fraction, such as a learning rate."""
    if isinstance(settings, dict):
        return {key: _rough(value) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [_rough(value) for value in settings]
    return settings != 0 if isinstance(settings, float) else settings


def _run(job: str, settings: dict[str, Any], device: torch.device, count: int) -> None:
    began = time.monotonic()
    tqdm.write(f"compiling kernels with {count} processes, once for these shapes")
    worker = "diffusion.runs.precompile_worker"
    command = [sys.executable, "-m", worker, job, str(device.index or 0)]
    processes = []
    # None: shown on a terminal only
    bar = tqdm(total=0, unit="kernel", dynamic_ncols=True, disable=None, leave=False)
    with tempfile.TemporaryFile("w+") as errors, bar:
        try:
            for part in range(count):
                processes.append(_start([*command, str(part), str(count)], settings, errors))
            lock = threading.Lock()
            with ThreadPoolExecutor(count) as threads:
                done = threads.map(lambda process: _follow(process.stdout, bar, lock), processes)
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
        errors.seek(0)
        said = errors.read().strip()
    tqdm.write(f"{sum(done)} kernels in {time.monotonic() - began:.0f} s")
    if any(codes):
        log.warning("a process that compiles failed; the rest is compiled later: %s", said[-2000:])


def _start(command: list[str], settings: dict[str, Any], errors: IO[str]) -> subprocess.Popen:
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    alone = {key: value for key, value in os.environ.items() if key not in _OF_TORCHRUN}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=alone | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    with suppress(BrokenPipeError), process.stdin as stdin:  # it has failed, and says why
        json.dump(settings, stdin)
    return process


def _follow(lines: IO[str], bar: tqdm, lock: threading.Lock) -> int:
    """A process says how many kernels it has to compile, and a line for each that it has; returns
    the latter's number."""
    done = 0
    for line in lines:
        with lock:
            if not line.strip():
                bar.update()
                done += 1
            elif line.strip().isdecimal():  # or what a library has to say
                bar.total += int(line)
                bar.refresh()
    return done
