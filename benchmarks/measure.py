"""One experiment: its results checked, then timed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks import harness, stopwatch
from benchmarks.account import Account
from benchmarks.experiment import Experiment, Inputs, Outputs, copied, widened
from benchmarks.harness import OURS, Provenance, Row, WrongResult

# The reference may multiply exactly where it should in TF32, whose operands lose 13 bits: in the
# mean 2^-11 of each, and twice that of a product.
_FLOORS = {"tf32": 2**-10}
# Whom we are compared with may round a little worse than ours must: leaving out the fastest would
# make ours look good.
_LENIENCE = 2.0
_COMPILED = (OURS, "compile")  # providers that compile


class Conditions(NamedTuple):
    """What the measurements of a run have in common."""

    device: torch.device
    origin: Provenance
    budget_ms: float  # of replays
    account: Account


def compile_only(experiment: Experiment, providers: Sequence[str], device: torch.device) -> None:
    """Leave what the compilers make in their caches on disk. Errors are for the run to report."""
    torch._dynamo.reset()
    harness.set_precision(experiment.dtype)
    inputs = experiment.inputs(device)
    for name in _COMPILED:
        if name in experiment.providers and is_wanted(name, providers):
            try:
                experiment.providers[name].prepare(copied(inputs))()
            except Exception as error:
                print(f"! {experiment.op} {experiment.shape} {experiment.pass_} {name}:"
                      f" {harness.reason(error)}", flush=True)  # fmt: skip
    stopwatch.release_memory()


def is_wanted(name: str, providers: Sequence[str]) -> bool:
    """Whether a provider is to be timed if these are asked for; ours always is."""
    return not providers or name in (OURS, *providers)


def run_experiment(
    experiment: Experiment, providers: Sequence[str], conditions: Conditions
) -> tuple[list[Row], list[str]]:
    """The rows, and a line for each provider that was wrong or could not do it."""
    device, account = conditions.device, conditions.account
    harness.set_precision(experiment.dtype)
    with account.stage("inputs"):
        if "compile" in experiment.providers:
            torch._dynamo.reset()  # a compiled function a shape; there is a limit to their number
        inputs = experiment.inputs(device)
    exact, budget = expected(experiment, inputs, account)
    rows, failed = [], []
    for name, provider in experiment.providers.items():
        if not is_wanted(name, providers):
            continue
        try:
            with account.stage(f"check {_family(name)}"):
                verify(experiment, name, inputs, exact, budget)
            with account.stage("copies"):
                size = sum(x.nbytes for x in inputs.values())
                copies = stopwatch.copies_beyond_l2(size, device)
                sets = [copied(inputs) for _ in range(copies)]
                runs = [provider.prepare(i) for i in sets]
            timing, results = stopwatch.time_graph(runs, conditions.budget_ms, account.stage)
            if not experiment.in_place and provider.prepare_checked is None:
                with account.stage(f"check {_family(name)}"):
                    for outputs in (results[0], results[-1]):  # of the replays themselves
                        check(name, provider.finish(outputs), exact, budget)
        except WrongResult as error:
            failed.append(f"{name} is wrong and not timed: {error}")
            continue
        except Exception as error:  # a backend that does not serve the shape raises what it likes
            failed.append(f"{name} failed: {harness.reason(error)}")
            continue
        finally:
            sets = runs = results = outputs = None
        rows.append(_row(experiment, name, timing, conditions.origin))
    if rows and experiment.least is not None:
        rows.append(time_least(experiment, inputs, conditions))
    del inputs, exact
    with account.stage("release"):
        stopwatch.release_memory(least=0.25)
    return rows, failed


def time_least(experiment: Experiment, inputs: Inputs, conditions: Conditions) -> Row:
    """A copy at the size of this experiment, as cold as what it is compared with: small tensors do
    not reach the rate of large ones."""
    copies = stopwatch.copies_beyond_l2(sum(x.nbytes for x in inputs.values()), conditions.device)
    runs = [experiment.least.prepare(copied(inputs)) for _ in range(copies)]
    timing, _ = stopwatch.time_graph(runs, conditions.budget_ms, conditions.account.stage)
    row = _row(experiment, "torch", timing, conditions.origin)
    return replace(row, op=harness.LEAST, bytes=experiment.least.bytes, flops=0)


def expected(
    experiment: Experiment, inputs: Inputs, account: Account | None = None
) -> tuple[Outputs, list[float]]:
    """The exact outputs and what each may be off."""
    account = account or Account()
    with account.stage("reference"):
        low = experiment.reference(copied(inputs))
    with account.stage("exact"):
        harness.set_precision("fp32")
        torch.backends.cudnn.benchmark = False  # which would try them all to be fast once
        exact = experiment.reference(widened(copied(inputs)))
        harness.set_precision(experiment.dtype)
        return exact, harness.budgets(low, exact, _FLOORS.get(experiment.dtype, 1e-5))


def verify(
    experiment: Experiment, name: str, inputs: Inputs, exact: Outputs, budget: list[float]
) -> None:
    """Raise WrongResult unless the provider is right, three times over: a race is not wrong every
    time."""
    provider = experiment.providers[name]
    prepare = provider.prepare_checked or provider.prepare
    device = inputs[next(iter(inputs))].device
    for _ in range(3):
        run = prepare(copied(inputs))
        harness.poison_free_memory(max(x.nbytes for x in exact), device)
        check(name, provider.finish(run()), exact, budget)


def check(name: str, got: Outputs, exact: Outputs, budget: Sequence[float]) -> None:
    """Raise WrongResult if a provider's output is off by more than it may be."""
    lenience = 1.0 if _family(name) == OURS else _LENIENCE
    harness.check(got, exact, [lenience * limit for limit in budget])


def time_roofs(conditions: Conditions) -> list[Row]:
    """What the GPU can do in this run: a copy past the L2 cache, by the driver and by a kernel that
    reads and writes as many bytes (faster: the roof is the better of the two), and a large matrix
    product."""
    size, device, origin = 8192, conditions.device, conditions.origin
    source = torch.randn(2**28, device=device)
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    copied_bytes, product_bytes = 2 * source.nbytes, 3 * size**2 * a.itemsize
    stage = conditions.account.stage
    copy, _ = stopwatch.time_graph([source.clone], stage=stage)
    kernel, _ = stopwatch.time_graph([source.neg], stage=stage)
    product, _ = stopwatch.time_graph([lambda: a @ b], stage=stage)
    return [
        Row("copy", "1 GiB", "fp32", "fwd", "torch", *copy, copied_bytes, 0, *origin),
        Row("copy", "1 GiB", "fp32", "fwd", "torch-neg", *kernel, copied_bytes, 0, *origin),
        Row("matmul", f"{size}^3", "bf16", "fwd", "cublas", *product, product_bytes, 2 * size**3,
            *origin),
    ]  # fmt: skip


def _row(
    experiment: Experiment, provider: str, timing: stopwatch.Timing, origin: Provenance
) -> Row:
    e = experiment
    what = (e.op, e.shape, e.dtype, e.pass_, provider)
    return Row(*what, *timing, e.bytes, e.flops, *origin)


def _family(provider: str) -> str:
    """ "torch-nchw" -> torch."""
    return provider.split("-")[0]
