"""What a file holds of a policy, whoever wrote it."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..data.action_chunks import PolicySpec
from ..factory import Process


@dataclass(frozen=True)
class StoredPolicy:
    """A policy that is not built yet."""

    settings: dict[str, Any]  # the group `model`
    state: dict[str, Tensor]  # float32, by the names of the network
    spec: PolicySpec
    process: Process
    clip: float | None = 1.0  # of the normalised actions in sampling
    steps: int | None = None  # of sampling; None: all of the process
    spacing: str | None = None  # of these steps; None: what suits the sampler
    sampler: str = "ddpm"
    as_diffusers: bool = False  # whether samplers step as diffusers' of that name do
    remarks: tuple[str, ...] = ()  # on what its scheduler does in sampling and no sampler does here
