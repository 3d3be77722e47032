"""Where the time of a run goes: seconds by op and stage."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.harness import format_table


class Account:
    """Adds up what `stage` encloses, for the op that `op` names at the time."""

    def __init__(self) -> None:
        self.op = "start"
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the block, and what it has the GPU do, as `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.seconds[self.op, name] += time.perf_counter() - began

    def __str__(self) -> str:
        """A line for each op, a column for each stage."""
        ops, stages = (list(dict.fromkeys(key[i] for key in self.seconds)) for i in (0, 1))
        lines = []
        for op in ops:
            of_op = [self.seconds.get((op, stage), 0.0) for stage in stages]
            lines.append([op, *(f"{s:.1f}" for s in (*of_op, sum(of_op)))])
        totals = [sum(s for (_, stage), s in self.seconds.items() if stage == x) for x in stages]
        lines.append(["all", *(f"{s:.1f}" for s in (*totals, sum(totals)))])
        return format_table(["seconds", *stages, "all"], lines)
