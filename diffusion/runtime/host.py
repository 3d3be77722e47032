"""What of this machine a process may use.

A container or a batch system may allow it less than there is, by control groups (Linux, versions 1
and 2), of which the numbers of processors and of free bytes know nothing.
"""

import math
import os
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNKNOWN = 8 * 2**30  # bytes of memory, where the system does not say


def processors() -> int:
    """How many this process may keep busy."""
    count = len(_allowed()) or os.cpu_count() or 1
    for group, version in _control_groups("cpu"):
        if version == 2:
            quota, period = [*_words(group / "cpu.max"), "max", "max"][:2]
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ([*_words(group / name), ""][0] for name in names)
        if quota.isdecimal() and period.isdecimal():  # or max, or -1
            count = min(count, math.ceil(int(quota) / int(period)))
    return count


def free_memory() -> int:
    """Bytes that may still be had."""
    lines = (line.split() for line in _text(_PROC / "meminfo").splitlines())
    free = next((1024 * int(words[1]) for words in lines if words[0] == "MemAvailable:"), _UNKNOWN)
    for group, version in _control_groups("memory"):
        names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        most, used = ([*_words(group / f"memory.{name}"), ""][0] for name in names)
        if most.isdecimal() and used.isdecimal():
            # files in memory give way
            stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
            free = min(free, int(most) - int(used) + int(stat.get("inactive_file", 0)))
    return max(free, 0)


def _control_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """The groups that this process is in, the innermost first, and their version."""
    for line in _text(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _GROUPS / controller if controllers else _GROUPS
        group = root / path.strip("/")
        while True:
            yield group, 1 if controllers else 2
            if group == root or root not in group.parents:
                break
            group = group.parent


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    """Of a file; nothing if there is none that can be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


# --- threads --------------------------------------------------------------------------------------

# The user's own word on threads: then nothing is chosen here.
_OF_OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
# Turns of the loop in which a thread of GNU OpenMP waits for another before it sleeps: about half
# a millisecond, longer than most pauses between ops and shorter than a turn of the scheduler. Its
# own 300,000 are many milliseconds, which are lost whenever the other one has been descheduled.
_SPINS = 10_000
_SHORTEST = 0.2  # seconds over which it is worth asking how busy others are

_chosen: str | None = None  # what was chosen, for the log


def busy_seconds() -> tuple[float, float]:
    """(seconds that processes other than this one have run on the processors that it may use, the
    time), from which two calls tell how busy others are between. Those of low priority, which give
    way, do not count, unless this one has a low one too."""
    allowed, ticks = _allowed(), 0
    for line in _text(_PROC / "stat").splitlines():
        name, *numbers = line.split()
        if name.removeprefix("cpu").isdecimal() and int(name[3:]) in allowed:
            user, low, system = map(int, numbers[:3])
            ticks += user + system + (low if os.nice(0) > 0 else 0)
    own = sum(os.times()[:4])
    return ticks / os.sysconf("SC_CLK_TCK") - own, time.monotonic()


def choose_threads(before: tuple[float, float]) -> None:
    """As many threads as other processes leave processors, as they were since `before` (of
    `busy_seconds`), which wait for one another for a short time only. That short time has to be
    said before PyTorch is imported; where it has been, it is told their number alone. What the
    environment says of OpenMP stands, and a number that PyTorch was told by somebody."""
    global _chosen
    torch, count = sys.modules.get("torch"), processors()
    if set(_OF_OPENMP) & set(os.environ) or (torch and torch.get_num_threads() != count):
        return
    if torch is None:
        os.environ["GOMP_SPINCOUNT"] = str(_SPINS)
    now = busy_seconds()
    seconds = now[1] - before[1]
    if seconds < _SHORTEST or count < len(_allowed()):
        return  # too soon to say, or a share of more processors than others are seen on
    others = max(0.0, now[0] - before[0]) / seconds
    threads = max(1, min(count, round(count - others)))
    if threads < count:
        if torch is None:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        else:
            torch.set_num_threads(threads)
        _chosen = (
            f"other processes keep {others:.1f} of {count} processors busy, so the number of"
            f" threads is {threads} (OMP_NUM_THREADS in the environment decides otherwise)"
        )


@cache
def choose_threads_now() -> None:
    """`choose_threads` by a fifth of a second that begins now; once in a process."""
    before = busy_seconds()
    time.sleep(_SHORTEST)
    choose_threads(before)


def _allowed() -> set[int]:
    """The numbers of the processors that this process may use; none where nobody says."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def threads_are_ours() -> bool:
    """Whether their number is not what the user's environment says."""
    return "OMP_NUM_THREADS" not in os.environ or _chosen is not None


def threads_chosen() -> str | None:
    """What `choose_threads` found, if it left processors to others."""
    return _chosen
