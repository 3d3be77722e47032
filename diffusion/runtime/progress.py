"""How far is what takes long: a bar on a terminal, a line every ten seconds in a log."""

import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

from .distributed import own_rank

_LINE_EVERY = 10.0  # seconds


class Progress:
    """A bar where there is a terminal. Elsewhere, as under Slurm, lines such as `elephants: 4096 of
    10000, 512 img/s, about 12 s left`. Use it in a `with`."""

    def __init__(
        self,
        total: int | None = None,  # None: `reach` says
        *,
        unit: str,
        what: str = "",
        leave: bool = True,  # the bar stays when it is done
    ) -> None:
        self._total, self._unit = total, unit
        self._hidden = own_rank() != 0  # the first process says it
        self._before = f"{what or unit}: "
        self._bar = tqdm(
            total=total,
            unit=unit,
            desc=what or None,
            leave=leave,
            dynamic_ncols=True,
            disable=True if self._hidden else None,  # None: shown on a terminal
        )
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def reach(self, done: int, total: int | None = None, *, said: str = "") -> None:
        """So many of `total` are done; `said` stands behind the bar."""
        if total is not None:
            self._total = self._bar.total = total
        if not self._bar.disable:
            self._bar.update(done - self._bar.n)
            if said:
                self._bar.set_postfix_str(said)
            return
        now = time.monotonic()
        if not self._hidden and now - self._said >= _LINE_EVERY:
            self._said = now
            parts = [f"{done} of {self._total}" if self._total else f"{done}", said]
            if done:
                rate = done / (now - self._began)
                parts.append(f"{rate:.3g} {self._unit}/s")
                if self._total:
                    parts.append(f"about {duration((self._total - done) / rate)} left")
            print(f"{self._before}{', '.join(filter(None, parts))}", flush=True)


def duration(seconds: float) -> str:
    """In the unit that says it in two or three digits; what is not 0 is not said to be."""
    if 0 < seconds < 1:
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
