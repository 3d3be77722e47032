"""Every command of README.md, CONTRIBUTING.md and docs/ is run, small and on a CPU where it can be.

What the documents call RUN, PHOTOS and so on are folders and files of these names. A command for
which `how` knows no way fails, so a new one brings its test along. What needs a GPU runs in
`make test-slow` where there is one.
"""

import importlib
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import diffusion
from diffusion.factory import build_model
from diffusion.runtime.backend import TORCH_FP32

from .diffusion.test_data_shards import tar
from .end_to_end.run import run
from .test_docs import DOCUMENTS, ROOT

STARTS = r"(?:python|torchrun|srun|make|pip|pytest|triton-diffusion) "

SMALL = ("device=cpu", "train.steps=1", "train.batch_size=4", "train.accumulate=1")
SMALL += ("train.sample_count=0", "train.tensorboard=false", "train.precision=fp32")
IMAGES = ("model.model_channels=8", "model.channel_mult=[1,2]", "model.num_res_blocks=1")
IMAGES += ("model.attention_resolutions=[]", "model.num_groups=4", "model.num_head_channels=8")
DRAWN = ("dataset.count=12", "dataset.size=16")
CHUNKS = ("model.down_dims=[16,32]", "model.diffusion_step_embed_dim=16")
ADM = ("model.model_channels=32", "model.channel_mult=[1]", "model.num_res_blocks=1")
ADM += ("model.attention_resolutions=[]", "model.num_head_channels=32")
TRAINED_AS = ("model=unet_tiny", *IMAGES, "model.num_classes=auto", "model.label_dropout=0.1")

CAPTIONED = ("dataset=array", "dataset.path=pictures.npy", "dataset.context=words.npz")

# what runs a command that is not run here, as FILE::FUNCTION
ELSEWHERE = {
    r"pip install \.$": "test_package.py::test_train_and_sample_outside_of_the_checkout",
    r"pip (un)?install.* triton(_kernels|-diffusion)$": "test_public.py::"
    "test_another_package_of_the_name_is_one_line",
    r"(python|torchrun .*) tools/evaluate.py": "diffusion/test_runs_evaluation.py::",
    r".* train.fid_images": "diffusion/test_runs_evaluation.py::test_beside_the_grids_of_a_run",
    r"python tools/report.py .* sort=": "diffusion/test_report.py::",
    r"python tools/average.py": "diffusion/test_averaging.py::",
    r"python tools/export.py .*onnx": "diffusion/test_export.py::",
    r"python tools/report.py .*sort=(fid|held_out)": "diffusion/test_report.py::",
    r".* train.fid_images=": "diffusion/test_runs_evaluation.py::",
    r".*latents": "diffusion/test_latents.py::",
    r"pip install transformers|python examples/encode_captions.py": "test_public.py::"
    "test_the_example_that_encodes_captions",
    r"python examples/captions.py": "test_public.py::test_the_example_with_captions",
    r"python tools/tune.py": "diffusion/test_tune.py::",
    r"python tools/benchmark.py": "diffusion/test_runs_benchmark.py::",
    r"python tools/rollout.py ckpt=latest.ckpt": "diffusion/test_diffusion_policy.py::",
    r".*(dataset=huggingface|src=hf:)": "diffusion/test_data_shards.py::test_hugging_face",
    r"python docs/make_api.py": "test_docs.py::"
    "test_the_page_of_the_interface_is_made_from_the_docstrings",
    r"python -m (diffusion|triton_kernels|tests)[\w.]+$": "test_docs.py::"
    "test_modules_that_are_run_exist",
    r"python -m tests.faults": "test_faults.py::",
    r"python -m tests.kernels.compile_only": "kernels/test_compile.py::",
    r"python -m tests.kernels.other_chip": "kernels/test_conv_pointer.py::test_every_tile",
    r"python -m benchmarks.ablate": "benchmarks/test_ablate.py::",
    r"python -m benchmarks.learning": "benchmarks/test_learning.py::",
    r"python -m benchmarks.count_house": "",  # needs a commit that a checkout may lack
    # what they read is the reader's
    r"python -m benchmarks.parity$": "benchmarks/test_parity.py::"
    "test_parity_writes_curves_and_a_picture",
    r"python -m benchmarks.calls": "benchmarks/test_calls.py::"
    "test_kernels_belong_to_the_call_that_launched_them",
    r"python -m benchmarks.fit_costs": "benchmarks/test_fit_costs.py::"
    "test_left_out_layers_are_chosen_for",
    r"python -m benchmarks.plots": "benchmarks/test_rows.py::"
    "test_the_page_of_the_ops_has_the_table_of_the_csv",
    r"pytest -m .gpu|make test": "",  # the suite itself
    r"torchrun --nnodes|srun": "end_to_end/test_restarts.py::",
}


def commands(path: Path) -> list[str]:
    """Of blocks, of indented lines, and of the text; without comments. A sentence's `...` or a
    format that stands for any make no command."""
    text = path.read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    fences = [block for language, block in blocks if language != "python"]
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = [line for block in fences for line in block.replace("\\\n", " ").splitlines()]
    found += re.findall(r"^ {4}(.*)$", rest, re.MULTILINE)
    found += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", rest)]
    found = [line.strip() for line in found if re.match(STARTS, line.strip())]
    found = [re.sub(r"\s+# .*", "", line) for line in found]
    form = re.compile(r" \.\.\.|FORMAT|=PATH")
    return [line for line in dict.fromkeys(found) if not form.search(line)]


ALL = [(path, command) for path in DOCUMENTS for command in commands(path)]


def how(command: str) -> str:
    """The way in which a command is tested; ValueError: there is none."""
    for pattern, test in ELSEWHERE.items():
        if re.match(pattern, command):
            file, _, function = test.partition("::")
            if file:
                assert f"def {function or 'test_'}" in (ROOT / "tests" / file).read_text(), test
            return "elsewhere"
    for pattern, way in (
        (r"make ", "make"),
        (r"pip install (-c constraints\.txt |torch==[\d.]+ )?-e '\.\[", "extra"),
        (r"(python|torchrun .*) -m benchmarks\.", "benchmark"),
        (r"python (train|sample|tools/(prepare|report|export|rollout|doctor))\.py", "script"),
        (r"torchrun --nproc-per-node=\d+ (train|sample|tools/\w+)\.py", "script"),
        (r"python -m (diffusion\.plan|triton_kernels\.explain)", "m"),
    ):
        if re.match(pattern, command):
            return way
    raise ValueError(f"no test runs `{command}`; give it a way in tests/test_commands.py")


@pytest.mark.parametrize(("path", "command"), ALL, ids=[f"{p.name}: {c}" for p, c in ALL])
def test_every_command_has_a_test(path, command):
    how(command)


def chosen(way: str, *, readme: bool | None = None) -> list[str]:
    """The commands that are tested so: all of them, those of README.md, or those that only the
    other pages have."""
    found = {command: path for path, command in reversed(ALL) if how_or_none(command) == way}
    return [c for c, path in found.items() if readme in (None, path.name == "README.md")]


def how_or_none(command: str) -> str | None:
    try:
        return how(command)
    except ValueError:
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """RUN, PHOTOS, DIRECTORY and the other names of the documents, as small as can be."""
    at = tmp_path_factory.mktemp("commands")
    for i in range(6):
        place = at / "PHOTOS" / ("cats" if i < 3 else "dogs")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 24, 3), 40 * i, np.uint8)).save(place / f"{i}.png")
    Image.fromarray(np.full((16, 16, 3), 90, np.uint8)).save(at / "PICTURE.png")
    Image.fromarray(np.eye(16, dtype=np.uint8) * 255).save(at / "HOLE.png")
    shutil.copytree(at / "PHOTOS", at / "SKETCHES")
    (at / "FOLDER").symlink_to(at / "PHOTOS" / "cats")
    (at / "examples").symlink_to(ROOT / "examples")
    settings = diffusion.preset(
        "model", "adm64", **{s.split("=")[0][6:]: eval(s.split("=")[1]) for s in ADM}
    )
    network = build_model(settings, TORCH_FP32, (64, 64), 3, True, torch.device("cpu"))
    torch.save(network.state_dict(), at / "model.pt")
    (at / "runs").mkdir()
    (at / "RUN").symlink_to(at / "runs" / "first")
    (at / "PAIRED").symlink_to(at / "runs" / "paired")
    np.save(at / "VECTORS.npy", np.linspace(-1, 1, 12).reshape(6, 2))
    (at / "WEATHER").symlink_to(at / "runs" / "weather")
    (at / "TOLD").symlink_to(at / "runs" / "told")
    (at / "CAPTIONED").symlink_to(at / "runs" / "captioned")
    (at / "OWN").symlink_to(at / "runs" / "own")
    (at / "SMALLER_OR_EARLIER").symlink_to(at / "runs" / "first")
    for command in (
        ("train.py", *SMALL, *DRAWN, *TRAINED_AS, "run_dir=runs/first"),
        ("tools/prepare.py", "src=PHOTOS", "out=photos.packed", "size=16"),
        ("tools/export.py", "ckpt=RUN", "format=diffusers", "out=DIRECTORY"),
    ):
        code, _, err = run(*command, cwd=at)
        assert code == 0, err
    for name in ("one", "two"):
        shutil.copytree(at / "runs" / "first", at / "compared" / name)
    return at


@pytest.fixture(scope="module")
def whole_folder(folder) -> Path:
    """With a policy, its rollouts, and a run of a network of one's own."""
    episodes = np.random.default_rng(0).uniform(size=(4, 20, 5)).astype(np.float32)
    rollouts = {f"observation_{i}": episode[:, :3] for i, episode in enumerate(episodes)}
    rollouts |= {f"action_{i}": episode[:, 3:] for i, episode in enumerate(episodes)}
    np.savez(folder / "FILE.npz", **rollouts)
    fields = np.random.default_rng(0).normal(size=(6, 2, 16, 16)).astype(np.float32)
    np.savez(folder / "weather.npz", fields=fields)
    (folder / "SHARDS").mkdir()
    (folder / "SET").mkdir()
    photos = [path.read_bytes() for path in sorted((folder / "PHOTOS").rglob("*.png"))]
    files = [(f"{i}.png", photo) for i, photo in enumerate(photos)]
    files += [(f"{i}.cls", str(i // 3).encode()) for i in range(len(photos))]
    tar(folder / "SHARDS" / "a.tar", sorted(files))
    columns = {"image": photos, "label": [i // 3 for i in range(len(photos))]}
    parquet.write_table(pyarrow.table(columns), folder / "SET" / "a.parquet")
    pairs = ("dataset=pairs", "dataset.path=PHOTOS", "dataset.condition=SKETCHES")
    pairs += ("dataset.size=16",)
    told = ("dataset=folder", "dataset.path=PHOTOS", "dataset.size=16")
    told += ("dataset.vectors=VECTORS.npy",)
    code, _, err = run("examples/captions.py", "6", cwd=folder)
    assert code == 0, err
    captioned = (*CAPTIONED, *TRAINED_AS[:-2], "model.condition_dropout=0.1")
    measured = ("dataset=array", "dataset.path=weather.npz", *TRAINED_AS[:-2])
    own = ("--config-dir", "examples/configs", "plugin=examples/own_model.py", "model=conv_stack")
    for command in (
        (*SMALL, "dataset=push_disc", "dataset.episodes=4", *CHUNKS, "run_dir=runs/push_disc"),
        (*SMALL, *DRAWN, *own, "model.width=8", "run_dir=runs/own"),
        (*SMALL, *measured, "run_dir=runs/weather"),
        (*SMALL, *told, *TRAINED_AS[:-2], "run_dir=runs/told"),
        (*SMALL, *captioned, "run_dir=runs/captioned"),
        (*SMALL, *pairs, *TRAINED_AS, "model.condition_dropout=0.1", "run_dir=runs/paired"),
    ):
        code, _, err = run("train.py", *command, cwd=folder)
        assert code == 0, err
    return folder


def small(script: str, words: list[str]) -> list[str]:
    """What makes a command quick, behind its own settings."""
    given = dict(word.partition("=")[::2] for word in words)
    if "--help" in words:
        return []
    if script == "sample.py":
        more = ["n=2", "device=cpu"] + ["steps=2"]
        return more + [*ADM, "out=guided.png"] if "model" in given else more
    if script == "tools/rollout.py":
        return ["n=2", "max_steps=3", "device=cpu", "latency_calls=1"]
    if script == "tools/doctor.py":
        return ["step=false", "out=null"]
    if script != "train.py":
        return ["overwrite=true"] if script in ("tools/prepare.py", "tools/export.py") else []
    if given.get("dataset") in ("trajectories", "push_disc") or "experiment" in given:
        episodes = [] if "dataset.path" in given else ["dataset.episodes=4"]
        return [*SMALL, *episodes, *([] if "model.down_dims" in given else CHUNKS)]
    more = [*SMALL]
    if given.get("dataset", "elephants") in ("elephants", "rings"):
        more += DRAWN
    elif given["dataset"] in ("folder", "pairs"):
        more.append("dataset.size=16")
    if "train.init" in given:
        return [*more, "dataset.size=16", "model.num_classes=3", *TRAINED_AS[:-2], TRAINED_AS[-1]]
    if given.get("model") == "conv_stack":
        return [*more, "model.width=8"]
    return [*more, *IMAGES] if "model" in given else [*more, "model=unet_tiny", *IMAGES]


def check_script(command: str, folder: Path) -> None:
    words = shlex.split(command)
    if words[0] == "torchrun":  # in one process here; two are in end_to_end/test_distributed.py
        from torch.distributed.run import parse_args

        assert parse_args([*words[1:]]).training_script.endswith(".py")
        words = ["python", *words[2:]]
    script, settings = words[1], words[2:]
    if script == "train.py" and not any(w.startswith("run_dir=") for w in settings):
        settings.append(f"run_dir={abs(hash(command))}")
    if "plugin=examples/own_model.py" in settings:
        settings = [word.replace("ckpt=RUN", "ckpt=OWN") for word in settings]
    if "hydra/sweeper=optuna" in settings:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
        settings = [word.replace("n_trials=50", "n_trials=1") for word in settings]
        settings = [word.replace("run_dir=SWEEP", "run_dir=SEARCH") for word in settings]
    if script in ("train.py", "tools/rollout.py") and "run_dir=runs/push_disc" in settings:
        settings = [word.replace("runs/push_disc", "runs/pushed") for word in settings]
    if script == "train.py" and "run_dir=runs/first" in settings and len(settings) > 1:
        settings = [word.replace("runs/first", "runs/one") for word in settings]
    if script == "tools/report.py":
        settings = ["runs=compared" if word.startswith("runs=") else word for word in settings]
    kept = {word.partition("=")[0] for word in settings} <= {"run_dir", "train.steps"}
    if not kept:
        settings = [word.replace("run_dir=RUN", "run_dir=another") for word in settings]
    if kept and {"run_dir=runs/first", "run_dir=RUN"} & set(settings):  # goes on, by a step
        done = max((folder / "RUN" / "checkpoints").iterdir()).name
        settings.append(f"train.steps={int(done[-8:]) + 1}")
        code, _, err = run(script, *settings, cwd=folder)
    else:
        code, _, err = run(script, *settings, *small(script, settings), cwd=folder)
    assert code == 0, err


@pytest.mark.parametrize("command", chosen("script", readme=True))
def test_scripts_of_the_readme_run(command, folder):
    check_script(command, folder)


@pytest.mark.parametrize("command", chosen("script", readme=False))
def test_scripts_of_the_documents_run(command, whole_folder):
    check_script(command, whole_folder)


@pytest.mark.parametrize("command", chosen("make"))
def test_targets_of_make_exist(command):
    done = subprocess.run(
        [*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", chosen("extra"))
def test_extras_exist(command):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (named,) = re.findall(r"\[([\w,]+)\]", command)
    assert set(named.split(",")) <= set(extras["optional-dependencies"])


@pytest.mark.parametrize("command", chosen("m"))
def test_what_prints_without_a_gpu_runs(command, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    _, _, module, *words = shlex.split(command)
    words = [word.replace("=examples/", f"={ROOT}/examples/") for word in words]
    code, out, err = run("-m", module, *words, cwd=tmp_path)
    assert code == 0 and out, err


def settings_of(command: str) -> tuple[str, list[str]]:
    words = shlex.split(command)
    at = words.index("-m")
    return words[at + 1], words[at + 2 :]


BENCHMARKS = chosen("benchmark")


@pytest.mark.parametrize("command", BENCHMARKS)
def test_settings_of_benchmarks_exist(command):
    """What a GPU would then run for minutes."""
    module, words = settings_of(command)
    defaults = getattr(importlib.import_module(module), "DEFAULTS", None)
    if defaults is not None:
        assert {word.partition("=")[0] for word in words} <= set(defaults)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("command", BENCHMARKS)
def test_benchmarks_run(command, tmp_path):
    words = shlex.split(command)
    if words[0] == "torchrun" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    module, given = settings_of(command)
    if "out" in getattr(importlib.import_module(module), "DEFAULTS", ()):
        if not any(word.startswith("out=") for word in given):
            # a folder or a file, which is made; the rows of the checkout stay as they are
            words.append(f"out={tmp_path / 'out'}")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
