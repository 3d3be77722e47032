"""What each row of the fuse table is worth: the plan with it, in turns with the plan without it.

    python -m benchmarks.plan_rows [key=value ...]

    model=unet64        configs/model
    size=64             pixels
    batch=16,128        images
    mode=train,sample   forward and backward, or the forward pass without gradients
    rows=               names of rows, or parts of them; default: all that change the plan
    rounds=5            of turns
    processes=12        that compile kernels beforehand

Both plans are of `diffusion.accelerate`, bf16, each captured in one CUDA graph. A line has the time
of the whole plan, that of the plan without the row, and their ratio.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import ROOT, check_choice
from diffusion.factory import build_model
from diffusion.plan.accelerate import Accelerated
from diffusion.plan.fuse.backward import BACKWARD_ROWS
from diffusion.plan.fuse.forward import FORWARD_ROWS
from diffusion.plan.fuse.preparing import PREPARING
from diffusion.plan.fuse.rewrite import Row
from diffusion.presets import preset
from diffusion.runtime.backend import Backend
from triton_kernels import reference
from triton_kernels.runtime.compile_launches import compile_launches
from triton_kernels.runtime.device import Device, describe
from triton_kernels.runtime.launch_recorder import rehearsal

DEFAULTS = {
    "model": "unet64",
    "size": 64,
    "batch": (16, 128),
    "mode": ("train", "sample"),
    "rows": (),
    "rounds": 5,
    "processes": 12,
    "gpu": "",  # of the process that compiles, as `describe` has it
}


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for mode in settings["mode"]:
        check_choice("mode", mode, ("train", "sample"))
    if settings["gpu"]:
        compile_kernels(settings, Device(*json.loads(settings["gpu"])))
        return 0
    device = harness.require_cuda()
    gpu = json.dumps(describe(device))
    command = [sys.executable, "-m", "benchmarks.plan_rows", *arguments, f"gpu={gpu}"]
    subprocess.run(command, cwd=ROOT, check=True)
    harness.set_precision("bf16")
    module = network(settings, device)
    for mode in settings["mode"]:
        module.train(mode == "train")
        for batch in settings["batch"]:
            args = given(settings, batch, device)
            whole, size = Accelerated(module), settings["size"]
            print(f"\n{settings['model']} {size}px, {batch} images, {mode}: microseconds with and")
            print("without a row, and their ratio\n", flush=True)
            for row in asked(settings["rows"], mode):
                times = turns(whole, args, mode, row, settings["rounds"])
                if times is not None:
                    with_row, without = times
                    ratio = without / with_row
                    print(
                        f"{row.name:50} {with_row:10.1f} {without:10.1f} {ratio:8.4f}", flush=True
                    )
    return 0


def network(settings: dict, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    backend, size = Backend("torch", reference, torch.bfloat16, allow_tf32=True), settings["size"]
    return build_model(preset("model", settings["model"]), backend, (size, size), 3, False, device)


def given(settings: dict, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images and timesteps."""
    x = torch.randn(batch, 3, settings["size"], settings["size"], device=device)
    return x, torch.arange(batch, device=device) * (1000 // batch)


def compile_kernels(settings: dict, gpu: Device) -> None:
    """Of every plan that is timed, over memory that nobody reads."""
    torch.set_num_threads(1)
    host = torch.device("cpu")
    module = network(settings, host)
    with rehearsal(gpu) as launches:
        for mode in settings["mode"]:
            module.train(mode == "train")
            for batch in settings["batch"]:
                args = given(settings, batch, host)
                whole = Accelerated(module)
                call(whole, args, mode)()
                for row in asked(settings["rows"], mode):
                    part = lacking(whole, args, mode, row)
                    if part is not None:
                        call(part, args, mode)()
    count = sum(1 for _ in compile_launches(launches, gpu.arch, settings["processes"]))
    print(f"{count} kernels compiled", flush=True)


def asked(names: Sequence[str], mode: str) -> list[Row]:
    """The rows whose names have one of these parts, and that apply."""
    rows = PREPARING + FORWARD_ROWS + (BACKWARD_ROWS if mode == "train" else ())
    rows = [row for row in rows if mode in row.when]
    return [row for row in rows if not names or any(name in row.name for name in names)]


def turns(
    whole: Accelerated, args: tuple[Tensor, ...], mode: str, row: Row, rounds: int
) -> tuple[float, float] | None:
    """Microseconds with and without the row, the best of so many turns; None: the plan is the same
    without it."""
    part = lacking(whole, args, mode, row)
    if part is None:
        return None
    calls = [call(p, args, mode) for p in (whole, part)]
    best = [float("inf")] * 2
    for _ in range(rounds):
        for i, run in enumerate(calls):
            timing, _ = harness.time_graph([run])
            best[i] = min(best[i], timing.median)
    return best[0], best[1]


def lacking(
    whole: Accelerated, args: tuple[Tensor, ...], mode: str, row: Row
) -> Accelerated | None:
    """What lacks the row; None: its plan is the same."""
    part = Accelerated(whole.module, without=(row.name,))
    with torch.set_grad_enabled(mode == "train"):
        counts = [p.plan_of(args, {})[0].graph.count() for p in (whole, part)]
    return None if counts[0] == counts[1] else part


def call(fast: Accelerated, args: tuple[Tensor, ...], mode: str) -> Callable[[], object]:
    if mode == "sample":

        def evaluate() -> Tensor:
            with torch.no_grad():
                return fast(*args)

        return evaluate
    parameters = [p for p in fast.module.parameters() if p.requires_grad]

    def step() -> tuple[Tensor | None, ...]:
        y = fast(*args)
        return torch.autograd.grad(y, parameters, torch.ones_like(y), allow_unused=True)

    return step


if __name__ == "__main__":
    harness.run_entry(main)
