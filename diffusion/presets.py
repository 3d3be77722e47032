"""The files of the configuration: where they are, and what one of them says."""

import os
import re
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError
from .settings import shown

_HERE = Path(__file__).resolve().parent
# inside the package where a wheel was installed, beside it in a checkout
CONFIGS = _HERE / "configs" if (_HERE / "configs").is_dir() else _HERE.parent / "configs"


class _Loader(yaml.SafeLoader):
    """Takes 2e-4 for a number, as Hydra does; YAML 1.1 wants 2.0e-4."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def preset(group: str, name: str, **changes: Any) -> dict[str, Any]:
    """The settings of configs/GROUP/NAME.yaml with these changes. ConfigError: there is none."""
    path = CONFIGS / group / f"{name}.yaml"
    if not (CONFIGS / group).is_dir():
        raise ConfigError(f"{group} is no group; choose one of model, dataset, diffusion, optim")
    if not path.is_file():
        raise ConfigError(
            f"{group}={name} is unknown; {for_path(group, name)}choose one of"
            f" {', '.join(names_of(group))}"
        )
    settings = _read(path)
    settings.pop("defaults", None)  # which is for Hydra
    return settings | changes


def names_of(group: str) -> list[str]:
    """The files of a group."""
    return sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))


def for_path(group: str, name: str) -> str:
    """For a message, what to give where a path stands in place of a name; "": it is none."""
    is_path = group == "dataset" and ("/" in name or os.path.exists(name))
    return f"for images there give dataset=folder dataset.path={name}; " if is_path else ""


def filled(group: str, given: str | dict[str, Any], otherwise: str | None = None) -> dict[str, Any]:
    """The settings of a file by its name; or these, and for the rest those of the file that has
    their `name`, or is called `otherwise`."""
    if isinstance(given, str):
        return preset(group, given)
    if not isinstance(given, dict):
        raise ConfigError(f"{group}={shown(given)} is wrong; expected a name or a dict of settings")
    name = given.get("name", otherwise)
    if name is None:
        choices = ", ".join(names_of(group))
        raise ConfigError(f"{group}.name is not set; choose one of {choices}")
    known = isinstance(name, str) and (CONFIGS / group / f"{name}.yaml").is_file()
    return preset(group, name) | given if known else dict(given)


def chosen_with(dataset: Any) -> dict[str, str]:
    """The file of each group that training takes for this data set if nobody says another."""
    chosen = _defaults(CONFIGS / "train.yaml")
    path = CONFIGS / "dataset" / f"{dataset}.yaml"
    return chosen | _defaults(path) if path.is_file() else chosen


def defaults_of_training() -> dict[str, Any]:
    """The group `train` of the configuration."""
    return _read(CONFIGS / "train.yaml")["train"]


def _defaults(path: Path) -> dict[str, str]:
    """The defaults list of a file, by group: of `override /model@_global_.model` that is model."""
    listed = [entry for entry in _read(path).get("defaults", []) if isinstance(entry, dict)]
    pairs = (pair for entry in listed for pair in entry.items())
    return {re.sub(r"override /?|@.*", "", group): choice for group, choice in pairs}


def parsed(value: str) -> Any:
    """A value of a command line, as in these files. ConfigError: it is no YAML."""
    try:
        return yaml.load(value, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{value} is no value of YAML") from error


def _read(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(), _Loader)
