"""What drawing images with a trained network costs, by who computes the network.

    torch_fp32    the torch backend in float32, layer by layer: the images that others are held to
    torch         the same in the precision of the run, with its convolutions' weights in it
    compile       torch.compile of that; on a GPU the chain is one CUDA graph, as for triton
    triton        this project's kernels
    onnxruntime   the exported ONNX file (`export.graph`), float32
    tensorrt      the engine of that file (`export.tensorrt_engine`), TF32

Only the network differs: the sampler, its noise and its step are the same for all rows. A row is
drawn once before it is timed, which compiles and captures. A row that cannot run says why.
"""

import csv
import gc
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import triton_kernels

from ..errors import ConfigError, counted, writing
from ..export.graph import OnnxDenoiser, export_onnx, image_graph, onnx_provider
from ..export.tensorrt_engine import TensorRTDenoiser, build_engine, require_tensorrt
from ..factory import check_sampler
from ..formats.trained import Trained, TrainedSettings
from ..models.layers import Conv1d, Conv2d
from ..plan.inference import sampling_network
from ..process.objective import Denoiser
from ..runtime.backend import Backend
from ..runtime.distributed import choose_device
from ..sampling.chain import Progress, TabulatedDenoiser
from ..sampling.guidance import guide
from ..settings import construct

_REFERENCE = "torch_fp32"
_MIN_DRAWS, _MAX_DRAWS = 3, 100


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings(TrainedSettings):
    """The configuration; see configs/benchmark.yaml."""

    n: int = 16
    steps: int | None = 50
    sampler: str = "ddim"
    guidance: float = 1.0
    seed: int = 0
    rows: list[str] | None = None
    seconds: float = 10.0
    out: str | None = None
    device: str = "auto"
    precision: str | None = None

    def __post_init__(self) -> None:
        check_sampler(self.sampler)
        if self.n < 1:
            raise ConfigError(f"n={self.n}; expected at least 1")
        if not 0 <= self.seconds < math.inf:
            raise ConfigError(f"seconds={self.seconds}; expected a number of at least 0")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed}; expected a whole number from 0 to 2^63 - 1")
        for row in self.rows or ():
            if row not in _ROWS:
                raise ConfigError(f"rows has {row}; choose from {', '.join(_ROWS)}")


@dataclass
class Row:
    """A line of the table. What was not measured is None, and `note` says why."""

    row: str
    precision: str = ""
    seconds: float | None = None  # mean of a draw of n images
    images_per_second: float | None = None
    latency_p50_ms: float | None = None  # of a draw
    latency_p99_ms: float | None = None
    draws: int = 0  # that were timed
    first_draw_seconds: float | None = None  # with what is compiled, built and captured
    peak_mib: float | None = None  # beyond what was held before the row; weights included
    max_difference: float | None = None  # of the images from torch_fp32's, in levels of 255
    mean_difference: float | None = None  # one pixel may have gone another way, all do not
    note: str = ""


@dataclass
class _Network:
    """What a row asks in the place of a network."""

    denoiser: Denoiser | TabulatedDenoiser
    precision: str
    dtype: torch.dtype  # that it is given x in
    capture: bool = False  # whether a CUDA graph can hold it
    outside: bool = False  # whether it has memory that PyTorch does not know of


@dataclass
class _Job:
    """What the rows have in common."""

    settings: BenchmarkSettings
    device: torch.device
    precision: str | None = None
    folder: Path = field(default_factory=Path)  # for files that live as long as the benchmark

    def load(self, backend: str, precision: str | None) -> Trained:
        return self.settings.load(self.device, backend=backend, precision=precision)


def benchmark(config: dict[str, Any]) -> Path:
    """Measure, print the table as it grows, and write it; returns the path of the CSV."""
    settings = construct(BenchmarkSettings, config, "")
    device = choose_device(settings.device)
    job = _Job(settings, device, settings.precision)
    trained = job.load("torch", settings.precision)
    if settings.precision is None:
        job.precision = trained.model.backend.precision
    if trained.is_given:
        raise ConfigError(
            f"{settings.ckpt} was trained with a condition beside classes, which no row here hands"
            " to it; give a network without"
        )
    guide(trained.model.forward_nhwc, settings.guidance, trained.model.null_label)
    out = Path(settings.out) if settings.out else (trained.run_dir or Path()) / "benchmark"
    with writing(out):  # now rather than after minutes
        out.mkdir(parents=True, exist_ok=True)
    stem = _stem(settings, device, trained)
    height, width, channels = trained.image_shape
    print(
        f"{settings.ckpt}: {counted(settings.n, 'images')} of {height}x{width}x{channels} a call,"
        f" {settings.sampler}, {settings.steps or 'all'} steps, on {_device_name(device)}"
    )
    del trained
    wanted = _ROWS if settings.rows is None else settings.rows
    chosen = [name for name in _ROWS if name == _REFERENCE or name in wanted]
    rows: list[Row] = []
    reference: Tensor | None = None
    with tempfile.TemporaryDirectory() as folder:
        job.folder = Path(folder)
        print(_line(_HEADER))
        for name in chosen:
            row, images = _measure(name, job, reference)
            reference = images if name == _REFERENCE else reference
            rows.append(row)
            print(_line(_cells(row)), flush=True)
    with writing(out):
        _write(out, stem, rows, job)
    print(f"{out / stem}.csv and .json")
    return out / f"{stem}.csv"


def _stem(settings: BenchmarkSettings, device: torch.device, trained: Trained) -> str:
    """Of the files' names: what is drawn otherwise, or by other weights, replaces none."""
    stem = f"{device.type}_{settings.sampler}{settings.steps or ''}_n{settings.n}"
    if trained.run_dir is None:  # the folder is not the run's
        stem = f"{trained.name}_{stem}"
    if settings.guidance != 1:
        stem += f"_guidance{settings.guidance:g}"
    if settings.precision is not None:
        stem += f"_{settings.precision}"
    if settings.ema is not True:
        stem += f"_ema{settings.ema or '-false'}"
    return stem


# --- rows: each makes a network, or raises what its note will say ---------------------------------


def _torch_fp32(job: _Job) -> tuple[_Network, Trained]:
    trained = job.load("torch", "fp32")
    return _Network(trained.model.forward_nhwc, "fp32", torch.float32), trained


def _torch(job: _Job) -> tuple[_Network, Trained]:
    if job.precision == "fp32":
        raise ConfigError(f"precision is fp32: this is {_REFERENCE}")
    trained = job.load("torch", job.precision)
    dtype = trained.model.backend.dtype
    _keep_weights_in(trained.model, dtype)
    return _Network(trained.model.forward_nhwc, job.precision, dtype), trained


def _compile(job: _Job) -> tuple[_Network, Trained]:
    if job.device.type == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise ConfigError("torch.compile needs a C++ compiler on a CPU; there is no g++")
    trained = job.load("torch", job.precision)
    dtype = trained.model.backend.dtype
    _keep_weights_in(trained.model, dtype)
    torch._dynamo.reset()
    compiled = torch.compile(trained.model.forward_nhwc, dynamic=False)
    return _Network(compiled, job.precision, dtype, capture=job.device.type == "cuda"), trained


def _triton(job: _Job) -> tuple[_Network, Trained]:
    if job.device.type != "cuda":
        raise ConfigError(f"this project's kernels need a CUDA device; device is {job.device}")
    trained = job.load("triton", job.precision)
    network, dtype = sampling_network(trained.model), trained.model.backend.dtype
    return _Network(network, job.precision, dtype, capture=True), trained


def _onnxruntime(job: _Job) -> tuple[_Network, Trained]:
    onnx_provider(job.device)
    trained = job.load("torch", "fp32")
    denoiser = OnnxDenoiser(_onnx_file(job, trained), job.device)
    return _Network(denoiser, "fp32", torch.float32, outside=True), trained


def _tensorrt(job: _Job) -> tuple[_Network, Trained]:
    require_tensorrt()
    trained = job.load("torch", "fp32")
    path, n = job.folder / "denoiser.plan", job.settings.n
    n = n if job.settings.guidance == 1 else 2 * n
    build_engine(_onnx_file(job, trained), path, image_graph(trained), batch=n, max_batch=n)
    denoiser = TensorRTDenoiser(path, job.device)
    return _Network(denoiser, "tf32", torch.float32, outside=True), trained


_ROWS: dict[str, Callable[[_Job], tuple[_Network, Trained]]] = {
    _REFERENCE: _torch_fp32,
    "torch": _torch,
    "compile": _compile,
    "triton": _triton,
    "onnxruntime": _onnxruntime,
    "tensorrt": _tensorrt,
}


def _keep_weights_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Convolutions' weights in the precision of the activations, instead of casting them in every
    call."""
    for module in model.modules():
        if isinstance(module, Conv1d | Conv2d):
            for parameter in module.parameters():
                parameter.data = parameter.data.to(dtype)


def _onnx_file(job: _Job, trained: Trained) -> Path:
    path = job.folder / "denoiser.onnx"
    if not path.exists():
        export_onnx(path, image_graph(trained))
    return path


# --- measuring ------------------------------------------------------------------------------------


def _measure(name: str, job: _Job, reference: Tensor | None) -> tuple[Row, Tensor | None]:
    """(the row, its images). Whatever a row raises is its note: the others are still wanted."""
    row, images = Row(name), None
    try:
        images = _fill(row, job)
    except torch.cuda.OutOfMemoryError:
        row.note = "not enough GPU memory"
    except Exception as error:
        if name == _REFERENCE:
            raise
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        row.note = (kind + str(error)).strip().splitlines()[0][:200]
    if images is not None and reference is not None:
        difference = (images - reference).abs() * 127.5
        row.max_difference, row.mean_difference = difference.max().item(), difference.mean().item()
    gc.collect()
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
    return row, images


def _fill(row: Row, job: _Job) -> Tensor:
    """Draw and time; the images, in [-1, 1], on the CPU."""
    s, memory = job.settings, _Memory(job.device)
    began = time.perf_counter()
    network, trained = _ROWS[row.row](job)
    row.precision = network.precision
    model, n = trained.model, s.n
    # the step is by this project's kernels in all rows, where they run
    ops = triton_kernels if job.device.type == "cuda" else model.backend.ops
    sampler = trained.process.sampler(
        Backend(model.backend.name, ops, network.dtype, model.backend.allow_tf32),
        job.device,
        sampler=s.sampler,
        steps=s.steps,
        capture=network.capture,
    )
    denoiser = guide(network.denoiser, s.guidance, model.null_label, network.dtype)
    classes = model.num_classes
    labels = None if classes is None else torch.arange(n, device=job.device) % classes

    def draw(progress: Progress | None = None) -> Tensor:
        shape = (n, *trained.image_shape)
        x = sampler.sample(denoiser, shape, seed=s.seed, labels=labels, progress=progress)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        return x

    # shown on a terminal only: steps of the first draw, then, beside what is timed, whole draws
    with tqdm(desc=row.row, unit="step", leave=False, dynamic_ncols=True, disable=None) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        images = draw(report).clamp(-1, 1).cpu()
        row.first_draw_seconds = time.perf_counter() - began
        times: list[float] = []
        while len(times) < _MIN_DRAWS or (sum(times) < s.seconds and len(times) < _MAX_DRAWS):
            bar.set_postfix_str(f"timed {len(times)} draws")
            start = time.perf_counter()
            draw()
            times.append(time.perf_counter() - start)
    row.draws = len(times)
    row.seconds = statistics.fmean(times)
    row.images_per_second = n / row.seconds
    row.latency_p50_ms, row.latency_p99_ms = np.percentile(times, (50, 99)) * 1e3
    row.peak_mib = memory.peak_mib(network.outside)
    return images


class _Memory:
    """The peak from here on, beyond what is held now: of PyTorch on a GPU, else of the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.held = torch.cuda.memory_allocated(device)
            self.free = torch.cuda.mem_get_info(device)[0]
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
            except OSError:
                self.held = None
            else:
                self.held = _process_mib("VmRSS")

    def peak_mib(self, outside: bool) -> float | None:
        """`outside`: of a GPU, what has become less in it, since PyTorch does not see it all."""
        if self.device.type == "cuda":
            if outside:
                return (self.free - torch.cuda.mem_get_info(self.device)[0]) / 2**20
            return (torch.cuda.max_memory_allocated(self.device) - self.held) / 2**20
        peak = _process_mib("VmHWM")
        return None if self.held is None or peak is None else peak - self.held


def _process_mib(name: str) -> float | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) / 1024 if found else None


# --- the table ------------------------------------------------------------------------------------

_HEADER = ("", "precision", "s", "images/s", "p50 ms", "p99 ms", "MiB", "max diff", "mean", "")
_WIDTHS = (12, 10, 9, 10, 10, 10, 8, 10, 8, 0)


def _cells(row: Row) -> tuple[str, ...]:
    numbers = (
        (row.seconds, "{:.4f}"),
        (row.images_per_second, "{:.1f}"),
        (row.latency_p50_ms, "{:.2f}"),
        (row.latency_p99_ms, "{:.2f}"),
        (row.peak_mib, "{:.0f}"),
        (row.max_difference, "{:.3f}"),
        (row.mean_difference, "{:.3f}"),
    )
    shown = ("-" if number is None else form.format(number) for number, form in numbers)
    return (row.row, row.precision, *shown, row.note)


def _line(cells: tuple[str, ...]) -> str:
    first, second, *rest, note = cells
    right = (f"{cell:>{w}}" for cell, w in zip(rest, _WIDTHS[2:-1], strict=True))
    return f"{first:<{_WIDTHS[0]}}{second:<{_WIDTHS[1]}}{''.join(right)}  {note}".rstrip()


def _write(out: Path, stem: str, rows: list[Row], job: _Job) -> None:
    with open(out / f"{stem}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    about = {
        "device": _device_name(job.device),
        "threads": torch.get_num_threads(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "settings": asdict(job.settings),
        "rows": [asdict(row) for row in rows],
    }
    (out / f"{stem}.json").write_text(json.dumps(about, indent=2, default=str) + "\n")


_PACKAGES = ("torch", "triton", "onnxruntime", "onnxruntime-gpu", "tensorrt")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"the CPU, {threads} thread{'s' * (threads > 1)}"
