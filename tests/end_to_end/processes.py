"""Processes of a test: none outlives it, and one that does not end says where it is."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

_SOON = 20.0  # seconds in which a process that is to end does so
_GRACE = 5.0  # seconds in which a process that is to say where it is may do so
_started: list[subprocess.Popen] = []


def started(*arguments, **options) -> subprocess.Popen:
    """A process, as of `subprocess.Popen`, that ends with the test at the latest."""
    return ends_with_the_test(subprocess.Popen(*arguments, **options))


def ends_with_the_test(process):
    _started.append(process)
    return process


def finish(process: subprocess.Popen, seconds: float) -> tuple[str, str]:
    """Its (stdout, stderr) once it has ended. AssertionError: it takes longer; with what it has
    written, and the stacks of Python where PYTHONFAULTHANDLER is set for it."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        command = process.args
        out, err = end(process)
        raise AssertionError(f"{command} took more than {seconds} s\n{out}\n{err}") from None


def end(process: subprocess.Popen) -> tuple[str, str]:
    """End it and all that it has started, and return what they have written."""
    family = [process.pid, *descendants(process.pid)]
    signal_all(family, signal.SIGCONT)
    signal_all(family, signal.SIGABRT)
    try:
        return process.communicate(timeout=_GRACE)
    except subprocess.TimeoutExpired:
        signal_all(family, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # another process may hold its pipes
            return process.communicate(timeout=_GRACE)
        return "", ""
    finally:
        signal_all(family[1:], signal.SIGKILL)


def end_all() -> None:
    """End what is left of all that was started."""
    while _started:
        if (process := _started.pop()).poll() is None:
            end(process)


def descendants(pid: int) -> list[int]:
    """The processes that it has started, those that these have started, and so on."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = list(children.get(pid, []))
    for one in found:
        found += children.get(one, [])
    return found


def ranks(agent: int) -> dict[int, int]:
    """The processes that an agent of torchrun has started, by their rank."""
    found: dict[int, int] = {}
    for child in descendants(agent):
        with suppress(OSError):  # it has ended meanwhile
            told = Path(f"/proc/{child}/environ").read_bytes().decode(errors="replace").split("\0")
            rank = next((pair[5:] for pair in told if pair.startswith("RANK=")), None)
            if rank is not None:
                found.setdefault(int(rank), child)  # and not what that one has started
    return found


def ends(pid: int) -> bool:
    """Whether it does, soon; one that nobody has waited for yet has ended, too."""
    until = time.monotonic() + _SOON
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
