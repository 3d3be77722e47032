"""A run goes on with its own settings: those of its config.yaml, but for what is given anew.

`python train.py run_dir=X` (triton_diffusion/resume.py) and `diffusion.train(X)` both take them.
PyTorch is not imported.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, first_of
from ..near_runs import runs_in, runs_near
from ..presets import chosen_with, defaults_of_training, filled, preset
from ..settings import NEUTRAL

CHOSEN = ("dataset", "model", "diffusion")  # groups of which each choice has settings of its own
MERGED = ("optim", "train")  # groups whose settings are always the same ones
PLACES = ("backend", "device")
_GROUPS = (*CHOSEN, *MERGED)
_SILENT = NEUTRAL - {"train.resume"}  # settings that say nothing of what is trained


def stored_settings(run_dir: Path, given: Collection[str]) -> dict[str, Any]:
    """The settings of the run in the folder; {} if there is none. ConfigError: they cannot be read,
    or there is no run and the settings `given` do not say what a new one would train; the message
    names the runs that are near."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        if _SILENT.issuperset(given):
            _check_begun(run_dir)
        return {}
    try:
        stored = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(stored, dict) or any(
        not isinstance(stored.get(group), dict | None) for group in _GROUPS
    ):
        raise ConfigError(f"{path} cannot be read: expected the groups {', '.join(_GROUPS)}")
    kept = {key: value for key, value in stored.items() if value is not None or key in PLACES}
    if "train" in kept:  # without how it began, which is behind it
        kept["train"] = {key: value for key, value in kept["train"].items() if key != "resume"}
    return kept


def completed(
    run_dir: Path, given: dict[str, str | dict[str, Any]], train: dict[str, Any]
) -> dict[str, Any]:
    """The whole configuration: the groups and places that are `given` and the settings `train`; for
    the rest those of the run in the folder, or the defaults of a new one. A group is given by the
    name of a file of configs/, or as settings: without a `name` they change those of the run."""
    own = stored_settings(run_dir, [*given, *(f"train.{key}" for key in train)])
    dataset = _group("dataset", given, own, "elephants")
    defaults = chosen_with(dataset.get("name"))
    return {
        "dataset": dataset,
        **{key: _group(key, given, own, defaults[key]) for key in ("model", "diffusion", "optim")},
        **{key: given.get(key, own.get(key, "auto")) for key in PLACES},
        "run_dir": str(run_dir),
        "train": defaults_of_training() | own.get("train", {}) | train,
    }


def _group(
    key: str, given: dict[str, str | dict[str, Any]], own: dict[str, Any], default: str
) -> dict[str, Any]:
    """The settings of a group, those of the run without a change as they were."""
    value = given.get(key)
    if key in own and value is None:
        return own[key]
    if key in own and isinstance(value, dict) and "name" not in value:
        return own[key] | value
    value = default if value is None else value
    if key == "diffusion" and isinstance(value, dict) and "name" in value:
        raise ConfigError(
            "diffusion.name is unknown; a file of settings is diffusion=NAME, and changes of it"
            ' preset("diffusion", NAME, ...)'
        )
    if key in ("model", "diffusion"):
        return preset(key, value) if isinstance(value, str) else value
    return filled(key, value, otherwise="adamw" if key == "optim" else None)


def _check_begun(run_dir: Path) -> None:
    """ConfigError if the folder has no checkpoint either; it names the runs that are near."""
    if (run_dir / "checkpoints").is_dir():
        return
    within = runs_in(run_dir)
    near = f"runs: {first_of(within)}; " if within else runs_near(run_dir, "run_dir")
    raise ConfigError(
        f"run_dir={run_dir} has no run to resume; {near}a new run needs a setting that says what to"
        " train, such as dataset=elephants"
    )
