"""Every public op has its twin in reference.py, with the same parameters; where there is no GPU it
says so, and on the device "meta" it says shapes."""

import inspect

import pytest
import torch

import triton_kernels
from triton_kernels import reference
from triton_kernels.runtime import layout

OPS = [name for name in triton_kernels.__all__ if name[0].islower()]


@pytest.mark.parametrize("name", OPS)
def test_twin_has_the_same_signature(name):
    ours = inspect.signature(getattr(triton_kernels, name))
    twin = inspect.signature(getattr(reference, name))
    described = [
        [(p.name, p.kind, p.default) for p in signature.parameters.values()]
        for signature in (ours, twin)
    ]
    assert described[0] == described[1]


def _arguments(device: str) -> dict[str, tuple[tuple, dict]]:
    """Of every op: (positional, by name)."""
    x, rng = (
        torch.zeros(2, 4, 4, 6, device=device),
        torch.zeros(2, dtype=torch.int64, device=device),
    )
    t = torch.zeros(2, dtype=torch.int64, device=device)
    weight = torch.zeros(3, 6, 3, 3, device=device).to(memory_format=torch.channels_last)
    flat = [torch.zeros(8, device=device) for _ in range(5)]
    norm, hyper = flat[0][:1], torch.zeros(9, dtype=torch.float64, device=device)
    skipped = torch.zeros(1, dtype=torch.int32, device=device)
    table, row = torch.zeros(5, 2, device=device), t[:1]
    return {
        "adamw_step": ((*flat, norm, hyper, skipped), {}),
        "attention": ((x.view(2, 16, 6), 1), {}),
        "avg_pool2d": ((x,), {}),
        "channel_norm": ((x,), {}),
        "cross_attention": ((x.view(2, 16, 6), torch.zeros(2, 3, 12, device=device), 1), {}),
        "conv2d": ((x, weight), {}),
        "denoise_loss": ((x, x, t, table, rng), {}),
        "denoise_step": ((x, x, torch.zeros(5, 8, device=device), row, rng), {}),
        "draw_flips": ((rng, 3), {}),
        "draw_timesteps": ((rng, 3, 5), {}),
        "draw_weighted_timesteps": ((rng, 3, torch.arange(1, 6, device=device)), {}),
        "dropout": ((x, 0.5, rng), {"layer": 1}),
        "gather_images": ((x,), {}),
        "grad_norm": ((flat[0],), {}),
        "group_norm": ((x, 2), {}),
        "normal": (((2, 3), rng), {}),
        "q_sample": ((x, t, table, rng), {}),
        "record_losses": (
            (flat[0][:2], t, torch.zeros(2, 5, device=device), skipped.expand(5).contiguous()),
            {},
        ),
        "upsample_nearest2d": ((x,), {}),
    }


@pytest.mark.parametrize("name", OPS)
def test_a_tensor_on_the_cpu_is_named(name, monkeypatch):
    monkeypatch.setattr(layout, "_INTERPRETED", False)
    positional, named = _arguments("cpu")[name]
    with pytest.raises(ValueError, match="is on the CPU; kernels need a CUDA device"):
        getattr(triton_kernels, name)(*positional, **named)


@pytest.mark.parametrize("name", [name for name in OPS if name != "adamw_step"])
def test_shapes_on_the_device_meta(name):
    """Those of the reference, without a kernel."""
    ours, theirs = (
        getattr(module, name)(*positional, **named)
        for module, device in ((triton_kernels, "meta"), (reference, "cpu"))
        for positional, named in [_arguments(device)[name]]
    )
    assert ours.is_meta and ours.shape == theirs.shape and ours.dtype == theirs.dtype
