"""Pictures from the CSV files.

    python -m benchmarks.plots [merge=FILE,FILE] [out=FOLDER]

`merge` first adds the rows of other CSV files (of a run on another machine) to
benchmarks/results/<gpu>.csv. Without `out` the pictures go to docs/benchmarks, and the table of the
ops in docs/ops.md is written anew, too (`benchmarks.summary`).
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import harness
from benchmarks.harness import ROOT, Row, rates_of
from benchmarks.summary import TIMED, files_of_ops, write_into
from diffusion.errors import ConfigError

DEFAULTS = {"merge": (), "out": ""}
_ROOFS = ("copy", "matmul", harness.LEAST)
# ops that are drawn together
_FAMILIES = dict.fromkeys(("q_sample", "denoise_loss", "denoise_step", "adamw"), "noise-and-adamw")
_PASSES = {  # from left to right
    "fwd": "forward",
    "fwd+bias": "forward and bias",
    "dgrad": "input gradient",
    "wgrad": "weight gradient",
    "fwd+bwd": "forward and backward",
    "step": "step",
    "chain": "chain",
    "act-p50": "from condition to actions, p50",
    "act-p99": "p99",
}
_ORDER = tuple(_PASSES)


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for name in settings["merge"]:
        if not Path(name).is_file():
            raise ConfigError(f"merge={name}: there is no such file")
        rows = harness.read_rows(Path(name))
        for gpu in {row.gpu for row in rows}:
            path = harness.RESULTS / f"{gpu}.csv"
            new = [row for row in rows if row.gpu == gpu]
            harness.write_rows(path, merged(harness.read_rows(path), new))
            print(f"{name} -> {path}")
    files = files_of_ops()
    for path in sorted(harness.RESULTS.glob("*.csv")):
        for drawn in draw_plots(harness.read_rows(path), Path(settings["out"] or harness.PLOTS)):
            print(drawn)
    if not settings["out"] and len(files) == 1:  # which has the figures of one GPU
        page = ROOT / "docs" / "ops.md"
        write_into(page, harness.read_rows(files[0]))
        print(page)
    return 0


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """`new` over `old`. Where an op was timed anew beside others, no older row of these stays: a
    ratio is of one run."""
    anew = {ours.key[:4] for ours, _ in harness.ratios(new) if ours.op in TIMED}
    return harness.merge_rows([row for row in old if row.key[:4] not in anew], new)


def draw_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the plots of one GPU's rows; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    families: dict[str, list[Row]] = {}
    for row in rows:
        if row.op not in _ROOFS:
            families.setdefault(_FAMILIES.get(row.op, row.op), []).append(row)
    for family, mine in sorted(families.items()):
        gpu = mine[0].gpu
        if family == "train_step":
            for model in dict.fromkeys(row.shape.split()[1] for row in mine):
                paths.append(folder / f"{gpu}-train_step-{model}.png")
                _draw_steps(gpu, [r for r in mine if r.shape.split()[1] == model], paths[-1])
            continue
        for suffix, title, pairs in _pictures(family, harness.ratios(mine)):
            paths.append(folder / f"{gpu}-{family}{suffix}-ratio.png")
            _draw_ratios(f"{family}{title}, {gpu}", pairs, paths[-1])
        if any(row.bytes for row in mine) and any(row.is_ours for row in mine):
            roofs = [row for row in rows if row.op in _ROOFS]
            paths.append(folder / f"{gpu}-{family}-roofline.png")
            _draw_roofline(family, gpu, mine, roofs, paths[-1])
    return paths


def _pictures(
    family: str, pairs: Sequence[tuple[Row, Row]]
) -> list[tuple[str, str, list[tuple[Row, Row]]]]:
    """What of a file's name and of the title says which pairs are on a picture, and these: of
    convolutions, which have too many shapes for one, by batch and precision."""
    if family != "conv2d":
        return [("", "", sorted(pairs, key=_by_op))] if pairs else []
    pictures = []
    for batch in sorted({_batch(ours) for ours, _ in pairs}):
        mine = [pair for pair in pairs if _batch(pair[0]) == batch]
        others = {ours.dtype for ours, _ in mine} - {"bf16"}
        # with bf16 goes the TF32 of the embedding, which is never in less
        low = [p for p in mine if p[0].dtype == "bf16" or _is_embedding(p[0])]
        kinds = [("", " in bf16", [p for p in low if p[0].dtype in ("bf16", "tf32")])]
        for dtype in sorted(others):
            kinds.append((f"-{dtype}", f" in {dtype}", [p for p in mine if p[0].dtype == dtype]))
        for suffix, title, chosen in kinds:
            if any(p[0].dtype == "bf16" or not _is_embedding(p[0]) for p in chosen):
                chosen.sort(key=_by_size)
                pictures.append((f"-batch{batch}{suffix}", f"{title} at batch {batch}", chosen))
    return pictures


def _by_op(pair: tuple[Row, Row]) -> tuple[str, str, int]:
    """Where a pair of any other op stands: bf16 and large batches first."""
    row = pair[0]
    return row.op, row.dtype, -_batch(row)


def _is_embedding(row: Row) -> bool:
    return "x1x1 " in row.shape


def _by_size(pair: tuple[Row, Row]) -> tuple[int, ...]:
    """Where a convolution stands: filters, large images first, channels."""
    image, channels, filters = pair[0].shape.split()[:3]
    _, height, width = map(int, image.split("x"))
    return (-int(filters.split("x")[0]), -height * width, *map(int, channels.split("->")))


def _draw_steps(gpu: str, rows: Sequence[Row], path: Path) -> None:
    """A panel for each batch size, a bar for each provider in the faster of its modes: images a
    second, with milliseconds and how many times longer than ours it takes."""
    fastest: dict[tuple[int, str], Row] = {}
    for row in sorted(rows, key=_time_of, reverse=True):
        fastest[_batch(row), row.provider.split()[0]] = row
    batches = sorted({batch for batch, _ in fastest})
    times = {name: row.median_us / batch for (batch, name), row in fastest.items()}
    names = sorted(times, key=times.get)
    figure, panels = plt.subplots(
        1,
        len(batches),
        sharey=True,
        squeeze=False,
        figsize=(1.2 + 2.6 * len(batches), 1.3 + 0.28 * len(names)),
        layout="constrained",
    )
    for axes, batch in zip(panels[0], batches, strict=True):
        mine = {name: row for (b, name), row in fastest.items() if b == batch}
        ours = min((row.median_us for row in mine.values() if row.is_ours), default=None)
        rates = {name: 1e6 * batch / row.median_us for name, row in mine.items()}
        for name, row in mine.items():
            at, ms = names.index(name), row.median_us / 1000
            axes.barh(at, rates[name], color="tab:green" if row.is_ours else "tab:gray")
            text = f" {ms:.1f} ms" if ms < 99.5 else f" {ms:.0f} ms"
            if ours is not None and not row.is_ours:
                text += f", {row.median_us / ours:.1f}x"
            axes.text(rates[name], at, text, va="center", fontsize=7)
        axes.set_xlim(0, 1.55 * max(rates.values()))
        axes.set_title(f"batch {batch}", fontsize=9)
        axes.tick_params(labelsize=7)
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].set_ylim(len(names) - 0.5, -0.5)
    figure.supxlabel(
        "images a second; the time of a step, and how many times that of our fastest", fontsize=8
    )
    pixels, model = rows[0].shape.split("x", 1)[1].split()
    size = pixels.rpartition("x")[0]
    figure.suptitle(f"Training steps of {model} at {size}, {gpu}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _time_of(row: Row) -> float:
    return row.median_us


def _batch(row: Row) -> int:
    return int(row.shape.split("x")[0])


def _draw_ratios(title: str, pairs: Sequence[tuple[Row, Row]], path: Path) -> None:
    """A panel for each pass, a line for each shape; to the right of 1 is faster than every
    alternative."""
    passes = sorted({ours.pass_ for ours, _ in pairs}, key=_ORDER.index)
    lines = list(dict.fromkeys((ours.op, ours.shape, ours.dtype) for ours, _ in pairs))
    several = len({dtype for _, _, dtype in lines}) > 1
    names = [f"{shape}  {dtype}" if several else shape for _, shape, dtype in lines]
    if len({op for op, _, _ in lines}) > 1:
        names = [f"{op}  {name}" for (op, _, _), name in zip(lines, names, strict=True)]
    figure, panels = plt.subplots(
        1,
        len(passes),
        sharey=True,
        squeeze=False,
        figsize=(2.5 + 2.7 * len(passes), 1.2 + 0.19 * len(lines)),
        layout="constrained",
    )
    for axes, pass_ in zip(panels[0], passes, strict=True):
        drawn = [(ours, best) for ours, best in pairs if ours.pass_ == pass_]
        at = [lines.index((ours.op, ours.shape, ours.dtype)) for ours, _ in drawn]
        values = [best.median_us / ours.median_us for ours, best in drawn]
        axes.barh(at, values, color=["tab:green" if v >= 1 else "tab:red" for v in values])
        for i, value, (_, best) in zip(at, values, drawn, strict=True):
            text = axes.text(value, i, f" {value:.2f} {best.provider}", va="center", fontsize=6)
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.3})
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlim(0, (1.25 + 0.035 * max(len(b.provider) for _, b in drawn)) * max(values))
        axes.set_title(_PASSES[pass_], fontsize=8)
        axes.tick_params(labelsize=6)
    panels[0][0].set_yticks(range(len(lines)), names)
    panels[0][0].set_ylim(len(lines) - 0.4, -0.6)
    figure.supxlabel("time of the fastest alternative / time of the Triton kernel", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_roofline(
    op: str, gpu: str, rows: Sequence[Row], roofs: Sequence[Row], path: Path
) -> None:
    """Rate over arithmetic intensity, under the roofs measured in the same run; for an op without
    matrix products, bandwidth over the bytes it has to move."""
    bandwidth = max((row.tbytes for row in roofs if row.op == "copy"), default=None)
    products = max((r.tflops for r in roofs if r.op == "matmul"), default=None)
    peak = rates_of(gpu).products or products
    by_flops = any(row.flops for row in rows)
    if by_flops and any(row.dtype == "bf16" for row in rows):
        op, rows = f"{op} in bf16", [row for row in rows if row.dtype == "bf16"]  # as the roof is
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for provider in sorted({row.provider for row in rows}, key=lambda p: (p != "triton", p)):
        mine = [row for row in rows if row.provider == provider]
        x = [row.flops / row.bytes if by_flops else row.bytes / 1e6 for row in mine]
        y = [row.tflops if by_flops else row.tbytes for row in mine]
        ours = provider.startswith("triton")
        axes.scatter(x, y, s=22 if ours else 12, label=provider, zorder=3 if ours else 2, alpha=0.8)
    if by_flops and bandwidth and peak:
        low, high = axes.get_xlim()
        xs = [max(low, 1), peak / bandwidth, max(high, 2 * peak / bandwidth)]
        axes.plot(xs, [min(peak, x * bandwidth) for x in xs], color="black", linewidth=0.8)
    elif not by_flops and bandwidth:
        axes.axhline(bandwidth, color="black", linewidth=0.8)
        where = axes.get_yaxis_transform()
        axes.text(0.01, bandwidth, "a copy of 1 GiB", va="bottom", fontsize=7, transform=where)
    axes.set_xscale("log")
    if by_flops:
        axes.set_yscale("log")
        axes.set_xlabel("arithmetic intensity, FLOP / byte")
        axes.set_ylabel("TFLOP/s")
    else:
        axes.set_xlabel("megabytes to be moved")
        axes.set_ylabel("TB/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    axes.set_title(f"{op}, {gpu}", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    harness.run_entry(main)
