"""Time diffusers' UNets as `diffusion.accelerate` runs them, and that of
denoising-diffusion-pytorch, beside torch.compile.

    python -m benchmarks.accelerated [key=value ...]

    models=ddpm_cifar10,butterflies  networks, see `NETWORKS` (also stable_diffusion and
                                     denoising_diffusion)
    batch=128,16                     images, one number a model
    what=train,evaluate
    loop=false                       true: in an ordinary Python loop, without a graph around it
    processes=12                     that compile our kernels
    out=                             a folder for the CSV; default benchmarks/results

A training step is the loss of given noise, its gradient and PyTorch's fused AdamW, under autocast
to bf16; an evaluation is of a network in bf16. Both networks are channels_last, and each is
captured in one CUDA graph. They are timed in turns, after the output and the gradient of ours have
been found at most twice as far from the float32 module as the module in bf16 is. In a loop,
`accelerate` and torch.compile's mode=reduce-overhead capture graphs of their own, and torch.compile
by default does not.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import denoising_diffusion, harness, precompile, stopwatch
from benchmarks.harness import Row, WrongResult, check_choice, relative_error
from benchmarks.papers import in_turns
from benchmarks.steps import fused_adamw
from diffusion.errors import ConfigError
from diffusion.plan.accelerate import Accelerated

_PLAIN = ("DownBlock2D",) * 4, ("UpBlock2D",) * 4
NETWORKS = {
    "ddpm_cifar10": {  # google/ddpm-cifar10-32, Ho et al. 2020
        "sample_size": 32,
        "block_out_channels": (128, 256, 256, 256),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": None,
        "norm_eps": 1e-6,
        "downsample_padding": 0,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
    },
    "butterflies": {  # the training example of diffusers' documentation
        "sample_size": 128,
        "block_out_channels": (128, 128, 256, 256, 512, 512),
        "down_block_types": (*_PLAIN[0], "AttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "AttnUpBlock2D", *_PLAIN[1]),
    },
    "stable_diffusion": {  # 1.5, of latents with 4 channels, beside 77 tokens of 768 numbers
        "sample_size": 64,
        "cross_attention_dim": 768,
    },
    # the example of denoising-diffusion-pytorch, of smaller images
    "denoising_diffusion": {"sample_size": 64, "dim": 64, "dim_mults": (1, 2, 4, 8)},
}
DEFAULTS = {
    "models": ("ddpm_cifar10", "butterflies"),
    "batch": (128, 16),
    "what": ("train", "evaluate"),
    "loop": False,
    **precompile.SETTINGS,
    "out": "",
}
_CHECKED = 4  # images
_TIMESTEPS, _TOKENS, _WARM_UP = 1000, 77, 4


class Loss(nn.Module):
    """The mean squared error of the noise."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, noise: Tensor, *given: Tensor) -> Tensor:
        return F.mse_loss(self.network(*given).sample.float(), noise)


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for model in settings["models"]:
        check_choice("models", model, tuple(NETWORKS))
    for what in settings["what"]:
        check_choice("what", what, DEFAULTS["what"])
    if len(settings["batch"]) != len(settings["models"]):
        raise ConfigError(f"batch={settings['batch']}; expected as many numbers as models")
    if settings["compile_for"]:
        return precompile.compile_kernels(partial(rehearse, settings), settings)
    device = harness.require_cuda()
    compiling = precompile.start("benchmarks.accelerated", arguments, device)
    harness.set_precision("bf16")
    cases = [
        (what, model, batch)
        for model, batch in zip(settings["models"], settings["batch"], strict=True)
        for what in settings["what"]
    ]
    loop = settings["loop"]
    theirs = [compiled(*case, device, loop) for case in cases]
    compiling.wait()
    print("compiled", flush=True)
    for case, runs in zip(cases, theirs, strict=True):
        time_case(*case, runs, device, loop, Path(settings["out"] or harness.RESULTS))
    return 0


def build(model: str, device: torch.device) -> nn.Module:
    """The network, of seed 0, channels_last."""
    from diffusers import UNet2DConditionModel, UNet2DModel

    torch.manual_seed(0)
    made = UNet2DConditionModel if "cross_attention_dim" in NETWORKS[model] else UNet2DModel
    made = made if library(model) == "diffusers" else denoising_diffusion.Unet
    if harness.is_unwritten(device):  # parameters that nobody draws
        with torch.device("meta"):
            network = made(**NETWORKS[model])
        network = network.to_empty(device=device)
    else:
        network = made(**NETWORKS[model])
    return network.to(device, memory_format=torch.channels_last)


def library(model: str) -> str:
    """Whose network it is."""
    return "lucidrains" if "dim_mults" in NETWORKS[model] else "diffusers"


def inputs(model: str, batch: int, device: torch.device) -> tuple[Tensor, ...]:
    """The noise; noised images and timesteps, and tokens if the network has them."""
    generator = torch.Generator(device).manual_seed(1)
    size, tokens = NETWORKS[model]["sample_size"], NETWORKS[model].get("cross_attention_dim")
    shape = batch, channels(model), size, size
    x, noise = (
        torch.randn(shape, device=device, generator=generator).contiguous(
            memory_format=torch.channels_last
        )
        for _ in range(2)
    )
    t = torch.arange(batch, device=device) * (_TIMESTEPS // batch)
    if tokens is None:
        return noise, x, t
    return noise, x, t, torch.randn((batch, _TOKENS, tokens), device=device, generator=generator)


def channels(model: str) -> int:
    """Of its images."""
    return 4 if "cross_attention_dim" in NETWORKS[model] else 3


def step_of(loss: nn.Module, given: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    """A training step."""
    adamw = fused_adamw(loss)

    def run() -> Tensor:
        adamw.zero_grad(set_to_none=True)
        with torch.autocast(given[0].device.type, torch.bfloat16):
            value = loss(*given)
        value.backward()
        adamw.step()
        return value.detach()

    return run


def evaluation_of(network: nn.Module, given: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    @torch.no_grad()
    def run() -> Tensor:
        return network(*given).sample

    return run


def captured(run: Callable[[], Tensor]) -> Callable[[int], object]:
    """The same as one CUDA graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    return lambda _, reads=run: graph.replay()


def runner(
    what: str,
    model: str,
    batch: int,
    device: torch.device,
    around: Callable[[nn.Module], nn.Module],
    compiler: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> Callable[[], Tensor]:
    """A step or an evaluation: `around` the network, `compiler` around all that is compiled."""
    noise, *given = inputs(model, batch, device)
    network = build(model, device)
    if what == "train":
        return step_of(compiler(Loss(around(network.train()))), (noise, *given))
    low = tuple(x.bfloat16() if x.is_floating_point() else x for x in given)
    return evaluation_of(compiler(around(network.eval().bfloat16())), low)


def looped(run: Callable[[], Tensor]) -> Callable[[int], object]:
    """As Python runs it, call by call."""
    for _ in range(_WARM_UP):
        run()
    return lambda _: run()


def compiled(
    what: str, model: str, batch: int, device: torch.device, loop: bool
) -> dict[str, Callable[[int], object]]:
    """torch.compile's, by provider."""
    torch._dynamo.reset()
    modes = {"compile-bf16": None} | (
        {"compile-bf16 reduce-overhead": "reduce-overhead"} if loop else {}
    )
    found = {}
    for name, mode in modes.items():
        compiler = partial(torch.compile, dynamic=False, mode=mode)
        run = runner(what, model, batch, device, lambda network: network, compiler)
        found[name] = looped(run) if loop else captured(run)
    return found


def rehearse(settings: dict) -> None:
    """Ask for all that ours launches, over memory that nobody reads."""
    host = torch.device("cpu")
    for model, batch in zip(settings["models"], settings["batch"], strict=True):
        network = Accelerated(build(model, host))
        _output_and_gradient(network, *inputs(model, _CHECKED, host), low=True)
        for what in settings["what"]:
            runner(what, model, batch, host, Accelerated)()


def _output_and_gradient(
    network: nn.Module, dy: Tensor, *given: Tensor, low: bool
) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of all parameters as one vector; `low`: under autocast."""
    with torch.autocast(dy.device.type, torch.bfloat16, enabled=low):
        y = network(*given).sample
    grads = torch.autograd.grad(y, list(network.parameters()), dy.to(y.dtype))
    return y.detach().float(), torch.cat([g.float().flatten() for g in grads])


def check(model: str, device: torch.device) -> None:
    """Raise WrongResult unless ours is at most twice as far from float32 as the module in bf16."""
    given, module = inputs(model, _CHECKED, device), build(model, device)
    harness.set_precision("fp32")
    exact = _output_and_gradient(module, *given, low=False)
    harness.set_precision("bf16")
    low = _output_and_gradient(module, *given, low=True)
    got = _output_and_gradient(Accelerated(copy.deepcopy(module)), *given, low=True)
    for name, a, b, c in zip(("output", "gradient"), got, low, exact, strict=True):
        error, theirs = relative_error(a, c), relative_error(b, c)
        print(f"{model}: {name} off by {error:.1e}, the module in bf16 by {theirs:.1e}", flush=True)
        if error > 2 * theirs + 1e-5:
            raise WrongResult(f"the {name} is off by {error:.1e}, the module by {theirs:.1e}")


def time_case(
    what: str,
    model: str,
    batch: int,
    theirs: dict[str, Callable[[int], object]],
    device: torch.device,
    loop: bool,
    folder: Path,
) -> None:
    """Check ours, time all in turns, write the rows and say the ratios."""
    check(model, device)
    stopwatch.release_memory()
    if loop:
        ours = looped(runner(what, model, batch, device, Accelerated))
    else:
        ours = captured(runner(what, model, batch, device, partial(Accelerated, capture=False)))
    size, origin = NETWORKS[model]["sample_size"], harness.provenance()
    shape = f"{batch}x{size}x{size}x{channels(model)} {library(model)}:{model}"
    op, pass_ = ("train_step", "step") if what == "train" else ("unet_forward", "fwd")
    # as the other benchmarks of steps name it
    suffix = " loop" if loop else " graph" if what == "train" else ""
    runs = {f"{name}{suffix}": run for name, run in ({"triton-bf16": ours} | theirs).items()}
    for timings in in_turns(runs):
        rows = [
            Row(op, shape, "any", pass_, name, *timing, 0, 0, *origin)
            for name, timing in timings.items()
        ]
    harness.add_rows(folder / f"{origin.gpu}.csv", rows)
    mine, *others = (timings[name].median / 1000 for name in runs)
    for name, other in zip(list(runs)[1:], others, strict=True):
        print(f"{what} {shape}: {mine:.3f} ms, {name} {other:.3f}: {other / mine:.2f}", flush=True)


if __name__ == "__main__":
    harness.run_entry(main)
