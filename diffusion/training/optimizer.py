"""AdamW, clipping and EMA over flat parameters; lr and EMA decay as functions of the step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError
from ..models.flat_parameters import FlatParameters
from ..runtime.backend import Backend
from .gradient_norm import GradientNorm


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with a learning rate that warms up linearly and then stays or decays."""

    lr: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # of the whole gradient; 0 turns clipping off
    warmup: int = 500  # steps of linear warm-up
    decay: str = "none"  # none | cosine | linear, to zero at the last step
    ema_decay: float = 0.9999
    ema_warmup: bool = True  # decay at step k is at most (1 + k) / (10 + k)
    more_ema: tuple[float, ...] = ()  # decays of further averages

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "more_ema", tuple(self.more_ema))
        for name, low, high in (
            ("lr", 0, math.inf),
            ("eps", 0, math.inf),
            ("weight_decay", 0, math.inf),
            ("clip_norm", 0, math.inf),
            ("warmup", 0, math.inf),
            ("ema_decay", 0, 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"optim.{name}={value} is not a number")
            if not low <= value < high:  # an average that decays by 1 stays what was drawn
                end = f"{high})"
                raise ConfigError(f"optim.{name}={value} is outside [{low}, {end}")
        if self.eps == 0:  # a parameter that has had no gradient yet would become 0 / 0
            raise ConfigError("optim.eps=0; expected a number above 0, such as 1e-8")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"optim.betas={list(self.betas)}; expected two numbers in [0, 1)")
        if not all(0 < decay < 1 for decay in self.more_ema):
            raise ConfigError(f"optim.more_ema={list(self.more_ema)}; expected decays in (0, 1)")
        if len(set(self.more_ema)) < len(self.more_ema):
            raise ConfigError(f"optim.more_ema={list(self.more_ema)} has the same decay twice")
        if self.decay not in ("none", "cosine", "linear"):
            raise ConfigError(f"optim.decay={self.decay} is unknown; choose none, cosine or linear")

    def lr_at(self, step: int, steps: int) -> float:
        """Learning rate of update number `step` (from 0) out of `steps`."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(steps - self.warmup, 1)
        if self.decay == "cosine":
            return self.lr * (1 + math.cos(math.pi * progress)) / 2
        if self.decay == "linear":
            return self.lr * (1 - progress)
        return self.lr

    def ema_decay_at(self, step: int, decay: float | None = None) -> float:
        """EMA decay of update number `step`, of the average with that decay, or of the first one:
        short at first, or early samples would be noise."""
        decay = self.ema_decay if decay is None else decay
        return min(decay, (1 + step) / (10 + step)) if self.ema_warmup else decay


class Optimizer:
    """Updates `flat` in place from `flat.grad`. What changes with the step is a device tensor."""

    def __init__(self, flat: FlatParameters, settings: OptimizerSettings, backend: Backend) -> None:
        device = flat.param.device
        self.flat, self.settings, self.ops = flat, settings, backend.ops
        self.norm = GradientNorm(flat, backend)  # to be told of gradients that are complete
        self.hyper = torch.zeros(9, dtype=torch.float64, device=device)
        self.skipped = torch.zeros(1, dtype=torch.int32, device=device)
        flat.keep_averages(settings.more_ema)
        # what the parameters weigh in each of them
        self._weights = torch.zeros(len(flat.averages), dtype=flat.param.dtype, device=device)

    def load(self, step: int, steps: int) -> None:
        """Write the constants of update number `step` (from 0) out of `steps`."""
        s = self.settings
        values = (
            s.lr_at(step, steps),
            *s.betas,
            s.eps,
            s.weight_decay,
            *(1 - beta ** (step + 1) for beta in s.betas),
            s.ema_decay_at(step),
            s.clip_norm,
        )
        hyper = torch.tensor(values, dtype=torch.float64)
        hyper = hyper.pin_memory() if self.hyper.is_cuda else hyper
        self.hyper.copy_(hyper, non_blocking=True)
        if self.flat.averages:
            weights = [1 - s.ema_decay_at(step, decay) for decay in self.flat.averages]
            weights = torch.tensor(weights, dtype=self._weights.dtype)
            weights = weights.pin_memory() if self._weights.is_cuda else weights
            self._weights.copy_(weights, non_blocking=True)

    def update(self) -> Tensor:
        """Update the parameters. Returns the gradient's norm before clipping, float32 [1], which
        the next update overwrites."""
        flat, norm = self.flat, self.norm.finish()
        self.ops.adamw_step(
            flat.param,
            flat.grad,
            flat.exp_avg,
            flat.exp_avg_sq,
            flat.ema,
            norm,
            self.hyper,
            self.skipped,
            flat.shadow,
        )
        if flat.averages:
            weights = torch.where(norm.isfinite(), self._weights, 0)  # else a step is left out
            for average, weight in zip(flat.averages.values(), weights, strict=True):
                average.lerp_(flat.param, weight)
        return norm
