"""A trained network in somebody else's format: from a plain dict to a file or directory.

    diffusers          directory of a DDPMPipeline: `formats.diffusers_directory`
    guided_diffusion   .pt, and a .json with the arguments that build its network
    unet_cu            .bin
    onnx               the denoiser, of images or actions, as ONNX's operators: `export.graph`
    torch_export       the same as torch.export saves it

Each is written aside, read back and compared, and then renamed: what is at `out` is whole.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.values import Pixels
from ..errors import ConfigError, check_writable, writing
from ..factory import Process, build_model
from ..formats.checkpoint import check_same_model
from ..formats.diffusers_directory import read_diffusers, save_diffusers
from ..formats.diffusers_files import is_model
from ..formats.trained import Trained, TrainedSettings, is_policy
from ..formats.weights import load_weights, save_guided, save_unet_cu
from ..policies.policy import load_policy
from ..process.schedule import NoiseSchedule
from ..settings import construct, shown
from .graph import Graph, export_onnx, export_program, image_graph, policy_graph, require_onnx
from .tensorrt_engine import build_engine, require_tensorrt

# what guided-diffusion's UNetModel has one value for, by option of `UNet`
_GUIDED_OPTIONS = {
    "num_groups": 32,
    "max_period": 10000,
    "norm_eps": 1e-5,
    "freq_shift": 0,
    "downsample_padding": 1,
    "stem_channels": -1,
    "decoder_attention": "all",
    "resample_projection": False,
    "vector_dim": 0,
    "context_dim": 0,
}
_GUIDED_ARGUMENTS = (
    "in_channels",
    "model_channels",
    "out_channels",
    "num_res_blocks",
    "attention_resolutions",
    "dropout",
    "channel_mult",
    "conv_resample",
    "num_heads",
    "num_head_channels",
    "num_heads_upsample",
    "use_scale_shift_norm",
    "resblock_updown",
    "use_new_attention_order",
)


# how the programs draw that read weights alone: betas, predictions, variances
_GUIDED_DRAWS = (
    (NoiseSchedule.linear, NoiseSchedule.cosine),
    ("epsilon", "sample"),
    ("fixed_small", "fixed_large", "learned_range"),
)
_UNET_CU_DRAWS = (NoiseSchedule.linear,), ("epsilon",), ("fixed_small", "fixed_large")


@dataclass(frozen=True, kw_only=True)
class ExportSettings(TrainedSettings):
    """The configuration; see configs/export.yaml."""

    format: str
    out: str
    overwrite: bool = False
    engine: str | None = None

    def __post_init__(self) -> None:
        formats = (*_WEIGHTS, *_GRAPHS)
        if self.format not in formats:
            raise ConfigError(
                f"format={self.format} is unknown; choose one of {', '.join(formats)}"
                + "; checkpoints hold .safetensors" * (self.format == "safetensors")
            )
        if self.format == "onnx":
            require_onnx()
        if self.format == "torch_export" and not self.out.endswith(".pt2"):
            raise ConfigError(f"out={self.out}; expected a file that ends in .pt2")
        if self.format == "guided_diffusion" and self.out.endswith(".json"):
            raise ConfigError(f"out={self.out} is where the arguments go; give the .pt")
        if self.engine is not None:
            if self.format != "onnx":
                raise ConfigError(
                    f"engine={self.engine} is built from format=onnx, not {self.format}"
                )
            require_tensorrt()


def export(config: dict[str, Any]) -> Path:
    """Write the network as configured and say what was compared; returns `out`."""
    settings = construct(ExportSettings, config, "")
    out = Path(settings.out).expanduser()
    targets = [out] + ([out.with_suffix(".json")] if settings.format == "guided_diffusion" else [])
    for target in [*targets, *([Path(settings.engine)] if settings.engine else [])]:
        check_writable(target)
        _check_target(target, settings)
    write, graph = _prepare(settings)
    if graph is not None:  # half a minute for a network of 20 M parameters
        print(f"{settings.ckpt}: tracing the network, then comparing the graph with it", flush=True)
    aside = out.with_name(f".writing_{out.name}")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            found = write(aside / out.name)
            for target in targets:
                if target.is_dir():
                    shutil.rmtree(target)
                os.replace(aside / target.name, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    print(f"{out}: {settings.ckpt} as {settings.format}; {found}")
    if settings.engine is not None:
        with writing(Path(settings.engine)):
            build_engine(out, Path(settings.engine), graph)
        print(f"{settings.engine}: TensorRT's engine of {out} for this GPU")
    return out


def _prepare(settings: ExportSettings) -> tuple[Callable[[Path], str], Graph | None]:
    """(what writes the format to a path, what the graph is of if it is one)."""
    write_graph = _GRAPHS.get(settings.format)
    if is_policy(settings.ckpt):
        if write_graph is None:
            raise ConfigError(
                f"format={settings.format} is for images; {settings.ckpt} is a policy: choose one"
                f" of {', '.join(_GRAPHS)}"
            )
        policy = load_policy(
            settings.ckpt, device="cpu", backend="torch", precision="fp32", ema=settings.ema
        )
        graph = policy_graph(policy)
        return partial(write_graph, graph=graph), graph
    trained = settings.load(torch.device("cpu"), backend="torch", precision="fp32")
    if write_graph is None:
        if trained.values != Pixels():
            warnings.warn(
                f"files of format={settings.format} do not say that what is drawn has to be brought"
                f" back from {trained.values}",
                stacklevel=2,
            )
        return partial(_WEIGHTS[settings.format], trained=trained), None
    graph = image_graph(trained)
    if settings.engine is not None and trained.model.context_dim:
        raise ConfigError(
            f"engine={settings.engine} would have a number of tokens of its own; leave it out, and"
            " run the ONNX file, which takes any"
        )
    return partial(write_graph, graph=graph), graph


def _check_target(target: Path, settings: ExportSettings) -> None:
    if target.is_dir() != (settings.format == "diffusers") and target.exists():
        expected = "a directory" if settings.format == "diffusers" else "a file"
        raise ConfigError(f"{target} is there and is not {expected}; give another out=PATH")
    if target.is_dir() and any(target.iterdir()) and not is_model(target):
        raise ConfigError(f"{target} holds something else than a model; give another out=PATH")
    if target.exists() and not settings.overwrite:
        raise ConfigError(f"{target} exists; overwrite=true replaces it")


# --- formats: each writes to a path and says what it found when it read that back -----------------


def _diffusers(path: Path, trained: Trained) -> str:
    path.mkdir()
    save_diffusers(path, trained.model, trained.process, trained.class_names)
    found = read_diffusers(path)
    model = _another(found.settings, trained)
    check_same_model(str(path), found.state, dict(model.named_parameters()))
    model.load_state_dict(found.state)
    return f"read back: largest difference of outputs {_difference(model, trained):.1e}"


def _guided_diffusion(path: Path, trained: Trained) -> str:
    path.with_suffix(".json").write_text(
        json.dumps(guided_arguments(trained.model), indent=2) + "\n"
    )
    save_guided(path, trained.model)
    _warn_of_process("guided-diffusion", trained.process, *_GUIDED_DRAWS)
    return _same_weights(path, trained)


def _unet_cu(path: Path, trained: Trained) -> str:
    save_unet_cu(path, trained.model)
    _warn_of_process("unet.cu", trained.process, *_UNET_CU_DRAWS)
    return _same_weights(path, trained)


_WEIGHTS = {
    "diffusers": _diffusers,
    "guided_diffusion": _guided_diffusion,
    "unet_cu": _unet_cu,
}
_GRAPHS = {"onnx": export_onnx, "torch_export": export_program}


def guided_arguments(model: nn.Module) -> dict[str, Any]:
    """The arguments of guided-diffusion's UNetModel that build this network. ConfigError: there
    are none."""
    for option, value in _GUIDED_OPTIONS.items():
        if getattr(model, option) != value:
            raise ConfigError(
                f"guided-diffusion's format needs {option}={shown(value)}; the model has"
                f" {shown(getattr(model, option))}"
            )
    height, width = model.image_size
    classes = None if model.num_classes is None else model.label_emb.num_embeddings
    arguments = {"image_size": height if height == width else [height, width]}
    arguments |= {option: getattr(model, option) for option in _GUIDED_ARGUMENTS}
    return arguments | {"num_classes": classes}


def _warn_of_process(
    program: str,
    process: Process,
    schedules: tuple[Callable[[int], NoiseSchedule], ...],
    predictions: tuple[str, ...],
    variances: tuple[str, ...],
) -> None:
    """Say if the program that the weights are for draws with none such as these: its files do not
    say what they were trained for."""
    betas = [] if process.is_flow else process.schedule.betas
    others = [
        f"{option}={value}"
        for option, value, valid in (
            ("prediction", process.prediction, predictions),
            ("variance", process.variance, variances),
        )
        if value not in valid
    ]
    total = process.schedule.num_timesteps
    if not any(np.array_equal(betas, make(total).betas) for make in schedules):
        names = " or ".join(make.__name__ for make in schedules)
        others.insert(0, f"a schedule that is not {names}")
    if others:
        warnings.warn(
            f"the network was trained with {', '.join(others)}, with which {program} does not draw,"
            " and its file does not say so: whoever reads it has to know",
            stacklevel=2,
        )


def _same_weights(path: Path, trained: Trained) -> str:
    model = _another(trained.settings, trained)
    load_weights(path, model)
    theirs = model.state_dict()
    for name, tensor in trained.model.state_dict().items():
        if not torch.equal(theirs[name], tensor):
            raise RuntimeError(f"{path}: {name} was not read back as it was written")
    return "read back, equal bit for bit"


@torch.no_grad()
def _difference(model: nn.Module, trained: Trained) -> float:
    inputs = image_graph(trained).inputs(2, 0)
    return (model(*inputs) - trained.model(*inputs)).abs().max().item()


def _another(settings: dict[str, Any], trained: Trained) -> nn.Module:
    height, width, channels = trained.image_shape
    return build_model(
        settings,
        trained.model.backend,
        (height, width),
        channels,
        trained.process.learns_variance,
        torch.device("cpu"),
    ).eval()
