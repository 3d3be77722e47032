"""Time the ops at the shapes of a model against the alternatives.

    python -m benchmarks.run op=OP [key=value ...]

    op=all           conv2d, group_norm, attention, cross_attention, adamw, denoise, or several of
                     them, comma-separated
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
    processes=12     that compile side by side; 0: none
    compile_on=      the GPU (CUDA_VISIBLE_DEVICES) that they use. On another than is timed they run
                     beside the measurements, which take what is compiled; default: all is compiled
                     before anything is timed
    warm=0           1: compile, and time nothing
    plots=1          0: draw none (python -m benchmarks.plots draws them from the CSV)
    out=             a folder for the CSV and the plots; default benchmarks/results, docs/benchmarks

A measurement that something disturbed (its p80 is more than 1.15 times its p20) is repeated at the
end. The rows of processes with the same BENCHMARK_RUN in their environment count as one run.

Exit code 1 if a result of ours was wrong or failed.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from benchmarks import harness, stopwatch
from benchmarks.account import Account
from benchmarks.cases import LONGER_ATTENTION, OPS, model_cases
from benchmarks.compilers import Compilers, serve
from benchmarks.experiment import DTYPES, Experiment
from benchmarks.harness import Row, check_choice
from benchmarks.measure import Conditions, compile_only, run_experiment, time_roofs
from benchmarks.providers import absent, experiments
from diffusion.errors import ConfigError

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
    "compile_on": "",
    "warm": 0,
    "compiler": 0,  # 1: a process that compiles for another
    "plots": 1,
    "out": "",
}


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    ops = OPS if "all" in settings["op"] else settings["op"]
    for op in ops:
        check_choice("op", op, (*OPS, "all"))
    for dtype in settings["dtype"]:
        check_choice("dtype", dtype, tuple(DTYPES))
    device = harness.require_cuda()
    chosen = select(settings, ops)
    if settings["compiler"]:
        serve(lambda number: compile_only(chosen[number], settings["providers"], device))
        return 0
    command = [sys.executable, "-m", "benchmarks.run", *arguments, "compiler=1"]
    numbers = range(len(chosen))
    count = settings["processes"]
    with closing(Compilers(command, count, numbers, settings["compile_on"])) as compilers:
        if settings["warm"] or not settings["compile_on"]:
            began = time.monotonic()
            for done, number in enumerate(numbers, 1):
                compilers.next_ready([number])
                if settings["warm"]:
                    print(progress(done, len(chosen), began), chosen[number].shape, flush=True)
        if compilers.failed:
            print(f"! {compilers.failed} of {count} compiling processes ended early")
        if settings["warm"]:
            return int(compilers.failed > 0)
        origin = harness.provenance()
        conditions = Conditions(device, origin, settings["budget_ms"], Account())
        return time_all(chosen, settings, conditions, compilers)


def time_all(
    chosen: Sequence[Experiment], settings: dict, conditions: Conditions, compilers: Compilers
) -> int:
    """Time what is compiled, write each row as it comes, and the summary; returns the exit code."""
    stopwatch.freeze_objects()
    results = Path(settings["out"] or harness.RESULTS) / f"{conditions.origin.gpu}.csv"
    account, began = conditions.account, time.monotonic()
    rows = time_roofs(conditions)
    harness.add_rows(results, rows)
    done, failures, unsteady = 0, [], []
    try:
        for experiment in _as_compiled(chosen, compilers, account):
            if experiment.op != account.op:
                account.op = experiment.op
                print(
                    f"\n{account.op}, microseconds; ratio: the fastest other provider over triton"
                )
                print("".join(f"! {line}\n" for line in absent(account.op)), end="")
            found, failed = run_experiment(experiment, settings["providers"], conditions)
            harness.add_rows(results, found)  # at once: a run may be cut short
            done += 1
            print(progress(done, len(chosen), began), end="")
            print(describe(experiment, found, failed), flush=True)
            rows += found
            failures += [f"{experiment.shape} {experiment.pass_}: {f}" for f in failed]
            if not all(row.is_steady for row in found):
                unsteady.append((experiment, found))
        account.op = "again"
        for experiment, before in unsteady:
            rows = harness.merge_rows(rows, time_again(experiment, before, conditions))
    except KeyboardInterrupt:
        print(f"! interrupted; {done} of {len(chosen)} were timed")
    harness.add_rows(results, rows)
    print(f"\n{summary(chosen, rows)}\n\n{account}")
    print(f"\n{len(rows)} rows in {results}, run {conditions.origin.run}")
    if settings["plots"]:
        from benchmarks.plots import draw_plots  # which needs matplotlib

        folder = Path(settings["out"]) if settings["out"] else harness.PLOTS
        print("\n".join(map(str, draw_plots(harness.read_rows(results), folder))))
    return 1 if any(": triton" in failure for failure in failures) else 0


def _as_compiled(
    chosen: Sequence[Experiment], compilers: Compilers, account: Account
) -> Iterator[Experiment]:
    """All of them, the first that is compiled first."""
    pending = list(range(len(chosen)))
    while pending:
        with account.stage("wait for compilers"):
            number = compilers.next_ready(pending)
        pending.remove(number)
        yield chosen[number]


def time_again(experiment: Experiment, before: Sequence[Row], conditions: Conditions) -> list[Row]:
    """What of an experiment was disturbed, once more: rows that are steadier than before."""
    disturbed = {row.key: row for row in before if not row.is_steady}
    found, _ = run_experiment(experiment, [row.provider for row in disturbed.values()], conditions)
    better = []
    for row in found:
        old = disturbed.get(row.key)
        if old is not None and row.p80_us / row.p20_us < old.p80_us / old.p20_us:
            better.append(row)
            print(f"again: {row.shape} {row.pass_} {row.op} {row.provider}"
                  f" {old.median_us:.1f} -> {row.median_us:.1f}", flush=True)  # fmt: skip
    return better


def progress(done: int, total: int, began: float) -> str:
    """How far a run is, at which rate, and how long the rest will take."""
    seconds = time.monotonic() - began
    left = seconds / done * (total - done)
    return f"[{done}/{total}, {seconds:.0f} s, {left:.0f} s to go] "


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
