"""tools/benchmark.py: rows that run are measured and held to the reference, others say why not."""

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from diffusion.errors import ConfigError
from diffusion.export import tensorrt_engine as export_tensorrt
from diffusion.export.graph import image_graph
from diffusion.export.tensorrt_engine import TensorRTDenoiser, build_engine
from diffusion.formats.trained import load_trained
from diffusion.runs import benchmark as sampling_benchmark
from diffusion.runs.benchmark import benchmark

from .test_export import MODEL, checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path) -> Path:
    return checkpoint(tmp_path / "run", num_classes=3, label_dropout=0.1).parent.parent


def measured(run: Path, **options) -> dict[str, dict[str, str]]:
    settings = {"ckpt": str(run), "n": 2, "steps": 2, "seconds": 0.0, "device": "cpu"}
    with open(benchmark(settings | options), newline="") as file:
        return {row["row"]: row for row in csv.DictReader(file)}


def test_rows(run, monkeypatch, capsys):
    """torch.compile and ONNX Runtime are stood in for: what they compute is tested elsewhere."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    network = load_trained(run, CPU).model.forward_nhwc
    monkeypatch.setattr(sampling_benchmark, "onnx_provider", lambda device: "any")
    monkeypatch.setattr(sampling_benchmark, "export_onnx", lambda path, graph: path.touch())
    monkeypatch.setattr(
        sampling_benchmark, "OnnxDenoiser", lambda path, device: lambda *a: network(*a) * 0.99
    )
    rows = measured(run, guidance=2.0)
    assert list(rows) == ["torch_fp32", "torch", "compile", "triton", "onnxruntime", "tensorrt"]
    for name in ("torch_fp32", "compile", "onnxruntime"):
        row = rows[name]
        assert not row["note"] and int(row["draws"]) == 3
        seconds = float(row["seconds"])
        assert float(row["images_per_second"]) == pytest.approx(2 / seconds)
        assert 0 < float(row["latency_p50_ms"]) <= float(row["latency_p99_ms"]) < 1e5
        assert float(row["peak_mib"]) >= 0
    assert rows["torch_fp32"]["max_difference"] == ""
    assert float(rows["compile"]["max_difference"]) == 0
    other = rows["onnxruntime"]
    assert 0 < float(other["mean_difference"]) < float(other["max_difference"]) <= 255
    assert rows["torch"]["note"] == "precision is fp32: this is torch_fp32"
    assert "need a CUDA device" in rows["triton"]["note"]
    assert rows["tensorrt"]["note"] and not rows["tensorrt"]["seconds"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)

    about = json.loads((run / "benchmark" / "cpu_ddim2_n2_guidance2.json").read_text())
    # the package's metadata may lack what the module's version says of CUDA
    assert about["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert about["settings"]["guidance"] == 2 and len(about["rows"]) == 6


def test_progress_is_shown(run, monkeypatch):
    """On a terminal: of a CPU's rows a draw can take minutes."""
    shown = []

    class Bar(tqdm):
        def __init__(self, **options):
            super().__init__(**options | {"disable": False, "file": io.StringIO()})
            assert options["disable"] is None  # nothing goes into a file or pipe
            shown.append(self)

    monkeypatch.setattr(sampling_benchmark, "tqdm", Bar)
    measured(run, rows=[], steps=4)
    assert [(bar.desc, bar.n, bar.total) for bar in shown] == [("torch_fp32", 4, 4)]
    assert "timed 2 draws" in shown[0].postfix


def test_a_row_in_another_precision(run):
    """Differs, but not by much; what fails is its note."""
    rows = measured(run, precision="bf16", rows=["torch"], sampler="ddpm")
    assert list(rows) == ["torch_fp32", "torch"]
    assert rows["torch"]["precision"] == "bf16"
    assert 0 < float(rows["torch"]["mean_difference"]) < 8


def test_files_of_what_is_drawn_otherwise_are_others(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options in ({}, {"guidance": 1.5}, {"precision": "bf16"}, {"ema": False}):
        measured(run, rows=[], **options)
    weights = next(run.rglob("ema.safetensors"))
    model = MODEL | {"num_classes": 3, "label_dropout": 0.1}
    measured(weights, rows=[], model=model, size=8)
    names = [path.name for path in (*run.rglob("*.csv"), *Path("benchmark").glob("*.csv"))]
    assert sorted(names) == [
        "cpu_ddim2_n2.csv",
        "cpu_ddim2_n2_bf16.csv",
        "cpu_ddim2_n2_ema-false.csv",
        "cpu_ddim2_n2_guidance1.5.csv",
        "ema_cpu_ddim2_n2.csv",
    ]


def test_what_a_row_raises_is_its_note(run, monkeypatch):
    def fails(job):
        raise RuntimeError("no such operator\nand more")

    monkeypatch.setitem(sampling_benchmark._ROWS, "compile", fails)
    assert measured(run, rows=["compile"])["compile"]["note"] == "RuntimeError: no such operator"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seconds": -1}, "seconds=-1; expected a number of at least 0"),
        ({"seed": -1}, "seed=-1"),
        ({"rows": ["tritn"]}, "rows has tritn; choose from torch_fp32, torch, compile"),
        ({"n": 0}, "n=0"),
        ({"ckpt": "nowhere"}, "nowhere does not exist"),
        ({"sampler": "dpm"}, "sampler=dpm is unknown"),
        ({"guidance": -1}, "guidance=-1"),
        ({"out": "file/a"}, "cannot be written"),
    ],
)
def test_wrong_settings(run, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(ConfigError) as caught:
        measured(run, **{"rows": [], **options})
    assert words in str(caught.value) and "\n" not in str(caught.value)


class _FakeTensorRT(SimpleNamespace):
    """Takes notes of what it is asked. That TensorRT itself would agree is not tested: it needs a
    GPU and its package."""

    __version__ = "10"
    int32, int64, float32 = "int32", "int64", "float32"
    BuilderFlag = SimpleNamespace(TF32="tf32")

    def __init__(self):
        super().__init__(shapes={}, flags=[], addresses={})
        self.Logger = type("Logger", (), {"WARNING": 0, "__init__": lambda *_: None})
        profile = SimpleNamespace(set_shape=lambda name, *sizes: self.shapes.update({name: sizes}))
        config = SimpleNamespace(
            set_flag=self.flags.append,
            clear_flag=lambda flag: self.flags.append(f"no {flag}"),
            add_optimization_profile=lambda given: None,
        )
        builder = SimpleNamespace(
            create_network=lambda flags: "network",
            create_builder_config=lambda: config,
            create_optimization_profile=lambda: profile,
            build_serialized_network=lambda network, config: b"engine",
        )
        self.Builder = lambda logger: builder
        self.OnnxParser = lambda network, logger: SimpleNamespace(
            parse=lambda data: data == b"onnx"
        )
        context = SimpleNamespace(
            set_input_shape=lambda name, shape: True,
            set_tensor_address=lambda name, address: self.addresses.update({name: address}),
            get_tensor_shape=lambda name: (2, 3, 8, 8),
            execute_async_v3=lambda stream: stream == 7,
        )
        engine = SimpleNamespace(
            create_execution_context=lambda: context, get_tensor_dtype=lambda name: "int64"
        )
        self.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda data: engine)


def test_the_engine_is_built_for_any_batch_and_given_addresses(run, tmp_path, monkeypatch):
    fake = _FakeTensorRT()
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", fake)
    monkeypatch.setattr(export_tensorrt, "require_tensorrt", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    (tmp_path / "a.onnx").write_bytes(b"onnx")
    graph = image_graph(load_trained(run, CPU))
    build_engine(tmp_path / "a.onnx", tmp_path / "a.plan", graph, batch=2)
    assert (tmp_path / "a.plan").read_bytes() == b"engine" and fake.flags == ["tf32"]
    assert fake.shapes["x"] == ((1, 3, 8, 8), (2, 3, 8, 8), (64, 3, 8, 8))
    assert fake.shapes["t"] == fake.shapes["labels"] == ((1,), (2,), (64,))
    denoiser = TensorRTDenoiser(tmp_path / "a.plan", CPU)
    x, t = torch.zeros(2, 8, 8, 3), torch.zeros(2, dtype=torch.int64)
    assert denoiser(x, t, t).shape == (2, 8, 8, 3)
    assert fake.addresses.keys() == {"x", "t", "labels", "output"}
