"""Weights in other people's formats.

    unet.cu .bin           256 int32 of header, then float32 parameters in the order of
                           named_parameters(), then perhaps AdamW's moments and generator states
    unet.cu .pt            a state dict under unet.cu's names, "_orig_mod." before them if compiled
    guided-diffusion .pt   a state dict under the names that `UNet` has too
    diffusion_policy .ckpt a state dict, or what a workspace writes: `diffusion_policy`
    .safetensors           a state dict under either

The header of a .bin says nothing of depth, multipliers, groups or heads: these come from the
configured model, and the size of the file is checked against it.
"""

import io
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..data.packed_format import UNET_CU_DATA, UNET_CU_HEADER_BYTES, UNET_CU_WEIGHTS
from ..errors import ConfigError
from ..models.unet import UNet
from ..settings import shown
from .diffusion_policy import SUFFIX, read_workspace

_GENERATOR_BYTES = 48  # of curandState_t
_UNET_CU, _SAFETENSORS, _PICKLED = "unet.cu weights", "safetensors", "state dict"  # kinds of file

# a layer inside a residual or an attention block: guided-diffusion's name, unet.cu's name
_NAMES = {
    "in_layers.0": "gn1",
    "in_layers.2": "cv3_1",
    "emb_layers.1": "l_emb",
    "out_layers.0": "gn2",
    "out_layers.3": "cv3_2",
    "norm": "gn",
    "proj_out": "proj",
}
_GUIDED_NAMES = {theirs: ours for ours, theirs in _NAMES.items()}
_BLOCK = re.compile(r"^((?:input_blocks|output_blocks)\.\d+\.\d+|middle_block\.\d+)\.(.+)(\.\w+)$")

# the structure that unet.cu's programs build, by option of `UNet`; its sizes, groups and heads are
# constants to edit there
_UNET_CU_OPTIONS = {
    "conv_resample": False,
    "use_scale_shift_norm": False,
    "resblock_updown": False,
    "use_new_attention_order": True,
    "num_classes": None,
    "norm_eps": 1e-5,
    "freq_shift": 0,
    "stem_channels": -1,
    "decoder_attention": "all",
    "resample_projection": False,
    "condition_channels": 0,
    "vector_dim": 0,
    "context_dim": 0,
}


@dataclass
class UnetCuState:
    """What a unet.cu weights file holds. Tensors are float32, by the names of `UNet`."""

    batch_size: int
    max_period: int
    params: dict[str, Tensor]
    exp_avg: dict[str, Tensor] | None  # AdamW's moments; the step count is not in the file
    exp_avg_sq: dict[str, Tensor] | None


def to_unet_cu_name(name: str) -> str:
    """The name that unet.cu's model has for this parameter of `UNet`."""
    return _rename(name, _NAMES)


def from_unet_cu_name(name: str) -> str:
    """The name that `UNet` has for this parameter of unet.cu's model."""
    return _rename(name, _GUIDED_NAMES)


# --- reading --------------------------------------------------------------------------------------


def load_weights(
    path: str | Path,
    model: nn.Module,
    ema: bool = True,  # the averaged weights, of a file that has both
) -> str:
    """Load the weights in `path` into `model`, in place; return the kind of file that it was.

    The kind is recognised by the first bytes. Raises ConfigError if the file is missing, truncated,
    of no known kind, or holds another model than the configured one.
    """
    path = Path(path)
    kind = _kind(path)
    if kind == _UNET_CU:
        state = read_unet_cu(path, model).params
    else:
        content = _read_safetensors(path) if kind == _SAFETENSORS else _read_pickled(path, ema)
        state = _network_in(content, path, model, ema)
    difference = _difference(state, model)
    if difference:
        raise ConfigError(
            f"{path} does not fit the model: it has {_count(state.values()):,} parameters, "
            f"the model has {_count(model.parameters()):,}; first difference: {difference}"
        )
    model.load_state_dict(state)
    return kind


def stored_image_shape(path: str | Path) -> tuple[int, int, int] | None:
    """(H, W, C) of the images that a weights file was trained on, if the file says so: unet.cu's
    .bin does. Raises ConfigError if it cannot be read, or is no weights file."""
    path = Path(path)
    if _kind(path) != _UNET_CU:
        return None
    if path.stat().st_size < UNET_CU_HEADER_BYTES:
        raise ConfigError(f"{path} is truncated: its header alone is {UNET_CU_HEADER_BYTES} bytes")
    header = np.fromfile(path, "<i4", 7)
    return int(header[5]), int(header[6]), int(header[2])


def _kind(path: Path) -> str:
    """Of a weights file, by its first bytes. ConfigError: it is none."""
    start = _first_bytes(path)
    magic = int.from_bytes(start[:4], "little")
    if magic == UNET_CU_DATA:
        raise ConfigError(f"{path} is a unet.cu data set (magic {magic}), not weights")
    if magic == UNET_CU_WEIGHTS:
        return _UNET_CU
    if start[8:9] == b"{":
        return _SAFETENSORS
    if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
        if path.suffix == ".safetensors":
            raise ConfigError(f"{path} is no safetensors file: it begins like one of torch.save")
        return _PICKLED
    raise ConfigError(
        f"{path} is no weights file: it begins with {start[:8]!r}; expected a unet.cu .bin "
        f"(int32 {UNET_CU_WEIGHTS}), a .pt or a .safetensors"
    )


def read_unet_cu(path: str | Path, model: UNet) -> UnetCuState:
    """Read a unet.cu weights file, by the names and shapes of `model`'s parameters.

    Generator states are skipped. Raises ConfigError as `load_weights`.
    """
    path = Path(path)
    if not isinstance(model, UNet):
        raise ConfigError(f"{path} holds a 2-D UNet's weights; the model is {type(model).__name__}")
    kind = _kind(path)
    if kind != _UNET_CU:
        raise ConfigError(
            f"{path} is a {kind}; weights of unet.cu begin with int32 {UNET_CU_WEIGHTS}"
        )
    size = path.stat().st_size
    if size < UNET_CU_HEADER_BYTES:
        raise ConfigError(
            f"{path} is truncated: {size} bytes, and the header alone is {UNET_CU_HEADER_BYTES}"
        )
    header = np.fromfile(path, "<i4", 256)
    batch_size, c_in, c_model, c_out, height, width, max_period, adamw, generators = map(
        int, header[1:10]
    )
    for option, value in (
        ("in_channels", c_in),
        ("model_channels", c_model),
        ("out_channels", c_out),
        ("max_period", max_period),
    ):
        if getattr(model, option) != value:
            raise ConfigError(
                f"{path} was written for {option}={value}; the model has {getattr(model, option)}"
            )

    shapes = {name: p.shape for name, p in model.named_parameters()}
    count = _count(model.parameters())
    sections = 3 if adamw else 1
    rest = size - UNET_CU_HEADER_BYTES - 4 * count * sections
    # one generator state an element of the batch; what size it has depends on the generator
    states = batch_size * c_in * height * width
    if rest < 0 or (rest > 0 and not (generators and states and rest % states == 0)):
        skipped = UNET_CU_HEADER_BYTES + (_GENERATOR_BYTES * states if generators else 0)
        held = max(size - skipped, 0) / (4 * sections)
        raise ConfigError(
            f"{path} has room for {held:,.10g} parameters{' and their moments' if adamw else ''}, "
            f"the model has {count:,}: the file is truncated, or of other depth or multipliers"
        )

    data = torch.from_numpy(np.fromfile(path, "<f4", count * sections, offset=UNET_CU_HEADER_BYTES))
    tensors = []
    for section in data.split(count):
        pieces = section.split([shape.numel() for shape in shapes.values()])
        named = zip(shapes.items(), pieces, strict=True)
        tensors.append({name: piece.view(shape) for (name, shape), piece in named})
    return UnetCuState(batch_size, max_period, *tensors, *[None] * (3 - sections))


def _first_bytes(path: Path) -> bytes:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"weights {path} are no file")
    try:
        with open(path, "rb") as file:
            return file.read(16)
    except OSError as error:
        raise ConfigError(f"weights {path} cannot be read: {error.strerror}") from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ConfigError(f"{path} is truncated or no safetensors file: {error}") from error


def _read_pickled(path: Path, ema: bool) -> object:
    """What is in a file of torch.save."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if path.suffix == SUFFIX:
            return read_workspace(path).state(ema)
        raise ConfigError(f"{path} holds more than tensors, which is not unpickled") from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).split(". ")[0] or "it ends early"  # of several sentences
        raise ConfigError(f"{path} is truncated or no file of torch.save: {reason}") from error


def _network_in(content: object, path: Path, model: nn.Module, ema: bool) -> dict[str, Tensor]:
    """The state dict that fits `model`, averaged or not as `ema` says if there are both; if none
    fits, the largest. ConfigError: there is none."""
    first = next(iter(model.state_dict()))
    found = list(_state_dicts(content, first))
    if not found:
        names = content if isinstance(content, dict) else ()
        keys = ", ".join(map(str, names)) or type(content).__name__
        raise ConfigError(f"{path} holds no state dict; found {keys}")
    found.sort(key=lambda pair: _is_average(pair[0]) != ema)
    states = [state for _, state in found]
    fitting = (state for state in states if not _difference(state, model))
    return next(fitting, None) or max(states, key=len)


def _state_dicts(
    content: object,
    first: str,  # parameter of the network that is looked for
    where: str = "",  # the names that lead to `content`
) -> Iterator[tuple[str, dict[str, Tensor]]]:  # the names that lead there, by our names
    """What may be networks, however deep: beside a counter of steps or an optimizer's state, and
    with the names of what the network was a part of before those of its parameters."""
    if not isinstance(content, dict):
        return
    # averages have a count of their updates beside them; no parameter is without dimensions
    tensors = {
        str(name): value
        for name, value in content.items()
        if isinstance(value, Tensor) and value.ndim > 0
    }
    prefixes = [name.removesuffix(first) for name in tensors if f".{name}".endswith(f".{first}")]
    for prefix in prefixes or [""] * bool(tensors):
        yield (
            where + prefix,
            {
                from_unet_cu_name(name.removeprefix(prefix)): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            },
        )
    for name, value in content.items():
        yield from _state_dicts(value, first, f"{where}{name}.")


def _is_average(where: str) -> bool:
    """Whether names such as model_ema. or ema_model.module. lead to averaged weights."""
    return any(word.startswith("ema") for word in re.split(r"[._]", where.lower()))


def _difference(state: dict[str, Tensor], model: nn.Module) -> str | None:
    """The first parameter in which `state` and `model` differ, or None."""
    expected = model.state_dict()
    for name, tensor in expected.items():
        if name not in state:
            return f"{name} {list(tensor.shape)} is not in the file"
        ours, theirs = list(tensor.shape), list(state[name].shape)
        if ours != theirs:
            return f"{name} is {theirs} in the file, {ours} in the model"
    for name, tensor in state.items():
        if name not in expected:
            return f"{name} {list(tensor.shape)} is not in the model"
    return None


def _count(tensors) -> int:
    return sum(t.numel() for t in tensors)


def _rename(name: str, names: dict[str, str]) -> str:
    match = _BLOCK.match(name)
    if match is None or match[2] not in names:
        return name
    return f"{match[1]}.{names[match[2]]}{match[3]}"


# --- writing --------------------------------------------------------------------------------------


def save_unet_cu(path: str | Path, model: UNet, batch_size: int = 32) -> None:
    """Write `model` as unet.cu's weights .bin. `batch_size` is the one that its trainer will use.

    Raises ConfigError if the model has options that unet.cu's does not.
    """
    for option, value in _UNET_CU_OPTIONS.items():
        if getattr(model, option) != value:
            raise ConfigError(
                f"unet.cu's format needs {option}={shown(value)}; the model has"
                f" {shown(getattr(model, option))}"
            )
    if model.max_period != int(model.max_period):
        raise ConfigError(
            f"unet.cu's format has a whole number for max_period; the model has {model.max_period}"
        )
    header = np.zeros(256, "<i4")
    header[:8] = [
        UNET_CU_WEIGHTS,
        batch_size,
        model.in_channels,
        model.model_channels,
        model.out_channels,
        *model.image_size,
        int(model.max_period),
    ]
    with open(path, "wb") as file:
        file.write(header.tobytes())
        for parameter in model.parameters():
            values = parameter.detach().cpu().contiguous().numpy()
            file.write(values.astype("<f4").tobytes())


def save_guided(path: str | Path, model: nn.Module) -> None:
    """Write `model` as guided-diffusion's .pt: a plain state dict, which its scripts load."""
    file = io.BytesIO()
    torch.save(_plain_state_dict(model), file)
    Path(path).write_bytes(file.getbuffer())  # on a full disk torch.save says no errno


def _plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """On the CPU, in the default order of memory, each tensor in storage of its own."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }
