"""Whole training steps to time and to profile: ours, and the same model in PyTorch.

A PyTorch step is noise, forward, loss, backward and fused AdamW. Ours does more: it also clips,
keeps an EMA, draws every number from its own counter and takes another batch from the data set.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baseline_unet import build_baseline
from benchmarks.cases import Images, images_of, model_settings
from benchmarks.harness import OURS, WrongResult, relative_error, set_precision
from benchmarks.stopwatch import release_memory
from diffusion.data.batches import Batches
from diffusion.data.image_set import ImageSet
from diffusion.errors import ConfigError
from diffusion.factory import build_model
from diffusion.models.flat_parameters import FlatParameters
from diffusion.models.unet import UNet
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.step.network import TrainingUNet, training_network
from diffusion.process.objective import Objective, vb_bits
from diffusion.process.schedule import NoiseSchedule
from diffusion.runtime.backend import TORCH_FP32, Backend, choose_backend
from diffusion.runtime.distributed import Processes
from diffusion.training.gradient_sum import BUCKET, GradientSum
from diffusion.training.optimizer import Optimizer, OptimizerSettings
from diffusion.training.train_step import TrainStep

LR, _TIMESTEPS, _IMAGES, _WARM_UP = 2e-4, 1000, 2048, 4
_MODES = {"eager": None, "compile": "default", "autotune": "max-autotune-no-cudagraphs"}

PROVIDERS = tuple(
    f"{kind}-{precision}" for kind in (OURS, *_MODES) for precision in ("bf16", "tf32", "fp32")
)


# what goes around the module of the loss before it is compiled, such as DistributedDataParallel
Wrap = Callable[[nn.Module], nn.Module] | None
# a batch: uint8 [N, C, H, W], channels_last, and labels; within a captured step it draws anew
Draw = Callable[[], tuple[Tensor, Tensor | None]]


@dataclass
class Step:
    """`plain(k)` does update number k; `captured()` does one, captures it and returns its like.
    `release()` lets go of what it has captured."""

    plain: Callable[[int], Any]
    captured: Callable[[], Callable[[int], Any]]
    release: Callable[[], None] = lambda: None
    planned: bool = False  # by `diffusion.plan.step`


class DenoisingLoss(nn.Module):
    """From uint8 images to the mean squared error of the noise, and the variational bound if the
    variance is learned: all of it in one compiled graph."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.learned = model, objective.learned
        self.vb_weight = objective.vb_weight
        self.register_buffer("table", objective.table)
        self.register_buffer("reverse_table", objective.reverse_table)

    def forward(
        self,
        images: Tensor,  # uint8 [N, C, H, W], channels_last
        labels: Tensor | None,  # int64 [N]
    ) -> Tensor:
        x0 = images.float() / 127.5 - 1
        t = torch.randint(_TIMESTEPS, (images.shape[0],), device=images.device)
        noise = torch.randn_like(x0)
        a, s = self.table[t].view(-1, 2, 1, 1, 1).unbind(1)
        x_t = a * x0 + s * noise
        output = self.model(x_t, t, labels).float()
        if not self.learned:
            return F.mse_loss(output, noise)
        mean, v = output.chunk(2, dim=1)
        frozen, x0, x_t = (
            y.permute(0, 2, 3, 1) for y in (torch.cat((mean.detach(), v), dim=1), x0, x_t)
        )
        bound = vb_bits(frozen, x0, x_t, t, self.reverse_table)
        return F.mse_loss(mean, noise) + self.vb_weight * bound.mean()


def settings_of(model: str) -> dict[str, Any]:
    """The group `model`, without layers that start at zero: zeros multiply faster."""
    return {**model_settings(model), "zero_init": False}


def random_images(shape: tuple[int, ...], device: torch.device) -> Tensor:  # uint8
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)


def random_labels(classes: int | None, count: int, device: torch.device) -> Tensor | None:
    """A class of each of so many images, int64 [count], if there are classes."""
    if classes is None:
        return None
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(classes, (count,), device=device, generator=generator)


def our_model(
    model: str, precision: str, device: torch.device, size: int | None = None, backend: str = OURS
) -> UNet:
    """The framework's network with the parameters of seed 0; without any on the device "meta"."""
    chosen = choose_backend(backend, precision, device, "precision")
    images = images_of(model, size)
    shape = (images.size, images.size), images.channels, images.learned_variance
    meta = torch.device("meta")
    with meta:
        network = build_model(settings_of(model), chosen, *shape, meta)
    return _filled(network, json.dumps(settings_of(model)), images, device).train()


def baseline_model(model: str, device: torch.device, size: int | None = None) -> nn.Module:
    """The baseline with the same parameters."""
    images = images_of(model, size)
    with torch.device("meta"):
        baseline = build_baseline(settings_of(model), images.channels, images.learned_variance)
    baseline = _filled(baseline, json.dumps(settings_of(model)), images, device)
    return baseline.to(memory_format=torch.channels_last).train()


def _filled(network: nn.Module, settings: str, images: Images, device: torch.device) -> nn.Module:
    """A network that was built on "meta", on the device with the parameters of seed 0."""
    if device.type == "meta":
        return network
    made = _made(settings, images)
    state = {name: value.to(device, copy=True) for name, value in made.state_dict().items()}
    network.load_state_dict(state, assign=True)
    network.timestep_embedding = copy.deepcopy(made.timestep_embedding)  # of a buffer alone
    return network.to(device)


@lru_cache(maxsize=1)  # hundreds of millions of draws take seconds
def _made(settings: str, images: Images) -> UNet:
    """Our network with these settings, of seed 0, on the host."""
    torch.manual_seed(0)
    shape = (images.size, images.size), images.channels, images.learned_variance
    return build_model(json.loads(settings), TORCH_FP32, *shape, torch.device("cpu"))


def build_step(
    provider: str,
    model: str,
    batch: int,
    device: torch.device,
    size: int | None = None,
    wrap: Wrap = None,  # of the providers of PyTorch
) -> Step:
    """The step of a provider such as triton-bf16 or compile-tf32."""
    kind, _, precision = provider.partition("-")
    if provider not in PROVIDERS:
        raise ConfigError(f"provider {provider} is unknown; choose from {', '.join(PROVIDERS)}")
    if kind == OURS:
        network = our_model(model, precision, device, size)
        return our_step(network, batch, network.image_size[0], device, Processes(None))
    baseline, images = baseline_model(model, device, size), images_of(model, size)
    objective = objective_of(images, TORCH_FP32, device)
    draw = _same_batch(images, baseline.num_classes, batch, device)
    return torch_step(provider, baseline, fused_adamw(baseline), objective, draw, wrap)


def objective_of(images: Images, backend: Backend, device: torch.device) -> Objective:
    """Epsilon of the linear schedule, and the variance if it is learned."""
    variance = "learned_range" if images.learned_variance else "fixed_small"
    schedule = NoiseSchedule.linear(_TIMESTEPS)
    return Objective(schedule, backend, variance=variance, device=device)


def our_step(
    model: UNet,
    batch: int,  # of all processes together
    size: int,
    device: torch.device,
    processes: Processes,
    accumulate: int = 1,
    bucket: int = BUCKET,  # bytes, see GradientSum
) -> Step:
    """A step of the framework, with this process's share of the batch."""
    first, share = processes.share_of(batch)
    host = torch.device("cpu")
    images = Images(size, model.in_channels, model.out_channels > model.in_channels)
    pixels = random_images((_IMAGES, images.size, images.size, images.channels), host)
    data = ImageSet(pixels, random_labels(model.num_classes, _IMAGES, host), name="random")
    flat = FlatParameters(model, together=TOGETHER)
    backend = model.backend
    optimizer = Optimizer(flat, OptimizerSettings(lr=LR, warmup=0), backend)
    gradient_sum = GradientSum(flat, processes, bucket, optimizer.norm)
    listening = {"ready": gradient_sum.listener, "urgent": gradient_sum.urgent}
    parts = (
        training_network(model, flat, **listening),
        objective_of(images, backend, device),
        Batches(data, batch, 0, device, first, share),
        flat,
        optimizer,
        gradient_sum,
    )

    options = {"seed": 0, "steps": 10**6, "accumulate": accumulate}
    step = TrainStep(*parts, **options)

    planned = isinstance(parts[0], TrainingUNet)
    plain = TrainStep(*parts, **options, capture=False)
    return Step(plain, partial(captured, step), step.release, planned)


def captured(step: TrainStep) -> TrainStep:
    """The step, once it has captured itself, after a few steps."""
    for k in range(_WARM_UP):
        step(k)
    return step


def _same_batch(images: Images, classes: int | None, batch: int, device: torch.device) -> Draw:
    """Gathers the same of random images every time."""
    pixels = random_images((_IMAGES, images.size, images.size, images.channels), device)
    pixels = pixels.permute(0, 3, 1, 2)
    index = torch.randint(_IMAGES, (batch,), device=device)
    labels = random_labels(classes, batch, device)
    return lambda: (pixels[index], labels)


def fused_adamw(model: nn.Module, weight_decay: float = 0.01) -> torch.optim.AdamW:
    """PyTorch's own in one launch, which a CUDA graph can capture."""
    parameters = list(model.parameters())
    cuda = parameters[0].is_cuda
    return torch.optim.AdamW(
        parameters, lr=LR, weight_decay=weight_decay, fused=True, capturable=cuda
    )


def torch_step(
    provider: str,
    model: nn.Module,
    adamw: torch.optim.AdamW,  # of the model
    objective: Objective,
    draw: Draw,
    wrap: Wrap = None,
) -> Step:
    """The step of a provider of PyTorch, such as compile-bf16."""
    kind, _, precision = provider.partition("-")
    mode = _MODES[kind]
    set_precision(precision)
    loss_of: nn.Module = DenoisingLoss(model, objective)
    if wrap is not None:
        loss_of = wrap(loss_of)
    if mode is not None:
        loss_of = torch.compile(
            loss_of, dynamic=False, **({} if mode == "default" else {"mode": mode})
        )
    return step_of(loss_of, adamw, draw, precision, objective.table.device)


def step_of(
    loss_of: Callable[..., Tensor],  # of what `draw` gives, compiled or not
    adamw: torch.optim.AdamW,
    draw: Callable[[], tuple],
    precision: str,
    device: torch.device,
) -> Step:
    """PyTorch's step of a loss."""

    def run(_: int) -> Tensor:
        adamw.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(*draw())
        loss.backward()
        adamw.step()
        return loss.detach()

    def captured() -> Callable[[int], Any]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for k in range(_WARM_UP):
                run(k)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        adamw.zero_grad(set_to_none=True)  # the graph's gradients lie in its own memory
        release_memory()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(_WARM_UP)
        # with `run`, since the graph keeps none of what it reads: images, moments, tables
        return lambda _, reads=run: graph.replay()

    return Step(run, captured)


def rehearse_step(model: str, precision: str, batch: int, size: int | None = None) -> None:
    """Ask for what our step launches, with parameters that nobody has written."""
    host = torch.device("cpu")
    network = our_model(model, precision, torch.device("meta"), size).to_empty(device=host)
    step = our_step(network, batch, network.image_size[0], host, Processes(None)).plain
    for k in range(2):  # the second finds memory that the first has made
        step(k)


def rehearse_check(model: str, precision: str, batch: int, size: int | None = None) -> None:
    """Ask for what `check_ours` launches, over memory that nobody has written."""
    network = our_model(model, precision, torch.device("meta"), size).to_empty(device="cpu")
    x, dy = (
        torch.empty(batch, *network.image_size, c)
        for c in (network.in_channels, network.out_channels)
    )
    _output_and_gradient(network, x, dy, torch.zeros(batch, dtype=torch.int64))


def _output_and_gradient(network: UNet, x: Tensor, dy: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """What we train with makes of x [N, H, W, C], and all gradients as one vector. Without dropout,
    whose masks are others than PyTorch's."""
    flat = FlatParameters(network.eval(), together=TOGETHER)
    labels = random_labels(network.num_classes, len(x), x.device)
    # the plan takes images in any precision, the layers one by one in their own
    y = training_network(network, flat)(x.to(network.backend.dtype), t, labels)
    (y.float() * dy).sum().backward()
    grads = flat.views(flat.grad)
    return y.detach().float(), torch.cat(
        [grads[name].flatten() for name, _ in network.named_parameters()]
    )


def check_ours(
    model: str, precision: str, device: torch.device, batch: int, size: int | None = None
) -> tuple[float, float]:
    """Raise WrongResult unless the output and the gradient of what we train with are at most twice
    as far from the float32 baseline as the reference ops in that precision are; without dropout,
    whose masks are others. Returns the two errors of the gradient, all parameters as one vector."""
    images = images_of(model, size)
    generator = torch.Generator(device).manual_seed(1)
    shape = batch, images.size, images.size
    x = torch.randn(*shape, images.channels, device=device, generator=generator)
    out = images.channels * (1 + images.learned_variance)
    dy = torch.randn(*shape, out, device=device, generator=generator)
    t = torch.randint(_TIMESTEPS, (batch,), device=device, generator=generator)

    def of_baseline(network: nn.Module) -> tuple[Tensor, Tensor]:
        labels = random_labels(reference.num_classes, batch, device)
        y = network.eval()(x.permute(0, 3, 1, 2), t, labels).permute(0, 2, 3, 1)  # NHWC
        (y.float() * dy).sum().backward()
        return y.detach().float(), torch.cat([p.grad.flatten() for p in network.parameters()])

    def of(network: UNet) -> tuple[Tensor, Tensor]:
        return _output_and_gradient(network, x, dy, t)

    reference = our_model(model, precision, device, size, "torch")
    set_precision("fp32")
    exact = of_baseline(baseline_model(model, device, size))
    set_precision(precision)
    low = of(reference)
    got = of(our_model(model, precision, device, size))
    for name, a, b, c in zip(("output", "gradient"), got, low, exact, strict=True):
        error, theirs = relative_error(a, c), relative_error(b, c)
        if error > 2 * theirs + 1e-5:
            raise WrongResult(
                f"the {name} is off by {error:.1e}, the reference in {precision} by {theirs:.1e}"
            )
    return error, theirs
