"""Time a training step on one GPU and on several, with the same number of images on each.

    torchrun --nproc-per-node=2 -m benchmarks.scaling [key=value ...]

    batch=128        images a step on each GPU
    model=unet64     configs/model
    precision=bf16   bf16 | tf32 | fp32
    size=64          pixels
    steps=20         steps timed
    buckets=16       MiB of gradient that are sent off together, see training/gradient_sum.py
    ctas=0           at most so many thread blocks a sum; 0: as NCCL chooses
    providers=triton,compile   ours, and torch.compile of the PyTorch baseline under
                     DistributedDataParallel
    processes=12     that compile our kernels first; 0: none
    out=             a folder for the CSV; default benchmarks/results

Every process times the step by itself, all at the same time, and then with the sum of the gradients
over all; ours both as one CUDA graph. The efficiency is the first time over the second, each that
of the slowest process. DistributedDataParallel launches its step, as it does in a training script:
its buckets overlap the compiled backward pass (torch's DDPOptimizer); alone, the compiled step is
launched too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import harness, precompile, stopwatch
from benchmarks.cases import meta_model
from benchmarks.harness import OURS, Provenance, Row
from benchmarks.steps import Step, Wrap, build_step, our_model, our_step, rehearse_step
from benchmarks.stopwatch import Timing
from diffusion.errors import ConfigError
from diffusion.runtime.distributed import Processes, choose_device
from diffusion.training.gradient_sum import BUCKET

DEFAULTS = {
    "batch": (128,),
    "model": "unet64",
    "precision": "bf16",
    "size": 64,
    "steps": 20,
    "buckets": (16,),
    "ctas": (0,),
    "providers": ("triton", "compile"),
    **precompile.SETTINGS,
    "out": "",
}
_HEADER = ("provider", "batch a GPU", "GPUs", "sum", "ms", "p20", "p80", "images/s", "efficiency %")


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    harness.check_choice("precision", settings["precision"], ("bf16", "tf32", "fp32"))
    for provider in settings["providers"]:
        harness.check_choice("providers", provider, DEFAULTS["providers"])
    if settings["compile_for"]:
        return precompile.compile_kernels(partial(rehearse, settings), settings)
    harness.require_cuda()
    device = choose_device("cuda")
    processes = Processes(device)
    if processes.count == 1:
        raise ConfigError(
            "one process has nothing to scale to; start it as"
            " torchrun --nproc-per-node=2 -m benchmarks.scaling"
        )
    if settings["processes"] and processes.is_first:
        precompile.start("benchmarks.scaling", arguments, device).wait()
    dist.barrier()
    table = Table(settings, harness.provenance())
    measure = {"triton": _time_ours, "compile": _time_compiled}
    for provider in settings["providers"]:
        for batch in settings["batch"]:
            measure[provider](settings, batch, device, processes, table)
    if processes.is_first:
        print(f"\n{table}", flush=True)
    processes.close()
    return 0


def rehearse(settings: dict) -> None:
    """Ask for all that ours launches: what sums gradients over processes is no kernel of ours."""
    for batch in settings["batch"] if OURS in settings["providers"] else ():
        rehearse_step(settings["model"], settings["precision"], batch, settings["size"])


def _time_ours(
    settings: dict, batch: int, device: torch.device, processes: Processes, table: "Table"
) -> None:
    alone = time_step(settings, batch, device, Processes(None))
    table.add(OURS, batch, 1, "-", alone, alone, processes.is_first)
    for ctas in settings["ctas"]:
        processes.group = _group(ctas)
        for bucket in settings["buckets"]:
            timing = time_step(settings, batch, device, processes, bucket * 2**20)
            name = f"{bucket} MiB" + (f", {ctas} blocks" if ctas else "")
            table.add(OURS, batch, processes.count, name, timing, alone, processes.is_first)


def _time_compiled(
    settings: dict, batch: int, device: torch.device, processes: Processes, table: "Table"
) -> None:
    provider = f"compile-{settings['precision']}"
    step = _compiled(settings, batch, device, provider, None)  # once for both, in minutes
    alone = _timed(step.plain, settings["steps"])
    table.add("compile", batch, 1, "launched", alone, alone, processes.is_first)
    graph = _timed(step.captured(), settings["steps"])
    del step
    table.add("compile", batch, 1, "one CUDA graph", graph, graph, processes.is_first)
    shared = _compiled(settings, batch, device, provider, partial(_ddp, device=device))
    timing = _timed(shared.plain, settings["steps"])
    table.add("compile", batch, processes.count, "DDP", timing, graph, processes.is_first)


def _compiled(settings: dict, batch: int, device: torch.device, provider: str, wrap: Wrap) -> Step:
    stopwatch.release_memory()
    torch.compiler.reset()
    return build_step(provider, settings["model"], batch, device, settings["size"], wrap)


def _ddp(module: nn.Module, device: torch.device) -> nn.Module:
    """With gradients that are views of the buckets, which saves a copy of each."""
    return DistributedDataParallel(
        module,
        device_ids=[device.index],
        gradient_as_bucket_view=True,
        broadcast_buffers=False,  # the one there is never changes
    )


def time_step(
    settings: dict, batch: int, device: torch.device, processes: Processes, bucket: int = BUCKET
) -> Timing:
    """Of the slowest of all processes, whether they sum or not; `batch` images on each."""
    stopwatch.release_memory()
    size = settings["size"]
    model = our_model(settings["model"], settings["precision"], device, size)
    step = our_step(model, batch * processes.count, size, device, processes, bucket=bucket)
    timing = _timed(step.captured(), settings["steps"])
    step.release()
    return timing


def _timed(run: Callable[[int], Any], steps: int) -> Timing:
    """Of the slowest process; all begin together."""
    for k in range(5):
        run(k)
    torch.cuda.synchronize()
    dist.barrier()
    timing = stopwatch.time_steps(run, steps, warm_up=5)
    slowest = torch.tensor(timing, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return Timing(*slowest.tolist())


def _group(ctas: int) -> dist.ProcessGroup | None:
    """A group of all whose sums have at most so many thread blocks."""
    if ctas == 0:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = ctas
    return dist.new_group(backend="nccl", pg_options=options)


class Table:
    """The lines and the rows of a run; a row is in the CSV as soon as it is there."""

    def __init__(self, settings: dict, origin: Provenance) -> None:
        self.settings, self.origin = settings, origin
        self.flops = 3 * meta_model(settings["model"], settings["size"]).flops_per_image
        self.path = Path(settings["out"] or harness.RESULTS) / f"{origin.gpu}.csv"
        self.lines: list[list[str]] = []

    def add(
        self,
        kind: str,
        batch: int,
        count: int,
        name: str,
        timing: Timing,
        alone: Timing,
        is_first: bool,
    ) -> None:
        """`batch` images on each of `count` GPUs; `name` says how gradients are summed."""
        if not is_first:
            return
        milliseconds = [f"{t / 1000:.3f}" for t in timing]
        rate = batch * count / timing.median * 1e6
        efficiency = 100 * alone.median / timing.median
        line = [
            kind,
            str(batch),
            str(count),
            name,
            *milliseconds,
            f"{rate:.0f}",
            f"{efficiency:.1f}",
        ]
        self.lines.append(line)
        print("  ".join(f"{a} {b}" for a, b in zip(_HEADER, line, strict=True)), flush=True)
        s = self.settings
        shape = f"{batch}x{s['size']}x{s['size']}x3 {s['model']}"
        provider = f"{kind}-{s['precision']} x{count}" + (f" ({name})" if name != "-" else "")
        row = Row(
            "scaling", shape, "any", "step", provider, *timing, 0, self.flops * batch, *self.origin
        )
        harness.add_rows(self.path, [row])

    def __str__(self) -> str:
        return harness.format_table(_HEADER, self.lines)


if __name__ == "__main__":
    harness.run_entry(main)
