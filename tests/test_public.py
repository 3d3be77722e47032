"""The public names of `diffusion`, the examples, and what a clash of names says."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import diffusion
from diffusion import name_clash
from diffusion.data.array import load_context
from diffusion.errors import ConfigError
from diffusion.runtime import backend

from .end_to_end.run import TINY, environment, run

ROOT = Path(__file__).resolve().parents[1]
OWN = ("--config-dir", str(ROOT / "examples" / "configs"))
QUICK = TINY[1:2] + tuple(s for s in TINY if s.startswith(("train.", "optim.")))


def test_every_public_name_is_typed_and_says_what_it_is():
    for name in diffusion.__all__:
        function = getattr(diffusion, name)
        assert inspect.getdoc(function), name
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty, name
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, (name, parameter)


def test_import_does_not_take_pytorch_along():
    code = "import sys, diffusion; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), check=True, timeout=240
    )


def test_prepare_and_evaluate(tmp_path):
    """With the settings and the table of the scripts."""
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 256, (9, 8, 8, 3), np.uint8))
    diffusion.prepare(tmp_path / "a.npy", tmp_path / "a.packed", layout="nhwc")
    with pytest.raises(ConfigError, match="siz"):
        diffusion.prepare(tmp_path / "a.npy", tmp_path / "b.packed", siz=8)
    model = diffusion.preset("model", "unet_tiny", channel_mult=[1, 2], attention_resolutions=[])
    held_out = diffusion.train(
        tmp_path / "run",
        dataset={"name": "packed", "path": str(tmp_path / "a.packed"), "held_out": 3},
        model=model, device="cpu", steps=2, batch_size=3, sample_every=0, tensorboard=False,
        precision="fp32",
    )  # fmt: skip
    row = diffusion.evaluate(tmp_path / "run", device="cpu", precision="fp32")
    assert row["held_out"] == pytest.approx(held_out, rel=1e-5) and row["images"] == 3
    assert (tmp_path / "run" / "evaluations.csv").is_file()
    for settings, words in (
        ({"datset": "elephants"}, "^datset is unknown; did you mean dataset"),
        ({"stepps": 3}, "^stepps is unknown; did you mean steps"),
    ):
        with pytest.raises(ConfigError, match=words):
            diffusion.train(tmp_path / "other", **settings)
    with pytest.raises(ConfigError, match="^stepz is unknown; did you mean steps"):
        diffusion.sample(tmp_path / "run", stepz=3)
    with pytest.raises(ConfigError, match="metrics has nothing; choose from loss, fid"):
        diffusion.evaluate(tmp_path / "run", ["nothing"])


def test_train_load_and_sample(tmp_path):
    """And the settings are those of the command line."""
    data = {"name": "elephants", "size": 16, "count": 12}
    loss = diffusion.train(
        tmp_path / "run",
        dataset=data,
        model=diffusion.preset("model", "unet_tiny", num_classes="auto"),
        optim={"lr": 1e-4},
        device="cpu",
        steps=1,
        batch_size=4,
        sample_count=0,
        tensorboard=False,
        precision="fp32",
    )
    assert np.isfinite(loss)
    trained = diffusion.load(tmp_path / "run", device="cpu")
    assert trained.image_shape == (16, 16, 3)
    images = diffusion.sample(trained, n=3, steps=2, label=1)
    assert images.shape == (3, 16, 16, 3) and images.dtype == np.uint8
    again = diffusion.sample(tmp_path / "run", n=2, steps=2, label=1, device="cpu")
    assert np.array_equal(images[:2], again)
    code, out, err = run("train.py", f"run_dir={tmp_path}/run")  # goes on, or is done
    assert code == 0 and "done already" in out + err


def test_values_of_python_are_those_of_the_configuration(tmp_path):
    """Paths, tuples and NumPy's numbers, which the run's config.yaml cannot hold as they are; what
    is wrong is named before anything is drawn."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    small = {"device": "cpu", "sample_count": 0, "tensorboard": False, "precision": "fp32"}
    for rate in np.logspace(-4, -4, 1):
        loss = diffusion.train(
            tmp_path.parent / f"{tmp_path.name}_run",
            dataset={"name": "folder", "path": tmp_path, "size": (8, 8)},
            model=diffusion.preset("model", "unet_tiny", channel_mult=np.array([1, 2])),
            optim={"lr": rate},
            steps=np.int64(1),
            batch_size=np.int32(2),
            **small | {"device": torch.device("cpu")},
        )
    assert np.isfinite(loss)
    trained = diffusion.load(tmp_path.parent / f"{tmp_path.name}_run", device="cpu")
    assert len(diffusion.sample(trained, np.int64(2), steps=np.int64(1), seed=np.int64(1))) == 2
    assert len(diffusion.sample(trained, 1, steps=1, eta=np.float32(0.5))) == 1
    network = diffusion.build("unet_tiny", size=np.int64(16), num_classes=np.int64(3))
    assert network.num_classes == 3
    for n in (-1, 0, 2.5, "2", None):
        with pytest.raises(ConfigError, match="n=.*; expected a whole number, at least 1"):
            diffusion.sample(trained, n)
    with pytest.raises(ConfigError, match=r"mask=an array \[8, 8\] goes with init=IMAGE"):
        diffusion.sample(trained, 1, mask=np.ones((8, 8)))
    for group in ("dataset", "optim"):
        with pytest.raises(ConfigError, match=f"{group}=3 is wrong; expected a name or a dict"):
            diffusion.train(tmp_path / "none", **{group: 3}, **small)
    for key, value, kind in (
        ("sampler", None, "expected text"),
        ("seed", 1.5, "expected a whole number"),
        ("seed", 2**70, "expected a whole number"),
        ("guidance", "2", "expected a number"),
        ("guidance", np.nan, "expected a finite number"),
        ("guidance_interval", 3, "expected a list of 2 numbers or null"),
        ("strength", "0.5", "expected a number or null"),
        ("resample", 1.5, "expected a whole number"),
    ):
        with pytest.raises(ConfigError, match=f"^{key}=.* is wrong; {kind}"):
            diffusion.sample(trained, 1, **{key: value})
    with pytest.raises(ConfigError, match="^seed=-1; expected a whole number from 0 to"):
        diffusion.sample(trained, 1, seed=-1)
    with pytest.raises(ConfigError, match="^ckpt is of type UNet; expected a run or a checkpoint"):
        diffusion.sample(trained.model)
    for key in ("init", "guide", "decoder"):
        with pytest.raises(ConfigError, match=f"^{key}= is wrong; expected a file or a folder"):
            diffusion.sample(trained, 1, **{key: ""})
    with pytest.raises(ConfigError, match="models is no group; choose one of model, dataset, "):
        diffusion.preset("models", "unet_tiny")
    with pytest.raises(ConfigError, match="give reference="):  # and not "metrics has l"
        diffusion.evaluate(trained.run_dir, metrics="loss", device="cpu")


@pytest.mark.parametrize("empty", ["", None, 3])
def test_an_empty_name_is_not_the_current_folder(monkeypatch, tmp_path, empty):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="^run_dir=.* is wrong; expected a folder, such as runs/"):
        diffusion.train(empty, dataset="elephants", steps=1)
    with pytest.raises(ConfigError, match="^ckpt=.* is wrong; expected a run or a checkpoint"):
        diffusion.load(empty)
    assert not list(tmp_path.iterdir())


def test_what_goes_with_rollouts_is_taken_for_them(tmp_path):
    loss = diffusion.train(
        tmp_path / "run",
        dataset={"name": "push_disc", "episodes": 3},
        device="cpu",
        steps=1,
        batch_size=2,
        sample_count=0,
        tensorboard=False,
        precision="fp32",
    )
    assert np.isfinite(loss)
    with pytest.raises(ConfigError, match="is a policy"):
        diffusion.load(tmp_path / "run", device="cpu")


def test_weights_and_pictures_as_pytorch_and_pillow_have_them(tmp_path):
    """A state dict with the name of its network, a whole network that is pickled, and pictures and
    tensors in place of arrays."""
    network = diffusion.build("unet_tiny", size=8)
    with torch.no_grad():
        network.out["2"].weight.normal_()
    torch.save(network.state_dict(), tmp_path / "a.pt")
    origin = {"model": "unet_tiny", "diffusion": "linear", "size": 8, "device": "cpu"}
    trained = diffusion.load(tmp_path / "a.pt", **origin)
    torch.save(network, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    x, t = torch.randn(1, 3, 8, 8), torch.zeros(1)
    assert torch.equal(whole(x, t), network(x, t)) and torch.equal(trained.model(x, t), whole(x, t))
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    mask = np.eye(8, dtype=bool)
    expected = diffusion.sample(trained, 1, steps=2, init=image, mask=mask)
    assert np.array_equal(expected[0][~mask], image[~mask])
    for init, where in (
        (Image.fromarray(image), Image.fromarray(mask)),
        (torch.from_numpy(image), torch.from_numpy(mask)),
    ):
        drawn = diffusion.sample(trained, 1, steps=2, init=init, mask=where)
        assert np.array_equal(drawn, expected)


def test_a_path_in_place_of_a_name(tmp_path):
    with pytest.raises(ConfigError, match=f"give dataset=folder dataset.path={tmp_path}; choose "):
        diffusion.train(tmp_path / "run", dataset=f"{tmp_path}")
    with pytest.raises(ConfigError, match="^model=a/b is unknown; choose one of adm64"):
        diffusion.build("a/b")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dataset": {"path": "set"}}, r"dataset.name is not set; choose one of array, cifar10"),
        ({"model": {"name": "unet_tiny"}}, "a file of settings is model=unet_tiny, not model.name"),
        ({"diffusion": {"name": "flow"}}, "a file of settings is diffusion=NAME, and changes of"),
    ],
)
def test_a_file_of_settings_is_given_by_its_name(tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        diffusion.train(tmp_path / "run", **{"dataset": "elephants", "device": "cpu"} | settings)


def test_what_a_network_is_called_with():
    for model in (None, 3):
        with pytest.raises(ConfigError, match="^model=.* is wrong; expected a name or a dict"):
            diffusion.build(model)
    for channels in (0, "3", 1.5):
        with pytest.raises(ConfigError, match="^channels=.*; expected a whole number, at least 1"):
            diffusion.build("unet_tiny", size=8, channels=channels)
    network = diffusion.build("unet_tiny", size=8)
    with pytest.raises(ValueError, match=r"^t is 5; expected a tensor of shape \(2,\)"):
        network(torch.zeros(2, 3, 8, 8), 5)


def test_numbers_of_a_preset_are_numbers():
    assert diffusion.preset("optim", "adamw")["lr"] == 2e-4
    with pytest.raises(ConfigError, match="model=unet46 is unknown; choose one of adm64"):
        diffusion.preset("model", "unet46")


def test_a_network_that_moves_takes_the_backend_of_the_device(monkeypatch):
    """Here "meta" stands for a GPU."""
    network = diffusion.build("unet_tiny", size=8)
    assert {m.backend.name for m in network.modules() if hasattr(m, "backend")} == {"torch"}
    monkeypatch.setattr(backend, "on_gpu", lambda device: device.type == "meta")
    monkeypatch.setattr(backend, "settle_cache_keys", lambda: None)
    backend.following.cache_clear()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    moved = network.to("meta")
    backends = {m.backend for m in moved.modules() if hasattr(m, "backend")}
    assert {(b.name, b.precision) for b in backends} == {("triton", "bf16")}
    home = moved.to_empty(device="cpu")
    assert {m.backend.precision for m in home.modules() if hasattr(m, "backend")} == {"fp32"}
    backend.following.cache_clear()


def test_a_backend_that_was_asked_for_stays():
    from diffusion.factory import build_model
    from diffusion.runtime.backend import TORCH_FP32

    settings = diffusion.preset("model", "unet_tiny")
    network = build_model(settings, TORCH_FP32, (8, 8), 3, False, torch.device("cpu"))
    assert network.to("meta").backend is TORCH_FP32


@pytest.mark.gpu
def test_a_network_that_moves_to_a_gpu_computes_with_its_kernels():
    from torch.profiler import ProfilerActivity, profile

    network = diffusion.build("unet64", size=64, precision="tf32").eval()
    x, t = torch.randn(1, 3, 64, 64), torch.tensor([10])
    with torch.no_grad():
        expected = network(x, t)
        network = network.cuda()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            got = network(x.cuda(), t.cuda())
    launched = {event.key for event in profiled.key_averages()}
    assert any("conv" in name for name in launched), launched
    assert not any("cudnn" in name or "implicit_gemm" in name for name in launched), launched
    assert (got.cpu() - expected).norm() <= 2e-2 * expected.norm().clamp_min(1e-6)
    assert network.cpu().backend.name == "torch"


OTHER = '"""Kernels of another project."""\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OTHER, "is of another project; triton-diffusion needs"),
        (None, "not there, or incomplete"),
    ],
)
def test_another_package_of_the_name_is_one_line(tmp_path, text, words):
    """As it is after `pip install triton_kernels`, and after uninstalling that again."""
    (tmp_path / "triton_kernels").mkdir()
    if text is not None:
        (tmp_path / "triton_kernels" / "__init__.py").write_text(text)
    for name in ("diffusion", "triton_diffusion"):
        (tmp_path / name).symlink_to(ROOT / name)
    env = environment() | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "import diffusion"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and words in last and "pip uninstall triton_kernels" in last


def test_this_package_is_ours():
    name_clash.check_name()


def test_own_model_and_own_data(tmp_path):
    (tmp_path / "plugin.py").write_text("import own_model, own_data\n")
    env_free = [*QUICK, "train.steps=1", f"run_dir={tmp_path}/run", "dataset.size=8"]
    plugin = f"plugin={tmp_path}/plugin.py"
    for name in ("own_model", "own_data"):
        (tmp_path / f"{name}.py").symlink_to(ROOT / "examples" / f"{name}.py")
    chosen = ("model=conv_stack", "model.width=8", "model.depth=1", "dataset=rings")
    chosen += ("dataset.count=8", "train.precision=fp32")
    code, out, err = run("train.py", *OWN, plugin, *chosen, *env_free)
    assert code == 0 and "rings, 8 images 8x8x1" in out + err, err
    code, _, err = run("sample.py", f"ckpt={tmp_path}/run", "n=2", "steps=2", "device=cpu")
    assert code == 2 and "model.name=conv_stack is unknown" in err and "plugin=FILE" in err
    drawn = (f"ckpt={tmp_path}/run", "n=2", "steps=2", "device=cpu", f"out={tmp_path}/a.png")
    code, _, err = run("sample.py", *drawn, plugin)
    assert code == 0 and (tmp_path / "a.png").is_file(), err


def test_the_network_and_the_data_set_of_the_page(tmp_path):
    """docs/extending.md, word for word."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
    (plugin := tmp_path / "plugin.py").write_text("\n".join(b for b in blocks if "register_" in b))
    for group, text in (
        ("dataset/noise", "name: noise\nsize: 8\ncount: 8\n"),
        ("model/two_layers", "name: two_layers\nwidth: 8\n"),
    ):
        (file := tmp_path / f"{group}.yaml").parent.mkdir()
        file.write_text(text)
    own = ("--config-dir", str(tmp_path), f"plugin={plugin}", "model=two_layers", "dataset=noise")
    code, _, err = run("train.py", *own, *QUICK, "train.steps=2", f"run_dir={tmp_path}/run")
    assert code == 0, err


def test_a_plugin_that_fails_is_one_line(tmp_path):
    (tmp_path / "bad.py").write_text("raise KeyError('x')\n")
    for plugin, words in (
        (f"{tmp_path}/bad.py", "KeyError: 'x'"),
        (f"{tmp_path}/none.py", "does not exist"),
        ("no_such_module", "No module named"),
        ("3", "expected a .py file or a module"),
    ):
        code, _, err = run("train.py", f"plugin={plugin}", f"run_dir={tmp_path}/run")
        assert code == 2 and err.count("\n") == 1 and words in err, err


def test_names_are_taken_once():
    from diffusion.data import ImageSet

    with pytest.raises(ValueError, match="there is a model unet already"):
        diffusion.register_model("unet")(torch.nn.Module)
    with pytest.raises(
        ValueError, match="model mine has no forward_nhwc; it is a diffusion.models"
    ):
        diffusion.register_model("mine")(lambda image_size, in_channels, out_channels, backend: 0)
    with pytest.raises(ValueError, match="its constructor has no argument image_size, in_channels"):
        diffusion.register_model("mine")(lambda out_channels, backend: 0)

    class Mine:
        def __init__(self, image_size, in_channels, out_channels, backend): ...

        def forward_nhwc(self, x, t, labels): ...

    with pytest.raises(ValueError, match="model mine: its forward_nhwc has no argument rng, first"):
        diffusion.register_model("mine")(Mine)
    with pytest.raises(ValueError, match="there is a data set mnist already"):
        diffusion.register_dataset("mnist")(lambda size=1: ImageSet(torch.zeros(0)))
    with pytest.raises(ValueError, match="no argument size"):
        diffusion.register_dataset("mine")(lambda: None)


@pytest.mark.long
def test_the_example_with_captions(tmp_path):
    code, _, err = run("examples/captions.py", "8", cwd=tmp_path)
    assert code == 0, err
    chosen = ("dataset=array", f"dataset.path={tmp_path}/pictures.npy", "train.precision=fp32")
    chosen += (f"dataset.context={tmp_path}/words.npz", "model.condition_dropout=0.1")
    code, out, err = run("train.py", *QUICK, *chosen, "train.steps=1", f"run_dir={tmp_path}/run")
    assert code == 0 and "sequences of up to 6 tokens of 16 numbers" in out + err, err
    drawn = (f"ckpt={tmp_path}/run", "n=2", "steps=2", "device=cpu", f"out={tmp_path}/a.png")
    code, _, err = run("sample.py", *drawn, f"context={tmp_path}/told.npz", "guidance=2")
    assert code == 0 and (tmp_path / "a.png").is_file(), err


TRANSFORMERS = """
from types import SimpleNamespace
import torch

class Loaded:
    from_pretrained = classmethod(lambda cls, name: cls())

class AutoConfig(Loaded):
    model_type = "clip"

class Words(dict):
    def to(self, device):
        return self

class AutoTokenizer(Loaded):
    def __call__(self, texts, padding, truncation, max_length, return_tensors):
        ids = torch.zeros(len(texts), 5, dtype=torch.int64)
        for row, text in zip(ids, texts):
            words = [len(word) for word in text.split()][:5]
            row[: len(words)] = torch.tensor(words)
        return Words(input_ids=ids, attention_mask=(ids > 0).long())

class CLIPTextModel(torch.nn.Module, Loaded):
    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(last_hidden_state=input_ids[..., None].float() * torch.ones(3))
"""


@pytest.mark.long
def test_the_example_that_encodes_captions(tmp_path, monkeypatch):
    """With a stand-in for the package, whose vectors are the lengths of words."""
    (tmp_path / "transformers.py").write_text(TRANSFORMERS)
    (tmp_path / "captions.txt").write_text("a red disc\n\n" + "blue\n" * 70)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = ("examples/encode_captions.py", "captions.txt", "words.npz", "a/name")
    code, _, err = run(*command, cwd=tmp_path, fresh=True)  # Python reads its path at its start
    assert code == 0, err
    context = load_context(str(tmp_path / "words.npz"), 72)
    assert context.lengths[:3].tolist() == [3, 0, 1] and context.dtype == torch.float16
    tokens, _ = context[torch.tensor([0, 71])]
    assert tokens[..., 0].tolist() == [[1, 3, 4, 0, 0], [4, 0, 0, 0, 0]] and context.dim == 3


def test_the_example_in_python(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = run("examples/in_python.py", f"{tmp_path}/run", cwd=tmp_path)
    assert code == 0, err
    assert "4 images of (16, 16, 3)" in out and "(2, 3, 16, 16), by torch" in out


def test_the_reference_has_the_signatures_of_the_ops():
    import triton_kernels
    from triton_kernels import reference

    def signature(module, name):
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    for name in triton_kernels.__all__:
        if name != "GroupNorm":  # a module, over either
            assert signature(triton_kernels, name) == signature(reference, name), name


def blocks(page: str | Path) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


NOT_ALONE = {"docs/kernels.md", "docs/policies.md"}  # needs a GPU, below; parts of a program
PAGES = [path.relative_to(ROOT) for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", [str(p) for p in PAGES if blocks(p) and str(p) not in NOT_ALONE])
def test_samples_of_code_run(page, tmp_path, monkeypatch):
    """With a small network and few steps."""
    (tmp_path / "PHOTOS").mkdir()
    for i in range(4):
        Image.fromarray(np.full((20, 24, 3), 40 * i, np.uint8)).save(tmp_path / f"PHOTOS/{i}.png")
    monkeypatch.chdir(tmp_path)
    train, sample = diffusion.train, diffusion.sample
    quick = {"steps": 1, "batch_size": 2, "sample_count": 0, "tensorboard": False}
    quick |= {"model": diffusion.preset("model", "unet_tiny"), "precision": "fp32", "device": "cpu"}

    def small_train(run_dir, *, dataset, **given):
        size = {"size": 16} if dataset["name"] == "folder" else {}
        return train(run_dir, dataset=dataset | size, **(given | quick))

    monkeypatch.setattr(diffusion, "train", small_train)
    monkeypatch.setattr(diffusion, "sample", lambda source, n: sample(source, n, steps=2))
    for code in blocks(page):
        exec(compile(code, page, "exec"), {})


@pytest.mark.gpu
def test_the_sample_of_one_op_alone_runs():
    (code,) = (block for block in blocks("docs/kernels.md") if "import torch" in block)
    exec(compile(code, "docs/kernels.md", "exec"), {})
