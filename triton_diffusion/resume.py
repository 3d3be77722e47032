"""A run goes on with its own settings: `python train.py run_dir=X` takes those of X/config.yaml.

They stand before the arguments that the user gave, as arguments of Hydra, so what is given wins and
`--cfg job` shows what is taken.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from diffusion.runs.own_settings import CHOSEN, MERGED, PLACES, stored_settings


def own_settings(arguments: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """What a run that is there already adds to the arguments; [] if they name none, or are of a
    sweep. `folders` hold the files of the groups. ConfigError: its config.yaml cannot be read, or
    there is no run and the arguments do not say what a new one would train."""
    if {"-m", "--multirun"} & set(arguments):
        return []
    try:
        given = OverridesParser.create().parse_overrides(
            [argument for argument in arguments if "=" in argument or argument.startswith("~")]
        )
    except OverrideParseException:
        return []  # which Hydra reports
    path = next((Path(str(o.value())) for o in given if _names_run(o)), None)
    if path is None:
        return []
    stored = stored_settings(path, [override.key_or_group for override in given])
    taken = set(_taken(given, folders))
    added = [f"~{group}" for group in CHOSEN if group in stored and group not in taken]
    for group in (*CHOSEN, *MERGED):
        if group in taken or group not in stored:
            continue
        kept = {k: v for k, v in stored[group].items() if f"{group}.{k}" not in taken}
        added.append(f"++{group}={_written(kept)}")
    added += [f"++{key}={_written(stored[key])}" for key in PLACES if key in stored]
    return added


def _names_run(override: Override) -> bool:
    if override.key_or_group != "run_dir":
        return False
    value = override.value()
    return isinstance(value, str | int | float) and value != ""


def _taken(given: Sequence[Override], folders: Sequence[Path]) -> Iterator[str]:
    """The groups that the arguments choose, and what groups and settings these choices bring."""
    for override in given:
        key, choice = override.key_or_group, override.value()
        if key not in (*CHOSEN, "optim", "experiment"):
            continue
        yield key
        for folder in folders:
            file = folder / key / f"{choice}.yaml"
            if not file.is_file():
                continue
            brought = yaml.safe_load(file.read_text()) or {}
            for entry in brought.pop("defaults", []):
                if isinstance(entry, dict):
                    named = next(iter(entry)).removeprefix("override ").strip()
                    yield named.partition("@")[0].strip("/")
            if key == "experiment":
                for group, settings in brought.items():
                    yield from (f"{group}.{k}" for k in settings if isinstance(settings, dict))


def _written(value: Any) -> str:
    """A value in the language of Hydra's arguments."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_written(item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    doubled = re.sub(r"\\+(?='|$)", lambda found: 2 * found[0], str(value))  # before quotes alone
    quoted = doubled.replace("'", "\\'")
    return f"'{quoted}'"
