"""A trained policy: what was observed in, actions out, in the units of the data."""

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..data.action_chunks import PolicySpec
from ..errors import ConfigError
from ..factory import AS_DIFFUSERS, Process, build_policy_model
from ..formats.checkpoint import (
    Average,
    check_same_model,
    find_checkpoint,
    naming_good_one,
    read_state,
    read_weights,
)
from ..formats.diffusion_policy import is_workspace, read_workspace, stored_policy
from ..formats.stored_policy import StoredPolicy
from ..formats.trained import warn_of_divergence
from ..plan.inference1d import real_time
from ..process.objective import Denoiser
from ..runtime.backend import choose_backend, precision_on
from ..runtime.distributed import choose_device
from ..sampling.chain import TabulatedDenoiser
from ..sampling.sampler import Sampler
from ..settings import construct

_OTHERS = ", or a whole .ckpt of diffusion_policy"


class Policy:
    """A network, a sampler that draws chunks of actions, and the normalisation of the data."""

    def __init__(
        self,
        model: nn.Module,
        sampler: Sampler,
        spec: PolicySpec,
        denoiser: Denoiser
        | TabulatedDenoiser
        | None = None,  # computes the network; None: the model
    ) -> None:
        self.model, self.sampler, self.spec = model, sampler, spec
        self.denoiser = denoiser or model.forward_nhwc

    def act(
        self,
        observations: Tensor | np.ndarray,  # [N, observation_steps, O], the newest last, anywhere
        *,
        seed: int,
        first: int = 0,
        action_steps: int | None = None,  # None: as many as it was trained for
    ) -> Tensor:  # float32 [N, action_steps, A], where the model is
        """The actions to take from the time of the newest observation on.

        Row i depends on its observations and on (seed, first + i) alone; another seed draws other
        actions. Raises ValueError for a wrong shape, or if a chunk has not so many actions.
        """
        spec, observations = self.spec, torch.as_tensor(observations)
        expected = (spec.observation_steps, spec.observation_dim)
        if observations.ndim != 3 or observations.shape[1:] != expected:
            raise ValueError(
                f"observations have shape {tuple(observations.shape)}; expected [N, {expected[0]},"
                f" {expected[1]}]"
            )
        now = spec.observation_steps - 1
        count = spec.action_steps if action_steps is None else action_steps
        if not 1 <= count <= spec.most_action_steps:
            raise ValueError(f"action_steps={count}; expected 1 to {spec.most_action_steps}")
        device = next(self.model.parameters()).device
        observations = observations.to(device, torch.float32)
        conditions = spec.observations.to(device).normalise(observations).flatten(1)
        chunks = self.draw(conditions, seed=seed, first=first)
        return spec.actions.to(device).restore(chunks[:, now : now + count])

    def draw(
        self,
        conditions: Tensor,  # float32 [N, observation_steps * O], normalised
        *,
        seed: int,
        first: int = 0,
    ) -> Tensor:  # float32 [N, horizon, A], normalised
        """Whole chunks, in the normalisation that the network knows."""
        shape = self._shape(len(conditions))
        x = self.sampler.sample(self.denoiser, shape, seed=seed, labels=conditions, first=first)
        return x[:, 0]

    def rehearse(self, n: int) -> None:
        """Make the launches of a call for n observations, for the launch recorder
        (`triton_kernels.runtime.launch_recorder`)."""
        device = next(self.model.parameters()).device
        conditions = torch.zeros(n, self.spec.condition_dim, device=device)
        self.sampler.rehearse(self.denoiser, self._shape(n), conditions)

    def _shape(self, n: int) -> tuple[int, int, int, int]:
        return n, 1, self.spec.horizon, self.spec.action_dim


def load_policy(
    checkpoint: str | Path,  # a run's folder, its checkpoints folder, a checkpoint; or a .ckpt file
    *,
    device: str = "auto",
    backend: str = "auto",
    precision: str | None = None,  # bf16 | tf32 | fp32; None: as trained, on a CPU fp32
    ema: Average = True,  # the averaged weights; or others, see `read_weights`
    sampler: str | None = None,  # see SAMPLERS; None: as stored, or ddpm, of a flow euler
    steps: int | None = None,  # of the reverse process; None: as stored, or all of them
) -> Policy:
    """The policy in a checkpoint of this project or of diffusion_policy. ConfigError: there is no
    such checkpoint, or a setting is wrong."""
    if is_workspace(checkpoint):
        if not isinstance(ema, bool):
            raise ConfigError(f"ema={ema}, but {checkpoint} has one average, which is ema=true")
        stored, trained_in = stored_policy(read_workspace(checkpoint), ema), "bf16"
    else:
        stored, trained_in = _own_policy(find_checkpoint(checkpoint, _OTHERS), ema)
    spec = stored.spec
    on = choose_device(device)
    precision = precision or precision_on(on, trained_in)
    chosen = choose_backend(backend, precision, on, setting="precision")
    model = build_policy_model(stored.settings, chosen, spec.action_dim, spec.condition_dim, on)
    check_same_model(str(checkpoint), stored.state, dict(model.named_parameters()))
    model.load_state_dict(stored.state)
    for remark in stored.remarks:
        warnings.warn(
            f"{checkpoint} says {remark} for sampling, which is not done here", stacklevel=2
        )
    sampler = sampler or stored.sampler
    steps_as = AS_DIFFUSERS.get(sampler, {}) if stored.as_diffusers else {}
    draws = stored.process.sampler(
        chosen,
        on,
        sampler=sampler,
        steps=stored.steps if steps is None else steps,
        spacing=stored.spacing,
        clip=stored.clip,
        **steps_as,
    )
    return Policy(model.eval(), draws, spec, real_time(model, spec.horizon))


def _own_policy(checkpoint: Path, ema: Average) -> tuple[StoredPolicy, str]:
    """(the policy in a checkpoint of this project, the precision that it was trained in)."""
    with naming_good_one(checkpoint):
        state, config = read_state(checkpoint)
    if "policy" not in state:
        raise ConfigError(f"{checkpoint} is not a policy: it was trained on {state.get('dataset')}")
    warn_of_divergence(checkpoint, state)
    try:
        spec = PolicySpec.from_state(state["policy"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{checkpoint / 'state.json'} is damaged: policy: {error}") from error
    with naming_good_one(checkpoint):
        weights = read_weights(checkpoint, ema)
    process = construct(Process, config["diffusion"], "diffusion")
    stored = StoredPolicy(
        config["model"],
        weights,
        spec,
        process,
        sampler=process.default_sampler,
    )
    return stored, config["train"].get("precision", "bf16")
