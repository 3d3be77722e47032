"""Time a policy's training step: noise, forward, loss, backward, update.

    python -m benchmarks.policy_step [key=value ...]

    batch=64,256     chunks of actions a step
    precision=bf16   bf16 | tf32 | fp32
    providers=       only these: plan, layers, compile, compile-channels-last; default all
    out=             a folder for the CSV; default benchmarks/results

The network is ConditionalUnet1D of Diffusion Policy at its published size, as in
`benchmarks.policy`. `plan` and `layers` are the step of train.py, by the network's plan and layer
by layer; which of them train.py takes, `training_network` decides. As in `benchmarks.steps` ours
also clips, keeps an EMA and gathers another batch, which torch.compile's side does not. All are
captured in a CUDA graph and timed in turns.

Exit code 1 if a gradient of ours was wrong or a provider failed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import harness, policy, stopwatch
from benchmarks.baseline_unet1d import ConditionalUnet1D
from benchmarks.harness import Row
from benchmarks.papers import in_turns
from benchmarks.steps import Step, captured, fused_adamw, step_of
from diffusion.data.batches import Batches
from diffusion.data.image_set import ImageSet
from diffusion.models.flat_parameters import FlatParameters
from diffusion.models.layers import set_backend
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.step.others import TrainingNetwork
from diffusion.process.objective import Objective
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32, Backend, choose_backend
from diffusion.runtime.distributed import Processes
from diffusion.training.gradient_sum import GradientSum
from diffusion.training.optimizer import Optimizer, OptimizerSettings
from diffusion.training.train_step import TrainStep

DEFAULTS = {"batch": (64, 256), "precision": "bf16", "providers": (), "out": ""}
_OURS = {"plan": TrainingNetwork, "layers": lambda model, flat: model.forward_nhwc}
PROVIDERS = (*_OURS, "compile", "compile-channels-last")
_CHUNKS, _TIMESTEPS, _LR = 2048, 100, 1e-4


class DenoisingLoss(nn.Module):
    """From chunks to the mean squared error of the noise: all of it in one compiled graph."""

    def __init__(self, model: ConditionalUnet1D, table: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("table", table)

    def forward(self, chunks: Tensor, condition: Tensor) -> Tensor:  # [N, C, T], [N, G]
        t = torch.randint(_TIMESTEPS, (len(chunks),), device=chunks.device)
        noise = torch.randn_like(chunks)
        a, s = self.table[t].view(-1, 2, 1, 1).unbind(1)
        return F.mse_loss(self.model(a * chunks + s * noise, t, condition).float(), noise)


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    precision, chosen = settings["precision"], settings["providers"] or PROVIDERS
    harness.check_choice("precision", precision, ("bf16", "tf32", "fp32"))
    for provider in chosen:
        harness.check_choice("providers", provider, PROVIDERS)
    device, origin = harness.require_cuda(), harness.provenance()
    path, failed = Path(settings["out"] or harness.RESULTS) / f"{origin.gpu}.csv", False
    for batch in settings["batch"]:
        runs: dict[str, Callable[[int], object]] = {}
        kept: list[Step] = []  # what the graphs need
        for provider in chosen:
            try:
                kept.append(build(provider, precision, batch, device))
                runs[provider] = kept[-1].captured()
            except Exception as error:  # a library says what it likes of what it cannot do
                print(f"! {provider}, {batch}: {harness.reason(error)}", flush=True)
                failed = True
        *_, timings = in_turns(runs)
        size, flops = policy.network_work(batch, 2 if precision == "bf16" else 4)
        harness.add_rows(
            path,
            [
                Row(
                    "policy_step", f"{batch}x16x2 unet1d", precision, "step", name, *timing,
                    size, 3 * flops, *origin,
                )
                for name, timing in timings.items()
            ],
        )  # fmt: skip
        said = (f"{name} {timing.median / 1000:.3f} ms" for name, timing in timings.items())
        print(f"{batch} chunks: " + ", ".join(said), flush=True)
        for step in kept:
            step.release()
        runs.clear()
        stopwatch.release_memory()
    return int(failed)


def build(provider: str, precision: str, batch: int, device: torch.device) -> Step:
    """The step of a provider. WrongResult: the gradient of ours is more than twice as far from
    float64 as that of PyTorch's module in that precision."""
    harness.set_precision(precision)
    if provider not in _OURS:
        return pytorch_step(batch, precision, device, provider.endswith("last"))
    backend = choose_backend("triton", precision, device, "precision")
    check(provider, backend, precision, device)
    return our_step(provider, backend, batch, device)


def our_step(provider: str, backend: Backend, batch: int, device: torch.device) -> Step:
    """train.py's, by plan or layer by layer."""
    model = _model(backend, device)
    x, _, condition = policy.inputs(_CHUNKS, torch.device("cpu"))
    data = ImageSet(x[:, None].contiguous(), condition)
    flat = FlatParameters(model, together=TOGETHER)
    optimizer = Optimizer(flat, OptimizerSettings(lr=_LR, warmup=0), backend)
    step = TrainStep(
        _OURS[provider](model, flat),
        Objective(make_schedule("cosine", _TIMESTEPS), backend, device=device),
        Batches(data, batch, 0, device),
        flat,
        optimizer,
        GradientSum(flat, Processes(None), norm=optimizer.norm),
        seed=0,
        steps=10**6,
        flip=False,
    )

    return Step(step, partial(captured, step), step.release)


def pytorch_step(
    batch: int, precision: str, device: torch.device, channels_last: bool, compiled: bool = True
) -> Step:
    """torch.compile's, of the module with the same parameters."""
    model = policy.baseline(device, torch.float32, channels_last).train()
    schedule = make_schedule("cosine", _TIMESTEPS)
    loss = DenoisingLoss(model, Objective(schedule, TORCH_FP32, device=device).table)
    loss = torch.compile(loss, dynamic=False) if compiled else loss
    x, _, condition = policy.inputs(_CHUNKS, device)
    chunks, index = x.mT.contiguous(), torch.randint(_CHUNKS, (batch,), device=device)

    def draw() -> tuple[Tensor, Tensor]:
        return chunks[index], condition[index]

    return step_of(loss, fused_adamw(model), draw, precision, device)


def _model(backend: Backend, device: torch.device) -> nn.Module:
    model = policy.network().to(device).train()
    set_backend(model, backend)
    return model


def check(
    provider: str, backend: Backend, precision: str, device: torch.device, batch: int = 8
) -> None:
    """WrongResult, see `build`."""
    x, t, condition = policy.inputs(batch, device)
    weights = torch.linspace(-1, 1, x.numel(), device=device).view(x.shape)

    def gradient(y: Tensor, model: nn.Module) -> Tensor:
        """Of a weighted sum of y [N, T, C], all parameters as one vector."""
        (y.double() * weights).sum().backward()
        found = dict(model.named_parameters())
        return torch.cat([found[name].grad.double().flatten() for name in sorted(found)])

    exact, low = (policy.baseline(device, d) for d in (torch.float64, torch.float32))
    wanted = gradient(exact(x.mT.double(), t, condition.double()).mT, exact)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        y = low(x.mT, t, condition).mT
    budget = harness.budgets([gradient(y, low)], [wanted])
    model = _model(backend, device)
    flat = FlatParameters(model)  # which has the gradients
    y = _OURS[provider](model, flat)(x[:, None].contiguous(), t, condition)
    harness.check([gradient(y[:, 0], model)], [wanted], budget)


if __name__ == "__main__":
    harness.run_entry(main)
