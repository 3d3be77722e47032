"""Time the ops at the shapes of a model against the alternatives.

    python -m benchmarks.run op=conv2d|group_norm|attention|adamw|denoise|all [key=value ...]

    op=all           ops, comma-separated
    batch=32,128     images a step
    model=unet64     configs/model
    size=64          pixels
    conv_resample=0  1: with convolutions in down- and upsampling, whatever the model has
    dtype=bf16       bf16 | fp16 | tf32 | fp32
    providers=       only these, e.g. triton,cudnn; ours is always among them
    passes=          only these, e.g. fwd,dgrad; default all but fwd+bias
    shape=           only shapes that contain this text, e.g. shape=64x64
    longer=0         1: attention over more positions than the model has, too
    budget_ms=40     time spent on replays of one measurement
    processes=12     that compile side by side before anything is timed; 0: none
    plots=1          0: draw none (python -m benchmarks.plots draws them from the CSV)
    out=             a folder for the CSV and the plots; default benchmarks/results, docs/benchmarks

Exit code 1 if a result of ours was wrong or failed.
"""

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from diffusion.errors import ConfigError

from . import harness
from .cases import LONGER_ATTENTION, OPS, model_cases
from .experiment import DTYPES, Experiment, Inputs, Outputs, copied, widened
from .harness import Provenance, Row, WrongResult, check_choice
from .providers import absent, experiments

DEFAULTS = {
    "op": ("all",),
    "batch": (32, 128),
    "model": "unet64",
    "size": 64,
    "conv_resample": 0,
    "dtype": ("bf16",),
    "providers": (),
    "passes": (),
    "shape": "",
    "longer": 0,
    "budget_ms": 40,
    "processes": 12,
    "part": -1,  # the share of a compiling process
    "plots": 1,
    "out": "",
}
# The reference may multiply exactly where it should in TF32, whose operands lose 13 bits: in the
# mean 2^-11 of each, and twice that of a product.
_FLOORS = {"tf32": 2**-10}
_COMPILED = (harness.OURS, "compile")  # providers that compile


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    ops = OPS if "all" in settings["op"] else settings["op"]
    for op in ops:
        check_choice("op", op, (*OPS, "all"))
    for dtype in settings["dtype"]:
        check_choice("dtype", dtype, tuple(DTYPES))
    device = harness.require_cuda()
    origin = harness.provenance()
    chosen = select(settings, ops)
    if settings["part"] >= 0:
        for experiment in chosen[settings["part"] :: settings["processes"]]:
            compile_only(experiment, settings["providers"], device)
        return 0
    if settings["processes"]:
        harness.run_shares("benchmarks.run", arguments, settings["processes"])
    results = Path(settings["out"] or harness.RESULTS) / f"{origin.gpu}.csv"
    rows, failures = time_roofs(device, origin), []
    harness.add_rows(results, rows)
    op = None
    for experiment in chosen:
        torch._dynamo.reset()  # a compiled function a shape; there is a limit to their number
        if experiment.op != op:
            op = experiment.op
            print(f"\n{op}, microseconds; ratio: the fastest other provider over triton")
            print("".join(f"! {line}\n" for line in absent(op)), end="")
        found, failed = run_experiment(
            experiment, settings["providers"], device, origin, settings["budget_ms"]
        )
        print(describe(experiment, found, failed), flush=True)
        harness.add_rows(results, found)  # at once: a run may be cut short
        rows += found
        failures += [f"{experiment.shape} {experiment.pass_}: {f}" for f in failed]
    print(f"\n{summary(chosen, rows)}")
    print(f"\n{len(rows)} rows in {results}")
    if settings["plots"]:
        from .plots import draw_plots  # which needs matplotlib

        folder = Path(settings["out"]) if settings["out"] else harness.PLOTS
        print("\n".join(map(str, draw_plots(harness.read_rows(results), folder))))
    ours = [f for f in failures if ": triton" in f]
    return 1 if ours else 0


def select(settings: dict, ops: Sequence[str]) -> list[Experiment]:
    """The experiments that the settings ask for, each once. ConfigError if there are none."""
    chosen = {}
    for op in ops:
        for batch in settings["batch"]:
            cases = model_cases(
                settings["model"],
                batch,
                op,
                settings["size"],
                conv_resample=bool(settings["conv_resample"]),
            )
            if op == "attention" and settings["longer"]:
                cases += [(case, 1) for case in LONGER_ATTENTION]
            for case, count in cases:
                for dtype in settings["dtype"]:
                    for e in experiments(case, count, dtype):
                        wanted = settings["passes"] or ("fwd", "dgrad", "wgrad", "fwd+bwd", "step")
                        if e.pass_ in wanted and settings["shape"] in e.shape:
                            key = (e.op, e.shape, e.dtype, e.pass_)
                            chosen.setdefault(key, e)
    if not chosen:
        raise ConfigError(
            f"nothing to time: passes={','.join(settings['passes'])} shape={settings['shape']}"
            f" leave none of the cases of {', '.join(ops)}"
        )
    return list(chosen.values())


def compile_only(experiment: Experiment, providers: Sequence[str], device: torch.device) -> None:
    """Leave what the compilers make in their caches on disk. Errors are for the run to report."""
    torch._dynamo.reset()
    harness.set_precision(experiment.dtype)
    inputs = experiment.inputs(device)
    for name in _COMPILED:
        if name in experiment.providers and (not providers or name in (harness.OURS, *providers)):
            with contextlib.suppress(Exception):
                experiment.providers[name].prepare(copied(inputs))()
    harness.release_memory()


def run_experiment(
    experiment: Experiment,
    providers: Sequence[str],
    device: torch.device,
    origin: Provenance,
    budget_ms: float,
) -> tuple[list[Row], list[str]]:
    """The rows, and a line for each provider that was wrong or could not do it."""
    harness.set_precision(experiment.dtype)
    inputs = experiment.inputs(device)
    exact, budget = expected(experiment, inputs)
    rows, failed = [], []
    for name, provider in experiment.providers.items():
        if providers and name not in (harness.OURS, *providers):
            continue
        try:
            verify(experiment, name, inputs, exact, budget)
            size = sum(x.nbytes for x in inputs.values())
            copies = harness.copies_beyond_l2(size, device)
            sets = [copied(inputs) for _ in range(copies)]
            timing, results = harness.time_graph([provider.prepare(i) for i in sets], budget_ms)
            if not experiment.in_place and provider.prepare_checked is None:
                for outputs in (results[0], results[-1]):  # of the replays themselves
                    harness.check(provider.finish(outputs), exact, budget)
        except WrongResult as error:
            failed.append(f"{name} is wrong and not timed: {error}")
            continue
        except Exception as error:  # a backend that does not serve the shape raises what it likes
            failed.append(f"{name} failed: {harness.reason(error)}")
            continue
        finally:
            sets = results = None
        rows.append(
            Row(
                experiment.op,
                experiment.shape,
                experiment.dtype,
                experiment.pass_,
                name,
                *timing,
                experiment.bytes,
                experiment.flops,
                *origin,
            )  # fmt: skip
        )
    if rows and experiment.least is not None:
        rows.append(time_least(experiment, inputs, device, origin, budget_ms))
    harness.release_memory()
    return rows, failed


def time_least(
    experiment: Experiment,
    inputs: Inputs,
    device: torch.device,
    origin: Provenance,
    budget_ms: float,
) -> Row:
    """A copy at the size of this experiment, as cold as what it is compared with: small tensors do
    not reach the rate of large ones."""
    copies = harness.copies_beyond_l2(sum(x.nbytes for x in inputs.values()), device)
    sets = [copied(inputs) for _ in range(copies)]
    least = experiment.least
    timing, _ = harness.time_graph([least.prepare(i) for i in sets], budget_ms)
    what = (experiment.shape, experiment.dtype, experiment.pass_)
    return Row(harness.LEAST, *what, "torch", *timing, least.bytes, 0, *origin)


def expected(experiment: Experiment, inputs: Inputs) -> tuple[Outputs, list[float]]:
    """The exact outputs and what each may be off."""
    low = experiment.reference(copied(inputs))
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
        harness.check(provider.finish(run()), exact, budget)


def time_roofs(device: torch.device, origin: Provenance) -> list[Row]:
    """What the GPU can do in this run: a copy past the L2 cache, by the driver and by a kernel that
    reads and writes as many bytes (faster: the roof is the better of the two), and a large matrix
    product."""
    size = 8192
    source = torch.randn(2**28, device=device)
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    copied_bytes, product_bytes = 2 * source.nbytes, 3 * size**2 * a.itemsize
    copy, _ = harness.time_graph([source.clone])
    kernel, _ = harness.time_graph([source.neg])
    product, _ = harness.time_graph([lambda: a @ b])
    return [
        Row("copy", "1 GiB", "fp32", "fwd", "torch", *copy, copied_bytes, 0, *origin),
        Row("copy", "1 GiB", "fp32", "fwd", "torch-neg", *kernel, copied_bytes, 0, *origin),
        Row("matmul", f"{size}^3", "bf16", "fwd", "cublas", *product, product_bytes, 2 * size**3,
            *origin),
    ]  # fmt: skip


def describe(experiment: Experiment, rows: Sequence[Row], failed: Sequence[str]) -> str:
    """One line on an experiment, and one for each failure."""
    copies = [row for row in rows if row.op == harness.LEAST]
    rows = [row for row in rows if row.op != harness.LEAST]
    times = "  ".join(f"{row.provider} {row.median_us:.1f}" for row in rows)
    line = f"{experiment.count:3d}x {experiment.shape:28s} {experiment.dtype} {experiment.pass_:8s}"
    line = f"{line} {times}"
    for ours, best in harness.ratios(rows):
        rate = f"{ours.tflops:.0f} TFLOP/s" if ours.flops else f"{ours.tbytes:.2f} TB/s"
        line += f"  ratio {best.median_us / ours.median_us:.2f} over {best.provider}, {rate}"
        for copy in copies:
            share = copy.median_us / ours.median_us
            line += f", the least as a copy {copy.median_us:.1f} ({share:.0%})"
    return "\n".join([line, *(f"     ! {f}" for f in failed)])


def summary(chosen: Sequence[Experiment], rows: Sequence[Row]) -> str:
    """Each op and pass, summed over the calls of a training step of the model. The floor is the
    time that a copy of as many bytes, or a product of as many FLOPs, takes in this run."""
    counts = {(e.op, e.shape, e.dtype, e.pass_): e.count for e in chosen}
    bandwidth = max((row.tbytes for row in rows if row.op == "copy"), default=None)
    peak = max((row.tflops for row in rows if row.op == "matmul"), default=None)
    sums: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0, 0])
    for ours, best in harness.ratios(rows):
        count = counts[ours.key[:4]]
        batch = ours.shape.split("x")[0] if "x" in ours.shape else "-"
        total = sums[ours.op, batch, ours.dtype, ours.pass_]
        total[0] += count * ours.median_us / 1000
        total[1] += count * best.median_us / 1000
        if bandwidth and peak:
            floor = max(ours.bytes / bandwidth, ours.flops / peak)  # 1e-12 s
            total[2] += count * floor / 1e9
        total[3] += 1
        total[4] += best.median_us >= ours.median_us
    lines = [
        [*key, f"{ours:.3f}", f"{best:.3f}", f"{best / ours:.2f}", f"{floor / ours:.0%}",
         f"{wins} of {n}"]
        for key, (ours, best, floor, n, wins) in sums.items()
    ]  # fmt: skip
    header = ["op", "batch", "dtype", "pass", "ours ms/step", "best other", "ratio", "of the floor",
              "shapes won"]  # fmt: skip
    return harness.format_table(header, lines)


if __name__ == "__main__":
    harness.run_entry(main)
