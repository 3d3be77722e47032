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
    "evaluate",
    "load",
    "prepare",
    "preset",
    "register_dataset",
    "register_model",
    "sample",
    "train",
]

_OPTIONS = "eta", "clip", "spacing"  # of a sampler

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
    """A network for images with newly initialised parameters.

    model: the name of a file in configs/model, or its settings as a dict with `name`. changes:
    further settings, such as `num_classes=10`. size: the side of the images in pixels, or (H, W).
    channels: of the images; the network's output has as many, or with `learned_variance` twice as
    many. precision: bf16, tf32 or fp32; None: bf16 on a GPU and fp32 on a CPU.

    `network(x, t)` takes x [N, C, H, W] and t [N]. The network uses the Triton kernels on a GPU and
    PyTorch on a CPU, also after it has moved (`to`, `cuda`, `cpu`). `build` sets PyTorch's TF32
    switches for the process to match the precision. ConfigError: a setting is wrong.
    """
    from dataclasses import replace

    from .data.image_set import parse_size
    from .errors import ConfigError
    from .factory import build_model
    from .runtime.backend import choose_backend, precision_on
    from .runtime.distributed import choose_device
    from .settings import as_plain, check_count, shown

    if not isinstance(model, str | dict):
        raise ConfigError(f"model={shown(model)} is wrong; expected a name or a dict of settings")
    settings = preset("model", model, **changes) if isinstance(model, str) else model | changes
    settings, size, channels = as_plain(settings), as_plain(size), check_count("channels", channels)
    on = choose_device(device)
    follows = (precision or "bf16", precision or "fp32")
    chosen = choose_backend("auto", precision or precision_on(on, "bf16"), on, "precision")
    chosen = replace(chosen, follows=follows)
    return build_model(settings, chosen, parse_size(size), channels, learned_variance, on)


def train(
    run_dir: str | Path,
    *,
    dataset: "str | dict[str, Any] | None" = None,
    model: "str | dict[str, Any] | None" = None,
    diffusion: "str | dict[str, Any] | None" = None,
    optim: "str | dict[str, Any] | None" = None,
    device: str | None = None,
    backend: str | None = None,
    **settings: Any,
) -> float:
    """Train in the folder `run_dir`, or resume the run there. Returns the figure named by
    `train.metric`: by default the held-out loss if images are held out, else the training loss.

    dataset, model, diffusion, optim: the name of a file in that folder of configs/, or settings as
    a dict. The dicts of `dataset` and `optim` may omit settings that have defaults. settings: of
    the group `train` in configs/train.yaml, such as `steps=1000, batch_size=32`.

    What is not given is as it was in the run that is resumed, so `train("runs/first")` continues
    it; a dict without `name` changes some of the run's settings. In a new run it is the default:
    elephants, the model and diffusion for the data set, adamw, auto.

    It runs train.py's loop and writes the same files. ConfigError: a setting is wrong.
    """
    from .runtime.host import choose_threads_now

    choose_threads_now()  # before what imports PyTorch
    from .presets import defaults_of_training
    from .runs.own_settings import completed
    from .runs.training import train as run
    from .settings import as_plain, check_keys, check_path

    check_path("run_dir", run_dir, "a folder, such as runs/first")
    check_keys(settings, [*defaults_of_training(), *_named(train)], "")
    chosen = {"dataset": dataset, "model": model, "diffusion": diffusion, "optim": optim}
    chosen |= {"device": device, "backend": backend}
    given = {key: value for key, value in chosen.items() if value is not None}
    config = completed(Path(run_dir), given, settings)
    return run(as_plain(config), Path(run_dir))


def load(
    ckpt: str | Path,
    *,
    device: str = "auto",
    ema: "bool | float | str" = True,
    precision: str | None = None,
    **origin: Any,
) -> "Trained":
    """A trained network for images, with `model`, `process`, `image_shape` and `class_names`.

    ckpt: a run, a checkpoint, a diffusers directory, or a weights file. origin: for a weights file,
    what it does not contain: `model` and `diffusion` (a name or a dict of settings), `size`,
    `channels`.
    ema: True: the averaged weights; False: the trained ones; a number: one of `optim.more_ema` or
    of tools/average.py, which also makes "sigma_rel_0.1". precision: bf16, tf32 or fp32; None: the
    run's on a GPU, fp32 on a CPU. ConfigError: there is no checkpoint, it is damaged, or a setting
    is wrong.

    `load(...).model` may be moved between devices like the network of `build`.
    """
    from .formats.trained import load_trained
    from .presets import preset
    from .runtime.distributed import choose_device
    from .settings import check_path

    check_path("ckpt", ckpt, "a run or a checkpoint, such as runs/first")
    for group in ("model", "diffusion"):
        if isinstance(origin.get(group), str):
            origin[group] = preset(group, origin[group])
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
    """Sample n images, uint8 [n, H, W, C]. For a run on arrays the result is in the data's units,
    with the axes of its file. Image i depends only on `seed` and i.

    source: a run, a checkpoint, or the result of `load`. device: where a path is loaded.
    sampler, steps: ddpm, ddim, euler, heun or dpmpp_2m; None: all steps of the schedule.
    label: a class by number or name; None: all classes in turn.
    condition, vector, context: for a network trained with them; image i uses number i % M. Here
      and for `init` and `mask` an array may be a tensor, and a picture one of Pillow.
      condition: a file, a folder or an array [M, H, W, K]; vector: numbers, a file or an array
      [M, D]; context: a file, an array [M, L, D], or arrays [L, D] of any lengths.
    guidance: strength of guidance away from the null class, from the class `negative`, or from the
      output of a weaker network (`guide`); 1: none. guidance_interval: the noise levels that are
      guided; None: all. guidance_rescale: 0 to 1, as configs/sample.yaml says.
    init: images to start from, a file, a folder or an array: uint8 [M, H, W, C], or in the units
      of a run on arrays or latents. strength: the share of the steps that run from there. mask:
      a file, a folder or an array [H, W] or [M, H, W]: where it is white, 1 or True, pixels are
      sampled, and black ones kept. resample: how often each noise level is visited.
    decoder: for a run on latents, the autoencoder's folder; None: the one that encoded the data;
      "none": return latents.
    options: eta, clip and spacing, as configs/sample.yaml says.

    ConfigError: a setting is wrong.
    """
    from .runtime.host import choose_threads_now

    if isinstance(source, str | Path):
        choose_threads_now()  # before what imports PyTorch
    from .data.handed import as_array
    from .formats.trained import Trained
    from .plan.inference import sampling_network
    from .runs.classes import choose_labels
    from .runs.conditioning import load_conditions
    from .runs.draw_settings import SampleSettings
    from .runs.editing import edited_options, load_edit
    from .runs.guiding import load_guide
    from .runs.outputs import choose_values
    from .sampling.draw import draw
    from .settings import as_plain, check_count, check_keys, check_path, check_seed, typed

    check_keys(options, [*_OPTIONS, *_named(sample)], "")
    paths = {"condition": condition, "vector": vector, "context": context, "guide": guide}
    paths |= {"init": init, "mask": mask, "decoder": decoder}
    for key, value in paths.items():
        if isinstance(value, str):
            check_path(key, value, "a file or a folder")
    n, batch_size = check_count("n", n), check_count("batch_size", batch_size)
    settings = {"sampler": sampler, "steps": steps, "seed": seed, **options}
    settings |= {"strength": strength, "resample": resample}
    how = {"guidance": guidance, "guidance_interval": guidance_interval}
    how |= {"guidance_rescale": guidance_rescale}
    settings, how = (typed(SampleSettings, as_plain(given), "") for given in (settings, how))
    seed, (strength, resample) = settings.pop("seed"), map(settings.pop, ("strength", "resample"))
    check_seed(seed)
    condition, vector, context = map(as_array, (condition, vector, context))
    init, mask = as_array(init), as_array(mask)
    label, negative = as_plain(label), as_plain(negative)
    trained = source if isinstance(source, Trained) else load(source, device=device)
    model = trained.model.eval()
    on = next(model.parameters()).device
    guided = load_guide(trained, **how, negative=negative, guide=guide)
    edited = edited_options(init, mask, strength, resample)
    return draw(
        model,
        trained.sampler(on, **settings, **edited),
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
        edit=load_edit(init, mask, n, trained, decoder),
    )


def _named(function: Callable) -> list[str]:
    """Its keyword arguments."""
    from inspect import signature

    return [p.name for p in signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def evaluate(
    ckpt: str | Path, metrics: "Sequence[str]" = ("loss",), **settings: Any
) -> dict[str, Any]:
    """The figures of a run, a checkpoint or a weights file, and what they depend on: the row that
    tools/evaluate.py appends to its table.

    metrics: some of loss (of what was held out, for which nothing is sampled), fid, kid, isc and
    prc. settings: others of configs/evaluate.yaml, such as `n=10000, reference=FOLDER`.

    ConfigError: a setting is wrong, or nothing was held out.
    """
    from .runtime.host import choose_threads_now

    choose_threads_now()  # before what imports PyTorch
    from .runs.evaluation import evaluate as run
    from .settings import as_plain

    metrics = [metrics] if isinstance(metrics, str) else list(metrics)
    return run(as_plain({"ckpt": str(ckpt), "metrics": metrics, **settings})) or {}


def prepare(src: str | Path, out: str | Path, **settings: Any) -> None:
    """Write images, latents or an array into one file, as tools/prepare.py does.

    settings: those of configs/prepare.yaml, such as `size=64, workers=4` or `encode=FOLDER`. If it
    was killed, the same call continues. ConfigError: a setting or the data are wrong.
    """
    from .runs.prepare import prepare_as_configured
    from .settings import as_plain

    prepare_as_configured(as_plain({"src": str(src), "out": str(out), **settings}))


def preset(group: str, name: str, **changes: Any) -> dict[str, Any]:
    """The settings of configs/GROUP/NAME.yaml as a dict, updated with `changes`.

    group: model, dataset, diffusion or optim. ConfigError: there is no such file.
    """
    from .presets import preset as read

    return read(group, name, **changes)


def register_model(name: str) -> "Callable[[type[nn.Module]], type[nn.Module]]":
    """Decorator for the class of a network for images, which `model.name=NAME` selects.

    The class is a `diffusion.models.layers.Network` with `forward_nhwc`. Its constructor takes
    image_size (H, W), in_channels, out_channels, backend, and the settings of the group `model` as
    keyword arguments. ValueError: the name is taken, or the constructor or `forward_nhwc` lacks an
    argument that it will be given. See docs/extending.md.
    """
    from .factory import register_model as register

    return register(name)


def register_dataset(name: str) -> "Callable[[Callable], Callable]":
    """Decorator for a function that loads images; `dataset.name=NAME` in a configuration calls it.

    The function's arguments are the settings of the group `dataset`, and have defaults. One of them
    is `size`, a side or [H, W]. Not among them are those of every set: `name`, `flip`, `held_out`,
    `vectors`, `context`, and `channels` unless the function has it. It returns a
    `diffusion.data.ImageSet`. ValueError: it has no argument `size`, or the name is taken. See
    docs/extending.md.
    """
    from .data import register_dataset as register

    return register(name)


def accelerate(module: "nn.Module", capture: bool = True) -> "nn.Module":
    """A module that runs the forward and backward of `module` by a plan (docs/plan.md). It has the
    same parameters, arguments and results, trains and evaluates, and may be wrapped in DDP.

    On a GPU the third call with the same shapes is captured in CUDA graphs, which later calls
    replay. The graphs keep the memory of one call. `capture=False`: every call is launched.

    The first call with new shapes traces and plans. It raises `diffusion.plan.graph.PlanError` for
    what cannot be planned, with the line of the module, and ConfigError on a GPU for which no
    kernel is right.
    """
    from .plan.accelerate import Accelerated

    return Accelerated(module, capture=capture)
