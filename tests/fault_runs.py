"""The runs that tests.faults breaks, and what came of each kind of fault."""

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from diffusion.errors import ConfigError
from diffusion.formats.checkpoint import verify_checkpoint
from diffusion.formats.checkpoint_folder import latest_checkpoint
from diffusion.formats.digests import read_sums
from diffusion.runs.training import train
from diffusion.tracking.run_log import FIELDS, WALL_CLOCK

from .end_to_end.processes import finish
from .end_to_end.run import TINY, rows, start_together
from .test_configs import composed

STEPS = 8

SETTINGS = (
    *TINY,
    *(f"train.steps={STEPS}", "train.save_every=1", "train.keep=3", "train.log_every=3"),
    *("train.sample_count=0", "optim.more_ema=[0.1]"),
)

TOGETHER = ("train.steps=40", "train.save_every=2")  # what two processes do

LONG = 120.0  # seconds after which a process that should have ended is an error


@dataclass
class Row:
    """A kind of fault, how often it was tried, and what came of it."""

    fault: str
    tried: int = 0
    expected: str = ""  # what should happen
    wrong: list[str] = field(default_factory=list)  # what happened otherwise

    def check(self, right: bool, otherwise: str) -> None:
        self.tried += 1
        if not right:
            self.wrong.append(otherwise)


class Faults:
    """The unbroken run, and processes that train."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random, self._count = folder, random.Random(seed), itertools.count()
        self.config = composed(*SETTINGS)
        self.whole = folder / "whole"
        began = time.monotonic()
        code, said = self.train(self.whole)
        self.seconds = time.monotonic() - began
        if code != 0:
            raise SystemExit(f"the unbroken run ended with {code}: {said}")
        self.checkpoint = latest_checkpoint(self.whole / "checkpoints")

    @cached_property
    def whole_together(self) -> Path:
        """The unbroken run of two processes."""
        run_dir = self.new()
        process = together(run_dir)
        out, err = finish(process, LONG)
        if process.returncode != 0:
            raise SystemExit(f"the unbroken run of two processes: {out} {err}")
        return run_dir

    def start(self, run_dir: Path, *overrides: str, before: Callable[[], object] | None = None):
        """Train in a copy of this process; returns its number and the file of what it says."""
        said = self.folder / f"said_{next(self._count)}"
        config = composed(*SETTINGS, *overrides) if overrides else self.config
        copy = os.fork()
        if copy == 0:
            code = 1
            try:
                out = os.open(said, os.O_WRONLY | os.O_CREAT)
                os.dup2(out, 1)
                os.dup2(out, 2)
                if before is not None:
                    before()
                train(config, run_dir)
                code = 0
            except ConfigError as error:
                print(f"error: {error}", flush=True)
                code = 2
            finally:
                sys.stdout.flush()
                os._exit(code)
        return copy, said

    def train(self, run_dir: Path, *overrides: str, **options) -> tuple[int, str]:
        """(exit code, what was said) of a run to its end."""
        return self.ending_of(*self.start(run_dir, *overrides, **options))

    def ending_of(self, copy: int, said: Path) -> tuple[int, str]:
        """(exit code, what was said) of what `start` has returned."""
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            found, status = os.waitpid(copy, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status), said.read_text(errors="replace")
            time.sleep(0.01)
        end(copy)
        return -1, f"ran for more than {LONG} s"

    def copy(self) -> Path:
        """Of the unbroken run, to be broken."""
        run_dir = self.folder / f"run_{next(self._count)}"
        shutil.copytree(self.whole, run_dir)
        return run_dir

    def new(self) -> Path:
        return self.folder / f"run_{next(self._count)}"

    def is_whole(self, run_dir: Path, whole: Path | None = None) -> bool:
        """Whether a run ended as the unbroken one did (or another one), bit for bit."""
        whole = self.whole if whole is None else whole
        last, goal = (latest_checkpoint(path / "checkpoints") for path in (run_dir, whole))
        if last is None or last.name != goal.name:
            return False
        verify_checkpoint(last)
        one, two = (tensors(path) for path in (last, goal))
        return one == two and logged(run_dir) == logged(whole)

    def goes_on(self, run_dir: Path, said: str) -> bool:
        """Whether what the error says to do brings the run to the end of the unbroken one."""
        way_out = re.search(r"train\.resume=(\S+)", said)
        return (
            way_out is not None
            and self.train(run_dir, way_out[0])[0] == 0
            and self.is_whole(run_dir)
        )


def tensors(checkpoint: Path) -> dict[str, str]:
    sums = read_sums(checkpoint)
    return {name: digest for name, digest in sums.items() if name.endswith(".safetensors")}


def logged(run_dir: Path) -> list[list[str]]:
    return [[row[f] for f in FIELDS if f not in WALL_CLOCK] for row in rows(run_dir)]


def end(copy: int) -> None:
    os.kill(copy, signal.SIGKILL)
    os.waitpid(copy, 0)


def wait_for(condition: Callable[[], object], said: Path) -> None:
    """SystemExit: it takes too long; with what the process has said."""
    until = time.monotonic() + LONG
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"waited for {LONG} s: {said.read_text(errors='replace')}")
        time.sleep(0.005)


def together(run_dir: Path) -> subprocess.Popen:
    """torchrun with two processes, which it starts anew when one of them ends."""
    return start_together(*SETTINGS, *TOGETHER, f"run_dir={run_dir}", restarts=3)
