"""From plain dicts to arguments: a constructor's signature is the schema of its settings."""

import difflib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError

T = TypeVar("T")

# of a training run: where, how long and with what display it trains, not what it learns. The same
# settings with other values of these are the same run
NEUTRAL = frozenset({"run_dir", "device", "backend"}) | {
    f"train.{name}"
    for name in (
        *("steps", "log_every", "sample_every", "save_every", "keep", "resume", "cuda_graph"),
        *("sample_count", "sample_steps", "tensorboard", "track"),
        *("fid_images", "fid_metrics", "fid_weights"),
        *("eval_every", "eval_images", "metric"),
    )
}

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_KINDS |= {NoneType: "null"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}  # of what lists hold


def construct(make: Callable[..., T], settings: dict[str, Any], group: str, **given: Any) -> T:
    """`make(**settings, **given)`. ConfigError names an unknown key of `settings` and the nearest
    valid one, a missing one without a default, or a value that is not of the annotated type.
    `group` is where the settings stand in the configuration, "" at its top."""
    if not isinstance(settings, dict):
        raise ConfigError(f"{group}={shown(settings)} is wrong; it is a group of settings")
    parameters = inspect.signature(make).parameters
    valid = [name for name in parameters if name not in given]
    check_keys(settings, valid, group)
    needed = (name for name in valid if _is_needed(parameters[name]))
    if missing := [name for name in needed if name not in settings]:
        raise ConfigError(f"{_dotted(group, missing[0])} is not set, and has no default")
    values = typed(make, settings, group)
    with naming_group(settings, group):
        return make(**values, **given)


@contextmanager
def naming_group(settings: Iterable[str], group: str) -> Iterator[None]:
    """An error within that begins with KEY=, one of the `settings`, names where that stands in the
    configuration, of which a constructor knows nothing."""
    try:
        yield
    except ConfigError as error:
        key, equals, _ = str(error).partition("=")
        if not group or not equals or key not in settings:
            raise
        raise ConfigError(f"{group}.{error}") from error


def check_keys(settings: dict[str, Any], valid: list[str], group: str) -> None:
    """Raise ConfigError for the first key that is not valid."""
    for key in settings:
        if key not in valid:
            near = difflib.get_close_matches(key, valid, n=1, cutoff=0.4)
            hint = f"did you mean {_dotted(group, near[0])}? " if near else ""
            raise ConfigError(
                f"{_dotted(group, key)} is unknown; {hint}valid: {', '.join(sorted(valid))}"
            )


def typed(make: Callable[..., Any], settings: dict[str, Any], group: str) -> dict[str, Any]:
    """`settings` as the annotations of `make` want them: 1e4 is a whole number, 2024 may be the
    name of a folder. ConfigError names the first value that is of another type."""
    hints = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    values = {}
    for key, value in settings.items():
        hint = hints.get(key, Any)
        try:
            values[key] = _as(value, hint)
        except TypeError:
            finite = "finite " if any(_is_endless(item) for item in _items(value)) else ""
            kind = _kind(hint).replace("number", f"{finite}number")
            meant = f", such as [{value}]" if _is_item(value, hint) else ""
            raise ConfigError(
                f"{_dotted(group, key)}={shown(value)} is wrong; expected {kind}{meant}"
            ) from None
    return values


def shown(value: Any) -> str:
    """A value as it is written in a configuration."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def flattened(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a tree of groups."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def as_plain(value: Any) -> Any:
    """As a file of the configuration has it. Callers from Python give paths, tuples, devices, and
    numbers and arrays of NumPy, as of np.logspace, that no such file can hold."""
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    torch = sys.modules.get("torch")  # without which there are no devices
    if torch is not None and isinstance(value, torch.device):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def check_count(key: str, value: Any) -> int:
    """A number of images or channels that a caller from Python gives. ConfigError: it is none."""
    value = as_plain(value)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{key}={shown(value)}; expected a whole number, at least 1")
    return value


def check_seed(seed: int) -> None:
    """ConfigError unless the generator takes it."""
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed}; expected a whole number from 0 to 2^63 - 1")


def check_path(key: str, value: Any, kind: str) -> None:
    """Of what a caller from Python gives. ConfigError: it is no path, or "", which would be the
    current folder, as where a variable was left empty."""
    if not isinstance(value, str | os.PathLike) or value == "":
        plain = isinstance(value, str | int | float | None)
        found = f"={shown(value)} is wrong" if plain else f" is of type {type(value).__name__}"
        raise ConfigError(f"{key}{found}; expected {kind}")


def _is_needed(parameter: inspect.Parameter) -> bool:
    several = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return parameter.default is parameter.empty and not several


def _dotted(group: str, key: str) -> str:
    return f"{group}.{key}" if group else key


def _as(value: Any, hint: Any) -> Any:
    """The value as the hint wants it; TypeError if it is something else. Hints that are not of the
    configuration's few types are not looked at."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for option in arguments:
            try:
                return _as(value, option)
            except TypeError:
                continue
        raise TypeError
    if origin in (Sequence, list, tuple):
        fixed = origin is tuple and Ellipsis not in arguments
        if not isinstance(value, list | tuple) or fixed and len(value) != len(arguments):
            raise TypeError
        return [_as(item, arguments[0]) for item in value]
    if origin is dict:
        return _as_exactly(dict, value)
    return _AS[hint](value) if hint in _AS else value


def _is_item(value: Any, hint: Any) -> bool:
    """Whether a list of this value alone would do."""
    try:
        _as([value], hint)
    except TypeError:
        return False
    return True


def _as_exactly(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _as_number(value: Any) -> int | float:
    """No NaN, which passes every comparison that asks for what is wrong, no infinity, and nothing
    that a float does not hold."""
    if not isinstance(value, int | float) or isinstance(value, bool) or _is_endless(value):
        raise TypeError
    return float(value) if abs(value) > 2**53 else value  # no int that a tensor cannot hold


def _is_endless(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) > sys.float_info.max
    return isinstance(value, float) and not math.isfinite(value)


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _as_whole_number(value: Any) -> int:
    _as_number(value)
    most = 2**53 if isinstance(value, float) else 2**63  # that a tensor's int64 holds
    if not (float(value).is_integer() and abs(value) < most):
        raise TypeError
    return int(value)


def _as_text(value: Any) -> str:
    if value == "":  # KEY= was left without a value; as a path it would be "."
        raise TypeError
    if isinstance(value, str | os.PathLike):
        return str(value)
    return str(_as_number(value))


_AS = {
    bool: partial(_as_exactly, bool),
    int: _as_whole_number,
    float: _as_number,
    str: _as_text,
    NoneType: partial(_as_exactly, NoneType),
}


def _kind(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_kind(option) for option in arguments)
    if origin in (Sequence, list, tuple):
        count = f"{len(arguments)} " if origin is tuple and Ellipsis not in arguments else ""
        return f"a list of {count}{_PLURALS[arguments[0]]}"
    if origin is dict:
        return "a group of settings"
    return _KINDS[hint]
