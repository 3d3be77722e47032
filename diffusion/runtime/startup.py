"""What the time between the command and the first step goes into.

Parts of the way say when they are done (`reached`), and the trainer says it all in a line when the
first step is. Only the first run of a process that takes a step counts: later jobs of a sweep have
nothing to import.
"""

import os
import time
from pathlib import Path

_STAT, _UPTIME = Path("/proc/self/stat"), Path("/proc/uptime")


def _age() -> float:
    """Seconds since the process began; 0 where the system does not say."""
    try:
        ticks = int(_STAT.read_text().rpartition(")")[2].split()[19])
        return float(_UPTIME.read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


class StartUp:
    """A clock that is read at the end of each part."""

    def __init__(self, before: float) -> None:
        """`before`: seconds that have gone by."""
        self.parts: dict[str, float] = {}  # seconds of each
        self._last = time.perf_counter() - before
        self._over = False

    def reached(self, part: str) -> None:
        """The part is done, which began where the one before it ended. If it is done again, as by
        jobs of a sweep that ended before a step, its times add up."""
        now = time.perf_counter()
        if not self._over:
            self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def finish(self) -> str | None:
        """The line, once; afterwards None."""
        if self._over or not self.parts:
            return None
        self._over = True
        total = sum(self.parts.values())
        said = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())
        return f"the first step was done after {total:.1f} s: {said}"


START_UP = StartUp(_age())
