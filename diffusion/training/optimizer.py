"""AdamW, clipping and EMA over flat parameters; lr and EMA decay as functions of the step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_kernels.optimizer.adamw import LateUpdate, late_update

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


# learning rate 0, and every average stays as it is
_NOTHING = (0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0)


class Optimizer:
    """Updates `flat` in place from `flat.grad`. What changes with the step is a device tensor.

    Once told to `defer` some filters, `update` leaves them and the EMA out. The next step makes up
    for them beside kernels that leave multiprocessors idle: it calls `begin`, and then `reached`
    with the number of each part in turn before it reads that part. Whoever looks at parameters,
    moments or EMA after a step has to `settle` first.
    """

    def __init__(self, flat: FlatParameters, settings: OptimizerSettings, backend: Backend) -> None:
        device = flat.param.device
        self.flat, self.settings, self.ops = flat, settings, backend.ops
        self.norm = GradientNorm(flat, backend)  # to be told of gradients that are complete
        # of this update, and of the one before for what it has left out
        self.hyper = torch.zeros(2, 9, dtype=torch.float64, device=device)
        self.skipped = torch.zeros(1, dtype=torch.int32, device=device)
        flat.keep_averages(settings.more_ema)
        # what the parameters weigh in each of them
        self._weights = torch.zeros(len(flat.averages), dtype=flat.param.dtype, device=device)
        self._late: LateUpdate | None = None
        self._left_out: tuple[float, ...] | None = None  # the constants of what is to be made up
        self._due = False  # whether this step still has to
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done: list[torch.cuda.Event | None] = []  # with each part; None: waited for

    def defer(self, *bounds: int) -> None:
        """From now on leave elements bounds[0] .. bounds[-1] of the flat buffers, or nearly all of
        them, for the next step, which may do so in parts. Further averages want them at once, and
        then nothing is left."""
        if not self.flat.averages:
            self._late = late_update(*bounds)

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
        hyper = torch.tensor([values, self._left_out or _NOTHING], dtype=torch.float64)
        hyper = hyper.pin_memory() if self.hyper.is_cuda else hyper
        self.hyper.copy_(hyper, non_blocking=True)
        if self.flat.averages:
            weights = [1 - s.ema_decay_at(step, decay) for decay in self.flat.averages]
            weights = torch.tensor(weights, dtype=self._weights.dtype)
            weights = weights.pin_memory() if self._weights.is_cuda else weights
            self._weights.copy_(weights, non_blocking=True)
        if self._late is not None:
            self._left_out = values

    def begin(self) -> None:
        """A step begins."""
        self._due = self._late is not None

    def start_late(self) -> None:
        """Make up for what the last update has left out, beside the current stream."""
        if not self._due:
            return
        self._due = False
        if self._stream is None:
            self._update_late(self.hyper[1])
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._update_late(self.hyper[1])

    def reached(self, part: int) -> None:
        """Let the current stream wait for deferred filters: this part, or the EMA as the last."""
        self.start_late()
        if part < len(self._done) and self._done[part] is not None:
            torch.cuda.current_stream().wait_event(self._done[part])
            self._done[part] = None

    def settle(self) -> None:
        """Make up for what the last update has left out, if anything, now."""
        if self._left_out is not None:
            self._update_late(self.hyper[0])
            self._left_out, self._done = None, []

    def update(self) -> Tensor:
        """Update the parameters. Returns the gradient's norm before clipping, float32 [1], which
        the next update overwrites."""
        flat, hyper = self.flat, self.hyper[0]
        if self._late is not None:
            for part in range(self._parts + 1):
                self.reached(part)
        norm = self.norm.finish()
        moments = flat.exp_avg, flat.exp_avg_sq
        if self._late is None:
            self.ops.adamw_step(
                flat.param, flat.grad, *moments, flat.ema, norm, hyper, self.skipped, flat.shadow
            )
        else:
            self._late.early(
                flat.param, flat.grad, *moments, norm, hyper, self.skipped, flat.shadow
            )
        if flat.averages:
            weights = torch.where(norm.isfinite(), self._weights, 0)  # else a step is left out
            for average, weight in zip(flat.averages.values(), weights, strict=True):
                average.lerp_(flat.param, weight)
        return norm

    def _update_late(self, hyper: Tensor) -> None:
        flat, late, norm = self.flat, self._late, self.norm.norm
        buffers = flat.param, flat.grad, flat.exp_avg, flat.exp_avg_sq, flat.ema
        self._done = []
        for part in range(self._parts):
            late.late_part(*buffers, norm, hyper, flat.shadow, part)
            self._mark()
        late.late_ema(flat.param, flat.ema, norm, hyper)
        self._mark()

    def _mark(self) -> None:
        if self._stream is not None:
            self._done.append(torch.cuda.current_stream().record_event())

    @property
    def _parts(self) -> int:
        return 0 if self._late is None else len(self._late.bounds) - 1
