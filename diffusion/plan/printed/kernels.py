"""Which kernels nodes launch on a GPU.

No GPU is needed: each node is launched over host tensors that stand for a GPU's, and its launches
are noted, as in `triton_kernels.runtime.launch_recorder`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton.runtime.jit import JITFunction

from triton_kernels import fused_ops
from triton_kernels.registry.chips import Chip
from triton_kernels.registry.choose import Decision, noted
from triton_kernels.runtime.launch_recorder import noting_launches

from ..build import Plan
from ..calls.dry_passes import HOST, dry_passes, starts
from ..graph import Node
from ..launch.table import BY_PYTORCH, Kernels, launcher_of


@dataclass(frozen=True)
class Launched:
    """What nodes launch."""

    kernels: tuple[str, ...]
    config: str = ""  # of the first
    predicted_us: float | None = None  # None: no times were fitted to these kernels
    decisions: tuple[Decision, ...] = ()  # answers of the registry


def launched(plan: Plan, gpu: Chip, ops: Kernels = fused_ops) -> dict[Node, Launched]:
    """Of each node what it launches on such a GPU, of these kernels."""
    if is_interpreted():
        return {node: Launched((node.op,)) for node in plan.schedule.nodes}
    found = {}

    def note(node: Node) -> None:
        free = node.is_view and node.op in BY_PYTORCH
        found[node] = Launched(("",)) if free else notes.taken()

    with noting(gpu) as notes:
        dry_passes(plan, starts(plan), launcher_of(ops).of_backward({}, HOST), note)
    return found


def is_interpreted() -> bool:
    """Whether there are no kernels to be noted."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Notes:
    """What would have been launched, and what `select` took."""

    def __init__(self, gpu: Chip, decisions: list[Decision]) -> None:
        self.gpu, self.decisions = gpu, decisions
        self.launches: list[tuple[str, str]] = []  # names and configurations

    def taken(self) -> Launched:
        """All since the last call."""
        names = tuple(name for name, _ in self.launches) or ("PyTorch",)
        config = self.launches[0][1] if self.launches else ""
        device = self.gpu.gpu
        own = [d for d in self.decisions if not d.choice.kernel.delegates]
        times = [d.choice.kernel.model(d.spec, device, d.choice.config) for d in own]
        answers = tuple(self.decisions)
        self.launches.clear()
        self.decisions.clear()
        known = times and None not in times
        return Launched(names, config, sum(times) if known else None, answers)


@contextmanager
def noting(gpu: Chip) -> Iterator[Notes]:
    """Within the block kernels are not launched, but noted, for tensors in the host's memory that
    stand for such a GPU's."""

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | options
        blocks = {k.removeprefix("BLOCK_"): v for k, v in given.items() if k.startswith("BLOCK")}
        more = {k: given[k] for k in ("num_warps", "num_stages") if k in given}
        numbers = {k: v for k, v in (blocks | more).items() if isinstance(v, int)}
        notes.launches.append(
            (self.__name__.strip("_"), " ".join(f"{k}={v}" for k, v in numbers.items()))
        )

    with noting_launches(gpu.gpu, note), noted() as decisions:
        notes = Notes(gpu, decisions)
        yield notes
