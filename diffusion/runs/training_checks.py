"""Whether a run may train with these settings, in this folder and from this checkpoint, and the
settings that it leaves there. What is wrong is a ConfigError, before anything is built."""

import os
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, counted
from ..formats.checkpoint import read_state
from ..near_runs import runs_near
from ..runtime.distributed import Processes
from ..settings import NEUTRAL, check_keys, flattened, shown
from ..tracking.run_log import write_whole
from ..training.trainer import TrainSettings
from .resume_point import resume_point

_GROUPS = ("dataset", "model", "diffusion", "optim", "train", "backend", "device", "run_dir")
_PLACE = ("run_dir", "train.resume")  # where a run goes on, which is said anyway


def check_groups(config: dict[str, Any]) -> None:
    """A configuration has every group of settings and no other."""
    check_keys(config, list(_GROUPS), "")
    for key in _GROUPS:
        if key not in config:
            raise ConfigError(f"{key} is missing from the configuration")
    for group in ("dataset", "model"):
        _check_named(config[group], group)


def _check_named(settings: Any, group: str) -> None:
    if not isinstance(settings, dict):
        raise ConfigError(f"{group}={shown(settings)} is wrong; it is a group of settings")
    if not isinstance(settings.get("name"), str):
        raise ConfigError(f"{group}.name={shown(settings.get('name'))} is wrong; expected text")


def check_run_dir(run_dir: Path) -> None:
    """The folder can be made, or written to."""
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"run_dir={run_dir}: {nearest} is a file; give a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"run_dir={run_dir}: {nearest} cannot be written to")


def check_untouched(resume: str | None, run_dir: Path, resume_from: Path | None) -> None:
    """ConfigError if another run has been in the folder between looking and locking."""
    if resume_point(resume, run_dir) != resume_from:
        raise ConfigError(f"{run_dir} was trained in by another process just now; try again")


def check_share(settings: TrainSettings, processes: Processes) -> None:
    """The batch divides into processes and micro-batches."""
    _, share = processes.share_of(settings.batch_size)
    if share % settings.accumulate:
        raise ConfigError(
            f"train.batch_size={settings.batch_size} over {processes.count} processes is {share}"
            f" each, which does not divide into train.accumulate={settings.accumulate}"
        )


def check_init(settings: TrainSettings, resume_from: Path | None) -> None:
    """Initial weights are there, and nothing else sets them."""
    if settings.init is None:
        return
    if resume_from is None and not Path(settings.init).exists():
        raise ConfigError(
            f"train.init={settings.init} does not exist;"
            f" {runs_near(Path(settings.init), 'train.init')}expected a run, a checkpoint, a"
            " weights file or a directory of diffusers"
        )
    if resume_from is not None and settings.resume != "auto":
        raise ConfigError(
            f"train.init={settings.init} and train.resume={settings.resume} both set the"
            " initial state; resume also restores step and moments, init only the weights"
        )


def held_against(
    checkpoint: Path | None, config: dict[str, Any]
) -> tuple[int, dict[str, tuple[Any, Any]]]:
    """The step to go on from, and every setting that the checkpoint was not trained with, as (then,
    now) by its dotted key. ConfigError if it is of another model."""
    if checkpoint is None:
        return 0, {}
    state, stored = read_state(checkpoint)
    changes = _changes(stored, config)
    for key, (then, now) in changes.items():
        if key.startswith(("model.", "diffusion.")):
            raise ConfigError(
                f"{checkpoint} is of another model: {key} is {shown(then)} there, {shown(now)} here"
            )
    return state["step"], changes


def _changes(then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    before, after = dict(flattened(then)), dict(flattened(now))
    return {
        key: (before.get(key), after.get(key))
        for key in {**before, **after}
        if before.get(key) != after.get(key) and key not in _PLACE
    }


def is_finished(
    checkpoint: Path | None,
    run_dir: Path,
    start: int,
    settings: TrainSettings,
    changes: dict[str, tuple[Any, Any]],
) -> bool:
    """Whether the run has nothing left to do. ConfigError if it has done as many steps as are asked
    for, but with other settings."""
    if checkpoint is None or start < settings.steps:
        return False
    others = [key for key in changes if key not in NEUTRAL]
    if start == settings.steps and not others and run_dir in checkpoint.parents:
        return True
    key = next(iter(others), None)
    with_others = (
        f", with {key}={shown(changes[key][0])} and not {shown(changes[key][1])}" if key else ""
    )
    raise ConfigError(
        f"{checkpoint} has already done {counted(start, 'steps')}{with_others}, and"
        f" train.steps={settings.steps}; give a larger train.steps to continue, or another run_dir"
    )


def write_config(path: Path, config: dict[str, Any], start: int) -> None:
    """Write a run's settings; those that it was trained with up to here, if they were others, stay
    beside them."""
    text = yaml.safe_dump(config, sort_keys=False)
    if path.is_file():
        before = path.read_text()
        kept = path.with_name(f"config_until_step_{start:08d}.yaml")
        if _same_settings(before, text):  # perhaps in another order
            return
        if not kept.exists():
            write_whole(kept, before)
    write_whole(path, text)


def _same_settings(one: str, other: str) -> bool:
    try:
        return yaml.safe_load(one) == yaml.safe_load(other)
    except (yaml.YAMLError, RecursionError):
        return False
