"""Start an entry script the way a user does."""

import atexit
import csv
import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from .forked import ROOT, Copy, Forked
from .processes import ends_with_the_test, finish, started

PATIENCE = 240.0  # seconds for a command

TINY = (
    "experiment=demo",
    "device=cpu",
    "dataset.size=8",
    "dataset.count=12",
    "model.model_channels=32",
    "model.channel_mult=[1,2]",
    "model.attention_resolutions=[2]",
    "model.num_res_blocks=1",
    "train.batch_size=4",
    "train.log_every=1",
    "train.sample_count=4",
    "train.sample_steps=2",
    "train.tensorboard=false",
    "optim.warmup=2",
)


def environment() -> dict[str, str]:
    """As a user has it: no interpreter of Triton, few threads; and no processes that compile, for
    other tests run beside. What is aborted says where it is."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    alone = {"OMP_NUM_THREADS": "1", "TRITON_DIFFUSION_COMPILERS": "0"}
    return env | alone | {"PYTHONFAULTHANDLER": "1"}


def start(*command: str, cwd: Path | None = None) -> subprocess.Popen:
    """A process of its own for SCRIPT ..., -m MODULE ... or -c CODE ...; it ends with the test."""
    return started(
        [sys.executable, *_absolute(command)],
        cwd=cwd or ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def begin(*command: str) -> subprocess.Popen | Copy:
    """The same in a copy of a process that has imported PyTorch, as of `run`."""
    if torch.cuda.is_available():
        return start(*command)
    return ends_with_the_test(_forked().start(_absolute(command), ROOT, environment()))


def begin_together(*command: str, count: int = 2) -> list[subprocess.Popen | Copy]:
    """Copies that work together, as of `run_together`."""
    ranks = _ranks(count)
    if torch.cuda.is_available():
        return [_apart(command, env) for env in ranks]
    return [ends_with_the_test(_forked().start(_absolute(command), ROOT, env)) for env in ranks]


def start_together(
    *arguments: str, script: str = "train.py", count: int = 2, restarts: int = 0
) -> subprocess.Popen:
    """An agent of torchrun with `count` processes that work together."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
    torchrun += (f"--max-restarts={restarts}", "--local-addr=127.0.0.1")
    return start(*torchrun, str(ROOT / script), *arguments)


def run(*command: str, cwd: Path | None = None, fresh: bool = False) -> tuple[int, str, str]:
    """(exit code, stdout, stderr). Unless `fresh`, in a copy of a process that has imported
    PyTorch; not where there is a GPU, whose driver does not outlive a fork."""
    if fresh or torch.cuda.is_available():
        process = start(*command, cwd=cwd)
        out, err = finish(process, PATIENCE)
        return process.returncode, out, err
    return _forked().run(_absolute(command), cwd or ROOT, environment(), PATIENCE)


def run_together(*command: str, count: int = 2) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each of `count` processes that work together, as Slurm starts
    them: the environment says who they are. Copies as of `run`, which spare the agent and the
    imports of `start_together`."""
    ranks = _ranks(count)
    if not torch.cuda.is_available():
        return _forked().run_together(_absolute(command), ROOT, ranks, PATIENCE)
    processes = [_apart(command, env) for env in ranks]
    said = [finish(process, PATIENCE) for process in processes]
    return [(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


def _ranks(count: int) -> list[dict[str, str]]:
    """The environment of each of `count` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [
        environment() | meet | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(count)}
        for rank in map(str, range(count))
    ]


def _apart(command: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return started([sys.executable, *_absolute(command)], env=env, **pipes)


def rows(path: Path) -> list[dict[str, str]]:
    """Of a CSV file; of a run's folder those of its metrics."""
    with open(path / "metrics.csv" if path.is_dir() else path) as file:
        return list(csv.DictReader(file))


def _absolute(command: tuple[str, ...]) -> list[str]:
    first, *arguments = command
    return [first if first in ("-m", "-c") else str(ROOT / first), *arguments]


@functools.cache
def _forked() -> Forked:
    forked = Forked(environment())
    atexit.register(forked.close)
    return forked
