"""A checkpoint: a directory from which sampling and training go on. Nothing in it is unpickled.

    step_00003000/
        model.safetensors        parameters, float32, in PyTorch's shapes, by the model's own names
        ema.safetensors          their exponential moving average
        ema_0.999.safetensors    further ones by their decays, if the run keeps any
        optimizer.safetensors    exp_avg.NAME and exp_avg_sq.NAME
        state.json               format, step, images seen, seed, data set
        config.yaml              the whole configuration of the run

It is written aside, synced to the disk and renamed, so a directory of this name is always complete.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import ConfigError, writing
from ..models.flat_parameters import FlatParameters

FORMAT = 1
_GROUPS = ("model", "diffusion", "train")  # of its configuration, which are read again
_FILES = (
    "model.safetensors",
    "ema.safetensors",
    "optimizer.safetensors",
    "state.json",
    "config.yaml",
)


def save_checkpoint(
    folder: Path,  # RUN/checkpoints
    flat: FlatParameters,
    state: dict[str, Any],  # holds at least `step`, the number of updates done
    config: dict[str, Any],
    keep: int,  # how many of the newest stay
) -> Path:
    """Write folder/step_NNNNNNNN and delete the oldest beyond `keep`. If the disk is full the older
    checkpoints stay, what was begun is removed, and a ConfigError says so."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step_{state['step']:08d}"
    partial = folder / f".writing_{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        _write_tensors(partial / "model.safetensors", flat.views(flat.param))
        _write_tensors(partial / "ema.safetensors", flat.views(flat.ema))
        for decay, average in flat.averages.items():
            _write_tensors(partial / _weights_file(decay), flat.views(average))
        moments = {f"exp_avg.{name}": x for name, x in flat.views(flat.exp_avg).items()}
        moments |= {f"exp_avg_sq.{name}": x for name, x in flat.views(flat.exp_avg_sq).items()}
        _write_tensors(partial / "optimizer.safetensors", moments)
        _write_text(partial / "state.json", json.dumps({"format": FORMAT, **state}, indent=2))
        _write_text(partial / "config.yaml", yaml.safe_dump(config, sort_keys=False))
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        _sync_folder(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        last = latest_checkpoint(folder)
        kept = (
            f"the last good checkpoint stays: {last}" if last else "there is no earlier checkpoint"
        )
        raise ConfigError(f"cannot save {final}: {error}; {kept}") from error
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    return sorted(path for path in folder.glob("step_*") if path.is_dir())


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a folder, if there is one."""
    found = list_checkpoints(folder)
    return found[-1] if found else None


def find_checkpoint(path: str | Path, others: str = "") -> Path:
    """The checkpoint meant by a run's folder, its checkpoints folder, or a checkpoint itself.
    ConfigError: there is none; `others` is what else the caller takes."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"checkpoint {path} does not exist")
    if (path / "state.json").is_file():
        return path
    found = latest_checkpoint(path / "checkpoints") or latest_checkpoint(path)
    if found is None:
        raise ConfigError(
            f"{path} holds no checkpoint; expected a run's folder or RUN/checkpoints/step_NNNNNNNN"
            f"{others}"
        )
    return found


def read_state(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, config) of a checkpoint, all files of which are there and as long as they say."""
    missing = [name for name in _FILES if not (checkpoint / name).is_file()]
    if missing:
        raise ConfigError(f"checkpoint {checkpoint} is incomplete: {', '.join(missing)} is missing")
    for name in _FILES:
        if name.endswith(".safetensors"):
            with _readable(checkpoint / name), safe_open(checkpoint / name, "pt"):
                pass
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        config = yaml.safe_load((checkpoint / "config.yaml").read_text())
        if state["format"] != FORMAT:
            raise ValueError(f"format {state['format']}; this version reads format {FORMAT}")
        if not isinstance(state["step"], int):
            raise ValueError(f"step {state['step']} in state.json; expected a whole number")
        if not all(isinstance(config[group], dict) for group in _GROUPS):
            raise ValueError(f"config.yaml; expected the groups {', '.join(_GROUPS)}")
    except KeyError as error:
        raise ConfigError(f"checkpoint {checkpoint} does not say {error}: it is damaged") from error
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"checkpoint {checkpoint} cannot be read: {error}") from error
    return state, config


def read_weights(checkpoint: Path, ema: bool | float) -> dict[str, Tensor]:
    """The trained or averaged parameters by name, on the CPU; for a number the further average of
    that decay. ConfigError if there is none."""
    path = checkpoint / _weights_file(ema)
    if not isinstance(ema, bool) and not path.is_file():
        known = [file.stem.removeprefix("ema_") for file in checkpoint.glob("ema_*.safetensors")]
        others = f" and those of {', '.join(sorted(known))}" if known else ""
        raise ConfigError(
            f"{checkpoint} has no average of decay {ema}; it has that of ema=true{others}"
        )
    return _read_tensors(path)


def write_average(checkpoint: Path, value: float, weights: dict[str, Tensor]) -> Path:
    """Add an average to a checkpoint, which `read_weights` then has for ema=value; returns its
    file. ConfigError if there is one of that value, or the disk is full."""
    path = checkpoint / _weights_file(value)
    if path.exists():
        raise ConfigError(f"{path} is there already")
    partial = path.with_name(f".writing_{path.name}")
    with writing(path):
        try:
            _write_tensors(partial, weights)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return path


def _average(checkpoint: Path, decay: float) -> dict[str, Tensor]:
    """One of optim.more_ema that is to go on."""
    try:
        return read_weights(checkpoint, ema=decay)
    except ConfigError as error:
        raise ConfigError(f"{error}; optim.more_ema cannot grow where a run goes on") from error


def _weights_file(ema: bool | float) -> str:
    if isinstance(ema, bool):
        return "ema.safetensors" if ema else "model.safetensors"
    return f"ema_{ema}.safetensors"


def load_into(checkpoint: Path, flat: FlatParameters) -> None:
    """Copy parameters, EMA and moments into `flat`, bit for bit."""
    moments = _read_tensors(checkpoint / "optimizer.safetensors")
    split = {
        kind: {
            name.removeprefix(f"{kind}."): x
            for name, x in moments.items()
            if name.startswith(f"{kind}.")
        }
        for kind in ("exp_avg", "exp_avg_sq")
    }
    sources = {
        "model.safetensors": (flat.param, read_weights(checkpoint, ema=False)),
        "ema.safetensors": (flat.ema, read_weights(checkpoint, ema=True)),
        **{
            _weights_file(decay): (average, _average(checkpoint, decay))
            for decay, average in flat.averages.items()
        },
        "optimizer.safetensors, exp_avg": (flat.exp_avg, split["exp_avg"]),
        "optimizer.safetensors, exp_avg_sq": (flat.exp_avg_sq, split["exp_avg_sq"]),
    }
    for where, (buffer, stored) in sources.items():
        check_same_model(f"{checkpoint} ({where})", stored, flat.views(buffer))
    for buffer, stored in sources.values():
        for name, view in flat.views(buffer).items():
            view.copy_(stored[name])


def check_same_model(where: str, stored: dict[str, Tensor], model: dict[str, Tensor]) -> None:
    """Raise ConfigError naming the first parameter in which the two differ."""
    for name in [*model, *stored]:
        if name not in stored or name not in model:
            side = "the file lacks" if name not in stored else "the configured model lacks"
            raise ConfigError(f"{where} is of another model: {side} {name}")
        if stored[name].shape != model[name].shape:
            raise ConfigError(
                f"{where} is of another model: {name} is {tuple(stored[name].shape)} there and"
                f" {tuple(model[name].shape)} in the configured model"
            )


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    with _readable(path):
        tensors = load_file(path)
    return {name: x.to(torch.float32) for name, x in tensors.items()}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read, it may be truncated: {error}") from error
