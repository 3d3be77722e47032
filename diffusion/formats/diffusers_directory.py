r"""Directories of diffusers: UNet2DModel and its scheduler, read and written.

    DIR/model_index.json                             class of the pipeline and of its parts
    DIR/unet/config.json                             options of UNet2DModel
    DIR/unet/diffusion_pytorch_model.safetensors     and other forms, see `diffusers_files`
    DIR/scheduler/scheduler_config.json              the process, see `diffusers_schedulers`

or the first or last of these left out. An option that a file does not say has diffusers' default.
The network is the same but for names and packing, and three things are said in other words:

- The mean of 2x2 pixels is a convolution of stride 2 with weights of a quarter, and nearest
  neighbours alone are followed by a convolution with the identity. Exact, but not free; read back,
  they are recognised.
- A period P of the sinusoids is the shift s with (half - s) log P = half log 10000.
- Sine before cosine is another order of the columns that read them.

Whatever cannot be said in the other's words is a ConfigError that names it.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ..data.image_set import parse_size
from ..errors import ConfigError
from ..factory import Process
from ..models.blocks import AttentionBlock
from ..models.unet import MOST_BLOCKS, UNet
from ..settings import shown
from .diffusers_files import (
    WEIGHTS,
    check_texts,
    read_json,
    read_weights,
    scheduler_folder,
    unet_folder,
)
from .diffusers_names import from_diffusers_state, resamples_by_constants, to_diffusers_state
from .diffusers_schedulers import read_process, scheduler_config

_PERIOD = 10000  # of UNet2DModel's sinusoids

# options of UNet2DModel with a single value that `UNet` has, which is their default too
_FIXED = {
    "center_input_sample": False,
    "time_embedding_type": "positional",
    "mid_block_type": "UNetMidBlock2D",
    "mid_block_scale_factor": 1,
    "add_attention": True,
    "class_embed_type": None,
}
_DEFAULTS = {  # of the options that have to fit each other
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "block_out_channels": (224, 448, 672, 896),
    "down_block_types": ("DownBlock2D", *["AttnDownBlock2D"] * 3),
    "up_block_types": (*["AttnUpBlock2D"] * 3, "UpBlock2D"),
}
_BLOCKS = {  # a block's attention, and how it resamples; None: as the configuration says
    "DownBlock2D": (False, "conv"),
    "UpBlock2D": (False, "conv"),
    "AttnDownBlock2D": (True, None),
    "AttnUpBlock2D": (True, None),
    "ResnetDownsampleBlock2D": (False, "resnet"),
    "ResnetUpsampleBlock2D": (False, "resnet"),
}


@dataclass(frozen=True)
class DiffusersModel:
    """What a directory holds, in this project's words."""

    settings: dict[str, Any]  # the group `model`
    image_size: tuple[int, int] | None  # H, W
    in_channels: int
    out_channels: int
    process: Process | None  # None: there is no scheduler
    clip: float | None  # of x_0 in sampling
    spacing: str | None  # of the timesteps in sampling; None: there is no scheduler
    remarks: tuple[str, ...]  # on what its scheduler does in sampling and no sampler does here
    class_names: tuple[str, ...] | None
    state: dict[str, Tensor]  # float32, by the names of `UNet`


# --- reading --------------------------------------------------------------------------------------


def read_diffusers(
    folder: str | Path,
    ema: bool = True,  # the averaged weights, of a training checkpoint that has both
) -> DiffusersModel:
    """Read a directory. ConfigError: a part is missing or damaged, or nothing that `UNet` and
    `Process` can be."""
    folder = Path(folder)
    index = {}
    if (folder / "model_index.json").is_file():
        index = read_json(folder / "model_index.json")
        parts = {name for name, part in index.items() if isinstance(part, list) and any(part)}
        parts = {name for name in parts if not name.startswith("_")}
        if not {"unet"} <= parts <= {"unet", "scheduler"}:
            raise ConfigError(
                f"{folder} is a pipeline of {', '.join(sorted(parts)) or 'nothing'};"
                " expected unet and scheduler alone"
            )
    unet = unet_folder(folder, ema and not index)
    if not (unet / "config.json").is_file():
        raise ConfigError(f"{folder} has no network; expected unet/config.json or config.json")
    config = _DEFAULTS | read_json(unet / "config.json")
    if config.get("_class_name", "UNet2DModel") != "UNet2DModel":
        raise ConfigError(f"{unet} is a {config['_class_name']}; expected a UNet2DModel")
    settings = _settings_of(config, unet)
    theirs = read_weights(unet)
    if not settings["resblock_updown"] and settings["downsample_padding"] == 1:
        settings["conv_resample"] = not resamples_by_constants(theirs)
    state = from_diffusers_state(theirs, settings, config.get("flip_sin_to_cos", True))
    if index.get("_label_dropout") and settings["num_classes"] is not None:
        # this project's word: the last class is the null class
        settings |= {
            "num_classes": settings["num_classes"] - 1,
            "label_dropout": index["_label_dropout"],
        }
    size, names = config.get("sample_size"), index.get("_class_names")
    process, clip, spacing, remarks = None, 1.0, None, ()
    scheduler = scheduler_folder(folder) / "scheduler_config.json"
    if scheduler.is_file():
        process, clip, spacing, remarks = read_process(scheduler)
    return DiffusersModel(
        settings,
        None if size is None else parse_size(size),
        config["in_channels"],
        config["out_channels"],
        process,
        clip,
        spacing,
        remarks,
        tuple(names) if isinstance(names, list) else None,
        state,
    )


def _settings_of(config: dict[str, Any], where: Path) -> dict[str, Any]:
    """The group `model` of a UNet2DModel's options."""

    def need(option: str, value: Any, expected: Any) -> None:
        if value != expected:
            raise ConfigError(f"{where} has {option}={value}, which this UNet cannot be")

    _check_types(config, where / "config.json")
    for option, expected in _FIXED.items():
        need(option, config.get(option, expected), expected)
    if config.get("act_fn", "silu") not in ("silu", "swish"):
        need("act_fn", config["act_fn"], "silu")
    widths = config["block_out_channels"]
    groups = config["norm_num_groups"]
    film = config.get("resnet_time_scale_shift", "default")
    if film not in ("default", "scale_shift"):
        need("resnet_time_scale_shift", film, "default")
    need("time_embedding_dim", config.get("time_embedding_dim") or 4 * widths[0], 4 * widths[0])
    middle = config.get("attn_norm_num_groups") or (groups if film == "default" else None)
    need("attn_norm_num_groups", middle, groups)
    down, up = config["down_block_types"], config["up_block_types"]
    attention, resampling = _read_blocks(config, down, up, where)
    head = config.get("attention_head_dim", 8)
    attending = {width for width, has in zip(widths, attention, strict=True) if has}
    for width in sorted(attending | {widths[-1]}):
        if head is not None and (type(head) is not int or head < 1 or width % head):
            raise ConfigError(
                f"{where} has attention_head_dim={head}; expected a number that divides the"
                f" {width} channels of its attention, or null"
            )
    return {
        "name": "unet",
        "model_channels": widths[0],
        "channel_mult": [_multiplier(width, widths[0]) for width in widths],
        "num_res_blocks": config["layers_per_block"],
        "attention_resolutions": [2**level for level, has in enumerate(attention) if has],
        "dropout": config.get("dropout", 0.0),
        "conv_resample": True,
        "num_classes": config.get("num_class_embeds"),
        "label_dropout": 0.0,
        "num_heads": 1,
        "num_head_channels": -1 if head is None else head,
        "num_heads_upsample": -1,
        "num_groups": groups,
        "use_scale_shift_norm": film == "scale_shift",
        "resblock_updown": resampling == "resnet",
        "use_new_attention_order": True,
        "max_period": _PERIOD,
        "zero_init": False,
        "norm_eps": config.get("norm_eps", 1e-5),
        "freq_shift": config.get("freq_shift", 0),
        "downsample_padding": config.get("downsample_padding", 1) if resampling == "conv" else 1,
    }


def _check_types(config: dict[str, Any], path: Path) -> None:
    """ConfigError unless numbers are numbers, and there is a block a level on either way."""
    check_texts(config, ("downsample_type", "upsample_type"), path)
    classes = config.get("num_class_embeds")
    if classes is not None and type(classes) is not int:
        raise ConfigError(
            f"{path} has num_class_embeds={classes}; expected a whole number, or null"
        )
    for option in ("in_channels", "out_channels", "layers_per_block", "norm_num_groups"):
        if type(config[option]) is not int or config[option] < 1:
            raise ConfigError(
                f"{path} has {option}={shown(config[option])}; expected a whole number of at"
                " least 1"
            )
    widths = config["block_out_channels"]
    if (
        not isinstance(widths, list | tuple)
        or not widths
        or any(type(w) is not int for w in widths)
    ):
        raise ConfigError(f"{path} has block_out_channels={widths}; expected a list of channels")
    layers = config["layers_per_block"]
    if 2 * len(widths) * layers > MOST_BLOCKS:  # said before the weights are looked through
        raise ConfigError(
            f"{path} has layers_per_block={layers} at {len(widths)} levels; expected at most"
            f" {MOST_BLOCKS // (2 * len(widths))}"
        )
    for option in ("down_block_types", "up_block_types"):
        types = config[option]
        if (
            not isinstance(types, list | tuple)
            or len(types) != len(widths)
            or not all(isinstance(name, str) for name in types)
        ):
            raise ConfigError(
                f"{path} has {option}={types}; expected {len(widths)} of them, one for each of"
                f" block_out_channels={list(widths)}"
            )


def _read_blocks(
    config: dict[str, Any], down: list[str], up: list[str], where: Path
) -> tuple[list[bool], str]:
    """(the attention of each level, conv or resnet for all resampling)."""
    for name in (*down, *up):
        if name.removeprefix("UNetRes") not in _BLOCKS:
            raise ConfigError(f"{where} has a {name}; this UNet can be {', '.join(_BLOCKS)}")
    down = [_BLOCKS[name.removeprefix("UNetRes")] for name in down]
    up = [_BLOCKS[name.removeprefix("UNetRes")] for name in up][::-1]
    attention = [has for has, _ in down]
    if attention != [has for has, _ in up]:
        raise ConfigError(
            f"{where} has attention at {[has for has, _ in up]} on the way up and at {attention} on"
            " the way down; this UNet has it at the same levels"
        )
    # the lowest level does not resample on the way down, the highest not on the way up
    kinds = {kind or config.get("downsample_type", "conv") for _, kind in down[:-1]}
    kinds |= {kind or config.get("upsample_type", "conv") for _, kind in up[1:]}
    if len(kinds) > 1:
        raise ConfigError(
            f"{where} resamples by {' and '.join(sorted(map(str, kinds)))}; this UNet does so in"
            " one way at all levels"
        )
    return attention, kinds.pop() if kinds else "conv"


def _multiplier(width: int, base: int) -> float:
    """The m with int(m base) = width."""
    multiplier = width / base
    return multiplier if int(multiplier * base) == width else math.nextafter(multiplier, math.inf)


# --- writing --------------------------------------------------------------------------------------


def save_diffusers(
    folder: Path,  # exists
    model: UNet,
    process: Process,
    class_names: tuple[str, ...] | None = None,
) -> None:
    """Write a DDPMPipeline's directory. ConfigError: an option that UNet2DModel does not have.

    A DDPMPipeline passes no labels on: of a class-conditional model, load the parts.
    """
    config, scheduler = unet_config(model), scheduler_config(process)
    index = {
        "_class_name": "DDPMPipeline",
        "scheduler": ["diffusers", scheduler["_class_name"]],
        "unet": ["diffusers", "UNet2DModel"],
    }
    if model.label_dropout > 0:
        index["_label_dropout"] = model.label_dropout
    if class_names is not None:
        index["_class_names"] = list(class_names)
    for name, content in (
        ("model_index.json", index),
        ("unet/config.json", config),
        ("scheduler/scheduler_config.json", scheduler),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    save_file(to_diffusers_state(model), folder / "unet" / f"{WEIGHTS}.safetensors")


def unet_config(model: UNet) -> dict[str, Any]:
    """The options of the UNet2DModel that is this network. ConfigError: there is none."""
    if not isinstance(model, UNet):
        raise ConfigError(
            f"format=diffusers is for images; the model is a {type(model).__name__}, which"
            " UNet2DModel cannot be"
        )
    if model.condition_channels:
        raise ConfigError(
            f"the network is given {model.condition_channels} channels beside x_t, and a"
            " DDPMPipeline hands nothing on; choose format=onnx, torch_export or guided_diffusion"
        )
    for option, only in (
        ("stem_channels", -1),
        ("decoder_attention", "all"),
        ("resample_projection", False),
        ("vector_dim", 0),
        ("context_dim", 0),
    ):
        if getattr(model, option) != only:
            raise ConfigError(f"{option}={getattr(model, option)}; UNet2DModel has {only} alone")
    widths = [int(mult * model.model_channels) for mult in model.channel_mult]
    if widths[0] != model.model_channels:
        raise ConfigError(
            f"channel_mult={list(model.channel_mult)} begins with {model.channel_mult[0]};"
            " UNet2DModel's sinusoids are as many as its first level's channels: it has to be 1"
        )
    if model.max_period <= 1:
        raise ConfigError(f"max_period={model.max_period}; UNet2DModel's has to be above 1")
    half = model.model_channels // 2
    shift = half - (half - model.freq_shift) * math.log(_PERIOD) / math.log(model.max_period)
    attention = [2**level in model.attention_resolutions for level in range(len(widths))]
    resnet = model.resblock_updown and len(widths) > 1  # a single level does not resample
    plain = ("ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D")
    plain = plain if resnet else ("DownBlock2D", "UpBlock2D")
    resampling = "resnet" if resnet else "conv"
    rows = None if model.num_classes is None else model.label_emb.num_embeddings
    return {
        "_class_name": "UNet2DModel",
        "sample_size": model.image_size[0] if len(set(model.image_size)) == 1 else model.image_size,
        "in_channels": model.in_channels,
        "out_channels": model.out_channels,
        **_FIXED,
        "freq_shift": model.freq_shift if model.max_period == _PERIOD else shift,
        "flip_sin_to_cos": True,
        "down_block_types": ["AttnDownBlock2D" if has else plain[0] for has in attention],
        "up_block_types": ["AttnUpBlock2D" if has else plain[1] for has in attention[::-1]],
        "block_out_channels": widths,
        "layers_per_block": model.num_res_blocks,
        "downsample_padding": 1 if resnet or not model.conv_resample else model.downsample_padding,
        "downsample_type": resampling,
        "upsample_type": resampling,
        "dropout": model.dropout,
        "act_fn": "silu",
        "attention_head_dim": _head_channels(model),
        "norm_num_groups": model.num_groups,
        "attn_norm_num_groups": model.num_groups,
        "norm_eps": model.norm_eps,
        "resnet_time_scale_shift": "scale_shift" if model.use_scale_shift_norm else "default",
        "num_class_embeds": rows,
    }


def _head_channels(model: UNet) -> int | None:
    """The channels of every head, or None for one head whatever the channels."""
    blocks = [module for module in model.modules() if isinstance(module, AttentionBlock)]
    sizes = {block.channels // block.num_heads for block in blocks}
    if len(sizes) == 1:
        return sizes.pop()
    if all(block.num_heads == 1 for block in blocks):
        return None
    raise ConfigError(
        f"num_heads={model.num_heads}, num_heads_upsample={model.num_heads_upsample} gives heads"
        f" of {', '.join(map(str, sorted(sizes)))} channels; UNet2DModel has one attention_head_dim"
    )
