"""Processes that compile what a benchmark times: the same benchmark, with one setting more.

- `Compilers` are told the number of what each compiles next: steps and ops of PyTorch, too.
- `run_shares` gives each process its share: where one launch says what the next one is.
- `benchmarks.precompile` compiles kernels of ours without a GPU.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Condition, Thread

_ROOT = Path(__file__).resolve().parents[1]
_NICENESS = 5  # what is timed goes first


def command(module: str, arguments: Sequence[str], *more: str) -> list[str]:
    """What starts a benchmark once more, with more settings; within `tests.kernels.other_chip` if
    this process is."""
    started = sys.orig_argv
    before = started[1 : started.index(module)] if module in started else ["-m"]
    return [sys.executable, *before, module, *arguments, *more]


def run_shares(module: str, arguments: Sequence[str], processes: int) -> None:
    """Run `module` with part=0, 1, 2, ... side by side, to compile what will be timed. Whatever
    does not get compiled by them is compiled later."""
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    again = command(module, arguments, f"processes={processes}")
    shares = [
        subprocess.Popen([*again, f"part={part}"], cwd=_ROOT, env=environment)
        for part in range(processes)
    ]
    if failed := sum(share.wait() != 0 for share in shares):
        print(f"! {failed} of {processes} compiling processes failed")


class Compilers:
    """`count` processes of `command` that are told numbers, one a line on their standard input, the
    first of `numbers` first, and answer with the number when they are done. What a process that
    ends leaves undone counts as done: whoever needs it compiles it."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        numbers: Sequence[int],
        visible: str = "",  # CUDA_VISIBLE_DEVICES of theirs; empty: that of this process
    ) -> None:
        self.ready: set[int] = set()
        self._numbers = list(numbers)[::-1]
        self._changed = Condition()
        self._environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        if visible:
            self._environment["CUDA_VISIBLE_DEVICES"] = visible
        self._command = list(command)
        self._processes: list[subprocess.Popen] = []
        self._at_work = min(count, len(self._numbers))
        self.failed = 0
        for _ in range(self._at_work):
            process = subprocess.Popen(
                self._command,
                cwd=_ROOT,
                env=self._environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._processes.append(process)
            Thread(target=self._feed, args=(process,), daemon=True).start()

    def next_ready(self, pending: Sequence[int]) -> int:
        """The first of `pending` that is compiled; waits until one is."""
        with self._changed:
            while True:
                for number in pending:
                    if number in self.ready or not self._at_work:
                        return number
                self._changed.wait()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _feed(self, process: subprocess.Popen) -> None:
        number = self._take()
        while number is not None:
            try:
                process.stdin.write(f"{number}\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:  # it has ended
                answer = ""
            with self._changed:
                self.ready.add(number)
                self._changed.notify_all()
            if not answer:
                self.failed += 1
                break
            number = self._take()
        process.stdin.close()
        with self._changed:
            self._at_work -= 1
            self._changed.notify_all()

    def _take(self) -> int | None:
        with self._changed:
            return self._numbers.pop() if self._numbers else None


def serve(compile_number: Callable[[int], None]) -> None:
    """What such a process does: compile each number that it reads, and say so. Whatever else is
    printed goes to the standard error."""
    os.nice(_NICENESS)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for line in sys.stdin:
            compile_number(int(line))
            print(int(line), file=answers, flush=True)
