"""Diffusion models over `triton_kernels`: the networks, the processes, the data, the trainer.

The names below are the public ones; docs/api.md lists them with their arguments. The command
`triton-diffusion`, train.py and sample.py do the same. Nothing here imports hydra or omegaconf.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .name_clash import check_name

__version__ = "0.2.0"

__all__ = [
    "accelerate",
    "build",
    "load",
    "preset",
    "register_dataset",
    "register_model",
    "sample",
    "train",
]

check_name()

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from .formats.trained import Trained
    from .models.layers import Network


def build(
    model: "str | dict[str, Any]" = "unet64",
    *,
    size: "int | tuple[int, int]" = 64,
    channels: int = 3,
    learned_variance: bool = False,
    device: str = "cpu",
    precision: str | None = None,
    **changes: Any,
) -> "Network":
    """A network of images with freshly drawn parameters.

    model: the name of a file of configs/model, or its settings as a dict with `name`; `changes` are
    further settings, such as `num_classes=10`. size: the side of the images in pixels, or (H, W).
    channels: of the images; out of the network come as many, or twice as many with
    `learned_variance`. precision: bf16, tf32 or fp32; None: bf16 on a GPU and fp32 on a CPU.

    `network(x, t)` takes x [N, C, H, W] and t [N]. Where the network moves (`to`, `cuda`, `cpu`),
    what computes it follows: the Triton kernels on a GPU, PyTorch on a CPU. It also sets PyTorch's
    TF32 switches for the process, as the precision says. ConfigError: settings that are wrong.
    """
    from dataclasses import replace

    from .data.image_set import parse_size
    from .factory import build_model
    from .runtime.backend import choose_backend, precision_on
    from .runtime.distributed import choose_device

    settings = preset("model", model, **changes) if isinstance(model, str) else model | changes
    on = choose_device(device)
    follows = (precision or "bf16", precision or "fp32")
    chosen = choose_backend("auto", precision or precision_on(on, "bf16"), on, "precision")
    chosen = replace(chosen, follows=follows)
    return build_model(settings, chosen, parse_size(size), channels, learned_variance, on)


def train(
    run_dir: str | Path,
    *,
    dataset: "str | dict[str, Any]" = "elephants",
    model: "str | dict[str, Any] | None" = None,
    diffusion: "str | dict[str, Any] | None" = None,
    optim: "str | dict[str, Any]" = "adamw",
    device: str = "auto",
    backend: str = "auto",
    **settings: Any,
) -> float:
    """Train in the folder `run_dir`, or go on there, and return what `train.metric` names: the loss
    on what is held out, where something is, otherwise that of training.

    dataset, model, diffusion, optim: the name of a file in that folder of configs/, or settings as
    a dict; that of `dataset` and `optim` may leave out what its file says. None: what goes with the
    data. settings: of the group `train` of configs/train.yaml, such as `steps=1000, batch_size=32`.

    It is what train.py does, with the same files in `run_dir`. ConfigError: wrong settings.
    """
    from .presets import chosen_with, defaults_of_training, filled
    from .runs.training import train as run

    dataset = filled("dataset", dataset)
    others = chosen_with(dataset.get("name"))
    groups = {"model": model or others["model"], "diffusion": diffusion or others["diffusion"]}
    config = {
        "dataset": dataset,
        **{k: preset(k, v) if isinstance(v, str) else v for k, v in groups.items()},
        "optim": filled("optim", optim, otherwise="adamw"),
        "backend": backend,
        "device": device,
        "run_dir": str(run_dir),
        "train": defaults_of_training() | settings,
    }
    return run(config, Path(run_dir))


def load(
    ckpt: str | Path,
    *,
    device: str = "auto",
    ema: "bool | float | str" = True,
    precision: str | None = None,
    **origin: Any,
) -> "Trained":
    """A trained network of images: its `model`, `process`, `image_shape` and `class_names`.

    ckpt: a run, a checkpoint, a directory of diffusers, or a weights file; for the last, `origin`
    says what it does not: `model` and `diffusion` (settings as dicts), `size`, `channels`. ema: the
    averaged weights; False: those that were trained; a number: one of `optim.more_ema`.
    precision: bf16, tf32 or fp32; None: as trained on a GPU, fp32 on a CPU. ConfigError: there is
    none, it is damaged, or the settings are wrong.

    `load(...).model` follows the device that it is moved to, as the network of `build` does.
    """
    from .formats.trained import load_trained
    from .runtime.distributed import choose_device

    return load_trained(ckpt, choose_device(device), ema=ema, precision=precision, **origin)


def sample(
    source: "str | Path | Trained",
    n: int = 16,
    *,
    sampler: str = "ddim",
    steps: "int | str | list[int] | None" = 50,
    seed: int = 0,
    label: "int | str | None" = None,
    condition: "str | Path | np.ndarray | None" = None,
    vector: "str | Path | np.ndarray | Sequence[float] | None" = None,
    context: "str | Path | np.ndarray | Sequence[np.ndarray] | None" = None,
    guidance: float = 1.0,
    guidance_interval: tuple[float, float] | None = None,
    guidance_rescale: float = 0.0,
    negative: "int | str | None" = None,
    guide: "str | Path | Trained | None" = None,
    init: "str | Path | np.ndarray | None" = None,
    mask: "str | Path | np.ndarray | None" = None,
    strength: float | None = None,
    resample: int = 1,
    batch_size: int = 64,
    device: str = "auto",
    decoder: str | None = None,
    **options: Any,
) -> "np.ndarray":
    """Draw n images, uint8 [n, H, W, C], with a run, a checkpoint, or what `load` returns. Of a run
    on arrays: in the data's units, with the axes of its file.

    sampler: ddpm, ddim, euler, heun or dpmpp_2m, with so many steps (None: all). Image i depends on
    `seed` and i alone. label: the class, by number or name; None: all in turn. condition: of a
    network trained with one a file, a folder or an array [M, H, W, K], of which image i has number
    i % M; vector: likewise numbers, a file or an array [M, D]; context: a file or an array [M, L,
    D], or arrays [L, D] of any lengths. guidance: how far to go away from the null class, from the
    class `negative`, or from what a weaker network says of the same (`guide`); 1: not at all.
    guidance_interval: the levels of noise where; None: all.
    guidance_rescale: how far the deviation goes back, from 0 to 1. init: images to begin from, a
    file, a folder or uint8 [M, H, W, C], of whose noise `strength` is the share; mask: what of them
    is drawn (white) and what stays, for which each level is gone to `resample` times. options: eta,
    clip and spacing, as configs/sample.yaml says. device: where `source` is loaded, if it is a
    path. decoder: of a run on latents the folder of the autoencoder, None: the one that encoded;
    "none": the latents themselves. ConfigError: settings that are wrong.
    """
    from .formats.trained import Trained
    from .plan.inference import sampling_network
    from .runs.conditioning import load_conditions
    from .runs.editing import edited_options, load_edit
    from .runs.sampling import choose_labels, choose_values, load_guide
    from .sampling.draw import draw

    trained = source if isinstance(source, Trained) else load(source, device=device)
    model = trained.model.eval()
    on = next(model.parameters()).device
    guided = load_guide(trained, guidance, guidance_interval, guidance_rescale, negative, guide)
    edited = edited_options(init, mask, strength, resample)
    return draw(
        model,
        trained.sampler(on, sampler=sampler, steps=steps, **options, **edited),
        n,
        trained.image_shape,
        seed=seed,
        labels=load_conditions(
            condition, vector, context, choose_labels(label, n, trained), n, trained
        ),
        guidance=guided.guidance,
        weaker=guided.network(),
        batch_size=batch_size,
        network=sampling_network(model),
        finish=choose_values(decoder, trained).finish,
        edit=load_edit(init, mask, trained),
    )


def preset(group: str, name: str, **changes: Any) -> dict[str, Any]:
    """The settings of configs/GROUP/NAME.yaml with these changes, as a dict.

    group: model, dataset, diffusion or optim. ConfigError: there is no such file.
    """
    from .presets import preset as read

    return read(group, name, **changes)


def register_model(name: str) -> "Callable[[type[nn.Module]], type[nn.Module]]":
    """Decorate the class of a network of images: `model.name=NAME` in a configuration is it.

    Its constructor takes image_size (H, W), in_channels, out_channels and backend, and the settings
    of the group `model` as further arguments by name. It is a `diffusion.models.layers.Network`
    with `forward_nhwc`. ValueError: there is another one of this name. See docs/extending.md.
    """
    from .factory import register_model as register

    return register(name)


def register_dataset(name: str) -> "Callable[[Callable], Callable]":
    """Decorate a function that loads images: `dataset.name=NAME` in a configuration calls it.

    Its arguments are the settings of the group `dataset` but `name` and `flip`, with defaults; one
    is `size`, a side or [H, W]. It returns a `diffusion.data.ImageSet`. ValueError: it has no
    `size`, or there is another function of this name. See docs/extending.md.
    """
    from .data import register_dataset as register

    return register(name)


def accelerate(module: "nn.Module") -> "nn.Module":
    """The module with its forward and backward run by plan (see docs/plan.md): a module with the
    same parameters, arguments and results, which trains, evaluates, and may be wrapped in DDP.

    Its first call for new shapes traces and plans. It raises `diffusion.plan.graph.PlanError` for
    what cannot be planned, with the op and the line that it came from.
    """
    from .plan.accelerate import Accelerated

    return Accelerated(module)
