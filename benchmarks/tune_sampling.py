"""Measure which tiles are fastest for sampling with a model, and remember it.

    python -m benchmarks.tune_sampling [key=value ...]

    model=unet64        configs/model
    batch=1,16,64       images
    processes=12        that compile side by side
    out=                the table; default: the user's cache for this GPU, torch and triton

As `benchmarks.tune`, for the forward pass of `diffusion.planned.inference` alone. Convolutions that
could be cut into parts are measured both ways.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from diffusion.chain import OVERLAP_PIXELS
from diffusion.planned.inference import InferenceUNet
from triton_kernels import tuning
from triton_kernels.dependent_launch import dependent_launches
from triton_kernels.fused import conv_split
from triton_kernels.fused import ops as fused

from . import harness
from .joins import measure_joins
from .steps import our_model
from .tune import report

DEFAULTS = {
    "model": "unet64",
    "batch": (1, 16, 64),
    "what": ("tiles", "joins"),
    "processes": 12,
    "out": "",
    "part": -1,  # the share of a compiling process
}
_SIZE = 64  # pixels
_SHOWN = 12  # of the largest gains


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for what in settings["what"]:
        harness.check_choice("what", what, DEFAULTS["what"])
    device = harness.require_cuda()
    part, parts = settings["part"], settings["processes"]
    if part >= 0:
        with tuning.search(part, parts, timed=False):
            _walk(settings, device)
        return 0
    if parts:
        harness.run_shares("benchmarks.tune_sampling", arguments, parts)
    path = Path(settings["out"]) if settings["out"] else tuning.cache_path()
    if "tiles" in settings["what"]:
        with tuning.search() as found:
            _walk(settings, device)
        tuning.save(found.found, path)
        report(found, _SHOWN)
        print(f"{len(found.found)} shapes in {path}")
    if "joins" in settings["what"]:
        plan = _plan(settings, device)
        for batch in settings["batch"]:
            print(f"batch {batch}", flush=True)
            evaluate = _step(plan, batch, device)
            with torch.no_grad(), dependent_launches(batch * _SIZE**2 <= OVERLAP_PIXELS):
                for rows in measure_joins(evaluate, _time):
                    tuning.save(rows, path)
    return 0


def _walk(settings: dict, device: torch.device) -> None:
    plan = _plan(settings, device)
    for batch in settings["batch"]:
        evaluate = _evaluation(plan, batch, device)
        for split in (True, False):
            plan.kernels.worth_splitting = conv_split.worth_splitting if split else _never
            with tuning.trial(_never):
                evaluate()
        with tuning.trial(lambda *_: True):
            evaluate()


def _plan(settings: dict, device: torch.device) -> InferenceUNet:
    return InferenceUNet(our_model(settings["model"], "bf16", device, _SIZE).eval(), fused)


def _evaluation(plan: InferenceUNet, batch: int, device: torch.device) -> Callable[[], Tensor]:
    x = torch.randn(batch, _SIZE, _SIZE, 3, device=device)
    return partial(plan, x, torch.zeros(batch, dtype=torch.int64, device=device))


def _step(plan: InferenceUNet, batch: int, device: torch.device) -> Callable[[], Tensor]:
    """An evaluation as a chain has it, its embedding out of a table."""
    x = torch.randn(batch, _SIZE, _SIZE, 3, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    tables = plan.tabulate(torch.tensor([500], device=device), None, batch)
    return partial(plan.at_row, x, row, tables)


def _time(evaluate: Callable[[], Tensor]) -> float:
    return harness.time_graph([evaluate])[0].median


def _never(*_: object) -> bool:
    return False


if __name__ == "__main__":
    harness.run_entry(main)
