"""The jobs of a sweep: the folder of each, what came of it, the GPU it takes, and a search goes on.

Hydra makes one `Jobs` a sweep (`hydra.callbacks` in the files of the configuration) and hands it to
whatever launcher runs the jobs: in this process, in those of joblib, in jobs of Slurm. A job whose
settings are wrong, that diverges or that raises is a row of the sweep that failed; the others run.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import math
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffusion.settings import NEUTRAL

RECORD = "job.json"  # in a job's folder: its overrides, its state, why it failed
_LONGEST = 120  # characters of a folder's name before its digest
_WAIT = 0.2  # seconds between looks at jobs that save before they stop


class JobFailed(Exception):
    """A job of a sweep failed for a reason that is one line."""


class JobStopped(Exception):
    """A job of a sweep was interrupted, after saving, in a process of a launcher."""


class Jobs(Callback):
    """What Hydra calls at the beginning and the end of a sweep and of each of its jobs. It is
    pickled into the processes of a launcher, so what is set before the jobs start is there too."""

    def __init__(self, swept: Sequence[str] = ()) -> None:
        self.swept = list(swept)
        self.sweep = ""  # of which sweep the records are; "": not in a sweep
        self.folder = Path()
        self.pid = os.getpid()  # of the process that the user started
        self.gpus: list[str] = []  # one for each process of the launcher, as far as they go
        self.better: Callable[[list], tuple] | None = None  # of results; None: not a search

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Before the sweeper is made, in the process that the user started."""
        global _running
        hydra = config.hydra
        self.sweep, self.folder = uuid.uuid4().hex, Path(str(hydra.sweep.dir))
        given = [*hydra.overrides.task]
        given += [f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()]
        parsed = OverridesParser.create().parse_overrides(given)
        self.swept = [o.get_key_element() for o in parsed if o.is_sweep_override()]
        listed = ",".join(f"'{key}'" for key in self.swept)
        hydra.overrides.hydra.append(f"hydra.callbacks.jobs.swept=[{listed}]")
        if str(hydra.launcher._target_).endswith(".JoblibLauncher"):
            self._spread(config)
        if str(hydra.sweeper._target_).endswith(".OptunaSweeper"):
            self._search(config, given)
        _running = self

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """In the process of the job, before it runs."""
        global _running
        if not self.sweep:
            return
        _running = self
        gpu = _claim_gpu(self.gpus) if str(config.get("device")) in ("auto", "cuda") else None
        self._record(config, "running", pid=os.getpid(), host=socket.gethostname(), gpu=gpu)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """In the process of the job. What failed returns nothing, so that sweepers go on; Optuna's
        counts a trial without a value as failed."""
        if not self.sweep:
            return
        error = job_return._return_value if job_return.status == JobStatus.FAILED else None
        loss = None if error else job_return._return_value
        if isinstance(error, JobStopped):
            self._record(config, "stopped", error=str(error))
        elif error is not None:
            if not isinstance(error, JobFailed):
                traceback.print_exception(error)
            name = "" if isinstance(error, JobFailed) else f"{type(error).__name__}: "
            self._failed(config, f"{name}{' '.join(str(error).split())}")
        elif isinstance(loss, float) and not math.isfinite(loss):
            self._failed(config, f"training has diverged: its loss is {loss} at the end")
        else:
            self._record(config, "done", loss=loss)
            return
        job_return.status, job_return.return_value = JobStatus.COMPLETED, None

    def failures(self) -> Iterator[tuple[str, str]]:
        """(folder, reason) of the jobs of this sweep that did not end well."""
        for path, job in sorted(_records(self.folder)):
            if job.get("sweep") == self.sweep and job["state"] != "done":
                reason = job.get("error") or "its process ended before the job did"
                yield str(path.parent), reason

    def best(self) -> str | None:
        """Of a search: the result and the folder of the best of all jobs in its folder, in a line.
        None: not a search for one figure, none is done, or another process says it."""
        if not self.sweep or self.better is None or os.environ.get("RANK", "0") != "0":
            return None
        done = [(job["loss"], path) for path, job in _records(self.folder) if _has_result(job)]
        if not done:
            return None
        result, path = self.better(done)
        return f"best of {len(done)} jobs: {result:.6g}, {path.parent}"

    def _failed(self, config: DictConfig, reason: str) -> None:
        folder = self._record(config, "failed", error=reason)
        print(f"failed: {folder}: {reason}", file=sys.stderr, flush=True)

    def _record(self, config: DictConfig, state: str, **more: Any) -> Path:
        folder = Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir)
        job = {
            "sweep": self.sweep,
            "number": config.hydra.job.num,
            "overrides": [*config.hydra.overrides.task],
            "state": state,
            **more,
        }
        if state == "running":
            job["settings"] = _settings(config)
        else:
            job = _read(folder / RECORD) | job
        partial = folder / f".writing_{RECORD}"
        if os.environ.get("RANK", "0") != "0":  # of several processes that train together
            return folder
        with contextlib.suppress(OSError):  # on a full disk the job itself says so
            partial.write_text(json.dumps(job, indent=2, default=str))
            os.replace(partial, folder / RECORD)
        return folder

    def _spread(self, config: DictConfig) -> None:
        """Joblib's processes: one a GPU, unless the user says how many; they stop as a run does."""
        self.gpus = _visible_gpus() if str(config.get("device")) in ("auto", "cuda") else []
        asked = any(o.startswith("hydra.launcher.n_jobs=") for o in config.hydra.overrides.hydra)
        if self.gpus and not asked:
            config.hydra.launcher.n_jobs = len(self.gpus)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def _stop(self, number: int, _frame: object) -> NoReturn:
        """Let the jobs save before joblib ends their processes. A signal to the whole group has
        reached them already, and a second one of its kind ends a run at once, so each is passed on
        as the other."""
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, signal.default_int_handler)
        other = signal.SIGTERM if number == signal.SIGINT else signal.SIGINT
        print("stopping after the jobs have saved; a second signal stops at once", file=sys.stderr)
        told: set[int] = set()
        while running := {
            job["pid"]
            for _, job in _records(self.folder)
            if job.get("sweep") == self.sweep and job["state"] == "running" and _lives(job["pid"])
        }:
            for pid in running - told:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, other)
            told |= running
            time.sleep(_WAIT)
        raise KeyboardInterrupt(number)

    def _search(self, config: DictConfig, given: list[str]) -> None:
        """Optuna's search: a failed trial does not end it, and one that was interrupted goes on:
        the jobs in the folder are its first trials, of which those that are done are not run."""
        sweeper, overrides = config.hydra.sweeper, config.hydra.overrides.hydra
        if not OmegaConf.is_list(sweeper.direction):
            direction = getattr(sweeper.direction, "name", str(sweeper.direction))
            self.better = max if direction == "maximize" else min
        logging.getLogger("hydra_plugins").setLevel(logging.ERROR)  # what failed has been said
        if not any(o.startswith("hydra.sweeper.max_failure_rate=") for o in overrides):
            sweeper.max_failure_rate = 1.0
        grid = str(sweeper.sampler._target_).endswith(".GridSampler")  # goes through all anyway
        if sweeper.storage is None and not OmegaConf.is_list(sweeper.direction) and not grid:
            seed = sweeper.sampler.get("seed")
            if seed is not None:  # or the draws of the first trials would come again
                sweeper.sampler.seed = seed + sum(1 for _ in _records(self.folder))
            sweeper.study_name = sweeper.study_name or "search"
            sweeper.storage = {
                "_target_": "triton_diffusion.sweep.search_so_far",
                "folder": str(self.folder),
                "given": given,
                "study_name": sweeper.study_name,
                "direction": getattr(sweeper.direction, "name", str(sweeper.direction)),
            }


DIED = ("TerminatedWorkerError", "UncompletedJobError", "FailedJobError")  # of launchers
_running: Jobs | None = None  # the sweep of this process
_stopped = False  # in a launcher's process: the jobs that come are not to begin
_gpu_lock: Any = None  # held until this process ends
_gpu: str | None = None


def current() -> Jobs | None:
    """The sweep that this process runs, or runs a job of."""
    return _running


def goes_on_without_this_job() -> bool:
    """Whether this is a job of a sweep whose other jobs can run if it fails."""
    return _running is not None and int(os.environ.get("WORLD_SIZE", 1)) == 1


def check_not_stopped() -> None:
    """At the beginning of a job: raise JobStopped if an earlier one of this process was."""
    if _stopped:
        raise JobStopped("the sweep was stopped before it began")


def stop_job(message: str) -> None:
    """In a process of a launcher raise JobStopped; in the one that the user started, return."""
    global _stopped
    if _running is not None and os.getpid() != _running.pid:
        _stopped = True
        raise JobStopped(message)


def job_folder(overrides: Sequence[str], swept: Sequence[str]) -> str:
    """The name of a job's folder: what the sweep goes through, and where the job is told more than
    that, a digest of all of it. It depends on nothing but the job's own settings: not on its number
    and not on the order in which they are given."""
    parsed = OverridesParser.create().parse_overrides([*overrides])
    values = {o.get_key_element(): o.get_value_element_as_str() for o in parsed}
    named = {key: value for key, value in sorted(values.items()) if key in swept}
    others = {k: v for k, v in sorted(values.items()) if k not in swept and k not in NEUTRAL}
    told = "_".join(f"{key}={value}" for key, value in named.items())
    name = re.sub(r"[^\w.=+-]+", "-", told)[:_LONGEST] or "job"
    if not others and name == told:
        return name
    digest = hashlib.sha256(json.dumps([named, others]).encode()).hexdigest()
    return f"{name}-{digest[:8]}"


OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)


def search_so_far(folder: str, given: Sequence[str], study_name: str, direction: str) -> Any:
    """The storage of Optuna's study, in which the jobs of the folder wait as its first trials, in
    the order of their numbers. Those outside of the present search space are left out."""
    import optuna
    from hydra_plugins.hydra_optuna_sweeper._impl import create_params_from_overrides

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would report the study made here
    space, _ = create_params_from_overrides([*given])
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage, study_name=study_name, direction=direction)
    jobs = sorted((job for _, job in _records(Path(folder))), key=lambda job: job["number"])
    for job in jobs:
        parsed = OverridesParser.create().parse_overrides(job["overrides"])
        values = {o.get_key_element(): o.value() for o in parsed}
        params = {key: values[key] for key in space if key in values}
        if len(params) == len(space) and all(_within(space[k], v) for k, v in params.items()):
            with warnings.catch_warnings(category=optuna.exceptions.ExperimentalWarning):
                warnings.simplefilter("ignore")
                study.enqueue_trial(params)
    return storage


def _within(distribution: Any, value: Any) -> bool:
    try:
        return distribution._contains(distribution.to_internal_repr(value))
    except (TypeError, ValueError):  # no choice of a list
        return False


def _visible_gpus() -> list[str]:
    """The GPUs of this host by the names that CUDA_VISIBLE_DEVICES takes."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def _claim_gpu(gpus: Sequence[str]) -> str | None:
    """The GPU of this process, for all of its jobs: one that no other process of the user has
    claimed, or where there are more processes than GPUs one with the fewest. The claim is a locked
    file, which the death of a process releases."""
    global _gpu, _gpu_lock
    if gpus and _gpu is None:
        for share, gpu in ((share, gpu) for share in itertools.count() for gpu in gpus):
            name = f"triton-diffusion-{os.getuid()}-gpu-{gpu.replace('/', '-')}-{share}.lock"
            lock = open(Path(tempfile.gettempdir(), name), "w")  # noqa: SIM115 (held)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            _gpu, _gpu_lock = gpu, lock
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # PyTorch has not asked for any yet
            break
    return _gpu


def _records(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in folder.glob(f"*/{RECORD}"):
        job = _read(path)
        if isinstance(job.get("overrides"), list) and isinstance(job.get("number"), int):
            yield path, job


def _has_result(job: dict[str, Any]) -> bool:
    return job.get("state") == "done" and isinstance(job.get("loss"), float)


def _read(path: Path) -> dict[str, Any]:
    try:
        job = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return job if isinstance(job, dict) else {}


def _settings(config: DictConfig) -> Any:
    task = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    try:
        return OmegaConf.to_container(task, resolve=True)
    except OmegaConfBaseException:  # an interpolation that leads nowhere, which the job reports
        return OmegaConf.to_container(task)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
