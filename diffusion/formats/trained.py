"""A trained network for images, rebuilt from what is on the disk: a run of this project, or weights
that another program wrote."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.given import GivenChannels, given_from_state
from ..data.image_set import parse_size
from ..data.values import Pixels, Values, values_from_state
from ..errors import ConfigError
from ..factory import AS_DIFFUSERS, Process, build_model, with_conditions
from ..models.blocks import AttentionBlock
from ..models.layers import TimestepEmbedding
from ..models.unet import UNet
from ..runtime.backend import choose_backend, precision_on
from ..sampling.sampler import Sampler
from ..settings import construct, shown
from ..tracking.run_log import diverged_at
from .checkpoint import (
    Average,
    check_same_model,
    find_checkpoint,
    naming_good_one,
    read_state,
    read_weights,
)
from .diffusers_directory import read_diffusers
from .diffusers_files import is_diffusers
from .diffusion_policy import is_workspace
from .weights import load_weights, stored_image_shape

_CPU = torch.device("cpu")
_OTHERS = ", a weights file (.safetensors, .pt, .bin) or a directory of diffusers"
_NO_IMAGES = (
    "is a policy: it draws actions from observations, not images; use tools/rollout.py, or"
    " diffusion.policies.policy.load_policy"
)
# options of `UNet` that no configuration has until it is given one
_FOR_OTHERS = (
    "norm_eps",
    "freq_shift",
    "downsample_padding",
    "stem_channels",
    "decoder_attention",
    "resample_projection",
)
# values that stand for another option's: a network has that one instead
_LEFT_TO_OTHERS = (
    ("num_heads_upsample", -1),
    ("condition_dropout", None),
    ("context_resolutions", None),
)
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Trained:
    """A trained network in evaluation mode, with its process and data."""

    model: nn.Module
    settings: dict[str, Any]  # the group `model`
    process: Process
    image_shape: tuple[int, int, int]  # H, W, C
    class_names: tuple[str, ...] | None
    run_dir: Path | None  # of the run that trained it; None: another program trained it
    name: str  # of the checkpoint or file
    spacing: str | None = None  # of the timesteps in sampling, if its origin specifies one
    as_diffusers: bool = False  # whether samplers compute the same steps as diffusers' schedulers
    values: Values = Pixels()  # the units of the data
    condition: GivenChannels | None = None  # its image condition

    @property
    def is_given(self) -> bool:
        """Whether the network is given more than classes."""
        model = self.model
        return self.condition is not None or bool(model.vector_dim or model.context_dim)

    def sampler(self, device: torch.device, **settings: Any) -> Sampler:
        """A sampler for the network, of its origin's kind where that makes a difference; settings:
        sampler, steps, eta, clip, spacing. clip is what suits the data if it is auto or left
        out."""
        if settings.get("spacing") is None:
            settings["spacing"] = self.spacing
        if settings.get("clip", "auto") == "auto":
            settings["clip"] = self.values.clip
        if self.as_diffusers:
            settings |= AS_DIFFUSERS.get(settings.get("sampler", "ddpm"), {})
        return self.process.sampler(self.model.backend, device, **settings)


def load_trained(
    ckpt: str | Path,  # a run's folder, a checkpoint's, a weights file or diffusers' directory
    device: torch.device,
    *,
    ema: Average = True,  # the averaged weights; or others, see `read_weights`
    model: dict[str, Any] | None = None,  # the group `model`; this and the next three are for a
    diffusion: dict[str, Any] | None = None,  # weights file, which does not say them
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,  # None: 3
    backend: str = "auto",
    precision: str | None = None,  # None: as trained, on a CPU fp32
) -> Trained:
    """The network in a checkpoint or file, on the device. ConfigError if there is none, it is
    damaged, or not what the settings say."""
    found = _find(Path(ckpt), ema, model, diffusion)
    height, width, channels = _image_shape(found.path, found.image_shape, size, channels)
    follows = (precision or found.precision, precision or precision_on(_CPU, found.precision))
    precision = precision or precision_on(device, found.precision)
    chosen = choose_backend(backend, precision, device, setting="precision")
    if backend == "auto":
        chosen = replace(chosen, follows=follows)
    network = build_model(
        found.settings, chosen, (height, width), channels, found.process.learns_variance, device
    )
    channels_given = getattr(network, "condition_channels", 0)
    condition = found.condition or (GivenChannels(channels_given) if channels_given else None)
    found.give_weights(network)
    _warn_of_bad_numbers(network, ckpt)
    return Trained(
        network.eval(),
        found.settings,
        found.process,
        (height, width, channels),
        found.class_names,
        found.run_dir,
        found.name,
        found.spacing,
        found.as_diffusers,
        found.values,
        condition,
    )


def _warn_of_bad_numbers(network: nn.Module, ckpt: str | Path) -> None:
    named = dict(network.named_parameters())
    bad = [name for name, values in named.items() if not torch.isfinite(values).all()]
    if bad:
        warnings.warn(
            f"{ckpt} has numbers that are not finite in {len(bad)} of {len(named)} parameters, such"
            f" as {bad[0]}: training has diverged, and what is drawn is no picture",
            stacklevel=3,
        )


@dataclass(frozen=True, kw_only=True)
class TrainedSettings:
    """What the configurations of `sample.py`, `tools/export.py` and `tools/benchmark.py` say of the
    network; see `load_trained`."""

    ckpt: str
    ema: Average = True
    model: dict[str, Any] | None = None  # this and the next three: for a weights file alone
    diffusion: dict[str, Any] | None = None
    size: int | tuple[int, int] | None = None
    channels: int | None = None

    def load(
        self, device: torch.device, *, backend: str = "auto", precision: str | None = None
    ) -> Trained:
        """The network that is meant. Raises ConfigError as `load_trained`."""
        return load_trained(
            self.ckpt,
            device,
            ema=self.ema,
            model=self.model,
            diffusion=self.diffusion,
            size=self.size,
            channels=self.channels,
            backend=backend,
            precision=precision,
        )


def load_initial(source: str | Path, network: nn.Module) -> None:
    """Give a network that is about to be trained the (averaged) weights of a run or checkpoint, a
    weights file or a directory of diffusers. ConfigError if there are none, they are damaged, or
    are of another network, be it one with parameters of the same shapes, where that is known."""
    path = Path(source)
    if path.is_file():
        load_weights(path, network)
        return
    if is_diffusers(path):
        found = read_diffusers(path, ema=True)
        weights, settings = found.state, found.settings
    else:
        checkpoint = find_checkpoint(path, _OTHERS)
        weights, settings = read_weights(checkpoint, ema=True), read_state(checkpoint)[1]["model"]
    try:
        _load(network, weights, path)
    except ConfigError as error:
        raise ConfigError(f"{error}{_otherwise(settings, network)}") from error
    if isinstance(network, UNet):
        _check_same_arithmetic(path, settings, network)


def _otherwise(settings: dict[str, Any], network: nn.Module) -> str:
    """The first option in which a network differs from the group `model` of another one."""
    for option, there in settings.items():
        here = getattr(network, option, there)
        here = list(here) if isinstance(here, tuple | list) else here
        if here != there and (option, there) not in _LEFT_TO_OTHERS:
            return f"; model.{option} is {shown(there)} there, {shown(here)} here"
    return ""


def _check_same_arithmetic(path: Path, settings: dict[str, Any], network: UNet) -> None:
    """ConfigError if the network computes something else with the same parameters than that of the
    group `model` that they were trained in."""
    defaults = {name: option.default for name, option in inspect.signature(UNet).parameters.items()}
    trained = defaults | settings
    options = ["num_groups", "norm_eps"]
    frequencies = TimestepEmbedding(
        network.model_channels, trained["max_period"], trained["freq_shift"]
    ).frequencies
    ours = network.timestep_embedding.frequencies.to(frequencies.device)
    if not torch.allclose(ours, frequencies, rtol=1e-5, atol=0):  # a period may be said as a shift
        options += ["max_period", "freq_shift"]
    if network.conv_resample and not network.resblock_updown:
        options.append("downsample_padding")
    heads = {name: block.num_heads for name, block in _attention(network)}
    if any(count > 1 for count in heads.values()):
        options.append("use_new_attention_order")
    for option in options:
        if trained[option] != getattr(network, option):
            raise ConfigError(
                f"{path} was trained with {option}={shown(trained[option])}; the model has"
                f" {shown(getattr(network, option))}: give {'+' * (option in _FOR_OTHERS)}"
                f"model.{option}={shown(trained[option])}"
            )
    for name, block in _attention(network):
        count = trained["num_heads"]
        if trained["num_head_channels"] != -1:
            count = block.channels // trained["num_head_channels"]
        elif name.startswith("output_blocks") and trained["num_heads_upsample"] != -1:
            count = trained["num_heads_upsample"]
        if count != heads[name]:
            raise ConfigError(
                f"{path} was trained with {count} heads in {name}; the model has {heads[name]}:"
                " see num_head_channels and num_heads"
            )


def _attention(network: UNet) -> list[tuple[str, AttentionBlock]]:
    return [(n, block) for n, block in network.named_modules() if isinstance(block, AttentionBlock)]


def is_policy(ckpt: str | Path) -> bool:
    """Whether a run or checkpoint learned actions, or a file is one of diffusion_policy's.
    ConfigError if a folder is none."""
    path = Path(ckpt)
    if is_workspace(path):
        return True
    if not path.is_dir() or is_diffusers(path):
        return False
    return "policy" in read_state(find_checkpoint(path))[0]


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A network that is not built yet: what its origin says of it, see `Trained`."""

    path: Path
    settings: dict[str, Any]
    process: Process
    image_shape: tuple[int | None, ...]  # H, W, C; None: it does not say
    precision: str  # that it was trained in
    name: str
    give_weights: Callable[[nn.Module], object]
    class_names: tuple[str, ...] | None = None
    run_dir: Path | None = None
    spacing: str | None = None
    as_diffusers: bool = False
    values: Values = Pixels()
    condition: GivenChannels | None = None


def _find(
    path: Path,
    ema: Average,
    model: dict[str, Any] | None,
    diffusion: dict[str, Any] | None,
) -> _Found:
    if is_workspace(path):
        raise ConfigError(f"{path} {_NO_IMAGES}")
    if path.is_file():
        return _in_file(path, ema, model, diffusion)
    if not path.exists() and path.suffix in _SUFFIXES:
        raise ConfigError(f"{path} does not exist; expected a weights file")
    if is_diffusers(path):
        return _in_diffusers(path, ema, model, diffusion)
    checkpoint = find_checkpoint(path, _OTHERS)
    if model is not None or diffusion is not None:
        raise ConfigError(
            f"model= and diffusion= are for a weights file; {checkpoint} says its own"
        )
    return _in_checkpoint(checkpoint, ema)


def warn_of_divergence(checkpoint: Path, state: dict[str, Any]) -> None:
    """If the run's losses stopped being finite, then or later, or many updates were left out."""
    at, skipped = diverged_at(checkpoint.parent.parent), state.get("skipped_steps", 0)
    if at is not None:
        warnings.warn(
            f"the run of {checkpoint} diverged: its loss is not finite at step {at}; what is drawn"
            " with its weights may be no good",
            stacklevel=4,
        )
    elif skipped > state["step"] / 100:
        warnings.warn(
            f"{skipped} of the {state['step']} updates of {checkpoint} were left out, since their"
            " gradients were not finite: the run may have diverged",
            stacklevel=4,
        )


def _in_checkpoint(checkpoint: Path, ema: Average) -> _Found:
    with naming_good_one(checkpoint):
        state, config = read_state(checkpoint)
    warn_of_divergence(checkpoint, state)
    if "policy" in state:
        raise ConfigError(f"{checkpoint} {_NO_IMAGES}")
    process = construct(Process, config["diffusion"], "diffusion")
    shape, class_names = state.get("image_shape"), state.get("class_names")
    if not isinstance(shape, list) or [type(side) for side in shape] != [int] * 3:
        raise ConfigError(
            f"{checkpoint / 'state.json'} does not say image_shape as [H, W, C]: it is damaged"
        )

    try:
        values = values_from_state(state.get("values"))
        condition = given_from_state(state.get("condition"))
    except ValueError as error:
        raise ConfigError(f"{checkpoint / 'state.json'} is damaged: {error}") from None

    def give_weights(network: nn.Module) -> None:
        with naming_good_one(checkpoint):
            weights = read_weights(checkpoint, ema)
        _load(network, weights, checkpoint)

    return _Found(
        path=checkpoint,
        settings=with_conditions(
            config["model"],
            condition_channels=condition.channels if condition else 0,
            vector_dim=state.get("vector_dim", 0),
            context_dim=state.get("context_dim", 0),
        ),
        process=process,
        image_shape=tuple(shape),
        precision=config["train"].get("precision", "bf16"),
        name=checkpoint.name,
        give_weights=give_weights,
        class_names=tuple(class_names) if isinstance(class_names, list) else None,
        run_dir=checkpoint.parent.parent,
        values=values,
        condition=condition,
    )


def _in_file(
    path: Path,
    ema: Average,
    model: dict[str, Any] | None,
    diffusion: dict[str, Any] | None,
) -> _Found:
    if not isinstance(ema, bool):
        raise ConfigError(f"ema={ema}, but {path} has one average at most, which is ema=true")
    stored = stored_image_shape(path) or (None, None, None)
    if model is None:
        raise ConfigError(
            f"ckpt={path} is a weights file and does not say its network: give model=NAME,"
            " for example model=unet_cu"
        )
    if diffusion is None:
        _say_assumed(path)
    return _Found(
        path=path,
        settings=model,
        process=construct(Process, diffusion or {}, "diffusion"),
        image_shape=stored,
        precision="bf16",
        name=path.stem,
        give_weights=lambda network: load_weights(path, network, ema=ema),
    )


def _in_diffusers(
    folder: Path,
    ema: Average,
    model: dict[str, Any] | None,
    diffusion: dict[str, Any] | None,
) -> _Found:
    if not isinstance(ema, bool):
        raise ConfigError(f"ema={ema}, but {folder} has one average, which is ema=true")
    found = read_diffusers(folder, ema)
    if model is not None or (diffusion is not None and found.process is not None):
        raise ConfigError(f"model= and diffusion= are for a weights file; {folder} says its own")
    process = found.process
    if process is None:
        if diffusion is None:
            _say_assumed(folder)
        learned = found.out_channels == 2 * found.in_channels
        variance = "learned_range" if learned else "fixed_small"
        process = construct(Process, {"variance": variance} | (diffusion or {}), "diffusion")
    expected = found.in_channels * (2 if process.learns_variance else 1)
    if found.out_channels != expected:
        raise ConfigError(
            f"{folder} has {found.out_channels} channels out for {found.in_channels} in, and"
            f" variance={process.variance}, which takes {expected}"
        )
    if found.clip != 1:
        warnings.warn(
            f"{folder} was trained for sampling with clip={shown(found.clip)}", stacklevel=4
        )
    for remark in found.remarks:
        warnings.warn(f"{folder} says {remark} for sampling, which is not done here", stacklevel=4)
    return _Found(
        path=folder,
        settings=found.settings,
        process=process,
        image_shape=(*(found.image_size or (None, None)), found.in_channels),
        precision="bf16",
        name=folder.resolve().name,
        give_weights=lambda network: _load(network, found.state, folder),
        class_names=found.class_names,
        spacing=found.spacing,
        as_diffusers=True,
    )


def _say_assumed(path: Path) -> None:
    warnings.warn(
        f"{path} does not say what it was trained for: taken is diffusion=linear, which predicts"
        " epsilon; give diffusion=NAME if that is wrong, or to confirm it",
        stacklevel=5,
    )


def _load(network: nn.Module, weights: dict[str, Tensor], origin: Path) -> None:
    check_same_model(str(origin), weights, dict(network.named_parameters()))
    network.load_state_dict(weights)


def _image_shape(
    path: Path,
    stored: tuple[int | None, ...],  # H, W, C as the file or run says; None: it does not
    size: int | tuple[int, int] | None,
    channels: int | None,
) -> tuple[int, int, int]:  # H, W, C
    """What is stored, or else what is given. ConfigError: they differ, or there is no size."""
    *sides, depth = stored
    if size is not None:
        size = parse_size(size)
        if None not in sides and list(size) != sides:
            raise ConfigError(f"size={list(size)}, but {path} was trained at {sides}; leave it out")
    elif None in sides:
        raise ConfigError(f"{path} does not say the size of its images: give size=SIDE or [H, W]")
    if None not in (channels, depth) and channels != depth:
        raise ConfigError(
            f"channels={channels}, but {path} was trained on {depth} channels; leave it out"
        )
    height, width = sides if size is None else size
    return height, width, depth or channels or 3
