"""Measure which tiles are fastest for sampling with a model, and remember it.

    python -m benchmarks.tune_sampling [key=value ...]

    model=unet64        configs/model
    size=64             pixels
    batch=1,16,64       images
    only=               kernels by the first word of their entries, e.g. conv_norm; default all
    processes=12        that compile side by side
    out=                the table; default: the user's cache for this GPU, torch and triton

As `benchmarks.tune`, for the forward pass of `diffusion.plan.inference` alone. Convolutions that
could be cut into parts are measured both ways; most of up to four images have no choice of tiles
(`triton_kernels.conv.plain.small_batch`).
"""

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from benchmarks import harness
from benchmarks.compilers import run_shares
from benchmarks.steps import our_model
from benchmarks.tune import report
from diffusion.errors import writing
from diffusion.plan.inference import InferenceUNet
from triton_kernels import fused_ops as fused
from triton_kernels.registry import rows
from triton_kernels.registry.kernel import Op
from triton_kernels.registry.search import search
from triton_kernels.runtime.device import describe

DEFAULTS = {
    "model": "unet64",
    "size": 64,
    "batch": (1, 16, 64),
    "only": (),
    "processes": 12,
    "out": "",
    "part": -1,  # the share of a compiling process
}
_SHOWN = 12  # of the largest gains


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    device = harness.require_cuda()
    part, parts = settings["part"], settings["processes"]
    if part >= 0:
        with search(part, parts, timed=False, only=settings["only"]):
            _walk(settings, device)
        return 0
    path = Path(settings["out"]) if settings["out"] else rows.cache_path(describe(device))
    with writing(path):
        rows.save([], path)  # before it takes minutes to find out that this cannot be done
    if parts:
        run_shares("benchmarks.tune_sampling", arguments, parts)
    with search(only=settings["only"]) as found:
        _walk(settings, device)
    rows.save(found.rows, path)
    report(found, _SHOWN)
    print(f"{len(found.rows)} shapes in {path}")
    return 0


def _walk(settings: dict, device: torch.device) -> None:
    size = settings["size"]
    model = our_model(settings["model"], "bf16", device, size).eval()
    for batch in settings["batch"]:
        x = torch.randn(batch, size, size, 3, device=device)
        for ops in (fused.OPS, fused.OPS | {"conv_split": Op("conv_split", (), ())}):
            with mock.patch.object(fused, "OPS", ops):  # without kernels there are no parts
                plan = InferenceUNet(model, fused)
                plan(x, torch.zeros(batch, dtype=torch.int64, device=device))


if __name__ == "__main__":
    harness.run_entry(main)
