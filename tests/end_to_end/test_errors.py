"""What a user can get wrong: one clear line, exit code 2, nothing lost or overwritten."""

import pytest

from triton_diffusion.naming import as_given

from .run import TINY, run


def fails(*command: str, cwd=None) -> str:
    """The one line that the command printed."""
    code, _, err = run(*command, cwd=cwd)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2, err
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lrr=1", "did you mean optim.lr?"),
        ("optim.learning_rate=1", "did you mean optim.lr?"),
        ("+model.chanel_mult=[1]", "did you mean model.channel_mult?"),
        ("dataset=elephnts", "did you mean elephants?"),
        ("dataset=null", "dataset"),
        ("dataset=/my/photos", "give dataset=folder dataset.path=/my/photos; valid: array, cifar"),
        ("dataset=docs", "dataset=docs is unknown; for images there give dataset=folder datas"),
        ("model=a/b", "model=a/b is unknown; valid: adm64"),
        ("model=unet46", "did you mean unet64?"),
        ("train.steps=0", "train.steps=0"),
        ("train.precision=fp8", "choose one of bf16, tf32, fp32"),
        ("optim.lr=fast", "optim.lr=fast"),
        ("backend=cuda", "choose one of auto, triton, torch"),
        ("backend=triton", "needs a CUDA device"),
        ("dataset.size=9", "image_size=(9, 9) does not suit 2 levels; height"),
        ("model.num_groups=24", "24"),
        ("model.num_classes=2", "has 3 classes"),
        ("train.resume=nowhere", "train.resume=nowhere does not exist; expected a run's folder"),
        ("dataset.channels=-1", "dataset.channels=-1; expected a whole number, at least 1"),
        ("dataset.flip=0", "dataset.flip=0 is wrong; expected true or false"),
        ("dataset.channels=true", "dataset.channels=true is wrong; expected a whole number"),
        ("dataset.vectors=true", "dataset.vectors=true is wrong; expected text or null"),
        ("dataset.vectors=nowhere.npy", "dataset.vectors=nowhere.npy does not exist"),
        ("train.fid_metrics=[1]", "train.fid_metrics has 1; choose from fid, kid"),
        ("train.fid_metrics=[]", "train.fid_metrics=[] is empty; choose from fid, kid"),
        ("model=[1]", "model=[1] is unknown; valid: adm64"),
        ("diffusion.variance=learned", "learned_range"),
        ("dataset=trajectories", "dataset.count is unknown; dataset=elephants has it; valid: "),
        ("dataset.path=a", "dataset=fashion_mnist, dataset=folder, "),
        ("model.dropout=1.5", "model.dropout=1.5; expected a number from 0 to below 1"),
        ("--batch-size", "settings are given as KEY=VALUE, here train.batch_size=VALUE"),
        ("--steps=3", "here train.steps=3"),
        ("dataset.path=/my(1)", """goes into quotes: "dataset.path='/my(1)'\""""),
        ("dataset.path=a,b", "for a list give dataset.path=[a,b]"),
        ("dataset", "dataset is no setting; expected KEY=VALUE"),
        ("run_dir=", "run_dir= is wrong; expected text or null"),
        ("run_dir=[a]", "run_dir=['a'] is wrong; expected text or null"),
        ("hydra/launcher=no_such", "pip install 'triton-diffusion[sweep]' brings"),
    ],
)
def test_wrong_setting(tmp_path, override, expected):
    command = (*TINY, f"run_dir={tmp_path}/run", "train.steps=1", override)
    assert expected in fails("train.py", *command)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("train.precision=fp8 is unknown", "precision=fp8 is unknown"),
        ("give dataset.size=null, not train.steps", "give size=null, not train.steps"),
        ("model.size=1 is wrong", "model.size=1 is wrong"),  # a group that is here
        ("a.b holds no checkpoint", "ckpt=a.b holds no checkpoint"),
        ("a.b/c holds no checkpoint", "a.b/c holds no checkpoint"),
        ("here does not exist", "here does not exist"),  # which of the two?
        ("ckpt=a.b is wrong", "ckpt=a.b is wrong"),
        ("precision of a.b", "precision of a.b"),
    ],
)
def test_settings_are_named_as_the_user_has_them(message, expected):
    """`tools/tune.py precision=fp8` has no group `train`."""
    settings = {"ckpt": "a.b", "precision": "fp8", "size": 3, "model": {"size": 1}}
    settings |= {"init": "here", "mask": "here", "sampler": "precision"}
    assert as_given(message, settings) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("dataset=folder",), "dataset.path"),
        (("dataset=folder", "dataset.channels=-1"), "dataset.channels=-1; expected a whole"),
        (("dataset=folder", "dataset.path=nowhere"), "nowhere"),
        (("dataset=packed", "dataset.path=nowhere.packed"), "nowhere.packed"),
        (("dataset=mnist", "dataset.path=nowhere"), "nowhere"),
    ],
)
def test_wrong_data(tmp_path, overrides, expected):
    command = [o for o in TINY if not o.startswith(("dataset.", "experiment"))]
    line = fails("train.py", *command, f"run_dir={tmp_path}/run", *overrides)
    assert expected in line


def test_the_home_folder_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"{tmp_path}/nowhere" in fails("sample.py", "ckpt=~/nowhere")
    assert f"{tmp_path}/Jörg 2/象 does" in fails("sample.py", "ckpt=~/Jörg 2/象")


def test_sample_needs_a_checkpoint(tmp_path):
    assert "ckpt is not set" in fails("sample.py")
    assert "does not exist" in fails("sample.py", "ckpt=nowhere")
    line = fails("sample.py", f"ckpt={tmp_path}")
    assert "holds no checkpoint" in line and "or a directory of diffusers" in line
    (tmp_path / "config.yaml").write_text("model: unet")
    assert "is no weights file" in fails("sample.py", f"ckpt={tmp_path}/config.yaml")


def test_weights_are_not_resumed(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"")
    command = (*TINY, f"run_dir={tmp_path}/run", f"train.resume={tmp_path}/a.pt")
    assert fails("train.py", *command).endswith("a run's folder or RUN/checkpoints/step_NNNNNNNN")


def test_a_run_is_not_overwritten(tmp_path):
    command = (*TINY, f"run_dir={tmp_path}/run", "train.steps=1")
    code, _, err = run("train.py", *command)
    assert code == 0, err
    assert "already holds" in fails("train.py", *command, "train.resume=none")
    code, out, _ = run("train.py", *command)  # it is done, which is no error
    assert code == 0 and "done already, after 1 step, with a loss of" in out
    line = fails("train.py", *command, "optim.lr=1e-5")
    assert "already done 1 step, with optim.lr=0.002 and not 1e-05, and train.steps=1" in line
    other = (*command, "train.steps=2", "model.num_res_blocks=2")
    assert "model.num_res_blocks is 1 there, 2 here" in fails("train.py", *other)


def test_a_batch_larger_than_the_set_works_with_a_note(tmp_path):
    command = (*TINY, f"run_dir={tmp_path}/run", "train.steps=1", "train.batch_size=16")
    code, out, err = run("train.py", *command, "model.attention_resolutions=[2,3]")
    assert code == 0, err
    assert "larger than the data set of 12 images, so a batch" in out + err
    (line,) = err.splitlines()  # and a warning that is one, said once
    assert line.startswith("warning: attention_resolutions has 3")
