"""Kernels compiled by many processes, before one process needs them all.

Triton compiles a kernel when it is first launched: minutes, for the hundred and fifty of a network,
one after the other. A worker (`diffusion.runs.precompile_worker`) rehearses what is about to be run
and compiles it into Triton's cache on disk by copies of itself, as many as there are processors:
once for each set of shapes, GPU and version, which a file in that cache says. This process waits
for what it needs at once, and shows how far it is; the worker goes on with what is needed later.
Nothing depends on it, for what has not been compiled here is compiled when it is launched.

The environment's TRITON_DIFFUSION_COMPILERS is how many processes there may be; 0: none.
"""

import atexit
import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
import triton
from torch import Tensor
from tqdm import tqdm

from triton_kernels.runtime.device import describe
from triton_kernels.runtime.launch_file import write_launches
from triton_kernels.runtime.launch_recorder import Launch, compiled_for

from ..errors import ConfigError, counted
from .host import free_memory, processors

log = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]
_LIMIT, _MOST = "TRITON_DIFFUSION_COMPILERS", 16
_FEWEST = 8  # launches for which the worker, which imports for seconds, is worth it
_LEAST = 4  # processes; fewer gain little over one that compiles on its way
_MEMORY = 2**30  # bytes of the host that a process takes to compile
DRAWN = 12  # bytes that the worker takes for each parameter that it reads; of a step it reads none
_SILENT = 10.0  # seconds between two lines, where no bar is shown
_OF_TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


_waiting: "_Worker | None" = None  # for its order


def prepare(device: torch.device) -> None:
    """Start the worker, which imports for seconds what it needs, where nothing has been compiled
    for this GPU and these versions: `compile_ahead` will then want it."""
    global _waiting
    if _waiting is None and _may_compile(device) and _processes(0) >= _LEAST:
        folder, versions = _folder(), _versions(device)
        if not any(folder.glob(f"{versions}-*")):
            _waiting = _Worker()


def compile_ahead(
    job: str,  # of `precompile_worker.JOBS`
    settings: dict[str, Any],  # of that job, as JSON has it
    shapes: dict[str, Any],  # what kernels depend on; of a number such as 0.1 whether it is 0
    device: torch.device,
    memory: int = 0,  # bytes of the host that a rehearsal takes for parameters and the like
) -> None:
    """Compile what the job launches, if that has not been done before, and show how far it is.
    Only where Triton compiles for a GPU, and in the first process of a machine."""
    with compiling_ahead(job, settings, shapes, device, memory):
        pass


@contextmanager
def compiling_ahead(
    job: str,
    settings: dict[str, Any],
    shapes: dict[str, Any],
    device: torch.device,
    memory: int = 0,
) -> Iterator[None]:
    """As `compile_ahead`, while the block runs, which may switch kernels off; behind it all that is
    needed at once is compiled. An exception in the block ends the compiling."""
    with ExitStack() as stack:
        order = None
        if _may_compile(device) and (count := _processes(memory)) >= _LEAST:
            done = _done_file(job, shapes, device)
            try:
                done.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(done.open("a+"))
                fcntl.flock(file, fcntl.LOCK_EX)  # the jobs of a sweep may begin together
                if os.fstat(file.fileno()).st_size == 0:
                    order = _Order(job, settings, device, count)
                    stack.callback(order.give_up)
            except OSError as error:
                log.info("kernels are compiled at their first launch, one at a time: %s", error)
        yield
        if order is not None:
            order.follow()
            with suppress(OSError):  # the disk is full: it is compiled already, and looked up again
                file.write(time.strftime("%F %T\n"))  # once, whatever came of it
                file.flush()


def compiles_ahead(device: torch.device) -> bool:
    """Whether this process compiles for it before kernels are launched, and may do so now."""
    may = _may_compile(device) and _processes(0) >= _LEAST
    return may and not torch.cuda.is_current_stream_capturing()


def compile_recorded(record: Callable[[], list[Launch]], device: torch.device) -> None:
    """Compile what `record` returns, if that has not been done before and there is enough of it,
    and show how far it is, as `compile_ahead` does."""
    launches = record()
    if len(launches) < _FEWEST:
        return
    what = sorted(hashlib.sha256(repr(compiled_for(*x)).encode()).hexdigest() for x in launches)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launches"
        write_launches(launches, path)
        compile_ahead("launches", {"file": str(path)}, {"launches": what}, device)


def described(x: Tensor | None) -> dict[str, Any] | None:
    """Shape and dtype, as settings of a job have them."""
    return None if x is None else {"shape": list(x.shape), "dtype": str(x.dtype).split(".")[1]}


def _may_compile(device: torch.device) -> bool:
    """Whether Triton makes machine code for it, and this process is the machine's first."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    return first and device.type == "cuda" and not triton.knobs.runtime.interpret


def _processes(memory: int) -> int:
    """How many there may be, and is room for in half of the memory."""
    most = os.environ.get(_LIMIT, str(_MOST))
    if not most.isdecimal():
        raise ConfigError(f"{_LIMIT}={most} in the environment; expected a number, 0 for none")
    return min(int(most), processors(), (free_memory() // 2 - memory) // _MEMORY)


def _folder() -> Path:
    """Of the files that say what is done: in Triton's cache, with which they go."""
    return Path(triton.knobs.cache.dir) / "compiled_ahead"


@cache
def _versions(device: torch.device) -> str:
    """A hash of all that kernels depend on, whatever their shapes are."""
    sources = hashlib.sha256()
    for folder in ("triton_kernels", "diffusion"):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            sources.update(path.read_bytes())
    gpu = torch.cuda.get_device_name(device)
    return _hashed([gpu, torch.__version__, triton.__version__, sources.hexdigest()])


def _done_file(job: str, shapes: dict[str, Any], device: torch.device) -> Path:
    """The file that says that it is done."""
    return _folder() / f"{_versions(device)}-{_hashed([job, _rough(shapes)])}"


def _hashed(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def _rough(settings: Any) -> Any:
    """Without the size of numbers that have a fraction, such as a learning rate."""
    if isinstance(settings, dict):
        return {key: _rough(value) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [_rough(value) for value in settings]
    return settings != 0 if isinstance(settings, float) else settings


class _Order:
    """A job that a worker is compiling."""

    def __init__(
        self, job: str, settings: dict[str, Any], device: torch.device, count: int
    ) -> None:
        self._job, self._settings, self._device, self._count = job, settings, device, count
        self._began = time.monotonic()
        tqdm.write(f"compiling kernels with {counted(count, 'processes')}, once for these shapes")
        self._give()

    def _give(self) -> None:
        global _waiting
        self._worker, _waiting = _waiting or _Worker(), None
        # it may have begun before an assembler was chosen, or a family of kernels switched off
        self._environment = _of_triton()
        self._worker.order(
            {
                "job": self._job,
                "settings": self._settings,
                "gpu": tuple(describe(self._device)),
                "processes": self._count,
                "environment": self._environment,
            }
        )

    def follow(self) -> None:
        """Show how far it is until what is needed at once is compiled. If kernels have been
        switched off since it was ordered, others take their place, and it begins again."""
        if self._environment != _of_triton():
            self._worker.end()
            self._give()
        # None: shown on a terminal only
        with tqdm(total=0, unit="kernel", dynamic_ncols=True, disable=None, leave=False) as bar:
            lines = self._worker.process.stdout
            done, needed = _follow(lines, bar, self._began, self._count)
        if done < needed or needed == 0:
            said = self._worker.end()
            log.warning(
                "compiling failed; other kernels compile at their first launch: %s", said[-2000:]
            )
        tqdm.write(f"{done} kernels in {time.monotonic() - self._began:.0f} s")
        self._worker = None  # it goes on with what is needed later

    def give_up(self) -> None:
        """If nobody has followed it."""
        if self._worker is not None:
            self._worker.end()


def _of_triton() -> dict[str, str]:
    """Triton's variables of the environment, and those of the kernels."""
    return {key: value for key, value in os.environ.items() if key.startswith("TRITON_")}


class _Worker:
    """A process of `diffusion.runs.precompile_worker`. It ends with this one at the latest."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        alone = {key: value for key, value in os.environ.items() if key not in _OF_TORCHRUN}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 as long as the process
        self.process = _start(alone | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, self._errors)
        atexit.register(self.end)

    def order(self, what: dict[str, Any]) -> None:
        """Tell it what to do."""
        with suppress(BrokenPipeError), self.process.stdin as stdin:  # it has failed, and says why
            json.dump(what, stdin)

    def end(self) -> str:
        """Kill it; returns what it said on standard error."""
        atexit.unregister(self.end)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)  # it may be about to say why it failed
        self.process.kill()
        self.process.wait()
        with self._errors as errors:
            errors.seek(0)
            return errors.read().strip()


def _start(environment: dict[str, str], errors: IO[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "diffusion.runs.precompile_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
    )


def _follow(lines: IO[str], bar: tqdm, began: float, processes: int) -> tuple[int, int]:
    """The worker says in a line how many kernels there are in all, and how many of them are needed
    at once, and then the number of each that is compiled, from 0. Returns how many of the needed
    are, and how many there are of these, as soon as they are all compiled or nothing more comes."""
    done = needed = 0
    shown = began
    for line in lines:
        words = line.split()
        if not all(word.isdecimal() for word in words):  # what a library has to say
            continue
        if len(words) == 2:
            needed = bar.total = int(words[1])
            bar.refresh()
        elif len(words) == 1 and int(words[0]) < needed:
            done += 1
            bar.update()
            now = time.monotonic()
            if bar.disable and now - shown > _SILENT:
                left = (now - began) / done * (needed - done)
                # the first of each process says little: they begin together
                about = f", about {left:.0f} s left" if done > processes else ""
                tqdm.write(f"{done} of {needed} kernels compiled{about}")
                shown = now
        if done == needed > 0:
            break
    return done, needed
