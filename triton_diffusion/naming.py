"""Errors with settings named as the user has given them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diffusion.errors import ConfigError
from diffusion.settings import flattened

# settings that may name a file or folder to read or to write
PATHS = ("path", "ckpt", "src", "out", "init", "mask", "resume", "reference", "weights", "runs")
PATHS += ("run_dir", "guide", "labels", "encode", "decoder", "vectors", "context", "condition")


@contextmanager
def named_as_given(settings: dict[str, Any]) -> Iterator[None]:
    """What commands share knows settings by the names that one of them has, and files by their
    paths alone. A ConfigError within says `precision` and not `train.precision`, where the command
    has no group `train`, and `ckpt=nowhere does not exist` and not `nowhere does not exist`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(as_given(str(error), settings)) from error


def as_given(message: str, settings: dict[str, Any]) -> str:
    """The message with the names that the settings have."""

    def named(found: re.Match) -> str:
        group, key = found.groups()
        return key if group not in settings and key in settings else found[0]

    message = re.sub(r"\b([a-z]+)\.([a-z_]+)\b(?=[= ,;:]|$)", named, message)
    of_paths = [
        (key, str(value))
        for key, value in flattened(settings)
        if key.rpartition(".")[2] in PATHS and isinstance(value, str | int | float)
    ]
    begun = {key for key, value in of_paths if re.match(rf"{re.escape(value)}(?=[ :,;])", message)}
    return f"{begun.pop()}={message}" if len(begun) == 1 else message
