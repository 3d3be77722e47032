"""Entry scripts in copies of one process that has imported what they import.

Starting Python and importing PyTorch takes two seconds or more, and the suite starts scripts a
hundred times. `Forked` starts one process, which forks itself for each command: the copy has the
command's arguments, folder, environment and output files, and runs the script as `__main__`.
"""

import atexit
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NoReturn

from .processes import descendants, signal_all

ROOT = Path(__file__).resolve().parents[2]
_GRACE = 5.0  # seconds in which a copy that is aborted says where it is
IMPORTED = (
    "hydra",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "torch._dynamo",  # which the ops of torch.library ask for
    "torch.fx.experimental.symbolic_shapes",  # which torch.autograd asks for
    "torch.utils.tensorboard",
    "triton_diffusion.entry",
    "diffusion.runs.training",
    "diffusion.runs.sampling",
    "diffusion.runs.rollout",
    "diffusion.export.run",
)


class Copy:
    """One that runs, as of `subprocess.Popen`, with what it writes in files."""

    def __init__(self, forked: "Forked", request: dict, pid: int):
        self.args, self.pid, self.returncode = request["command"], pid, None
        self._forked, self._files = forked, (Path(request["out"]), Path(request["err"]))

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forked.ask({"ended": self.pid})
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        out, err = (path.read_text() for path in self._files)
        return out, err


class Forked:
    """A process to fork; `run` runs a command in a copy of it, and `start` starts one."""

    def __init__(self, environment: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
            text=True,
        )
        self.folder = tempfile.TemporaryDirectory()  # of what started copies write
        self.count = 0

    def ask(self, request: dict | list) -> object:
        """What the process to fork answers at once."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process to fork has ended; what it said is above"
        return json.loads(answer)

    def start(self, command: list[str], cwd: Path, environment: dict[str, str]) -> Copy:
        self.count += 1
        out, err = (f"{self.folder.name}/{name}{self.count}" for name in ("out", "err"))
        request = {"command": command, "cwd": str(cwd), "environment": environment}
        request |= {"out": out, "err": err}
        for path in (out, err):
            Path(path).touch()
        return Copy(self, request, self.ask({"start": request}))

    def run(
        self, command: list[str], cwd: Path, environment: dict[str, str], timeout: float
    ) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of SCRIPT ..., -m MODULE ... or -c CODE ..."""
        (said,) = self.run_together(command, cwd, [environment], timeout)
        return said

    def run_together(
        self, command: list[str], cwd: Path, environments: list[dict[str, str]], timeout: float
    ) -> list[tuple[int, str, str]]:
        """The same of copies that run at once, one for each environment."""
        with tempfile.TemporaryDirectory() as folder:
            files = [
                (Path(folder, f"out{i}"), Path(folder, f"err{i}")) for i in range(len(environments))
            ]
            request = {"command": command, "cwd": str(cwd)}
            requests = [
                request | {"environment": environment, "out": str(out), "err": str(err)}
                for environment, (out, err) in zip(environments, files, strict=True)
            ]
            self.process.stdin.write(json.dumps(requests) + "\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], timeout)[0]:
                copies = descendants(self.process.pid)
                signal_all(copies, signal.SIGABRT)  # they say where they are
                select.select([self.process.stdout], [], [], _GRACE)
                signal_all(copies, signal.SIGKILL)
                self.process.stdout.readline()
                said = "\n".join(path.read_text() for pair in files for path in pair)
                raise AssertionError(f"{' '.join(command)} took more than {timeout} s\n{said}")
            codes = self.process.stdout.readline()
            assert codes, "the process to fork has ended; what it said is above"
            return [
                (code, out.read_text(), err.read_text())
                for code, (out, err) in zip(json.loads(codes), files, strict=True)
            ]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()


def _become(request: dict) -> NoReturn:
    """Run the command in this process, a copy, and end it."""
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY | os.O_CREAT),
        (2, request["err"], os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(path, flags), number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    faulthandler.enable()
    code = 0
    try:
        _run(*request["command"])
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an interpreter that ends by itself would take PyTorch apart for a second


def _run(script: str, *arguments: str) -> None:
    """What `python SCRIPT ...`, `python -m MODULE ...` and `python -c CODE ...` do."""
    if script == "-c":
        code, *arguments = arguments
        sys.argv, sys.path[0] = ["-c", *arguments], ""
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif script == "-m":
        module, *arguments = arguments
        sys.argv, sys.path[0] = [module, *arguments], os.getcwd()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # or the first collection in a copy would write to, and so copy, all of its memory
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, list):  # commands to run
            copies = [_copy(command) for command in request]
            answer = [os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) for copy in copies]
        elif "start" in request:
            answer = _copy(request["start"])
        else:
            ended, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        print(json.dumps(answer), flush=True)


def _copy(request: dict) -> int:
    """The process that runs a command."""
    copy = os.fork()
    return copy or _become(request)


if __name__ == "__main__":
    main()
