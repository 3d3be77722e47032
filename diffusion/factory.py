"""From the groups `model` and `diffusion` of the configuration to objects."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from .errors import ConfigError
from .models.unet import UNet
from .models.unet1d import UNet1d
from .process.edm import normal_draws
from .process.schedule import FIXED_VARIANCES, PREDICTIONS, NoiseSchedule, make_schedule
from .runtime.backend import Backend
from .sampling.sampler import DDIM, DDPM, Sampler
from .sampling.solvers import DPMSolverPP2M, Heun
from .settings import construct, shown

M = TypeVar("M", bound=Callable[..., torch.nn.Module])

MODELS: dict[str, Callable[..., torch.nn.Module]] = {"unet": UNet}  # of images
POLICY_MODELS: dict[str, Callable[..., torch.nn.Module]] = {"unet1d": UNet1d}  # of actions

# how diffusers' scheduler of that name steps where the sampler here does otherwise
AS_DIFFUSERS: dict[str, dict[str, bool]] = {
    "ddpm": {"noisy_end": True},
    "ddim": {"use_clipped_model_output": False, "joined": False},
    "heun": {"noise_alone": True},
}

SAMPLERS: dict[str, type[Sampler]] = {
    "ddpm": DDPM,
    "ddim": DDIM,
    "heun": Heun,
    "dpmpp_2m": DPMSolverPP2M,
}


def register_model(name: str) -> Callable[[M], M]:
    """As `diffusion.register_model`, which says what the class has to be."""

    def register(model: M) -> M:
        known = (MODELS | POLICY_MODELS).get(name)
        if known is not None and (known.__module__, known.__qualname__) != (
            model.__module__,
            model.__qualname__,
        ):
            raise ValueError(f"there is a model {name} already: {known.__module__}")
        MODELS[name] = model
        return model

    return register


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
    if not isinstance(name, str) or name not in models:
        name = shown(name)
        other = name in MODELS or name in POLICY_MODELS
        raise ConfigError(
            f"model.name={name} is {f'not for {data}' if other else 'unknown'}; choose one of"
            f" {', '.join(models)}, or register it by plugin=FILE"
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
        schedule: str = "linear",  # linear | scaled_linear | sigmoid | cosine | edm
        num_timesteps: int = 1000,
        prediction: str = "epsilon",  # epsilon | sample | v_prediction
        variance: str = "fixed_small",  # fixed_small | fixed_large | learned_range
        beta_start: float | None = None,  # of all but cosine, edm; None: 0.1 / num_timesteps
        beta_end: float | None = None,  # of all but cosine, edm; None: 20 / num_timesteps
        min_snr_gamma: float | None = None,  # of the loss; None: every timestep has one weight
        sigma_data: float = 1.0,  # what x_0 is divided by: with schedule edm, its deviation
        sigma_min: float | None = None,  # of edm; None: 0.002
        sigma_max: float | None = None,  # of edm; None: 80
        p_mean: float | None = None,  # of ln(sigma) in training; None: timesteps are equally likely
        p_std: float | None = None,
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
        self._check_edm(sigma_data, p_mean, p_std, prediction, variance)
        options = {"beta_start": beta_start, "beta_end": beta_end}
        options |= {"sigma_min": sigma_min, "sigma_max": sigma_max}
        if schedule == "edm":
            options["sigma_data"] = sigma_data
        self.schedule: NoiseSchedule = make_schedule(schedule, num_timesteps, **options)
        self.prediction, self.variance = prediction, variance
        self.min_snr_gamma, self.sigma_data = min_snr_gamma, sigma_data
        self.p_mean, self.p_std = p_mean, p_std
        self._spacing = "karras" if schedule == "edm" else None  # of samplers, if nobody says one

    @property
    def learns_variance(self) -> bool:
        """Whether the network has twice as many channels out."""
        return self.variance == "learned_range"

    @staticmethod
    def _check_edm(
        sigma_data: float, p_mean: float | None, p_std: float | None, prediction: str, variance: str
    ) -> None:
        if not 0 < sigma_data < math.inf:
            raise ConfigError(f"diffusion.sigma_data={sigma_data}; expected a number above 0")
        if sigma_data != 1 and (prediction == "sample" or variance == "learned_range"):
            raise ConfigError(
                f"diffusion.sigma_data={sigma_data} goes with prediction epsilon or v_prediction"
                f" and a fixed variance; these are {prediction} and {variance}"
            )
        if (p_mean is None) != (p_std is None):
            raise ConfigError("diffusion.p_mean and diffusion.p_std go together; one is null")
        if p_std is not None and not (0 < p_std < math.inf and math.isfinite(p_mean)):
            raise ConfigError(
                f"diffusion.p_mean={p_mean} and p_std={p_std}; expected numbers, p_std above 0"
            )

    def draws(self) -> np.ndarray | None:  # int64 [Q]
        """The timestep that each of equally likely draws stands for in training; None: they are
        equally likely themselves."""
        if self.p_mean is None:
            return None
        return normal_draws(self.schedule.sigmas * self.sigma_data, self.p_mean, self.p_std)

    def sampler(self, backend: Backend, device: torch.device, **settings: Any) -> Sampler:
        """A sampler of this process; settings: sampler, steps, eta, clip, spacing."""
        if settings.get("spacing") is None:
            settings["spacing"] = self._spacing
        return make_sampler(
            self.schedule,
            backend,
            device=device,
            prediction=self.prediction,
            variance=self.variance,
            sigma_data=self.sigma_data,
            **settings,
        )
