r"""Timesteps of training drawn by how large their losses have been.

The variational bound, and any loss whose size differs from timestep to timestep, has less variance
if those with large losses are drawn more often and count less (Nichol and Dhariwal, 2021, section
3.4; LossSecondMomentResampler in guided-diffusion): p_t is proportional to sqrt(E[L_t^2]) over the
last ten losses of each timestep, and 1 / T until every timestep has ten. A thousandth is uniform.
What is drawn in a step depends on the losses of the steps before it alone: not on the number of
processes or micro-batches.
"""

import torch
from torch import Tensor

from triton_kernels.noise.loss_aware import MOST_TIMESTEPS

from ..errors import ConfigError
from ..runtime.backend import Backend

HISTORY = 10  # losses of each timestep
UNIFORM = 0.001  # share of the draws that has nothing to do with losses


class LossAwareTimesteps:
    """Draws, and learns from the losses of each step. All of it is on the device, and no call waits
    for it, so that a step can be captured.

    Arguments:
        num_timesteps: T.
        batch_size: Samples of a step, of all processes.
        backend: Whose ops draw and count.
        device: Where.
    """

    def __init__(
        self,
        num_timesteps: int,
        batch_size: int,
        backend: Backend,
        device: torch.device | str = "cpu",
    ) -> None:
        check_timesteps(num_timesteps)
        self.ops = backend.ops
        self.history = torch.zeros(HISTORY, num_timesteps, device=device)
        self.counts = torch.zeros(num_timesteps, dtype=torch.int32, device=device)
        # of this step; those of other processes are 0 until they are summed
        self.losses = torch.zeros(batch_size, device=device)
        self._none = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.int64, device=device)
        self.ends = torch.zeros(num_timesteps, dtype=torch.int64, device=device)
        self.importance = torch.ones(num_timesteps, device=device)  # 1 / (T p_t)
        self._settle(self._record(*self._none))

    def draw(self, rng: Tensor, n: int, first: int) -> tuple[Tensor, Tensor]:
        """Timesteps of samples first .. first + n of the step, int64 [N], and what their losses are
        to be multiplied by, float32 [N], for the mean of evenly drawn ones."""
        t = self.ops.draw_weighted_timesteps(rng, n, self.ends, first=first)
        return t, self.importance[t]

    def note(self, losses: Tensor, first: int) -> None:  # float32 [N]
        """The losses of these samples, before they are multiplied."""
        self.losses[first : first + len(losses)] = losses

    def finish(self, rng: Tensor) -> None:
        """The step is over, and `losses` has those of all its samples."""
        t = self.ops.draw_weighted_timesteps(rng, len(self.losses), self.ends)
        self._settle(self._record(self.losses, t))
        self.losses.zero_()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, see `load`."""
        return {"history": self.history, "counts": self.counts}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from there, to the bit. ValueError: of another number of timesteps."""
        for name, mine in self.state().items():
            if name not in state or state[name].shape != mine.shape:
                found = list(state[name].shape) if name in state else "missing"
                raise ValueError(f"{name} is {found}; expected {list(mine.shape)}")
        for name, mine in self.state().items():
            mine.copy_(state[name])
        self._settle(self._record(*self._none))

    def _record(self, losses: Tensor, t: Tensor) -> Tensor:
        return self.ops.record_losses(losses, t, self.history, self.counts, uniform=UNIFORM)

    def _settle(self, ends: Tensor) -> None:
        self.ends.copy_(ends)
        q = torch.diff(ends, prepend=ends.new_zeros(1))
        self.importance.copy_(ends[-1] / (len(ends) * q))


def check_timesteps(num_timesteps: int) -> None:
    """ConfigError: more than can be drawn that way."""
    if num_timesteps > MOST_TIMESTEPS:
        raise ConfigError(
            f"diffusion.timestep_sampler=loss_second_moment is for at most {MOST_TIMESTEPS}"
            f" timesteps; diffusion.num_timesteps={num_timesteps}"
        )
