"""A sampling run from a plain dict: find the weights, rebuild the network, draw, save."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from .backend import choose_backend
from .build import Process, build_model, check_sampler
from .checkpoint import check_same_model, find_checkpoint, read_state, read_weights
from .data.image_set import parse_size
from .distributed import choose_device
from .draw import draw
from .errors import ConfigError, writing
from .interchange import load_weights, stored_image_shape
from .pictures import grid
from .settings import construct

_GRID_OF = 100  # images at most in the grid that comes with a folder of images
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


@dataclass(frozen=True)
class SampleSettings:
    """The configuration; see configs/sample.yaml."""

    ckpt: str
    n: int = 16
    sampler: str = "ddim"
    steps: int | None = 50
    spacing: str | None = None
    eta: float = 0.0
    clip: float | None = 1.0
    seed: int = 0
    label: Any = None  # name or number of a class
    guidance: float = 1.0
    ema: bool = True
    out: str | None = None
    batch_size: int = 64
    model: dict[str, Any] | None = None  # this and the next three: for a weights file alone
    diffusion: dict[str, Any] | None = None
    size: int | tuple[int, int] | None = None
    channels: int = 3
    backend: str = "auto"
    device: str = "auto"
    precision: str | None = None

    def __post_init__(self) -> None:
        for key in ("n", "batch_size"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)}; expected at least 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed}; expected a whole number from 0 to 2^63 - 1")
        check_sampler(self.sampler)


@dataclass(frozen=True)
class _Trained:
    """A network with its weights, and what it was trained for."""

    model: nn.Module
    process: Process
    image_shape: tuple[int, int, int]  # H, W, C
    class_names: tuple[str, ...] | None
    default_out: Path


def sample(config: dict[str, Any]) -> Path:
    """Draw as configured; returns the path of the picture, file or folder."""
    settings = construct(SampleSettings, config, "")
    device = choose_device(settings.device)
    trained = _load(settings, device)
    backend = trained.model.backend
    sampler = trained.process.sampler(
        backend,
        device,
        sampler=settings.sampler,
        steps=settings.steps,
        spacing=settings.spacing,
        eta=settings.eta,
        clip=settings.clip,
    )
    out = Path(settings.out or trained.default_out)
    _check_out(out)
    labels = _labels(settings.label, settings.n, trained, device)
    with tqdm(unit="step", dynamic_ncols=True, disable=None) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        images = draw(
            trained.model,
            sampler,
            settings.n,
            trained.image_shape,
            seed=settings.seed,
            labels=labels,
            guidance=settings.guidance,
            batch_size=settings.batch_size,
            progress=report,
        )
    with writing(out):
        _save(images, out)
    print(f"{settings.n} images of {settings.ckpt} in {out}")
    return out


def _load(settings: SampleSettings, device: torch.device) -> _Trained:
    path = Path(settings.ckpt)
    if path.is_file():
        return _load_file(path, settings, device)
    if not path.exists() and path.suffix in _SUFFIXES:
        raise ConfigError(f"weights file {path} does not exist")
    checkpoint = find_checkpoint(path)
    if settings.model is not None or settings.diffusion is not None:
        raise ConfigError(
            f"model= and diffusion= are for a weights file; {checkpoint} says its own"
        )
    state, trained_as = read_state(checkpoint)
    if "policy" in state:
        raise ConfigError(
            f"{checkpoint} is a policy: it draws actions from observations, not images; use"
            " diffusion.policy.load_policy"
        )
    process = construct(Process, trained_as["diffusion"], "diffusion")
    if "image_shape" not in state:
        raise ConfigError(f"{checkpoint / 'state.json'} does not say image_shape: it is damaged")
    height, width, channels = state["image_shape"]
    precision = settings.precision or _precision(trained_as["train"]["precision"], device)
    backend = choose_backend(settings.backend, precision, device, setting="precision")
    model = build_model(
        trained_as["model"], backend, (height, width), channels, process.learns_variance, device
    )
    weights = read_weights(checkpoint, ema=settings.ema)
    check_same_model(str(checkpoint), weights, dict(model.named_parameters()))
    model.load_state_dict(weights)
    run_dir = checkpoint.parent.parent
    class_names = state.get("class_names")
    return _Trained(
        model,
        process,
        (height, width, channels),
        None if class_names is None else tuple(class_names),
        run_dir / "samples" / f"sample_{checkpoint.name}_{_how(settings)}.png",
    )


def _load_file(path: Path, settings: SampleSettings, device: torch.device) -> _Trained:
    if settings.model is None:
        raise ConfigError(
            f"ckpt={path} is a weights file and does not say its network: give model=NAME,"
            " for example model=unet_cu"
        )
    process = construct(Process, settings.diffusion or {}, "diffusion")
    shape = stored_image_shape(path)
    if settings.size is not None:
        size = parse_size(settings.size)
        if shape is not None and size != shape[:2]:
            raise ConfigError(f"size={list(size)}, but {path} was trained at {list(shape[:2])}")
    elif shape is None:
        raise ConfigError(f"{path} does not say the size of its images: give size=SIDE or [H, W]")
    height, width, channels = shape or (*size, settings.channels)
    precision = settings.precision or _precision("bf16", device)
    backend = choose_backend(settings.backend, precision, device, setting="precision")
    model = build_model(
        settings.model, backend, (height, width), channels, process.learns_variance, device
    )
    load_weights(path, model)
    out = Path(f"{path.stem}_{_how(settings)}.png")
    return _Trained(model, process, (height, width, channels), None, out)


def _how(settings: SampleSettings) -> str:
    """What names the pictures after the weights they are drawn with."""
    guidance = "" if settings.guidance == 1 else f"_guidance{settings.guidance}"
    return f"{settings.sampler}{settings.steps or ''}{guidance}_{settings.seed}"


def _precision(trained: str, device: torch.device) -> str:
    """As trained, but fp32 on a CPU, where bf16 gains nothing."""
    return trained if device.type == "cuda" else "fp32"


def _labels(label: Any, n: int, trained: _Trained, device: torch.device) -> Tensor | None:
    num_classes = trained.model.num_classes
    if num_classes is None:
        if label is not None:
            raise ConfigError(f"label={label}, but the model has no classes; leave it out")
        return None
    if label is None:
        return torch.arange(n, device=device) % num_classes
    names = trained.class_names or ()
    if str(label) in names:
        label = names.index(str(label))
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < num_classes:
        valid = ", ".join(names) if names else f"0 to {num_classes - 1}"
        raise ConfigError(f"label={label} is unknown; the model has {num_classes} classes: {valid}")
    return torch.full((n,), label, device=device)


def _check_out(out: Path) -> None:
    if out.suffix not in ("", ".png", ".npz"):
        raise ConfigError(f"out={out}; expected a .png (grid), a .npz or a folder")
    if out.suffix and out.is_dir():
        raise ConfigError(f"out={out} is a folder; expected a file")


def _save(images: np.ndarray, out: Path) -> None:
    """uint8 [N, H, W, C] as a grid, as guided-diffusion's .npz, or one PNG an image and a grid."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix:
        partial = out.with_name(f".writing_{out.name}")  # on a full disk, what is there stays
        try:
            grid(images).save(partial) if out.suffix == ".png" else np.savez(partial, arr_0=images)
            os.replace(partial, out)
        finally:
            partial.unlink(missing_ok=True)
    else:
        out.mkdir(exist_ok=True)
        for i, image in enumerate(images):
            pixels = image[..., 0] if image.shape[2] == 1 else image
            Image.fromarray(pixels).save(out / f"{i:06d}.png")
        grid(images[:_GRID_OF]).save(out / "grid.png")
