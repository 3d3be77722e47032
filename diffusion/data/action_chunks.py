"""What rollouts are once they are cut: normalised chunks of actions, and what a policy has to know
to turn observations into such chunks and chunks into actions."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

CONSTANT = 1e-4  # a dimension with a smaller range is not stretched


@dataclass(frozen=True)
class Normaliser:
    """The range of each dimension, which `normalise` maps to [-1, 1]. A constant dimension is
    shifted to 0 alone."""

    low: Tensor  # float32 [D]
    high: Tensor  # float32 [D]

    @classmethod
    def of(cls, rows: np.ndarray) -> "Normaliser":  # [L, D]
        """The range of the data."""
        return cls(torch.from_numpy(rows.min(axis=0)), torch.from_numpy(rows.max(axis=0)))

    @classmethod
    def from_state(cls, state: dict[str, list[float]]) -> "Normaliser":
        """What `state` returned, exactly."""
        return cls(torch.tensor(state["low"]), torch.tensor(state["high"]))

    def state(self) -> dict[str, list[float]]:
        """For a checkpoint's state.json."""
        return {"low": self.low.tolist(), "high": self.high.tolist()}

    def to(self, device: torch.device) -> "Normaliser":
        return Normaliser(self.low.to(device), self.high.to(device))

    def normalise(self, x: Tensor) -> Tensor:  # [..., D]
        return (x - self._centre) / self._half_range

    def restore(self, x: Tensor) -> Tensor:  # [..., D]
        """The inverse of `normalise`."""
        return x * self._half_range + self._centre

    def flattened(self) -> list[int]:
        """The dimensions that are taken as constant though they are not quite."""
        spread = self.high - self.low
        return ((spread > 0) & (spread < CONSTANT)).nonzero().flatten().tolist()

    @property
    def _centre(self) -> Tensor:
        return (self.low + self.high) / 2

    @property
    def _half_range(self) -> Tensor:
        spread = self.high - self.low
        return torch.where(spread < CONSTANT, 1, spread / 2)


@dataclass(frozen=True)
class PolicySpec:
    """What a policy sees and does, beside its network: all that stands in a checkpoint for it."""

    horizon: int  # actions in a chunk
    observation_steps: int  # observations that a chunk is conditioned on
    action_steps: int  # actions of a chunk that are acted out
    observations: Normaliser  # [O]
    actions: Normaliser  # [A]

    @property
    def action_dim(self) -> int:
        return len(self.actions.low)

    @property
    def observation_dim(self) -> int:
        return len(self.observations.low)

    @property
    def most_action_steps(self) -> int:
        """Actions of a chunk from the last of its observations on."""
        return self.horizon - self.observation_steps + 1

    @property
    def condition_dim(self) -> int:
        return self.observation_steps * self.observation_dim

    def state(self) -> dict[str, Any]:
        """For a checkpoint's state.json."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: v.state() if isinstance(v, Normaliser) else v for k, v in values.items()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "PolicySpec":
        """What `state` returned, exactly."""
        ranges = {k: Normaliser.from_state(state[k]) for k in ("observations", "actions")}
        return cls(**{**state, **ranges})


@dataclass(frozen=True)
class Chunks:
    """Normalised chunks with what was observed at their start."""

    actions: Tensor  # float32 [M, 1, horizon, A], an image of one row
    conditions: Tensor  # float32 [M, observation_steps * O]

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def images(self) -> Tensor:
        """The actions, as `Batches` calls what is denoised."""
        return self.actions

    @property
    def labels(self) -> Tensor:
        """The conditions, as `Batches` calls what is told."""
        return self.conditions


@dataclass(frozen=True)
class ActionChunks:
    """Chunks to train on, and those held out."""

    train: Chunks
    held_out: Chunks  # perhaps none
    spec: PolicySpec
    name: str
    episodes: int  # in the file
    notes: tuple[str, ...] = ()  # on what of them is not learned from
