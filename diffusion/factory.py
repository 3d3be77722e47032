"""From the groups `model` and `diffusion` of the configuration to objects."""

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from .errors import ConfigError
from .models.unet import UNet
from .models.unet1d import UNet1d
from .presets import names_of
from .process import flow
from .process.edm import normal_draws
from .process.flow import FlowSchedule
from .process.schedule import FIXED_VARIANCES, PREDICTIONS, NoiseSchedule, make_schedule
from .process.timesteps import LossAwareTimesteps, check_timesteps
from .process.weights import Weighting
from .registration import check_name
from .runtime.backend import Backend
from .sampling.sampler import DDIM, DDPM, Sampler
from .sampling.solvers import DPMSolverPP2M, Euler, Heun
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

# what a network's constructor is given beside its settings, and every call beside x, t and labels
_GIVEN = ("image_size", "in_channels", "out_channels", "backend")
_ASKED = ("rng", "first")

SAMPLERS: dict[str, type[Sampler]] = {
    "ddpm": DDPM,
    "ddim": DDIM,
    "euler": Euler,
    "heun": Heun,
    "dpmpp_2m": DPMSolverPP2M,
}


def register_model(name: str) -> Callable[[M], M]:
    """As `diffusion.register_model`, which says what the class has to be."""

    def register(model: M) -> M:
        check_name("model", name, model, MODELS | POLICY_MODELS)
        _check_arguments(name, "constructor", model, _GIVEN)
        _check_arguments(name, "forward_nhwc", getattr(model, "forward_nhwc", None), _ASKED)
        MODELS[name] = model
        return model

    return register


def _check_arguments(name: str, what: str, call: Callable | None, needed: tuple[str, ...]) -> None:
    """ValueError: a network has no such method, or it does not take these keyword arguments."""
    if call is None:
        raise ValueError(f"model {name} has no {what}; it is a diffusion.models.layers.Network")
    known = inspect.signature(call).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in known.values())
    if lacking := [] if anything else [argument for argument in needed if argument not in known]:
        raise ValueError(f"model {name}: its {what} has no argument {', '.join(lacking)}")


def build_model(
    settings: dict[str, Any],  # the group `model`
    backend: Backend,
    image_size: tuple[int, int],
    channels: int,
    learned_variance: bool,
    device: torch.device,
) -> torch.nn.Module:
    """The network of the configuration, with freshly drawn parameters, on the device. One without
    memory, on the device "meta", warns of nothing: the network that is used then does."""
    with warnings.catch_warnings():
        if device.type == "meta":
            warnings.simplefilter("ignore")
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


def with_conditions(
    settings: dict[str, Any],  # the group `model`
    **found: int,  # what the data set gives, by options of `UNet`: condition_channels, vector_dim
) -> dict[str, Any]:
    """The settings of a network that is given this. ConfigError: they say otherwise."""
    for option, count in found.items():
        said = settings.get(option)
        if said is not None and said != count:
            raise ConfigError(
                f"model.{option}={shown(said)}, but the data set gives {count}; leave it out"
            )
    return settings | {option: count for option, count in found.items() if count}


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


def in_unwritten_memory(build: Callable[[torch.device], nn.Module]) -> nn.Module:
    """The model that `build(device)` makes, for a rehearsal: in host memory, of which no page is
    there before it is written, and without parameters that somebody has drawn."""
    meta = torch.device("meta")
    with meta:
        model = build(meta)
    return model._apply(_unwritten)  # not `to_empty`, which imports sympy for the strides


def _unwritten(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


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
        file = not other and name in names_of("model")
        raise ConfigError(
            f"model.name={name} is {f'not for {data}' if other else 'unknown'};"
            f"{f' a file of settings is model={name}, not model.name;' if file else ''} choose one"
            f" of {', '.join(models)}, or register it by plugin=FILE"
        )
    return construct(models[name], settings, "model", **given)


def check_sampler(name: str) -> None:
    """ConfigError unless there is a sampler of that name."""
    if name not in SAMPLERS:
        raise ConfigError(f"sampler={name} is unknown; choose one of {', '.join(SAMPLERS)}")


def make_sampler(
    schedule: NoiseSchedule | FlowSchedule,
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


TIMESTEP_SAMPLERS = ("uniform", "loss_second_moment")
_OF_OTHERS = (*PREDICTIONS, *flow.PREDICTIONS, "learned_range")  # values that some schedule has


class Process:
    """The group `diffusion` of the configuration."""

    def __init__(
        self,
        schedule: str = "linear",  # linear | scaled_linear | sigmoid | cosine | edm | flow
        num_timesteps: int = 1000,
        prediction: str = "epsilon",  # epsilon | sample | v_prediction; of a flow: velocity
        variance: str = "fixed_small",  # fixed_small | fixed_large | learned_range
        beta_start: float | None = None,  # of all but cosine, edm; None: 0.1 / num_timesteps
        beta_end: float | None = None,  # of all but cosine, edm; None: 20 / num_timesteps
        min_snr_gamma: float | None = None,  # of the loss; this and the next three: see `weights`
        soft_min_snr_gamma: float | None = None,
        p2_gamma: float | None = None,
        p2_k: float | None = None,  # None: 1
        timestep_sampler: str | None = None,  # uniform | loss_second_moment; None: uniform
        sigma_data: float = 1.0,  # what x_0 is divided by: with schedule edm, its deviation
        sigma_min: float | None = None,  # of edm; None: 0.002
        sigma_max: float | None = None,  # of edm; None: 80
        p_mean: float | None = None,  # of ln(sigma) in training; None: timesteps are equally likely
        p_std: float | None = None,
        shift: float | None = None,  # of a flow's times, towards noise; None: 1
    ) -> None:
        predictions = flow.PREDICTIONS if schedule == "flow" else PREDICTIONS
        variances = (*FIXED_VARIANCES, *(() if schedule == "flow" else ("learned_range",)))
        for key, value, valid in (
            ("prediction", prediction, predictions),
            ("variance", variance, variances),
            ("timestep_sampler", timestep_sampler, (None, *TIMESTEP_SAMPLERS)),
        ):
            if value not in valid:
                what = f" with diffusion.schedule={schedule}" if value in _OF_OTHERS else ""
                raise ConfigError(
                    f"diffusion.{key}={value} is {'wrong' if what else 'unknown'}{what}; choose one"
                    f" of {', '.join(map(shown, valid))}"
                )
        self.weighting = Weighting(min_snr_gamma, soft_min_snr_gamma, p2_gamma, p2_k)
        self._check_edm(sigma_data, p_mean, p_std, prediction, variance)
        options = {"beta_start": beta_start, "beta_end": beta_end, "shift": shift}
        options |= {"sigma_min": sigma_min, "sigma_max": sigma_max}
        if schedule == "edm":
            options["sigma_data"] = sigma_data
        elif schedule == "flow" and sigma_data != 1:
            raise ConfigError(f"diffusion.sigma_data={sigma_data} is not for a flow; leave it at 1")
        self.schedule = make_schedule(schedule, num_timesteps, **options)
        self.prediction, self.variance = prediction, variance
        self.sigma_data, self.p_mean, self.p_std = sigma_data, p_mean, p_std
        self.loss_aware = timestep_sampler == "loss_second_moment"
        if self.loss_aware:
            self._check_loss_aware()
        # of samplers, if nobody says one
        self._spacing = {"edm": "karras", "flow": "linspace"}.get(schedule)

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

    def _check_loss_aware(self) -> None:
        if self.p_mean is not None:
            raise ConfigError(
                f"diffusion.timestep_sampler=loss_second_moment and diffusion.p_mean={self.p_mean}"
                " both say how timesteps are drawn; set p_mean and p_std to null"
            )
        check_timesteps(self.schedule.num_timesteps)

    @property
    def is_flow(self) -> bool:
        """Whether paths are straight, so that samplers that draw noise are none for it."""
        return isinstance(self.schedule, FlowSchedule)

    def same_levels(self, other: "Process") -> bool:
        """Whether both have the same noise at each timestep, and tell the network the same."""
        mine, theirs = (
            (*process.schedule.signal_and_noise, process.schedule.timestep_map)
            for process in (self, other)
        )
        return all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))

    @property
    def default_sampler(self) -> str:
        """If nobody says one."""
        return "euler" if self.is_flow else "ddpm"

    def weights(self) -> np.ndarray | None:  # float64 [T]
        """What the loss of each timestep is multiplied by; None: nothing."""
        return self.weighting.of(self.schedule, self.prediction)

    def timesteps(
        self, batch_size: int, backend: Backend, device: torch.device
    ) -> LossAwareTimesteps | None:
        """Who draws the timesteps of training by their losses, if that is wanted."""
        if not self.loss_aware:
            return None
        return LossAwareTimesteps(self.schedule.num_timesteps, batch_size, backend, device)

    def draws(self) -> np.ndarray | None:  # int64 [Q]
        """The timestep that each of equally likely draws stands for in training; None: they are
        equally likely themselves."""
        if self.p_mean is None:
            return None
        sigmas = self.schedule.drawn_sigmas * self.sigma_data
        return normal_draws(sigmas, self.p_mean, self.p_std)

    def sampler(self, backend: Backend, device: torch.device, **settings: Any) -> Sampler:
        """A sampler of this process; settings: sampler (None: `default_sampler`), steps, eta, clip,
        spacing."""
        settings["sampler"] = settings.get("sampler") or self.default_sampler
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
