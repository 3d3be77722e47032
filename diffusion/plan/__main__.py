"""Print the launches of a network, without a GPU:

    python -m diffusion.plan model=unet64 batch=16 mode=sample gpu=h100
    python -m diffusion.plan model=unet64 batch=128 mode=train gpu=h100 node=input_blocks.5.0
    python -m diffusion.plan model=unet64 batch=128 mode=train gpu=h200 out=plan.png
    python -m diffusion.plan model=unet64 model.model_channels=96 channels=4 size=32 gpu=a100
    python -m diffusion.plan model=my_networks.py:make batch=16 mode=train gpu=a100

model      a file of configs/model; or FILE.py:FUNCTION, which returns a module and a tuple of its
           arguments for a number of images: what `diffusion.accelerate` makes of that
model.*    changes of its settings, as for train.py
batch      images, or chunks of actions
mode       train: with gradients; sample: without
gpu        one of `triton_kernels.registry.chips`
size       pixels per side; for a policy, steps of a chunk
channels   of an image; for a policy, numbers of an action
precision  bf16, fp32, tf32
node       input_blocks.5.0: only what this module launches, or this node (conv_fused8), with the
           answers of the registry: why this kernel, and why none of the others; empty: all
context    77x768: tokens and numbers per token of a sequence condition; empty: none
recompute  true: the training step of a UNet keeps fewer activations, as with train.recompute=true
out        file for a picture of the timeline; empty: none
"""

import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import triton_kernels
from triton_kernels import fused_ops
from triton_kernels.registry.chips import Chip, chip
from triton_kernels.runtime.device import standing_for

from ..errors import ConfigError, check_writable, lack_of_memory, writing
from ..factory import (
    POLICY_MODELS,
    build_model,
    build_policy_model,
    in_unwritten_memory,
    with_conditions,
)
from ..models.conditions import parts_of, zeros_given
from ..models.flat_parameters import FlatParameters
from ..models.unet import UNet
from ..models.unet1d import UNet1d
from ..presets import CONFIGS, parsed, preset
from ..runtime.backend import PRECISIONS, Backend
from .build import Plan, plan
from .embedding import TOGETHER
from .graph import PlanError
from .inference1d import real_time_plan
from .launch.table import Kernels
from .printed.call import call_memory
from .printed.evaluation import evaluation_memory
from .printed.memory import STEP, Memory
from .printed.page import Page, page
from .printed.step import step_page
from .printed.text import modules, table
from .printed.timeline import check_picture, draw
from .record.without_gpu import cuda_autocast
from .sampling_plan import sampling_plan
from .step.network import TrainingUNet, step_kernels
from .step.others import in_flat_buffers
from .user_module import in_bf16, names_function, user_function

_MODELS = CONFIGS / "model"
_CHANGE = "model."  # begins the name of a setting of the model
_DEFAULTS = {
    "model": "unet64",
    "batch": "16",
    "mode": "sample",
    "gpu": "h200",
    "size": "",
    "channels": "",
    "precision": "bf16",
    "node": "",
    "context": "",
    "recompute": "false",
    "out": "",
}
_CONDITION = 20  # numbers of a policy's condition, as of the built-in task


def settings(arguments: list[str]) -> dict[str, str]:
    """Of the command line. ConfigError: an unknown one, or a wrong value."""
    given = dict(_DEFAULTS)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name.startswith(_CHANGE):
            continue
        if not equals or name not in given:
            raise ConfigError(
                f"{argument} is unknown; give {'=..., '.join(given)}=..., model.*=..."
            )
        given[name] = value
    models = sorted(path.stem for path in _MODELS.glob("*.yaml"))
    for name, choices in (
        ("model", models),
        ("mode", ("train", "sample")),
        ("precision", tuple(PRECISIONS)),
        ("recompute", ("true", "false")),
    ):
        own = name == "model" and names_function(given[name])
        if not own and given[name] not in choices:
            raise ConfigError(
                f"{name}={given[name]} is unknown; choose one of {', '.join(choices)}"
                + ", or FILE.py:FUNCTION" * (name == "model")
            )
    for name in ("batch", "size", "channels"):
        if given[name] and not (given[name].isdecimal() and int(given[name]) > 0):
            raise ConfigError(f"{name}={given[name]} is no whole number of at least 1")
    if given["context"] and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", given["context"]):
        raise ConfigError(f"context={given['context']}; expected TOKENSxNUMBERS, such as 77x768")
    return given


def changes(model: str, arguments: list[str]) -> dict[str, Any]:
    """What `model.*` arguments change in the settings of that name. ConfigError: it has none of
    that name, or a value is no YAML."""
    known, changed = {} if names_function(model) else preset("model", model), {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or not name.startswith(_CHANGE):
            continue
        option = name.removeprefix(_CHANGE)
        known.pop("name", None)  # which says what kind of network it is
        if option not in known:
            raise ConfigError(f"{argument}: {model} has {', '.join(known) or 'no settings'}")
        changed[option] = parsed(value)
    return changed


def example(
    model: str,
    batch: int,
    size: str,
    precision: str,
    context: str = "",  # 77x768: tokens, and numbers of each
    channels: str = "",
    **changed: Any,  # in the settings of the model
) -> tuple[nn.Module, tuple, dict]:
    """A network of the configuration, whose parameters nobody has drawn, and arguments of its
    `forward`."""
    tokens, dim = map(int, context.split("x")) if context else (0, 0)
    chosen = preset("model", model, **changed)
    dtype = PRECISIONS[precision]
    backend = Backend("triton", triton_kernels, dtype, allow_tf32=precision != "fp32")
    t = torch.zeros(batch, dtype=torch.int64)
    if context and chosen["name"] in POLICY_MODELS:
        raise ConfigError(f"context={context} is for images, and {model} is of policies")
    if chosen["name"] in POLICY_MODELS:
        action = int(channels or 2)
        network = in_unwritten_memory(
            partial(build_policy_model, chosen, backend, action, _CONDITION)
        )
        x, cond = torch.zeros(batch, int(size or 16), action), torch.zeros(batch, _CONDITION)
        return network, (x, t, cond), {}
    side, c = int(size or 64), int(channels or 3)
    chosen = with_conditions(chosen, context_dim=dim)
    network = in_unwritten_memory(partial(build_model, chosen, backend, (side, side), c, False))
    labels = None if network.num_classes is None else t
    given = zeros_given(batch, labels, (side, side), network, tokens)
    labels = () if given is None else (given,)
    return network, (torch.zeros(batch, c, side, side), t, *labels), {"rng": torch.zeros(2).long()}


def _page(given: dict[str, str], changed: dict[str, Any], gpu: Chip) -> Page:
    """Of what train.py and samplers run."""
    trains = given["mode"] == "train"
    what = given["model"], int(given["batch"]), given["size"], given["precision"]
    what = *what, given["context"], given["channels"]
    network, args, kwargs = example(*what, **changed)
    if trains and TrainingUNet.refusal(network) is None:
        x, _, *labels = args
        x = x.permute(0, 2, 3, 1).contiguous()
        recompute = given["recompute"] == "true"
        return step_page(network.train(), x, *(labels or [None]), gpu, recompute)
    kwargs = kwargs if trains else {}
    return page(*_plan(network.train(trains), args, kwargs, trains, gpu))


def _user_page(given: dict[str, str], gpu: Chip) -> Page:
    """Of what `accelerate` runs. In bf16 training is under autocast, and an evaluation of a module
    in bf16, or under autocast where the module mixes types, as with an embedding in float32."""
    for name in ("size", "channels", "context"):
        if given[name]:
            raise ConfigError(f"{name}={given[name]}: the arguments of {given['model']} have that")
    trains, low = given["mode"] == "train", given["precision"] == "bf16"
    make = partial(user_function(given["model"]), int(given["batch"]))
    options = {"tf32": (given["precision"] == "tf32",) * 2, "kernels": (fused_ops, gpu.gpu)}

    def made(network: nn.Module, args: tuple, autocast: bool = False) -> Plan:
        with standing_for(gpu.gpu), cuda_autocast(torch.bfloat16, enabled=autocast):
            return plan(network.train(trains), args, {}, trains=trains, rounds=True, **options)

    if trains or not low:
        return page(made(*make(), autocast=low), gpu)
    try:
        return page(made(*in_bf16(*make())), gpu)
    except PlanError as error:
        found = page(made(*make(), autocast=True), gpu)
        return replace(found, about=f"under autocast, since in bfloat16 {error}")


def _plan(
    network: nn.Module, args: tuple, kwargs: dict, trains: bool, gpu: Chip
) -> tuple[Plan, Chip, Kernels, Callable]:
    """What runs, on which kernels, and what counts its memory: samplers and policies ask the
    framework's networks in their own ways. Other networks have the plan of `accelerate`, and what
    runs layer by layer; in train.py with flat buffers."""
    states = (*network.parameters(), *network.buffers())
    held = sum(x.nbytes for x in states)
    if isinstance(network, UNet1d) and not trains:
        n, length, _ = args[0].shape
        made = real_time_plan(network, n, length, fused_ops, gpu.gpu)
        shared = 1 if network.global_cond_dim is None else 2
        memory = partial(evaluation_memory, network=held, copied=None, shared=shared)
        return made, gpu, fused_ops, memory
    if trains:
        with standing_for(gpu.gpu):
            flat = in_flat_buffers(network, FlatParameters(network, together=TOGETHER))
        options = {"tf32": (network.backend.allow_tf32,) * 2, "rounds": True, "flat": flat}
        made = plan(network, args, kwargs, trains=True, kernels=(fused_ops, gpu.gpu), **options)
        return made, gpu, fused_ops, call_memory
    if not isinstance(network, UNet):
        return plan(network, args, kwargs), gpu, fused_ops, call_memory
    n, c, h, w = args[0].shape
    device = args[0].device
    shape, context = torch.Size((n, h, w, c)), parts_of(args[2] if len(args) > 2 else None).context
    tokens = 0 if context is None else context.shape[1]
    kernels = step_kernels(network.backend)
    made = sampling_plan(network, shape, device, kernels, tokens, gpu.gpu)
    copies = 2 if network.backend.precision == "tf32" else 1  # in TF32 one of them is rounded
    memory = partial(evaluation_memory, network=held, copied=copies * held)
    return made, gpu, kernels, memory


def _title(given: dict[str, str], changed: dict[str, Any]) -> str:
    """Of a picture: what it is of, as the command line says it."""
    named = given | {f"{_CHANGE}{name}": value for name, value in changed.items()}
    said = (
        f"{k}={v}" for k, v in named.items() if v not in ("", None) and k not in ("model", "out")
    )
    return f"{given['model']}: {', '.join(said)}"


def main(arguments: list[str]) -> None:
    given = settings(arguments)
    try:
        gpu = chip(given["gpu"])
    except ValueError as error:
        raise ConfigError(str(error)) from None
    changed = changes(given["model"], arguments)
    out = Path(given["out"]) if given["out"] else None
    if out is not None:
        check_picture(out)
        check_writable(out)
    try:
        own = names_function(given["model"])
        found = _user_page(given, gpu) if own else _page(given, changed, gpu)
    except PlanError as error:
        raise ConfigError(str(error)) from error
    except (MemoryError, RuntimeError) as error:
        if lack_of_memory(error) is None:
            raise
        what = " ".join(f"{name}={given[name]}" for name in ("batch", "size") if given[name])
        raise ConfigError(f"memory does not suffice for {what}; take less") from error
    of_step = isinstance(found.memory, Memory) and found.memory.of == STEP
    if given["recompute"] == "true" and not of_step:
        raise ConfigError("recompute=true is for mode=train of a UNet of images")
    try:
        said = table(found, given["node"])
        print(f"{found.about}\n{said}" if found.about else said)
    except KeyError:
        near = get_close_matches(given["node"], modules(found), 3)
        said = f"did you mean {', '.join(near)}" if near else "see the page without node="
        raise ConfigError(
            f"node={given['node']} is no module that launches, nor a node; {said}"
        ) from None
    if out is not None:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            draw(found, out, _title(given, changed))
        print(f"timeline: {out}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads may have read enough, such as head
    if {"--help", "-h"} & set(sys.argv):
        print(__doc__)
        sys.exit()
    try:
        main(sys.argv[1:])
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
