"""Which files of diffusers' directories hold what, and their contents.

    DIR/unet/config.json
    DIR/unet/diffusion_pytorch_model.safetensors             or .bin
    DIR/unet/diffusion_pytorch_model.fp16.safetensors        a variant, read where there is no other
    DIR/unet/diffusion_pytorch_model.safetensors.index.json  of weights in several files, by name

The parts' files may lie in DIR itself. A checkpoint of diffusers' training scripts has unet/ and
unet_ema/, and no model_index.json.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import ConfigError
from ..settings import shown

WEIGHTS = "diffusion_pytorch_model"
_KINDS = ("safetensors", "bin")
_AVERAGED, _TRAINED = "unet_ema", "unet"


def is_diffusers(folder: Path) -> bool:
    """Whether a folder is the directory of a pipeline, of a model or of a training checkpoint."""
    networks = (folder / name / "config.json" for name in (_AVERAGED, _TRAINED))
    return is_model(folder) or any(path.is_file() for path in networks)


def is_model(folder: Path) -> bool:
    """Whether a folder is the directory of a pipeline or of a model, and no more than that."""
    if (folder / "model_index.json").is_file():
        return True
    return (folder / "config.json").is_file() and any(folder.glob(f"{WEIGHTS}.*"))


def unet_folder(folder: Path, ema: bool) -> Path:
    """Where the network is; `ema`: the averaged one, if there are two."""
    names = (_AVERAGED, _TRAINED) if ema else (_TRAINED, _AVERAGED)
    parts = (folder / name for name in names)
    return next((part for part in parts if (part / "config.json").is_file()), folder)


def scheduler_folder(folder: Path) -> Path:
    """Where the scheduler is; of old pipelines and single parts at the top."""
    part = folder / "scheduler"
    return part if (part / "scheduler_config.json").is_file() else folder


def read_json(path: Path) -> dict[str, Any]:
    """The settings in a file. ConfigError: there are none."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no settings")
    return content


def read_weights(unet: Path) -> dict[str, Tensor]:
    """The state dict in a model's folder, in float32 whatever it is stored in. ConfigError: a file
    is missing, damaged or holds something else."""
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(unet):
        tensors |= _read_tensors(path)
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


def _weight_files(unet: Path) -> list[Path]:
    """One file, or those that an index names; variants come last."""
    candidates = [
        unet / f"{WEIGHTS}.{kind}{index}" for kind in _KINDS for index in ("", ".index.json")
    ]
    for kind in _KINDS:  # an index goes first, as its files are called as a variant's is
        candidates += sorted(unet.glob(f"{WEIGHTS}.{kind}.index.*.json"))
        candidates += sorted(unet.glob(f"{WEIGHTS}.*.{kind}"))
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise ConfigError(f"{unet} has no weights; expected {WEIGHTS}.safetensors or .bin")
    if found.suffix != ".json":
        return [found]
    names = read_json(found).get("weight_map")
    names = set(names.values()) if isinstance(names, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ConfigError(f"{found} does not say in which files beside it the weights are")
    missing = sorted(name for name in names if not (unet / name).is_file())
    if missing:
        raise ConfigError(f"{found} names {', '.join(missing)}, which is not there")
    return [unet / name for name in sorted(names)]


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{path} holds more than tensors, which is not unpickled") from error
    except (SafetensorError, OSError, RuntimeError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read, it may be truncated: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(x, Tensor) for x in tensors.values()):
        raise ConfigError(f"{path} holds no state dict")
    return tensors


def check_texts(config: dict[str, Any], options: tuple[str, ...], path: Path) -> None:
    """ConfigError, which names `path`: one of these options is given and no text."""
    for option in options:
        value = config.get(option)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{path} has {option}={shown(value)}; expected a name")
