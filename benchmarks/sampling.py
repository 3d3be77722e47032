"""Time sampling: one evaluation of the network, and whole chains from noise to images.

    python -m benchmarks.sampling [key=value ...]

    batch=1,16,64        images of an evaluation
    model=unet64         configs/model
    providers=...        any of triton-bf16, eager-bf16 and compile-bf16 (the PyTorch baseline); or
                         the same in tf32 or fp32
    chains=ddim50,ddpm1000   samplers with their numbers of steps; empty: none
    images=16            of a chain
    pipelines=...        what runs the chains: triton-bf16, diffusers-fp16, diffusers-compile-fp16,
                         diffusers-bf16, diffusers-compile-bf16
    seconds=2            of a chain; a long one is timed once
    processes=0          that compile side by side first
    out=                 a folder for the CSV; default benchmarks/results

An evaluation is timed in a CUDA graph, for everybody; the baseline has its parameters in bf16, so
that no launch converts them. A chain is timed by the clock, from the call to the images; that of
diffusers is its own pipeline over a UNet2DModel with the same weights; its images stay tensors.
Ours is timed only after its output has been compared with the float32 baseline.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import harness, stopwatch
from benchmarks.cases import Images, images_of, meta_model
from benchmarks.compilers import run_shares
from benchmarks.harness import OURS, Row, WrongResult, check_choice
from benchmarks.steps import Step, baseline_model, our_model, random_labels, settings_of
from benchmarks.stopwatch import Timing
from diffusion.factory import make_sampler
from diffusion.formats.diffusers_directory import unet_config
from diffusion.formats.diffusers_names import to_diffusers_state
from diffusion.plan.inference import sampling_network
from diffusion.process.schedule import NoiseSchedule
from triton_kernels.runtime.dependent_launch import dependent_launches

PROVIDERS = tuple(
    f"{kind}-{precision}"
    for precision in ("bf16", "tf32", "fp32")
    for kind in (OURS, "eager", "compile")
)
PIPELINES = (
    "triton-bf16",
    "diffusers-fp16",
    "diffusers-bf16",
    "diffusers-compile-fp16",
    "diffusers-compile-bf16",
)
SAMPLERS = ("ddim", "ddpm")
DEFAULTS = {
    "batch": (1, 16, 64),
    "model": "unet64",
    "providers": PROVIDERS[:3],
    "chains": ("ddim50", "ddpm1000"),
    "images": 16,
    "pipelines": PIPELINES,
    "seconds": 2.0,
    "processes": 0,
    "out": "",
    "part": -1,  # the share of a compiling process
}
_TIMESTEPS = 1000


class Task(NamedTuple):
    """An evaluation (chain is None), or a chain such as ddim50."""

    chain: str | None
    provider: str
    images: int


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    tasks = choose_tasks(settings)
    model, part, parts = settings["model"], settings["part"], settings["processes"]
    images = images_of(model)
    flops = meta_model(model, images.size, images.channels).flops_per_image
    device = harness.require_cuda()
    if part >= 0:
        for task in tasks[part::parts]:
            run_task(task, model, device, 0.0, compile_only=True)
        return 0
    if parts:
        run_shares("benchmarks.sampling", arguments, parts)
    origin, wrong = harness.provenance(), 0
    folder = Path(settings["out"] or harness.RESULTS)
    for task in tasks:
        try:
            timing = run_task(task, model, device, settings["seconds"])
        except WrongResult as error:
            print(f"! {task.provider} is wrong and not timed: {error}", flush=True)
            wrong = 1
            continue
        except Exception as error:  # a library says what it likes of what it cannot do
            print(f"! {task}: {harness.reason(error)}", flush=True)
            continue
        sampler, steps = split_chain(task.chain) if task.chain else ("", 1)
        shape = f"{shape_of(task.images, images)} {model}"
        op, shape = ("sampling", f"{shape} {task.chain}") if sampler else ("unet_forward", shape)
        work = steps * task.images * flops
        row = Row(op, shape, "any", "fwd", task.provider, *timing, 0, work, *origin)
        harness.add_rows(folder / f"{origin.gpu}.csv", [row])  # at once: a run may be cut short
        times = " / ".join(f"{t / 1000:.3f}" for t in timing)
        print(f"{op} {shape} {task.provider}: {times} ms (median, p20, p80)", flush=True)
    return wrong


def shape_of(batch: int, images: Images) -> str:
    """As rows of the CSV have it."""
    return f"{batch}x{images.size}x{images.size}x{images.channels}"


def choose_tasks(settings: dict) -> list[Task]:
    """What the settings ask for, what is compared one after the other, the slow ones last.
    ConfigError: something unknown."""
    for key, valid in (("providers", PROVIDERS), ("pipelines", PIPELINES)):
        for value in settings[key]:
            check_choice(key, value, valid)
    for chain in settings["chains"]:
        split_chain(chain)
    tasks = [Task(None, p, batch) for batch in settings["batch"] for p in settings["providers"]]
    chains = [(p, chain) for p in settings["pipelines"] for chain in settings["chains"]]
    return tasks + [Task(chain, p, settings["images"]) for p, chain in chains]


def split_chain(chain: str) -> tuple[str, int]:
    """ "ddim50" -> (ddim, 50); without a number all timesteps."""
    sampler = chain.rstrip("0123456789")
    check_choice("chains", sampler, SAMPLERS)
    return sampler, int(chain[len(sampler) :] or _TIMESTEPS)


def run_task(
    task: Task, model: str, device: torch.device, seconds: float, compile_only: bool = False
) -> Timing | None:
    """Time it, or only run it once, for the caches of the compilers."""
    torch._dynamo.reset()
    stopwatch.release_memory()
    harness.set_precision("bf16" if task.chain else task.provider.partition("-")[2])
    if task.chain is None:
        evaluate = evaluation(task.provider, model, task.images, device)
        with torch.no_grad(), dependent_launches(task.images * images_of(model).size ** 2):
            if compile_only:
                evaluate()
                return None
            return stopwatch.time_graph([evaluate])[0]
    sampler, steps = split_chain(task.chain)
    make = _our_chain if task.provider.startswith(OURS) else _chain_of_diffusers
    run = make(task.provider, model, sampler, task.images, device)
    run(min(steps, 2))  # compiles
    if compile_only:
        return None
    return time_chain(run, steps, task.provider.startswith(OURS), seconds)


# --- one evaluation -------------------------------------------------------------------------------


class _LowEmbedding(nn.Module):
    """Sinusoids in float32 for layers in bf16."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = [embedding]  # in a list, that the module's conversion passes it by

    def forward(self, t: Tensor) -> Tensor:
        return self.embedding[0](t).bfloat16()


def low_baseline(model: str, device: torch.device, size: int | None = None) -> nn.Module:
    """The baseline for inference in bf16."""
    network = baseline_model(model, device, size).eval()
    network.timestep_embedding = _LowEmbedding(network.timestep_embedding)
    return network.to(torch.bfloat16)


def evaluation(
    provider: str, model: str, batch: int, device: torch.device, size: int | None = None
) -> Callable[[], Tensor]:
    """A forward pass. WrongResult: ours is further from the float32 baseline than twice the
    reference ops in its precision."""
    precision = provider.partition("-")[2]
    x = _noise(images_of(model, size), batch, device, 0)
    labels = random_labels(settings_of(model)["num_classes"], batch, device)
    if provider.startswith(OURS):
        check_network(model, precision, device, size)
        network = sampling_network(our_model(model, precision, device, size).eval())
        row = torch.zeros(1, dtype=torch.int64, device=device)
        tables = network.tabulate(torch.tensor([500], device=device), labels, batch)
        return lambda: network.at_row(x, row, tables)
    low = precision == "bf16"
    network = (
        low_baseline(model, device, size) if low else baseline_model(model, device, size).eval()
    )
    harness.set_precision(precision)
    if provider.startswith("compile"):
        network = torch.compile(network, dynamic=False)
    image = (x.bfloat16() if low else x).permute(0, 3, 1, 2)  # channels_last
    t = torch.full((batch,), 500, device=device)
    return lambda: network(image, t, labels)


def _noise(images: Images, batch: int, device: torch.device, seed: int) -> Tensor:  # NHWC
    generator = torch.Generator(device).manual_seed(seed)
    shape = batch, images.size, images.size, images.channels
    return torch.randn(shape, device=device, generator=generator)


def evaluation_step(
    provider: str, model: str, batch: int, device: torch.device, size: int | None = None
) -> Step:
    """An evaluation to be profiled, as training steps are."""
    pixels = batch * images_of(model, size).size ** 2
    evaluate = evaluation(provider, model, batch, device, size)

    @torch.no_grad()
    def plain(_: int) -> Tensor:
        with dependent_launches(pixels):
            return evaluate()

    def captured() -> Callable[[int], None]:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            plain(0)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            plain(0)
        return lambda _: graph.replay()

    return Step(plain, captured, planned=provider.startswith(OURS))


@cache
@torch.no_grad()
def check_network(
    model: str, precision: str, device: torch.device, size: int | None = None, batch: int = 4
) -> None:
    """Raise WrongResult unless our plan is at most twice as far from the float32 baseline as the
    reference ops in this precision. A network that has passed is not asked again."""
    x = _noise(images_of(model, size), batch, device, 1)
    t = torch.arange(batch, device=device) * (_TIMESTEPS // batch)
    labels = random_labels(settings_of(model)["num_classes"], batch, device)
    harness.set_precision("fp32")
    nchw = baseline_model(model, device, size).eval()(x.permute(0, 3, 1, 2), t, labels)
    exact = nchw.permute(0, 2, 3, 1)
    harness.set_precision(precision)
    reference = our_model(model, precision, device, size, "torch").eval()
    low = reference.forward_nhwc(x.to(reference.backend.dtype), t, labels)
    got = sampling_network(our_model(model, precision, device, size).eval())(x, t, labels)
    harness.check([got], [exact], harness.budgets([low], [exact]))


# --- whole chains ---------------------------------------------------------------------------------


def time_chain(run: Callable[[int], object], steps: int, captures: bool, seconds: float) -> Timing:
    """From the call to the images on the device, as often as the seconds allow."""
    if captures:
        run(steps)
    times: list[float] = []
    while not times or (sum(times) < seconds and len(times) < 20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(steps)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return stopwatch.quantiles([1e6 * t for t in times])


def _our_chain(
    pipeline: str, model: str, sampler: str, images: int, device: torch.device
) -> Callable[[int], Tensor]:
    network = sampling_network(our_model(model, "bf16", device).eval())
    shape = images_of(model)
    made = {}

    def run(steps: int) -> Tensor:
        if steps not in made:
            schedule = NoiseSchedule.linear(_TIMESTEPS)
            made[steps] = make_sampler(
                schedule, network.model.backend, sampler, steps=steps, device=device
            )
        return made[steps].sample(network, (images, shape.size, shape.size, shape.channels), seed=0)

    return run


def _chain_of_diffusers(
    pipeline: str, model: str, sampler: str, images: int, device: torch.device
) -> Callable[[int], object]:
    from diffusers import (  # only this needs it
        DDIMPipeline,
        DDIMScheduler,
        DDPMPipeline,
        DDPMScheduler,
        UNet2DModel,
    )

    ours = our_model(model, "fp32", torch.device("cpu"), backend="torch")
    unet = UNet2DModel.from_config(unet_config(ours))
    unet.load_state_dict(to_diffusers_state(ours))
    dtype = torch.bfloat16 if pipeline.endswith("bf16") else torch.float16
    unet = unet.eval().to(device, dtype, memory_format=torch.channels_last)
    kinds = {"ddim": (DDIMPipeline, DDIMScheduler), "ddpm": (DDPMPipeline, DDPMScheduler)}
    kind, scheduler = kinds[sampler]
    made = kind(unet=unet, scheduler=scheduler(_TIMESTEPS))
    made.set_progress_bar_config(disable=True)
    if "compile" in pipeline:
        compiled = torch.compile(made.unet.forward, mode="reduce-overhead")
        # a timestep on the host, where the pipeline has it, would rule out CUDA graphs
        made.unet.forward = lambda x, t, **options: compiled(x, t.to(device), **options)

    def run(steps: int) -> object:
        generator = torch.Generator(device).manual_seed(0)
        return made(
            batch_size=images,
            generator=generator,
            num_inference_steps=steps,
            output_type="pt",  # there is no bfloat16 in NumPy
        )

    return run


if __name__ == "__main__":
    harness.run_entry(main)
