"""The recorded UNets: options, and the comparison of output and gradients."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

_SMALL = {
    "image_size": 16,
    "in_channels": 3,
    "model_channels": 32,
    "out_channels": 3,
    "num_res_blocks": 1,
    "attention_resolutions": (2,),
    "channel_mult": (1, 2),
    "num_head_channels": 16,
}
OPTIONS = {
    "unet_cu_small": {
        **_SMALL,
        "conv_resample": False,
        "use_new_attention_order": True,
        "max_period": 1000,
        "zero_init": False,
    },
    "guided_plain_small": {**_SMALL, "use_new_attention_order": True},
    "guided_adm_small": {
        **_SMALL,
        "out_channels": 6,
        "num_classes": 10,
        "use_scale_shift_norm": True,
        "resblock_updown": True,
    },
}


def check_golden(folder: Path, name: str, model: nn.Module, names: dict[str, str]) -> None:
    """Assert that `model`, with the recorded weights, gives the recorded output and gradients.

    `names` maps the model's parameter names to the recorded ones. The bound is 1e-4 of each
    tensor's norm. A gradient that vanishes in exact arithmetic (a bias before a norm of one channel
    a group) is recorded as rounding noise, below 1e-6 of the whole gradient; so ours has to be.
    """
    device = next(model.parameters()).device
    io = {k: v.to(device) for k, v in load_file(folder / f"{name}.io.safetensors").items()}
    x = io["x"].requires_grad_()
    y = model(x, io["t"], io.get("labels", io.get("global_cond")))
    y.backward(io["dy"])
    assert relative(y, io["y"]) < 1e-4
    assert relative(x.grad, io["dx"]) < 1e-4
    recorded = {k: io[f"grad.{theirs}"] for k, theirs in names.items()}
    whole = torch.stack([g.norm() for g in recorded.values()]).norm()
    for k, p in model.named_parameters():
        if recorded[k].norm() < 1e-6 * whole:
            assert p.grad.norm() < 1e-6 * whole, k
        else:
            assert relative(p.grad, recorded[k]) < 1e-4, k


def check_golden_bf16(
    folder: Path, name: str, model: nn.Module, independent: nn.Module, names: dict[str, str]
) -> None:
    """Assert that a model that computes in bf16 is at most twice as far from the recording as an
    `independent` one in bf16; for a parameter, give or take 1e-4 of the whole gradient."""
    device = next(model.parameters()).device
    io = {k: v.to(device) for k, v in load_file(folder / f"{name}.io.safetensors").items()}
    found = []
    for m in (model, independent):
        x = io["x"].clone().requires_grad_()
        y = m(x, io["t"], io.get("labels"))
        y.backward(io["dy"])
        found.append({"y": y, "dx": x.grad} | {k: p.grad for k, p in m.named_parameters()})
    recorded = {"y": io["y"], "dx": io["dx"]}
    recorded |= {k: io[f"grad.{theirs}"] for k, theirs in names.items()}
    whole = torch.stack([recorded[k].norm() for k in names]).norm()
    ours, theirs = found
    for k, expected in recorded.items():
        floor = 1e-4 * whole if k in names else 0
        budget = 2 * (theirs[k] - expected).norm() + floor
        assert (ours[k] - expected).norm() <= budget, k


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    """The error of x in Euclidean norm, relative to the reference."""
    return ((x - reference).norm() / reference.norm()).item()
