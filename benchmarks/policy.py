"""Time a robot policy's network: one forward, a chain of DDPM steps, and the time to act.

    python -m benchmarks.policy [key=value ...]

    batch=1,8,64     observations at a time
    dtype=bf16,fp32  bf16 | tf32 | fp32
    providers=       only these: eager, compile, triton; default all
    steps=100        of the chain
    seconds=5        of repeated chains; there are at least 2, and at most 20
    acts=200         times to act, of which p50 and p99 are taken; eager takes a tenth; 0: none
    warm=0           1: run everything once, for the caches of the compilers, and time nothing
    out=             a folder for the CSV; default benchmarks/results

The network is ConditionalUnet1D of Diffusion Policy at its published size (79.9 M parameters,
horizon 16, actions of 2, a condition of 1028 numbers). PyTorch's side is a plain module whose
parameters are in the dtype that is timed, `compile` is torch.compile of the forward and the step
together, captured in a CUDA graph. To act is: a condition from the host, the chain, a copy of the
actions to the host.

pass in the CSV: fwd is a forward with new timesteps and conditions (of `compile`, step), step a
forward within a chain and its update of x, chain all steps of one, act-p50 and act-p99 are
wall-clock times.

Exit code 1 if a result of ours was wrong or a provider failed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import harness, stopwatch
from benchmarks.baseline_unet1d import ConditionalUnet1D, DdpmStep
from benchmarks.harness import OURS, Provenance, Row
from benchmarks.stopwatch import Timing
from diffusion.models.layers import set_backend
from diffusion.models.unet1d import UNet1d
from diffusion.plan.inference1d import InferenceUNet1d
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import choose_backend
from diffusion.sampling.chain import Bound
from diffusion.sampling.sampler import DDPM

DEFAULTS = {
    "batch": (1, 8, 64),
    "dtype": ("bf16", "fp32"),
    "providers": (),
    "steps": 100,
    "seconds": 5.0,
    "acts": 200,
    "warm": 0,
    "out": "",
}
_CHANNELS_LAST = "compile-channels-last"  # the filters' memory, which cuDNN likes better
PROVIDERS = ("eager", "compile", _CHANNELS_LAST, OURS)

_ACTIONS, _HORIZON, _CONDITION = 2, 16, 1028
_FORWARDS = 10  # in a graph

Run = Callable[[], Any]


@dataclass
class Subject:
    """What is timed of a provider. `act` takes a condition on the host and gives actions there."""

    forward: Run
    step: Run
    chain: Run
    act: Callable[[Tensor], Tensor]
    captured: bool  # whether `forward` and `step` are to be timed inside a graph


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for dtype in settings["dtype"]:
        harness.check_choice("dtype", dtype, ("bf16", "tf32", "fp32"))
    providers = settings["providers"] or PROVIDERS
    for provider in providers:
        harness.check_choice("providers", provider, PROVIDERS)
    device, origin = harness.require_cuda(), harness.provenance()
    path = Path(settings["out"] or harness.RESULTS) / f"{origin.gpu}.csv"
    rows, failed = [], False
    for dtype in settings["dtype"]:
        for batch in settings["batch"]:
            for provider in providers:
                began = time.monotonic()
                try:
                    if settings["warm"]:
                        run_once(prepare(provider, dtype, batch, settings["steps"], device))
                        seconds = time.monotonic() - began
                        print(f"{dtype} B={batch} {provider}: {seconds:.0f} s", flush=True)
                        continue
                    found = list(measure(provider, dtype, batch, settings, device, origin))
                except Exception as error:  # a library says what it likes of what it cannot do
                    print(f"! {dtype} B={batch} {provider} failed: {harness.reason(error)}")
                    failed = True
                    continue
                for row in found:
                    print(f"{dtype} B={batch} {provider} {row.pass_}: {row.median_us:.1f} us")
                print(f"in {time.monotonic() - began:.0f} s", flush=True)
                rows += found
                harness.add_rows(path, found)  # at once: a run may be cut short
    if rows:
        print(f"\n{format_rows(rows)}\n\n{len(rows)} rows in {path}")
    return 1 if failed else 0


def network() -> UNet1d:
    """The published network with the parameters of seed 0, a copy of its own."""
    return deepcopy(_network())


@lru_cache(maxsize=1)
def _network() -> UNet1d:
    torch.manual_seed(0)
    return UNet1d(input_dim=_ACTIONS, global_cond_dim=_CONDITION)  # which takes seconds to draw


def inputs(batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, T, C], t [N] and the condition [N, G]."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(batch, _HORIZON, _ACTIONS, device=device, generator=generator)
    t = torch.randint(100, (batch,), device=device, generator=generator)
    return x, t, torch.randn(batch, _CONDITION, device=device, generator=generator)


def measure(
    provider: str,
    dtype: str,
    batch: int,
    settings: dict[str, Any],
    device: torch.device,
    origin: Provenance,
) -> Iterator[Row]:
    """The rows of one provider. Raises WrongResult if ours is further from float64 than twice what
    PyTorch's module in that dtype is."""
    with torch.no_grad():
        subject = prepare(provider, dtype, batch, settings["steps"], device)
        timings = time_subject(subject, batch, settings)
    yield from make_rows(timings, provider, dtype, batch, settings["steps"], origin)


def prepare(provider: str, dtype: str, batch: int, steps: int, device: torch.device) -> Subject:
    """What `measure` times; WrongResult as there."""
    torch._dynamo.reset()
    stopwatch.release_memory()
    harness.set_precision(dtype)
    build = _ours if provider == OURS else _pytorch
    subject = build(provider, dtype, batch, steps, device)
    if provider == OURS:
        _check(subject.forward(), dtype, batch, device)
    return subject


def run_once(subject: Subject) -> None:
    """Compile whatever `time_subject` needs."""
    with torch.no_grad():
        for run in (subject.forward, subject.step, subject.chain):
            run()
    torch.cuda.synchronize()


def time_subject(subject: Subject, batch: int, settings: dict[str, Any]) -> dict[str, Timing]:
    """By names as in the CSV, but `forward` for fwd."""
    timings = {}
    for name in ("forward", "step"):
        run = getattr(subject, name)
        if subject.captured:
            timings[name], _ = stopwatch.time_graph([run] * _FORWARDS)
        else:
            timings[name] = stopwatch.time_steps(lambda _, run=run: run(), 30, warm_up=5)
    # a graph's first replay, or the allocator's first chain, is not like the others
    once = stopwatch.time_steps(lambda _: subject.chain(), 1, warm_up=1).median
    repeats = max(2, min(20, round(1e6 * settings["seconds"] / once)))
    timings["chain"] = stopwatch.time_steps(lambda _: subject.chain(), repeats, warm_up=0)
    acts = settings["acts"] if subject.captured else settings["acts"] // 10
    if acts:
        times = [_act_us(subject, batch) for _ in range(acts + 3)][3:]
        for name, quantile in (("act-p50", 50), ("act-p99", 99)):
            timings[name] = Timing(*[float(np.percentile(times, quantile))] * 3)
    return timings


def make_rows(
    timings: dict[str, Timing],
    provider: str,
    dtype: str,
    batch: int,
    steps: int,
    origin: Provenance,
) -> Iterator[Row]:
    """Of `time_subject`."""
    work = network_work(batch, _parameter_dtype(dtype).itemsize)
    for name, timing in timings.items():
        times = 1 if name in ("forward", "step") else steps
        size, flops = (times * w for w in work)
        yield Row(
            "policy", f"{batch}x{_HORIZON}x{_ACTIONS} unet1d", dtype,
            {"forward": "fwd"}.get(name, name), provider, *timing, size, flops, *origin,
        )  # fmt: skip


def _ours(provider: str, dtype: str, batch: int, steps: int, device: torch.device) -> Subject:
    backend = choose_backend(OURS, dtype, device, "dtype")
    model = network().to(device)
    set_backend(model, backend)
    streamed = InferenceUNet1d(model)
    sampler = DDPM(make_schedule("cosine", 100), backend, steps=steps, device=device)
    x, t, cond = inputs(batch, device)
    x = x[:, None].contiguous()
    bound = Bound(streamed, streamed.tabulate(sampler.timesteps, cond, batch))
    row, rng = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros_like(t[:1].repeat(2))

    def chain(cond: Tensor = cond) -> Tensor:
        return sampler.sample(streamed, tuple(x.shape), seed=0, labels=cond)

    return Subject(
        forward=lambda: streamed(x, t, cond),
        step=lambda: sampler.step(bound, x, row, rng),
        chain=chain,
        act=lambda observed: chain(observed.to(device)).cpu(),
        captured=True,
    )


def _pytorch(provider: str, dtype: str, batch: int, steps: int, device: torch.device) -> Subject:
    model = baseline(device, _parameter_dtype(dtype), provider == _CHANNELS_LAST)
    backend = choose_backend("torch", dtype, device, "dtype")
    sampler = DDPM(make_schedule("cosine", 100), backend, steps=steps, device=device)
    step: nn.Module = DdpmStep(model, sampler.rows, sampler.timesteps)
    x, t, cond = inputs(batch, device)
    x, cond = x.mT.contiguous(), cond.to(_parameter_dtype(dtype))
    rows = torch.arange(steps, device=device)
    if provider != "eager":
        step = torch.compile(step, dynamic=False)

    def chain() -> Tensor:
        y = torch.randn_like(x)
        for k in range(steps):
            y = step(y, rows[k : k + 1], cond)
        return y

    def act(observed: Tensor) -> Tensor:
        cond.copy_(observed.to(device))
        return run().cpu()

    run = chain if provider == "eager" else _captured(chain)
    once = partial(step, x, rows[:1], cond)
    return Subject(
        forward=partial(model, x.to(cond.dtype), t, cond) if provider == "eager" else once,
        step=once,
        chain=run,
        act=act,
        captured=provider != "eager",
    )


def baseline(
    device: torch.device, dtype: torch.dtype, channels_last: bool = False
) -> ConditionalUnet1D:
    """PyTorch's module with the parameters of `network`, in PyTorch's layout, or with filters whose
    channels lie side by side."""
    with torch.device("meta"):
        model = ConditionalUnet1D(_ACTIONS, _CONDITION)
    state = network().state_dict()  # its filters are channels last
    if not channels_last:
        state = {name: value.contiguous() for name, value in state.items()}
    model.load_state_dict(state, assign=True)
    return model.to(device, dtype).eval()


def _captured(run: Run) -> Run:
    """A function that replays the calls and returns the result in the graph's memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _check(got: Tensor, dtype: str, batch: int, device: torch.device) -> None:
    x, t, cond = inputs(batch, device)
    exact = baseline(device, torch.float64)(x.mT.double(), t, cond.double())
    low_dtype = _parameter_dtype(dtype)
    low = baseline(device, low_dtype)(x.mT.to(low_dtype), t, cond.to(low_dtype))
    harness.check([got[:, 0].mT], [exact], harness.budgets([low], [exact]))


def _parameter_dtype(dtype: str) -> torch.dtype:
    return torch.bfloat16 if dtype == "bf16" else torch.float32


def _act_us(subject: Subject, batch: int) -> float:
    observed = torch.randn(batch, _CONDITION)
    torch.cuda.synchronize()
    start = time.perf_counter()
    subject.act(observed)
    return 1e6 * (time.perf_counter() - start)


def network_work(batch: int, itemsize: int) -> tuple[int, int]:
    """Bytes and FLOPs that a forward cannot do without: each weight is read once."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = ConditionalUnet1D(_ACTIONS, _CONDITION)
        model(
            torch.empty(batch, _ACTIONS, _HORIZON),
            torch.empty(batch),
            torch.empty(batch, _CONDITION),
        )
    size = sum(p.numel() for p in model.parameters()) * itemsize
    return size, counter.get_total_flops()


def format_rows(rows: Sequence[Row]) -> str:
    """A line for each provider, dtype and batch; ratios of `step` and `act-p50` to the fastest."""
    lines = []
    groups: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in rows:
        group = groups.setdefault((row.dtype, row.shape.split("x")[0]), {})
        group.setdefault(row.provider, {})[row.pass_] = row.median_us
    for (dtype, batch), providers in groups.items():
        others = [p for p in providers if p != OURS]
        for provider, us in providers.items():
            ratio = "-"
            if provider == OURS and others:
                ratio = f"{min(providers[p]['chain'] for p in others) / us['chain']:.1f}"
            lines.append(
                [
                    dtype,
                    batch,
                    provider,
                    f"{us['fwd']:.0f}",
                    f"{us['step']:.0f}",
                    f"{us['chain'] / 1000:.2f}",
                    *(f"{us[p] / 1000:.2f}" if p in us else "-" for p in ("act-p50", "act-p99")),
                    ratio,
                ]
            )
    header = ["dtype", "batch", "provider", "forward us", "step us", "chain ms", "act p50 ms"]
    return harness.format_table([*header, "act p99 ms", "chain, ratio"], lines)


if __name__ == "__main__":
    harness.run_entry(main)
