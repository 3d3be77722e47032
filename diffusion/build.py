"""From the groups `model` and `diffusion` of the configuration to objects."""

import math
from collections.abc import Callable
from typing import Any

import torch

from .backend import Backend
from .errors import ConfigError
from .sampler import DDIM, DDPM, Sampler
from .schedule import FIXED_VARIANCES, PREDICTIONS, NoiseSchedule, make_schedule
from .settings import construct
from .solvers import DPMSolverPP2M, Heun
from .unet import UNet
from .unet1d import UNet1d

MODELS: dict[str, Callable[..., torch.nn.Module]] = {"unet": UNet}  # of images
POLICY_MODELS: dict[str, Callable[..., torch.nn.Module]] = {"unet1d": UNet1d}  # of actions

SAMPLERS: dict[str, type[Sampler]] = {
    "ddpm": DDPM,
    "ddim": DDIM,
    "heun": Heun,
    "dpmpp_2m": DPMSolverPP2M,
}


def build_model(
    settings: dict[str, Any],  # the group `model`
    backend: Backend,
    image_size: tuple[int, int],
    channels: int,
    learned_variance: bool,
    device: torch.device,
) -> torch.nn.Module:
    """The network of the configuration, with freshly drawn parameters, on the device."""
    model = _construct_model(
        MODELS,
        settings,
        "images",
        image_size=image_size,
        in_channels=channels,
        out_channels=channels * (2 if learned_variance else 1),
        backend=backend,
    )
    return model.to(device)


def build_policy_model(
    settings: dict[str, Any],  # the group `model`
    backend: Backend,
    action_dim: int,
    condition_dim: int,
    device: torch.device,
) -> torch.nn.Module:
    """As `build_model`, for chunks of actions."""
    model = _construct_model(
        POLICY_MODELS,
        settings,
        "trajectories",
        input_dim=action_dim,
        global_cond_dim=condition_dim,
        backend=backend,
    )
    return model.to(device)


def _construct_model(
    models: dict[str, Callable[..., torch.nn.Module]],
    settings: dict[str, Any],
    data: str,  # what the models learn
    **given: Any,
) -> torch.nn.Module:
    settings = dict(settings)
    name = settings.pop("name", None)
    if name not in models:
        other = name in MODELS or name in POLICY_MODELS
        raise ConfigError(
            f"model.name={name} is {f'not for {data}' if other else 'unknown'}; choose one of"
            f" {', '.join(models)}"
        )
    return construct(models[name], settings, "model", **given)


def check_sampler(name: str) -> None:
    """ConfigError unless there is a sampler of that name."""
    if name not in SAMPLERS:
        raise ConfigError(f"sampler={name} is unknown; choose one of {', '.join(SAMPLERS)}")


def make_sampler(
    schedule: NoiseSchedule,
    backend: Backend,
    sampler: str = "ddpm",
    *,
    eta: float = 0.0,  # of ddim alone
    **options: Any,  # of Sampler
) -> Sampler:
    """The sampler of that name. ConfigError: an unknown name, eta where it has no meaning, or what
    its constructor finds wrong."""
    check_sampler(sampler)
    if sampler == "ddim":
        options["eta"] = eta
    elif eta:
        raise ConfigError(f"eta={eta} has no meaning with sampler={sampler}; use sampler=ddim")
    return SAMPLERS[sampler](schedule, backend, **options)


class Process:
    """The group `diffusion` of the configuration."""

    def __init__(
        self,
        schedule: str = "linear",  # linear | scaled_linear | sigmoid | cosine
        num_timesteps: int = 1000,
        prediction: str = "epsilon",  # epsilon | sample | v_prediction
        variance: str = "fixed_small",  # fixed_small | fixed_large | learned_range
        beta_start: float | None = None,  # of all but cosine; None: 0.1 / num_timesteps
        beta_end: float | None = None,  # of all but cosine; None: 20 / num_timesteps
        min_snr_gamma: float | None = None,  # of the loss; None: every timestep has one weight
    ) -> None:
        for key, value, valid in (
            ("prediction", prediction, PREDICTIONS),
            ("variance", variance, (*FIXED_VARIANCES, "learned_range")),
        ):
            if value not in valid:
                raise ConfigError(
                    f"diffusion.{key}={value} is unknown; choose one of {', '.join(valid)}"
                )
        if min_snr_gamma is not None and not 0 < min_snr_gamma < math.inf:
            raise ConfigError(
                f"diffusion.min_snr_gamma={min_snr_gamma}; expected a number above 0, such as 5,"
                " or null"
            )
        self.schedule: NoiseSchedule = make_schedule(
            schedule, num_timesteps, beta_start=beta_start, beta_end=beta_end
        )
        self.prediction, self.variance = prediction, variance
        self.min_snr_gamma = min_snr_gamma

    @property
    def learns_variance(self) -> bool:
        """Whether the network has twice as many channels out."""
        return self.variance == "learned_range"

    def sampler(self, backend: Backend, device: torch.device, **settings: Any) -> Sampler:
        """A sampler of this process; settings: sampler, steps, eta, clip, spacing."""
        return make_sampler(
            self.schedule,
            backend,
            device=device,
            prediction=self.prediction,
            variance=self.variance,
            **settings,
        )
