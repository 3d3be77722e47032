"""Configurations of diffusers' schedulers: the process, and how they sample. What cannot be said in
the other's words is a ConfigError that names it.

    {"_class_name": "DDPMScheduler", "beta_schedule": "linear", ...}

An option that is not given has the default of its class.
"""

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..factory import Process
from ..process.schedule import NoiseSchedule
from ..settings import shown
from .diffusers_files import check_texts, read_json

_USUAL = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
_LEADING, _LINSPACE = {"timestep_spacing": "leading"}, {"timestep_spacing": "linspace"}
_FLOWS = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
_SCHEDULERS = {  # what they take for what their configuration does not say
    **dict.fromkeys(
        (
            *("DDPMScheduler", "DDPMParallelScheduler", "DDIMScheduler", "DDIMParallelScheduler"),
            *("DDIMInverseScheduler", "PNDMScheduler"),
        ),
        _USUAL | _LEADING,
    ),
    **dict.fromkeys(
        (
            *("DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler"),
            *("UniPCMultistepScheduler", "DEISMultistepScheduler", "SASolverScheduler"),
            *("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "LMSDiscreteScheduler"),
        ),
        _USUAL | _LINSPACE,
    ),
    **dict.fromkeys(
        ("HeunDiscreteScheduler", "KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler"),
        _USUAL | _LINSPACE | {"beta_start": 0.00085, "beta_end": 0.012},
    ),
    **dict.fromkeys(_FLOWS, _LINSPACE),
}
_BETWEEN_ENDS = {
    "linear": NoiseSchedule.linear,
    "scaled_linear": NoiseSchedule.scaled_linear,
    "sigmoid": NoiseSchedule.sigmoid,
}
_CLIPPING = ("DDPMScheduler", "DDPMParallelScheduler", "DDIMScheduler", "DDIMParallelScheduler")
_SAMPLING = {  # options of schedulers, with the value that every sampler here has
    "thresholding": False,
    "steps_offset": 0,
    "set_alpha_to_one": True,
    "algorithm_type": "dpmsolver++",
    "solver_order": 2,
    "solver_type": "midpoint",
    "lower_order_final": True,
    "final_sigmas_type": "zero",
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "use_lu_lambdas": False,
    "use_flow_sigmas": False,
    "stochastic_sampling": False,
}
_VARIANCES = {  # by diffusers' names; None is of schedulers that draw no noise
    **{name: name for name in ("fixed_small", "fixed_large", "learned_range")},
    "fixed_small_log": "fixed_small",
    None: "fixed_small",
}


def read_process(path: Path) -> tuple[Process, float | None, str, tuple[str, ...]]:
    """(process, limit of x_0, spacing, remarks) of a scheduler's configuration."""
    config = read_json(path)
    return *process_of(config, path), *sampling_of(config, path)


def sampling_of(config: dict[str, Any], path: Path) -> tuple[str, tuple[str, ...]]:
    """(spacing, remarks on what no sampler does here) of the options of a scheduler. ConfigError,
    which names `path`: there is no such spacing."""
    config = _with_defaults(config)
    remarks = tuple(
        f"{option}={shown(config[option])}"
        for option, here in _SAMPLING.items()
        if config.get(option, here) != here
    )
    spacing = config["timestep_spacing"]
    if spacing not in ("leading", "trailing", "linspace"):
        raise ConfigError(
            f"{path} has timestep_spacing={spacing}; choose one of leading, trailing, linspace"
        )
    return spacing, remarks


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's options; those that are not given or null are its class's."""
    named = config.get("_class_name", "DDPMScheduler")
    defaults = _SCHEDULERS.get(named, _SCHEDULERS["DDPMScheduler"])
    return defaults | {name: value for name, value in config.items() if value is not None}


def process_of(config: dict[str, Any], path: Path) -> tuple[Process, float | None]:
    """(process, limit of x_0) of the options of a scheduler, whichever of those over betas.
    ConfigError, which names `path`: there is no such process here."""
    check_texts(config, ("_class_name", "beta_schedule", "variance_type"), path)
    name = config.get("_class_name", "DDPMScheduler")
    if name in _FLOWS:
        return _flow_of(config, path), None  # which clips nothing
    if "beta_schedule" not in config and name not in _SCHEDULERS:
        raise ConfigError(f"{path} is a {name}, which has no betas")
    config = _with_defaults(config)
    if config.get("rescale_betas_zero_snr"):
        raise ConfigError(f"{path} has rescale_betas_zero_snr=true: its last step has no signal")
    old = "epsilon" if config.get("predict_epsilon", True) else "sample"
    variance = config.get("variance_type", "fixed_small")
    if variance not in _VARIANCES:
        raise ConfigError(
            f"{path} has variance_type={variance}; choose one of"
            f" {', '.join(filter(None, _VARIANCES))}"
        )
    process = Process(prediction=config.get("prediction_type", old), variance=_VARIANCES[variance])
    process.schedule = _read_betas(config, path)
    clips = config.get("clip_sample", name in _CLIPPING)  # others do not clip by themselves
    return process, config.get("clip_sample_range", 1.0) if clips else None


def _flow_of(config: dict[str, Any], path: Path) -> Process:
    for option in ("use_dynamic_shifting", "shift_terminal", "invert_sigmas"):
        if config.get(option):
            raise ConfigError(
                f"{path} has {option}={shown(config[option])}, which no flow here has; expected a"
                " shift alone"
            )
    total, shift = config.get("num_train_timesteps", 1000), config.get("shift", 1.0)
    if type(total) is not int or total < 2 or type(shift) not in (int, float):
        raise ConfigError(
            f"{path} has num_train_timesteps={total} and shift={shown(shift)}; expected a whole"
            " number of at least 2, and a number"
        )
    return Process(schedule="flow", prediction="velocity", num_timesteps=total, shift=shift)


def _read_betas(config: dict[str, Any], path: Path) -> NoiseSchedule:
    kind, ends = config["beta_schedule"], (config["beta_start"], config["beta_end"])
    total = config.get("num_train_timesteps", 1000)
    if type(total) is not int or total < 1:
        raise ConfigError(
            f"{path} has num_train_timesteps={total}; expected a whole number of at least 1"
        )
    try:
        start, end = map(float, ends)
        trained = config.get("trained_betas")
        trained = None if trained is None else np.asarray(trained, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{path} has beta_start={ends[0]}, beta_end={ends[1]} and"
            f" trained_betas={config.get('trained_betas')}; expected numbers"
        ) from None
    if trained is not None:
        return NoiseSchedule(trained)
    if kind == "squaredcos_cap_v2":
        return NoiseSchedule.cosine(total)
    if kind in _BETWEEN_ENDS:
        return _BETWEEN_ENDS[kind](total, start, end)
    raise ConfigError(
        f"{path} has beta_schedule={kind}; choose one of linear, scaled_linear,"
        " squaredcos_cap_v2, sigmoid"
    )


def scheduler_config(process: Process) -> dict[str, Any]:
    """The options of the DDPMScheduler that is this process, or of a flow those of the
    FlowMatchEulerDiscreteScheduler. Betas that have no name there are written out. ConfigError:
    there is none."""
    if process.is_flow:
        return {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "num_train_timesteps": process.schedule.num_train_timesteps,
            "shift": process.schedule.shift,
        }
    schedule, total = process.schedule, process.schedule.num_timesteps
    if process.sigma_data != 1 or not np.array_equal(schedule.timestep_map, np.arange(total)):
        raise ConfigError(
            "a DDPMScheduler has no sigma_data and tells whole timesteps: diffusion=edm cannot be"
            " written as a directory of diffusers"
        )
    betas: dict[str, Any] = {"trained_betas": schedule.betas.tolist()}
    ends = float(schedule.betas[0]), float(schedule.betas[-1])
    if np.array_equal(schedule.betas, NoiseSchedule.cosine(total).betas):
        betas = {"beta_schedule": "squaredcos_cap_v2"}
    elif np.array_equal(schedule.betas, NoiseSchedule.linear(total, *ends).betas):
        betas = {"beta_schedule": "linear", "beta_start": ends[0], "beta_end": ends[1]}
    return {
        "_class_name": "DDPMScheduler",
        "num_train_timesteps": total,
        **betas,
        "prediction_type": process.prediction,
        "variance_type": process.variance,
        "clip_sample": True,
        "clip_sample_range": 1.0,
        "timestep_spacing": "leading",
    }
