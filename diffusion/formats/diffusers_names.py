"""The tensors of UNet2DModel by diffusers' names, and those of `UNet` by guided-diffusion's.

The values are the same. q, k and v are packed here and layers of their own there; attention's
layers are convolutions over a single pixel here and linear there; and what resamples without a
convolution has one there, which changes nothing (`constant_convolution`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..models.blocks import AttentionBlock
from ..models.unet import UNet

# outside the blocks, in a residual block, in an attention block: ours, theirs
_OUTSIDE = {
    "time_embed.0": ("time_embedding.linear_1",),
    "time_embed.2": ("time_embedding.linear_2",),
    "label_emb": ("class_embedding",),
    "input_blocks.0.0": ("conv_in",),
    "out.0": ("conv_norm_out",),
    "out.2": ("conv_out",),
}
_RES_BLOCK = {
    "in_layers.0": ("norm1",),
    "in_layers.2": ("conv1",),
    "emb_layers.1": ("time_emb_proj",),
    "out_layers.0": ("norm2",),
    "out_layers.3": ("conv2",),
    "skip_connection": ("conv_shortcut",),
}
_ATTENTION = {"norm": ("group_norm",), "qkv": ("to_q", "to_k", "to_v"), "proj_out": ("to_out.0",)}
_DOWN, _UP = {"op": ("conv",)}, {"conv": ("conv",)}
_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}

Layers = Iterator[tuple[str, tuple[str, ...]]]  # our name of a layer, their name or names


def to_diffusers_state(model: UNet) -> dict[str, Tensor]:
    """The weights by UNet2DModel's names: float32 on the CPU, in the default order of memory."""
    ours = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    state: dict[str, Tensor] = {}
    for name, theirs in _layers(
        len(model.channel_mult),
        model.num_res_blocks,
        model.attention_resolutions,
        model.resblock_updown,
    ):
        for part in ("weight", "bias"):
            if f"{name}.{part}" in ours:
                tensor = ours[f"{name}.{part}"]
                tensor = tensor.flatten(1) if tensor.ndim == 3 else tensor  # a Conv1d's weight
                split = (tensor,) if len(theirs) == 1 else _unpack(tensor, model, name)
                state |= {f"{key}.{part}": piece for key, piece in zip(theirs, split, strict=True)}
        if theirs[0].endswith("samplers.0.conv") and f"{theirs[0]}.weight" not in state:
            channels = _width(model, theirs[0])
            state[f"{theirs[0]}.weight"] = constant_convolution(theirs[0], channels)
            state[f"{theirs[0]}.bias"] = torch.zeros(channels)
    return {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()
    }


def from_diffusers_state(
    theirs: Mapping[str, Tensor],
    settings: Mapping[str, Any],  # of the `UNet` that they are for
    cosine_first: bool,  # of the timestep's sinusoids: flip_sin_to_cos
) -> dict[str, Tensor]:
    """A state dict of `UNet` with new attention order. What is missing in `theirs` is missing in
    it; ConfigError: something is left over."""
    rest, state = {current_name(name): tensor for name, tensor in theirs.items()}, {}
    for name, sources in _layers(
        len(settings["channel_mult"]),
        settings["num_res_blocks"],
        settings["attention_resolutions"],
        settings["resblock_updown"],
    ):
        for part in ("weight", "bias"):
            pieces = [rest.pop(f"{key}.{part}", None) for key in sources]
            constant = sources[0].endswith("samplers.0.conv") and not settings["conv_resample"]
            if constant or any(piece is None for piece in pieces):
                continue
            tensor = torch.cat(pieces)
            linear = part == "weight" and name.endswith((".qkv", ".proj_out"))
            state[f"{name}.{part}"] = tensor.flatten(1)[:, :, None] if linear else tensor
    if rest:
        name, tensor = next(iter(rest.items()))
        raise ConfigError(f"{name} {list(tensor.shape)} is in the weights, and not in config.json")
    if not cosine_first and "time_embed.0.weight" in state:
        weight = state["time_embed.0.weight"]
        half = weight.shape[1] // 2
        sine, cosine, odd = weight.split((half, half, weight.shape[1] - 2 * half), dim=1)
        state["time_embed.0.weight"] = torch.cat((cosine, sine, odd), dim=1)
    return state


def current_name(name: str) -> str:
    """Attention's layers had other names once."""
    path, _, layer = name.rpartition(".")[0].rpartition(".")
    return name.replace(f".{layer}.", f".{_OLD_ATTENTION.get(layer, layer)}.") if path else name


def constant_convolution(name: str, channels: int) -> Tensor:  # [C, C, 3, 3]
    """What does nothing but resample: of a layer downsamplers.0.conv, with stride 2, the mean of
    2x2 pixels; of upsamplers.0.conv the identity."""
    weight = torch.zeros(channels, channels, 3, 3)
    diagonal = torch.arange(channels)
    if ".downsamplers." in name:
        weight[diagonal, diagonal, 1:, 1:] = 0.25  # the window begins a pixel above and to the left
    else:
        weight[diagonal, diagonal, 1, 1] = 1
    return weight


def resamples_by_constants(theirs: Mapping[str, Tensor]) -> bool:
    """Whether there are convolutions that resample and all of them are constant."""
    weights = {name: x for name, x in theirs.items() if name.endswith("samplers.0.conv.weight")}
    for name, weight in weights.items():
        bias = theirs.get(name.replace(".weight", ".bias"))
        if bias is None or bias.any():
            return False
        if not torch.equal(weight, constant_convolution(name, len(weight))):
            return False
    return bool(weights)


def _layers(
    levels: int, res_blocks: int, attention_resolutions: Sequence[int], resblock_updown: bool
) -> Layers:
    """Every layer that has parameters on either side."""

    def inside(block: dict[str, tuple[str, ...]], ours: str, theirs: str) -> Layers:
        for name, others in block.items():
            yield f"{ours}.{name}", tuple(f"{theirs}.{other}" for other in others)

    yield from _OUTSIDE.items()
    attention = [2**level in attention_resolutions for level in range(levels)]
    place = 1
    for level in range(levels):
        ours, theirs = "input_blocks", f"down_blocks.{level}"
        for i in range(res_blocks):
            yield from inside(_RES_BLOCK, f"{ours}.{place}.0", f"{theirs}.resnets.{i}")
            if attention[level]:
                yield from inside(_ATTENTION, f"{ours}.{place}.1", f"{theirs}.attentions.{i}")
            place += 1
        if level < levels - 1:
            block = _RES_BLOCK if resblock_updown else _DOWN
            yield from inside(block, f"{ours}.{place}.0", f"{theirs}.downsamplers.0")
            place += 1
    yield from inside(_RES_BLOCK, "middle_block.0", "mid_block.resnets.0")
    yield from inside(_ATTENTION, "middle_block.1", "mid_block.attentions.0")
    yield from inside(_RES_BLOCK, "middle_block.2", "mid_block.resnets.1")
    place = 0
    for level in reversed(range(levels)):
        ours, theirs = "output_blocks", f"up_blocks.{levels - 1 - level}"
        for i in range(res_blocks + 1):
            yield from inside(_RES_BLOCK, f"{ours}.{place}.0", f"{theirs}.resnets.{i}")
            if attention[level]:
                yield from inside(_ATTENTION, f"{ours}.{place}.1", f"{theirs}.attentions.{i}")
            if level > 0 and i == res_blocks:
                last = 2 if attention[level] else 1
                block = _RES_BLOCK if resblock_updown else _UP
                yield from inside(block, f"{ours}.{place}.{last}", f"{theirs}.upsamplers.0")
            place += 1


def _unpack(packed: Tensor, model: UNet, name: str) -> tuple[Tensor, ...]:
    """q, k and v of a packed [3C, ...]."""
    block = model.get_submodule(name.removesuffix(".qkv"))
    assert isinstance(block, AttentionBlock)
    if block.order == "qkv_heads":
        return packed.chunk(3)
    heads = packed.unflatten(0, (block.num_heads, 3, -1))
    return tuple(part.flatten(0, 1) for part in heads.unbind(1))


def _width(model: UNet, name: str) -> int:
    """The channels of their down_blocks.I or up_blocks.I."""
    level = int(name.split(".")[1])
    if name.startswith("up"):
        level = len(model.channel_mult) - 1 - level
    return int(model.channel_mult[level] * model.model_channels)
