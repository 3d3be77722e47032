"""Time networks that are not the framework's, as `diffusion.accelerate` runs them, beside
torch.compile: diffusers', or your own.

    python -m benchmarks.accelerated [key=value ...]

    models=ddpm_cifar10,butterflies  of `other_networks.NETWORKS` (also stable_diffusion and
                                     denoising_diffusion), or FILE.py:FUNCTION, which returns a
                                     module and its arguments for a number of images
    batch=128,16                     images, one number a model
    what=train,evaluate              or evaluate_autocast: of a network that has to stay in float32
    memory_format=channels_last      or contiguous: filters and images as PyTorch makes them
    loop=false                       true: in an ordinary Python loop, without a graph around it
    processes=12                     that compile our kernels
    out=                             a folder for the CSV; default benchmarks/results

A training step is the loss of given noise, its gradient and PyTorch's fused AdamW, under autocast
to bf16; an evaluation is of a network in bf16, or under autocast. Both networks have this memory
format, and each is captured in one CUDA graph. They are timed in turns, after the output and the
gradient of ours have been found at most twice as far from the float32 module as the module in bf16
is. In a loop, `accelerate` and torch.compile's mode=reduce-overhead capture graphs of their own,
and torch.compile by default does not. What torch.compile cannot compile is timed beside the module
as it is (eager).
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from benchmarks import harness, precompile, stopwatch
from benchmarks.harness import Row, WrongResult, check_choice, relative_error
from benchmarks.other_networks import Inputs, Network, network_of
from benchmarks.papers import in_turns
from benchmarks.steps import fused_adamw
from diffusion.errors import ConfigError
from diffusion.plan.accelerate import Accelerated
from diffusion.plan.record.without_gpu import cuda_autocast
from diffusion.plan.user_module import in_bf16
from triton_kernels.runtime.device import on_gpu

_KINDS = ("train", "evaluate", "evaluate_autocast")
_FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
DEFAULTS = {
    "models": ("ddpm_cifar10", "butterflies"),
    "batch": (128, 16),
    "what": _KINDS[:2],
    "memory_format": "channels_last",
    "loop": False,
    **precompile.SETTINGS,
    "out": "",
}
_CHECKED = 4  # images
_WARM_UP = 4


def first_tensor(output: Any) -> Tensor:
    """Of an output, which may be an object of diffusers, or several."""
    if isinstance(output, Tensor):
        return output
    return output.sample if hasattr(output, "sample") else first_tensor(output[0])


class Model(NamedTuple):
    """A network to be timed, in a memory format of `_FORMATS`."""

    name: str  # as `network_of` takes it
    memory_format: str = "channels_last"

    @property
    def network(self) -> Network:
        return network_of(self.name)

    def build(self, device: torch.device) -> nn.Module:
        """The network, of seed 0."""
        torch.manual_seed(0)
        return self.network.build(device).to(memory_format=_FORMATS[self.memory_format])

    def inputs(self, batch: int, device: torch.device) -> Inputs:
        target, given = self.network.inputs(batch, device)

        def in_format(x: Tensor) -> Tensor:
            return x.contiguous(memory_format=_FORMATS[self.memory_format]) if x.dim() == 4 else x

        return tree_map_only(Tensor, in_format, (target, given))

    def shape(self, batch: int) -> str:
        """Of a row: images, height, width, channels and the network's name."""
        network, name = self.network, self.name.rpartition(":")[2]
        _, given = network.inputs(batch, torch.device("cpu"))
        n, c, *size = max((x.shape for x in given if isinstance(x, Tensor)), key=len)
        suffix = "" if self.memory_format == "channels_last" else f":{self.memory_format}"
        return f"{'x'.join(map(str, (n, *size, c)))} {network.library}:{name}{suffix}"


class Loss(nn.Module):
    """The mean squared error of the target, or the mean square of the output."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, target: Tensor | None, *given: Any) -> Tensor:
        y = first_tensor(self.network(*given)).float()
        return y.square().mean() if target is None else F.mse_loss(y, target)


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for name in settings["models"]:
        network_of(name)
    check_choice("memory_format", settings["memory_format"], _FORMATS)
    for what in settings["what"]:
        check_choice("what", what, _KINDS)
    if len(settings["batch"]) != len(settings["models"]):
        raise ConfigError(f"batch={settings['batch']}; expected as many numbers as models")
    if settings["compile_for"]:
        return precompile.compile_kernels(partial(rehearse, settings), settings)
    device = harness.require_cuda()
    compiling = precompile.start("benchmarks.accelerated", arguments, device)
    harness.set_precision("bf16")
    cases = [(what, *case) for case in _models(settings) for what in settings["what"]]
    loop = settings["loop"]
    theirs = [compiled(*case, device, loop) for case in cases]
    compiling.wait()
    print("compiled", flush=True)
    for case, runs in zip(cases, theirs, strict=True):
        time_case(*case, runs, device, loop, Path(settings["out"] or harness.RESULTS))
    return 0


def _models(settings: dict) -> list[tuple[Model, int]]:
    """The networks, and of how many images each."""
    models = (Model(name, settings["memory_format"]) for name in settings["models"])
    return list(zip(models, settings["batch"], strict=True))


def _autocast(device: torch.device, enabled: bool = True) -> AbstractContextManager[None]:
    """To bf16, of where tensors are, or in a rehearsal would be."""
    if on_gpu(device):
        return cuda_autocast(torch.bfloat16, enabled)
    return torch.autocast(device.type, torch.bfloat16, enabled)


def step_of(
    loss: nn.Module, target: Tensor | None, given: tuple, device: torch.device
) -> Callable[[], Tensor]:
    """A training step."""
    adamw = fused_adamw(loss)

    def run() -> Tensor:
        adamw.zero_grad(set_to_none=True)
        with _autocast(device):
            value = loss(target, *given)
        value.backward()
        adamw.step()
        return value.detach()

    return run


def evaluation_of(
    network: nn.Module, given: tuple[Tensor, ...], autocast: bool = False
) -> Callable[[], Tensor]:
    device = next(network.parameters()).device

    @torch.no_grad()
    def run() -> Tensor:
        with _autocast(device, autocast):
            return first_tensor(network(*given))

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
    model: Model,
    batch: int,
    device: torch.device,
    around: Callable[[nn.Module], nn.Module],
    compiler: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> Callable[[], Tensor]:
    """A step or an evaluation: `around` the network, `compiler` around all that is compiled."""
    target, given = model.inputs(batch, device)
    network = model.build(device)
    if what == "train":
        return step_of(compiler(Loss(around(network.train()))), target, given, device)
    if what == "evaluate_autocast":
        return evaluation_of(compiler(around(network.eval())), given, autocast=True)
    network, given = in_bf16(network.eval(), given)
    return evaluation_of(compiler(around(network)), given)


def looped(run: Callable[[], Tensor]) -> Callable[[int], object]:
    """As Python runs it, call by call."""
    for _ in range(_WARM_UP):
        run()
    return lambda _: run()


def compiled(
    what: str, model: Model, batch: int, device: torch.device, loop: bool
) -> dict[str, Callable[[int], object]]:
    """torch.compile's, by provider, or those of the module as it is."""
    torch._dynamo.reset()
    modes = {"compile-bf16": None} | (
        {"compile-bf16 reduce-overhead": "reduce-overhead"} if loop else {}
    )
    capture = looped if loop else captured
    alone = partial(runner, what, model, batch, device, lambda network: network)
    try:
        return {
            name: capture(alone(partial(torch.compile, dynamic=False, mode=mode)))
            for name, mode in modes.items()
        }
    except Exception as e:  # of any kind: who compiles says what
        print(f"{what} {model.name}: torch.compile fails: {str(e).splitlines()[0]}", flush=True)
        return {"eager-bf16": capture(alone())}


def rehearse(settings: dict) -> None:
    """Ask for all that ours launches, over memory that nobody reads."""
    host = torch.device("cpu")
    for model, batch in _models(settings):
        network = Accelerated(model.build(host))
        _output_and_gradient(network, *model.inputs(_CHECKED, host), low=True)
        for what in settings["what"]:
            runner(what, model, batch, host, Accelerated)()


def _output_and_gradient(
    network: nn.Module, dy: Tensor | None, given: tuple, low: bool
) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of all parameters as one vector, of `dy` or of the output
    itself; `low`: under autocast."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    with _autocast(parameters[0].device, low):
        y = first_tensor(network(*given))
    dy = y.detach() if dy is None else dy.to(y.dtype)
    grads = torch.autograd.grad(y, parameters, dy, materialize_grads=True)
    return y.detach().float(), torch.cat([g.float().flatten() for g in grads])


def check(model: Model, device: torch.device) -> None:
    """Raise WrongResult unless ours is at most twice as far from float32 as the module in bf16."""
    (dy, given), module = model.inputs(_CHECKED, device), model.build(device)
    harness.set_precision("fp32")
    exact = _output_and_gradient(module, dy, given, low=False)
    dy = exact[0] if dy is None else dy  # one for all three
    harness.set_precision("bf16")
    low = _output_and_gradient(module, dy, given, low=True)
    got = _output_and_gradient(Accelerated(copy.deepcopy(module)), dy, given, low=True)
    for name, a, b, c in zip(("output", "gradient"), got, low, exact, strict=True):
        error, theirs = relative_error(a, c), relative_error(b, c)
        said = f"off by {error:.1e}, the module in bf16 by {theirs:.1e}"
        print(f"{model.name}: {name} {said}", flush=True)
        if error > 2 * theirs + 1e-5:
            raise WrongResult(f"the {name} is off by {error:.1e}, the module by {theirs:.1e}")


def time_case(
    what: str,
    model: Model,
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
    shape, origin = model.shape(batch), harness.provenance()
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
