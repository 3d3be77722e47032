"""What a run refuses, when it refuses it, and what is left of it then."""

import dataclasses
import errno
import io
import threading
import warnings

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from diffusion.errors import ConfigError
from diffusion.export.run import export
from diffusion.formats.checkpoint_folder import latest_checkpoint
from diffusion.runs import training
from diffusion.runs.sampling import sample
from diffusion.runs.training import train
from diffusion.runs.training_checks import write_config
from diffusion.tracking import run_log
from diffusion.training import image_task

from ..end_to_end.run import TINY
from ..test_configs import composed

NO_DATASET = tuple(o for o in TINY if not o.startswith(("dataset.", "experiment")))
NO_DATASET += ("model.num_groups=8", "train.precision=fp32")


def run(run_dir, *overrides):
    """One step, in this process."""
    train(composed("train.steps=1", *overrides), run_dir)
    return latest_checkpoint(run_dir / "checkpoints")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.num_groups=24", "num_groups=24 does not divide"),
        ("model.num_head_channels=24", "num_head_channels=24 does not divide"),
        ("model.num_classes=2", "has 3 classes"),
        ("model.channel_mult=[1,b]", "expected a list of numbers"),
        ("model.max_period=0", "max_period=0"),
        ("dataset.size=9", "multiples of 2"),
        ("dataset.size=[8,9]", "multiples of 2"),
        ("dataset.channels=2", "choose 1 or 3"),
        ("dataset.count=many", "dataset.count=many is wrong; expected a whole number"),
        ("dataset.flip=maybe", "dataset.flip=maybe is wrong; expected true or false"),
        ("optim.betas=0.9", "expected a list of 2 numbers"),
        ("train=5", "it is a group of settings"),
        ("~dataset.name", "dataset.name=null is wrong"),
        ("model.name=[unet]", "model.name=['unet'] is wrong; expected text"),
        ("train.steps=1e300", "train.steps=1e+300 is wrong; expected a whole number"),
        ("~train", "train is missing"),
        ("train.batch_size=6", None),  # is fine: shows that the test would notice
    ],
)
def test_settings_are_checked_before_a_picture_is_drawn(tmp_path, monkeypatch, override, words):
    class DataWanted(Exception):
        pass

    def load(**_options):
        raise DataWanted

    monkeypatch.setattr(image_task, "load_dataset", load)
    if words is None:
        with pytest.raises(DataWanted):
            run(tmp_path / "run", *TINY, override)
    else:
        with pytest.raises(ConfigError) as caught:
            run(tmp_path / "run", *TINY, override)
        assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_class_folders_are_counted_before_an_image_is_decoded(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(b"not decoded")
    options = (*NO_DATASET, "dataset=folder", f"dataset.path={tmp_path}", "model.num_classes=2")
    with pytest.raises(ConfigError, match="model.num_classes=2, but data set folder has 3 classes"):
        run(tmp_path / "run", *options)
    with pytest.raises(ConfigError, match="has no labels"):
        run(tmp_path / "run", *options, "dataset.classes=false")


def test_where_no_kernel_is_right_the_network_is_built_again(tmp_path, monkeypatch):
    """The same run as with backend=torch: kernels are tried when there is a network already."""
    expected = train(composed("train.steps=1", *TINY, "backend=torch"), tmp_path / "torch")
    right = training.untried_backend
    wanted = []

    def untried(name, precision, device):
        found = right(name, precision, device)
        return dataclasses.replace(found, name="triton")  # its ops are torch's

    def none(backend, device, required):
        wanted.append((backend.name, required))
        return dataclasses.replace(backend, name="torch")

    monkeypatch.setattr(training, "untried_backend", untried)
    monkeypatch.setattr(training, "tried", none)
    found = train(composed("train.steps=1", *TINY, "backend=auto"), tmp_path / "auto")
    assert found == expected and wanted == [("triton", False)]
    assert "backend torch" in (tmp_path / "auto/train.log").read_text()


def test_weights_of_the_loss(tmp_path):
    """min_snr_gamma and the ends of the betas reach the loss."""
    losses = [
        train(composed("train.steps=1", *TINY, *given), tmp_path / str(i))
        for i, given in enumerate(
            (
                ("diffusion=linear",),
                ("diffusion=linear", "diffusion.min_snr_gamma=1"),
                ("diffusion=linear", "diffusion.beta_end=0.03"),
            )
        )
    ]
    assert len(set(losses)) == 3
    assert losses[1] < losses[0]  # the predicted velocity's weight is min(SNR, 1) / (SNR + 1)


@pytest.mark.parametrize(
    "given, words",
    [
        (("diffusion.min_snr_gamma=0",), "min_snr_gamma=0; expected a number above 0"),
        (
            ("diffusion=linear", "diffusion.beta_end=2"),
            "diffusion.beta_end=2 is impossible; expected a number between",
        ),
        (
            ("diffusion=linear", "diffusion.num_timesteps=10"),
            "diffusion.num_timesteps=10 is too small",
        ),
    ],
)
def test_impossible_processes(tmp_path, given, words):
    with pytest.raises(ConfigError, match=words):
        train(composed("train.steps=1", *TINY, *given), tmp_path / "run")


def test_no_pictures_on_the_way(tmp_path):
    folder = tmp_path / "cost in $x_{"  # no formula
    assert run(folder, *TINY, "train.sample_every=1", "train.sample_count=0")
    assert not (folder / "samples").exists() and (folder / "loss.png").is_file()


@pytest.mark.parametrize(
    "tail", ["2,8,0.6", "2,", "x,y\n", "\n\n"], ids=["whole", "half a row", "no number", "empty"]
)
def test_a_table_that_a_failure_has_left_is_continued(tmp_path, tail):
    fields = ("step", "loss", "lr")
    (tmp_path / "metrics.csv").write_text("step,loss,lr\n1,0.5,1e-3\n" + tail)
    table = run_log._Table(tmp_path / "metrics.csv", fields, step=5)
    table.append({"step": 6, "loss": 0.25, "lr": 1e-3})
    table.close()
    rows = (tmp_path / "metrics.csv").read_text().split()
    whole = [tail] if tail.count(",") == 2 else []
    assert rows == ["step,loss,lr", "1,0.5,1e-3", *whole, "6,0.25,0.001"]


def test_a_table_of_something_else_is_begun_anew(tmp_path):
    (tmp_path / "metrics.csv").write_text("a,b\n1,2\n")
    run_log._Table(tmp_path / "metrics.csv", ("step", "loss"), step=5).close()
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,loss"]


def test_run_dir_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("precious")
    for run_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="file is a file; give a folder"):
            run(run_dir, *TINY)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    ("mode", "channels"), [("RGBA", 3), ("RGBA", 4), ("P", 3), ("L", 1), ("LA", 3)]
)
def test_folder_of_any_mode(tmp_path, mode, channels):
    """Trained on and sampled from, not square."""
    (tmp_path / "images").mkdir()
    generator = np.random.default_rng(0)
    for i in range(5):
        image = Image.fromarray(generator.integers(0, 256, (11, 13, 4), dtype=np.uint8))
        image.convert("RGB" if mode == "P" else mode).convert(mode).save(
            tmp_path / "images" / f"{i}.png"
        )
    options = ("dataset=folder", f"dataset.path={tmp_path}/images", "dataset.size=[8,12]")
    checkpoint = run(tmp_path / "run", *NO_DATASET, *options, f"dataset.channels={channels}")
    out = sample({"ckpt": str(checkpoint), "n": 2, "steps": 1, "out": str(tmp_path / "a.npz")})
    assert np.load(out)["arr_0"].shape == (2, 8, 12, channels)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "classes", "channels"),
    [("mnist", 10, 1), ("fashion_mnist", 10, 1), ("cifar10", 10, 3)],
)
def test_real_sets_by_class(tmp_path, real_data, name, classes, channels):
    if not (real_data / name).is_dir():
        pytest.skip(f"no {name} among the real data")
    options = (f"dataset={name}", f"dataset.path={real_data / name}", "model.num_classes=10")
    checkpoint = run(tmp_path / "run", *NO_DATASET, *options)
    label = {"mnist": 7, "fashion_mnist": "ankle_boot", "cifar10": "cat"}[name]
    settings = {"ckpt": str(checkpoint), "n": 2, "steps": 1, "out": str(tmp_path / "a.npz")}
    out = sample(settings | {"label": label})
    assert np.load(out)["arr_0"].shape == (2, 32, 32, channels)
    with pytest.raises(ConfigError, match="label=nothing is unknown; the model has 10 classes"):
        sample(settings | {"label": "nothing"})


@pytest.mark.parametrize("where", ["config.yaml", "metrics.csv", "row"])
def test_disk_full_is_one_line_and_loses_nothing(tmp_path, monkeypatch, where):
    """On a resume config.yaml and metrics.csv are written anew, and a row is appended."""
    run(tmp_path / "run", *TINY)
    before = {
        name: (tmp_path / "run" / name).read_text() for name in ("config.yaml", "metrics.csv")
    }

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(path, mode="r", **options):
        partial = mode == "w" and where in path.name
        row = mode == "a" and where == "row"
        return Full() if partial or row else open(path, mode, **options)

    monkeypatch.setattr(run_log, "open", opened, raising=False)
    with pytest.raises(ConfigError, match="run cannot be written: No space left on device"):
        train(composed("train.steps=2", *TINY, "optim.lr=1e-5"), tmp_path / "run")
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step_00000001"
    assert (tmp_path / "run" / "metrics.csv").read_text() == before["metrics.csv"]
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (kept == yaml.safe_load(before["config.yaml"])) == (where == "config.yaml")
    assert not list((tmp_path / "run").glob(".writing*"))


def test_resume_from_the_path_of_another_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "threads_chosen", lambda: None)  # what it says on a busy machine
    first = run(tmp_path / "a", *TINY)
    before = sorted(path.name for path in (tmp_path / "a").rglob("*"))
    resumed = composed("train.steps=2", *TINY, f"train.resume={tmp_path / 'a'}")
    train(resumed | {"dataset": resumed["dataset"] | {"flip": False}}, tmp_path / "b")
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")]
    assert sorted(notes) == ["note: dataset.flip: true -> false", "note: train.steps: 1 -> 2"]
    assert latest_checkpoint(tmp_path / "b" / "checkpoints").name == "step_00000002"
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == before
    with pytest.raises(ConfigError, match="model.num_classes is null there, 3 here"):
        train(resumed | {"model": resumed["model"] | {"num_classes": 3}}, tmp_path / "c")
    (first / "ema.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match="ema.safetensors cannot be read, it may be truncated"):
        train(resumed, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def weights_of(checkpoint, kind="model"):
    return load_file(checkpoint / f"{kind}.safetensors")


@pytest.mark.parametrize("kind", ["run", "file", "diffusers"])
def test_begin_with_the_weights_of(kind, tmp_path):
    """The averaged ones, at step 0; and a run that goes on later does not ask for them again."""
    checkpoint = run(tmp_path / "a", *TINY, "optim.lr=1e-2")
    expected = weights_of(checkpoint, "ema")
    source = {"run": tmp_path / "a", "file": checkpoint / "ema.safetensors"}.get(kind)
    if source is None:
        source = tmp_path / "theirs"
        export({"ckpt": str(tmp_path / "a"), "format": "diffusers", "out": str(source)})
    source = source.rename(tmp_path / f"source{source.suffix}")
    tuned = (*TINY, "optim.lr=1e-30", f"train.init={source}")
    found = weights_of(run(tmp_path / "b", *tuned))
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-25)
    source.rename(tmp_path / "elsewhere")
    train(composed("train.steps=2", *tuned), tmp_path / "b")
    assert latest_checkpoint(tmp_path / "b" / "checkpoints").name == "step_00000002"


def test_begin_with_a_directory_that_says_the_network_in_other_words(tmp_path):
    """diffusers has no period but a shift."""
    model = ("model.max_period=1000", "model.num_groups=4", "+model.norm_eps=1e-6")
    run(tmp_path / "a", *TINY, *model)
    source = tmp_path / "theirs"
    export({"ckpt": str(tmp_path / "a"), "format": "diffusers", "out": str(source)})
    run(tmp_path / "b", *TINY, *model, f"train.init={source}")
    for others, words in (
        ((*model, "model.max_period=5"), "with max_period=10000; the model has 5"),
        (model[:2], r"norm_eps=1e-06; the model has 1e-05: give \+model.norm_eps=1e-06"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(tmp_path / "c", *TINY, *others, f"train.init={source}")


def test_averages_of_several_lengths(tmp_path):
    """They go on where a run does, and one of them can be drawn with."""
    averages = (*TINY, "optim.more_ema=[0.9,0.5]", "optim.lr=1e-2")
    train(composed("train.steps=3", *averages, "train.deterministic=true"), tmp_path / "a")
    assert not torch.are_deterministic_algorithms_enabled()  # for the next job of a sweep
    run(tmp_path / "b", *averages)
    train(composed("train.steps=3", *averages), tmp_path / "b")
    for kind in ("ema_0.9", "ema_0.5", "ema"):
        one, two = (
            weights_of(latest_checkpoint(tmp_path / name / "checkpoints"), kind) for name in "ab"
        )
        assert all((one[name] == two[name]).all() for name in one), kind
    settings = {"ckpt": str(tmp_path / "a"), "n": 1, "steps": 1, "device": "cpu"}
    assert sample(settings | {"ema": 0.5}).name == "sample_step_00000003_ema0.5_ddim1_0.png"
    with pytest.raises(ConfigError, match="has no average of decay 0.7"):
        sample(settings | {"ema": 0.7})
    with pytest.raises(ConfigError, match="decay 0.2; .* 0.5, 0.9; optim.more_ema cannot grow"):
        train(composed("train.steps=4", *averages, "optim.more_ema=[0.2]"), tmp_path / "a")


def test_what_cannot_be_begun_with(tmp_path):
    run(tmp_path / "a", *TINY)
    init = f"train.init={tmp_path / 'a'}"
    for overrides, words in (
        ((f"train.init={tmp_path}/no",), "no does not exist"),
        ((init, f"train.resume={tmp_path / 'a'}", "train.steps=2"), "both set the initial state"),
        (
            (init, "model.channel_mult=[1,1]"),
            r"model.channel_mult is \[1, 2\] there, \[1, 1\] here",
        ),
        ((init, "model.num_classes=3"), "model.num_classes is null there, 3 here"),
        ((init, "+model.stem_channels=16"), r"\(16, 3, 3, 3\) in the configured model$"),
        # parameters of the same shapes, which would compute something else
        ((init, "model.num_groups=4"), "trained with num_groups=8; the model has 4"),
        ((init, "model.max_period=1000"), "trained with max_period=10000; the model has 1000"),
        ((init, "model.num_head_channels=4"), "heads in .*; the model has"),
        (
            (init, "model.num_head_channels=4", "model.use_new_attention_order=false"),
            "trained with use_new_attention_order=true; the model has false",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            run(tmp_path / "b", *TINY, *overrides)
        assert not (tmp_path / "b").exists()


def test_classes_that_are_not_learned_are_said(tmp_path, capsys):
    """And `auto` learns them; a folder without any has none."""
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (8, 8)).save(tmp_path / "images" / name / f"{i}.png")
    options = (*NO_DATASET, "dataset=folder", f"dataset.path={tmp_path}/images", "dataset.size=8")
    run(tmp_path / "a", *options)
    assert (
        "note: model.num_classes=auto learns 2 classes, which are not learned now: a, b"
        in capsys.readouterr().out
    )
    run(tmp_path / "b", *options, "model.num_classes=auto")
    assert "not learned now" not in capsys.readouterr().out
    told = yaml.safe_load((tmp_path / "b" / "config.yaml").read_text())
    assert told["model"]["num_classes"] == 2
    run(tmp_path / "c", *options, "model.num_classes=auto", f"dataset.path={tmp_path}/images/a")
    assert "note: model.num_classes=auto finds no labels" in capsys.readouterr().out
    told = yaml.safe_load((tmp_path / "c" / "config.yaml").read_text())
    assert told["model"]["num_classes"] is None


def test_a_warning_about_the_network_is_given_once(tmp_path, recwarn):
    """Though it is built before that, too, to be checked and to be counted."""
    warnings.simplefilter("always")
    run(tmp_path, *TINY, "model.attention_resolutions=[2,4]")
    assert sum("attention_resolutions has 4" in str(warning.message) for warning in recwarn) == 1


def test_settings_that_did_not_change_are_not_kept_twice(tmp_path):
    """A run that goes on has its groups in another order."""
    path, settings = tmp_path / "config.yaml", {"a": {"x": 1, "y": 1e-5}, "b": {"z": None}}
    write_config(path, settings, 0)
    before = path.read_text()
    write_config(path, {"b": {"z": None}, "a": {"y": 1e-5, "x": 1}}, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"] and path.read_text() == before
    write_config(path, settings | {"b": {"z": 1}}, 5)
    assert (tmp_path / "config_until_step_00000005.yaml").read_text() == before
    path.write_text("a: [")
    write_config(path, settings, 7)
    assert (tmp_path / "config_until_step_00000007.yaml").read_text() == "a: ["
    assert path.read_text() == before


@pytest.mark.parametrize("before", [True, False])
def test_tf32_is_behind_a_run_as_it_was(tmp_path, monkeypatch, before):
    was, matmul = torch.backends.cuda.matmul.allow_tf32, torch.backends.cuda.matmul
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    matmul.allow_tf32 = before
    try:
        run(tmp_path / "a", *TINY, f"train.precision={'fp32' if before else 'tf32'}")
        assert (matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (before, before)
    finally:
        matmul.allow_tf32 = was


def test_tensorboard_is_not_imported_before_there_is_something_to_write(tmp_path, monkeypatch):
    """It takes half a second, and the first step comes before the first row."""
    log = run_log.RunLog(tmp_path, 0, 0)
    assert not (tmp_path / "tensorboard").exists()
    log.row(dict.fromkeys(run_log.FIELDS, 1))
    assert list((tmp_path / "tensorboard").iterdir())
    log.close()
    run_log.RunLog(tmp_path, 1, 1).close()  # nor to be closed
    monkeypatch.setattr(run_log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="tensorboard is not installed; .*tensorboard=false"):
        run_log.RunLog(tmp_path, 1, 1)
    run_log.RunLog(tmp_path, 1, 1, tensorboard=False).close()


def test_a_full_disk_under_tensorboard_is_one_line(tmp_path, capsys, recwarn):
    """Its thread would print a traceback of its own."""
    log = run_log.RunLog(tmp_path, 0, 0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (writer,) = log._board.all_writers.values()
    events = writer.event_writer._async_writer
    events._worker._record_writer.write = full
    events._worker._record_writer.flush = full
    values = dict.fromkeys(run_log.FIELDS, 1)
    with pytest.raises(OSError):
        for _ in range(100):
            log.row(values)
            log._board.flush()
    events._worker.join(timeout=60)
    assert not events._worker.is_alive()
    assert "Traceback" not in capsys.readouterr().err
    assert [str(w.message) for w in recwarn if "TensorBoard's events" in str(w.message)]
    threading.excepthook = log._hook
