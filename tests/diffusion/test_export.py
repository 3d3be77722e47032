"""tools/export.py: every format from a checkpoint, read back by those who have it; refusals."""

import json
import resource
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from diffusion.data.action_chunks import Normaliser, PolicySpec
from diffusion.errors import ConfigError
from diffusion.export.graph import OnnxDenoiser
from diffusion.export.run import export
from diffusion.factory import build_model, build_policy_model
from diffusion.formats.checkpoint import save_checkpoint
from diffusion.formats.trained import load_trained
from diffusion.models.flat_parameters import FlatParameters
from diffusion.policies.policy import load_policy
from diffusion.runtime.backend import TORCH_FP32

CPU = torch.device("cpu")
MODEL = {
    "name": "unet",
    "model_channels": 32,
    "channel_mult": [1, 2],
    "num_res_blocks": 1,
    "attention_resolutions": [2],
    "num_head_channels": 32,
    "conv_resample": False,
    "use_new_attention_order": True,
}
ONE_LEVEL = {"channel_mult": [1], "attention_resolutions": []}  # traced in seconds
needs_onnx = pytest.mark.skipif(
    not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))),
    reason="needs the packages of the extra `export`: onnx, onnxscript, onnxruntime",
)


def checkpoint(folder: Path, size=(8, 8), **options) -> Path:
    """Of a run whose average differs from what was trained, or with `fresh` has not begun."""
    torch.manual_seed(0)
    fresh = options.pop("fresh", False)
    diffusion = options.pop("diffusion", {"schedule": "cosine"})
    settings = MODEL | options
    model = build_model(settings, TORCH_FP32, size, 3, False, CPU)
    flat = FlatParameters(model)
    flat.param.add_(torch.randn_like(flat.param) * (0 if fresh else 0.02))
    flat.ema.copy_(flat.param * 0.99)
    state = {"step": 1, "image_shape": [*size, 3]}
    config = {"model": settings, "diffusion": diffusion}
    config |= {"train": {"precision": "fp32"}}
    return save_checkpoint(folder / "checkpoints", flat, state, config, keep=1)


def policy_checkpoint(folder: Path, diffusion: dict | None = None) -> Path:
    """Of chunks of 4 actions of 2 numbers, from 2 observations of 3."""
    torch.manual_seed(0)
    settings = {"name": "unet1d", "diffusion_step_embed_dim": 8, "down_dims": [8], "kernel_size": 3}
    ranges = [Normaliser(torch.zeros(d) - 1, torch.ones(d)) for d in (3, 2)]
    spec = PolicySpec(4, 2, 1, *ranges)
    model = build_policy_model(settings, TORCH_FP32, 2, 6, CPU)
    diffusion = diffusion or {"schedule": "cosine", "num_timesteps": 10}
    config = {"model": settings, "diffusion": diffusion}
    config |= {"train": {"precision": "fp32"}}
    state = {"step": 1, "policy": spec.state()}
    return save_checkpoint(folder / "checkpoints", FlatParameters(model), state, config, keep=1)


@pytest.fixture
def run(tmp_path) -> Path:
    checkpoint(tmp_path / "run", max_period=1000)
    return tmp_path / "run"


def parameters(ckpt: Path, **options) -> dict[str, torch.Tensor]:
    return load_trained(ckpt, CPU, **options).model.state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("ema", [True, False], ids=["ema", "as trained"])
def test_unet_cu(run, tmp_path, capsys, ema):
    out = tmp_path / "new" / "weights.bin"
    export({"ckpt": str(run), "format": "unet_cu", "out": str(out), "ema": ema})
    assert "as unet_cu; read back, equal bit for bit" in capsys.readouterr().out
    model = MODEL | {"max_period": 1000}
    assert same(parameters(out, model=model), parameters(run, ema=ema))
    again = tmp_path / "again.bin"
    export({"ckpt": str(out), "format": "unet_cu", "out": str(again), "model": model})
    assert again.read_bytes() == out.read_bytes()


def test_guided_diffusion(tmp_path):
    run = checkpoint(tmp_path / "run", num_classes=3).parent.parent
    out = tmp_path / "model.pt"
    export({"ckpt": str(run), "format": "guided_diffusion", "out": str(out)})
    model = MODEL | {"num_classes": 3}
    assert same(parameters(out, model=model, size=8), parameters(run))
    arguments = json.loads(out.with_suffix(".json").read_text())
    assert (
        arguments.items()
        >= (
            {"image_size": 8, "in_channels": 3, "out_channels": 3, "num_classes": 3}
            | {name: value for name, value in MODEL.items() if name != "name"}
        ).items()
    )


@pytest.mark.parametrize(
    ("name", "diffusion", "words"),
    [
        ("guided_diffusion", {"schedule": "cosine", "variance": "learned_range"}, None),
        ("guided_diffusion", {"prediction": "v_prediction"}, "prediction=v_prediction"),
        ("guided_diffusion", {"schedule": "sigmoid"}, "a schedule that is not linear or cosine"),
        ("unet_cu", {"num_timesteps": 500}, None),
        ("unet_cu", {"variance": "learned_range"}, "variance=learned_range"),
        ("unet_cu", {"schedule": "edm", "prediction": "v_prediction"}, "schedule that is not lin"),
    ],
)
def test_a_process_that_the_weights_program_has_not_is_said(
    tmp_path, recwarn, name, diffusion, words
):
    """Its file holds weights alone, with which it would draw something else."""
    weights = tmp_path / "a.safetensors"
    learned = diffusion.get("variance") == "learned_range"
    model = build_model(MODEL, TORCH_FP32, (8, 8), 3, learned, CPU)
    save_file({name: x.contiguous() for name, x in model.state_dict().items()}, weights)
    settings = {"ckpt": str(weights), "model": MODEL, "size": 8, "diffusion": diffusion}
    export(settings | {"format": name, "out": str(tmp_path / "b")})
    said = [str(w.message) for w in recwarn if "was trained with" in str(w.message)]
    assert len(said) == (words is not None) and all(words in message for message in said)


def test_diffusers(run, tmp_path, capsys):
    out = tmp_path / "pipeline"
    export({"ckpt": str(run), "format": "diffusers", "out": str(out)})
    assert "read back: largest difference of outputs" in capsys.readouterr().out
    found = load_trained(out, CPU)
    assert same(found.model.state_dict(), parameters(run))
    with pytest.raises(ConfigError, match="pipeline exists; overwrite=true replaces it"):
        export({"ckpt": str(run), "format": "diffusers", "out": str(out)})
    export({"ckpt": str(run), "format": "diffusers", "out": str(out), "overwrite": True})


@pytest.mark.long
def test_a_policy_by_torch_export(tmp_path, capsys):
    """With all that a robot needs to know beside the network."""
    run = policy_checkpoint(tmp_path / "run")
    out = tmp_path / "model.pt2"
    export({"ckpt": str(run), "format": "torch_export", "out": str(out)})
    began, ended = capsys.readouterr().out.splitlines()
    assert began == f"{run}: tracing the network, then comparing the graph with it"
    assert "run by torch.export at batch 1 and 3" in ended
    files = {"denoiser.json": ""}
    program = torch.export.load(out, extra_files=files).module()
    policy = load_policy(run, device="cpu")
    described = json.loads(files["denoiser.json"])
    assert described["policy"] == policy.spec.state() and len(described["betas"]) == 10
    x, t, condition = torch.randn(5, 4, 2), torch.arange(5), torch.randn(5, 6)
    with torch.no_grad():
        expected = policy.model.forward_nhwc(x[:, None], t, condition)[:, 0]
        torch.testing.assert_close(program(x, t, condition), expected)
    with pytest.raises(ConfigError, match="is for images; .* is a policy: choose one of onnx"):
        export({"ckpt": str(run), "format": "diffusers", "out": str(tmp_path / "a")})


@pytest.mark.long
@needs_onnx
def test_onnx(tmp_path, capsys):
    """Of a model with classes, whose labels are an input."""
    run = checkpoint(tmp_path / "run", (4, 8), num_classes=3, **ONE_LEVEL).parent.parent
    out = tmp_path / "model.onnx"
    export({"ckpt": str(run), "format": "onnx", "out": str(out)})
    assert "run by ONNX Runtime at batch 1 and 3" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.onnx"]

    denoiser = OnnxDenoiser(out)
    inputs = {item.name: item.shape for item in denoiser.graph.session.get_inputs()}
    assert inputs == {"x": ["batch", 3, 4, 8], "t": ["batch"], "labels": ["batch"]}
    metadata = denoiser.graph.session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["image_shape"]) == [4, 8, 3]
    trained = load_trained(run, CPU)
    sampler = trained.process.sampler(TORCH_FP32, CPU, sampler="ddim", steps=4)
    images = [
        sampler.sample(network, (5, 4, 8, 3), seed=1, labels=torch.arange(5) % 3)
        for network in (denoiser, trained.model.forward_nhwc)
    ]
    np.testing.assert_allclose(*images, atol=1e-5)


def test_onnx_without_its_packages(run, tmp_path, monkeypatch):
    monkeypatch.setattr("diffusion.export.graph.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs onnx, onnxscript, onnxruntime: pip install"):
        export({"ckpt": "not looked at", "format": "onnx", "out": str(tmp_path / "a.onnx")})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "onx"}, "format=onx is unknown; choose one of diffusers, guided_diffusion"),
        ({"format": "safetensors"}, "torch_export; checkpoints hold .safetensors"),
        ({"format": "unet_cu", "engine": "a.plan"}, "engine=a.plan is built from format=onnx"),
        ({"format": "onnx", "engine": "a.plan"}, "an engine needs"),
        ({"format": "torch_export"}, "out=out; expected a file that ends in .pt2"),
        ({"format": "guided_diffusion", "out": "a.json"}, "a.json is where the arguments go"),
        ({"format": "guided_diffusion"}, "guided-diffusion's format needs max_period=10000"),
        ({"format": "unet_cu", "ckpt": "nowhere"}, "nowhere does not exist"),
        ({"format": "unet_cu", "out": "."}, "is not a file"),
        ({"format": "diffusers", "out": "file"}, "is not a directory"),
        ({"format": "diffusers", "out": "run"}, "holds something else than a model"),
        ({"format": "diffusers", "out": "run", "overwrite": True}, "holds something else"),
        ({"format": "unet_cu", "out": "file"}, "file exists; overwrite=true replaces it"),
        ({"format": "unet_cu", "out": "file/a.bin"}, "file/a.bin cannot be written"),
        # before the network is read, of which there is none
        ({"format": "unet_cu", "ckpt": "nowhere", "out": "file/a.bin"}, "file/a.bin cannot be"),
        ({"format": "unet_cu", "model": MODEL}, "says its own"),
    ],
)
def test_wrong_settings(run, monkeypatch, options, words):
    monkeypatch.chdir(run.parent)
    Path("file").write_text("kept")
    with pytest.raises(ConfigError) as caught:
        export({"ckpt": "run", "out": "out"} | options)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in Path().iterdir()) == ["file", "run"]
    assert Path("file").read_text() == "kept"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"conv_resample": True}, "unet.cu's format needs conv_resample=false"),
        ({"max_period": 500.5}, "a whole number for max_period; the model has 500.5"),
    ],
)
def test_what_unet_cu_cannot_be(tmp_path, options, words):
    run = checkpoint(tmp_path / "run", **options).parent.parent
    with pytest.raises(ConfigError, match=words):
        export({"ckpt": str(run), "format": "unet_cu", "out": str(tmp_path / "a.bin")})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["diffusers", "guided_diffusion", "torch_export"])
def test_a_full_disk_is_one_line(tmp_path, name):
    """A real refusal of the system in the middle of a file."""
    if name == "torch_export":
        path, run = tmp_path / "model.pt2", policy_checkpoint(tmp_path / "run").parent.parent
    else:
        options = {"max_period": 10000, "num_groups": 32}
        path, run = tmp_path / "a", checkpoint(tmp_path / "run", **options).parent.parent
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(ConfigError, match=rf"{path} cannot be written: .*File too large"):
            export({"ckpt": str(run), "format": name, "out": str(path)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.long
def test_a_fresh_network_is_compared_with_weights_that_tell(tmp_path, monkeypatch, capsys):
    """Its last layer is zero, and so is what any graph of it gives."""
    run = checkpoint(tmp_path / "run", (4, 8), fresh=True, **ONE_LEVEL).parent.parent
    out = tmp_path / "model.pt2"
    settings = {"ckpt": str(run), "format": "torch_export", "out": str(out)}
    traced, trace = [], torch.export.export
    monkeypatch.setattr(
        torch.export, "export", lambda *a, **k: traced.append(trace(*a, **k)) or traced[-1]
    )
    export(settings)
    assert "with weights drawn for" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.pt2"]
    x = torch.ones(1, 3, 4, 8)
    module = torch.export.load(out).module()
    assert not module(x, torch.zeros(1, dtype=torch.int64)).any()  # the network itself is written

    class Wrong:
        def module(self):
            return lambda x, *_: torch.zeros_like(x)

    monkeypatch.setattr(torch.export, "export", lambda *_, **__: traced[0])  # seconds less
    monkeypatch.setattr(torch.export, "load", lambda _: Wrong())
    with pytest.raises(RuntimeError, match="differs from the torch backend"):
        export(settings | {"out": str(tmp_path / "b.pt2")})
