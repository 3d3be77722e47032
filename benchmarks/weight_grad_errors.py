"""The error of every weight gradient's kernel against float64, by the number of images.

    python -m benchmarks.weight_grad_errors [key=value ...]

    batch=8,64,512,4096   images
    size=64          pixels
    channels=64      of x and of dy
    dtype=bf16,tf32
    filter=3         sides
    out=             a CSV; default weight_grad_errors.csv

Tensor cores cut off what does not fit an accumulator, always towards zero, so that a longer sum is
further off; `reductions.long_sums` bounds the length. x is what SiLU leaves of normal numbers,
which is positive on average, and dy has a mean of its own: sums that grow all along. The float64
sum is of the same operands; TF32 rounds them once more, inside the product.

Each kernel is a process of its own, so that they compile side by side. Exit code 1 if one failed.
"""

import csv
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness
from triton_kernels.conv.configs import WgradOperands
from triton_kernels.conv.weight_grad import WEIGHT_GRAD, weight_grad_spec
from triton_kernels.reductions.column_sum import sum_partials
from triton_kernels.runtime.device import describe

DEFAULTS = {
    "batch": (8, 64, 512, 4096),
    "size": 64,
    "channels": 64,
    "dtype": ("bf16", "tf32"),
    "filter": 3,
    "out": "weight_grad_errors.csv",
    "kernel": "",  # the one of this process
}
_DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32}
_CHUNK = 32  # images whose float64 copies are held at a time
_HEADER = ("kernel", "dtype", "images", "parts", "error")


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for dtype in settings["dtype"]:
        harness.check_choice("dtype", dtype, tuple(_DTYPES))
    harness.require_cuda()
    if settings["kernel"]:
        for row in errors(settings):
            print(*row, sep=",", flush=True)
        return 0
    command = [sys.executable, "-m", "benchmarks.weight_grad_errors", *arguments]
    running = [
        subprocess.Popen([*command, f"kernel={k.name}"], stdout=subprocess.PIPE, text=True)
        for k in WEIGHT_GRAD.kernels
    ]
    said = [process.communicate()[0] for process in running]
    rows = [line.split(",") for text in said for line in text.splitlines()]
    with open(Path(settings["out"]), "w", newline="") as file:
        csv.writer(file).writerows([_HEADER, *rows])
    print(harness.format_table(_HEADER, rows))
    return int(any(process.returncode for process in running))


def errors(settings: dict) -> Iterator[tuple]:
    """A row for every type and batch that the kernel of `settings` takes."""
    [kernel] = [k for k in WEIGHT_GRAD.kernels if k.name == settings["kernel"]]
    device, channels, side = torch.device("cuda"), settings["channels"], settings["filter"]
    padding = (side // 2, side // 2)
    for dtype in settings["dtype"]:
        for n in settings["batch"]:
            x, dy = operands(n, settings["size"], channels, _DTYPES[dtype], device)
            weight = torch.empty((channels, side, side, channels), device=device)
            weight = weight.permute(0, 3, 1, 2)
            spec = weight_grad_spec(x, dy, weight, 1, padding, "tf32")
            gpu = describe(device)
            if kernel.refuse(spec, gpu) is not None:
                continue
            config = next(iter(kernel.configs(spec, gpu)))
            parts = torch.full((config.splits, weight.numel()), torch.nan, device=device)
            kernel.launch(config, WgradOperands(x, dy, weight, 1, padding, "tf32", parts))
            found = torch.empty(weight.numel(), device=device)
            sum_partials(parts, found, follows=True)
            exact = weight_grad(x, dy, side)
            error = (found.view(exact.shape).double() - exact).norm() / exact.norm()
            yield kernel.name, dtype, n, config.splits, f"{error.item():.2e}"


def operands(
    n: int, size: int, channels: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """x and dy, [n, size, size, channels]."""
    generator = torch.Generator(device).manual_seed(n)
    x, dy = (torch.empty((n, size, size, channels), dtype=dtype, device=device) for _ in range(2))
    for part_x, part_dy in zip(x.split(_CHUNK), dy.split(_CHUNK), strict=True):
        part_x.copy_(F.silu(torch.randn(part_x.shape, device=device, generator=generator)))
        part_dy.copy_(torch.randn(part_dy.shape, device=device, generator=generator) + 0.25)
    return x, dy


def weight_grad(x: Tensor, dy: Tensor, side: int) -> Tensor:
    """The gradient in float64, [CO, side, side, CI], of a filter of odd sides that keeps sizes."""
    n, h, w, ci = x.shape
    co, pad = dy.shape[3], side // 2
    out = torch.zeros((side, side, co, ci), dtype=torch.float64, device=x.device)
    for part_x, part_dy in zip(x.split(_CHUNK), dy.split(_CHUNK), strict=True):
        padded = F.pad(part_x.double(), (0, 0, pad, pad, pad, pad))
        rows = part_dy.double().reshape(-1, co).T
        for r in range(side):
            for s in range(side):
                out[r, s] += rows @ padded[:, r : r + h, s : s + w].reshape(-1, ci)
    return out.permute(2, 0, 1, 3)


if __name__ == "__main__":
    harness.run_entry(main)
