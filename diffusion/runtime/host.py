"""What of this machine a process may use.

A container or a batch system may allow it less than there is, by control groups (Linux, versions 1
and 2), of which the numbers of processors and of free bytes know nothing.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNKNOWN = 8 * 2**30  # bytes of memory, where the system does not say


def processors() -> int:
    """How many this process may keep busy."""
    known = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
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
