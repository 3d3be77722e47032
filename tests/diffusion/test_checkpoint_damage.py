"""What is not as it was written is seen, named, and gone round."""

import json
import os
import random
import shutil

import pytest
import torch
import yaml

from diffusion.errors import ConfigError
from diffusion.formats import checkpoint as ckpt, checkpoint_folder
from diffusion.formats.checkpoint_folder import list_checkpoints
from diffusion.runs.sampling import sample
from diffusion.runs.training import train
from diffusion.tracking.run_log import read_rows

from ..end_to_end.run import TINY, rows
from ..test_configs import composed
from .test_checkpoint import flat_parameters, save

FOUR = (*TINY, "train.steps=4", "train.save_every=1", "train.keep=9", "train.sample_count=0")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run of four steps that keeps every checkpoint."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    train(composed(*FOUR), run_dir)
    return run_dir


@pytest.fixture
def trained(kept, tmp_path):
    shutil.copytree(kept, tmp_path / "run")
    return tmp_path / "run"


def at(run_dir, step):
    return run_dir / "checkpoints" / f"step_{step:08d}"


def go_on(run_dir, *overrides, steps=5):
    train(composed(*FOUR, f"train.steps={steps}", *overrides), run_dir)


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_the_sums_are_those_of_sha256sum(tmp_path):
    path = save(tmp_path, 1, flat_parameters())
    listed = (path / "SHA256SUMS").read_text().splitlines()
    files = {p.name for p in path.iterdir()} - {"SHA256SUMS"}
    assert {line.split("  ")[1] for line in listed[:-1]} == files and listed[-1].startswith("#")
    if shutil.which("sha256sum"):
        assert (
            os.waitstatus_to_exitcode(os.system(f"cd {path} && sha256sum -c --quiet SHA256SUMS"))
            == 0
        )


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json", "config.yaml"]
    + ["SHA256SUMS"],
)
def test_any_flipped_bit_is_seen_and_its_file_named(tmp_path, name):
    path = save(tmp_path, 1, flat_parameters())
    whole, size = (path / name).read_bytes(), (path / name).stat().st_size
    for bit in random.Random(0).sample(range(8 * size), 25):
        flip(path / name, bit)
        with pytest.raises(ConfigError, match=f"{path}/{name}"):
            ckpt.verify_checkpoint(path)
        (path / name).write_bytes(whole)
    ckpt.verify_checkpoint(path)


def test_who_reads_a_file_checks_it(tmp_path):
    path, flat = save(tmp_path, 1, flat_parameters()), flat_parameters(seed=1)
    before = flat.param.clone()
    for name in ("model", "ema", "optimizer"):
        file = path / f"{name}.safetensors"
        flip(file, 8 * file.stat().st_size - 3)  # of the last number
        with pytest.raises(ConfigError, match=f"{name}.safetensors is damaged"):
            ckpt.load_into(path, flat)
        assert torch.equal(flat.param, before)
        flip(file, 8 * file.stat().st_size - 3)
    ckpt.load_into(path, flat)


def test_files_in_others_places_are_seen(trained, tmp_path):
    last = at(trained, 4)
    (last / "model.safetensors").rename(tmp_path / "x")
    (last / "ema.safetensors").rename(last / "model.safetensors")
    (tmp_path / "x").rename(last / "ema.safetensors")
    with pytest.raises(ConfigError, match="step_00000004/.*.safetensors is damaged"):
        go_on(trained)
    shutil.copy(at(trained, 2) / "model.safetensors", at(trained, 3))
    with pytest.raises(ConfigError, match="step_00000003/model.safetensors is damaged"):
        go_on(trained, f"train.resume={at(trained, 3)}")
    settings = {"ckpt": str(trained), "n": 1, "steps": 1, "device": "cpu"}
    with pytest.raises(
        ConfigError, match="4/ema.safetensors is damaged.* good one is .*_00000002$"
    ):
        sample(settings)  # the one of step 3 is damaged, too
    with pytest.raises(ConfigError, match="of ema=true and those of|of ema=true$"):
        sample(settings | {"ckpt": str(at(trained, 2)), "ema": 0.5})  # is no damage


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.yaml", lambda text: text.replace("name: unet", "name: unit")),
        ("config.yaml", lambda text: text.replace("num_groups: 8", "num_groups: 4")),
        ("state.json", lambda text: text.replace('"step": 4', '"step": 2')),
        ("state.json", lambda text: text.replace('"seed": 0', '"seed": 1')),
        ("state.json", lambda text: text.replace('"dataset_size": 12', '"dataset_size": 13')),
    ],
    ids=["letter", "digit", "step", "seed", "dataset_size"],
)
def test_a_changed_word_is_seen(trained, name, change):
    file = at(trained, 4) / name
    before = file.read_text()
    file.write_text(change(before))
    assert file.read_text() != before
    with pytest.raises(ConfigError, match=f"step_00000004/{name} is damaged"):
        go_on(trained)
    with pytest.raises(ConfigError, match=f"step_00000004/{name} is damaged.* good one is .*003$"):
        sample({"ckpt": str(trained), "n": 1, "steps": 1, "device": "cpu"})


def test_the_step_is_that_of_the_folder(trained):
    at(trained, 3).rename(at(trained, 9))
    with pytest.raises(ConfigError, match="step 3 in state.json, which is not that of the folder"):
        go_on(trained, steps=12)


def without_digests(checkpoint):
    """As versions before this one wrote it."""
    (checkpoint / "SHA256SUMS").unlink()
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(state | {"format": 1}))


def test_old_checkpoints_go_on_with_a_note(trained):
    without_digests(at(trained, 4))
    with pytest.warns(UserWarning, match="step_00000004 was written without digests") as said:
        go_on(trained)
    assert len(said) == 1
    ckpt.verify_checkpoint(at(trained, 5))


def test_the_newest_good_one_is_named_and_gone_on_from(trained):
    """What the message says is what then works."""
    for step in (3, 4):
        flip(at(trained, step) / "optimizer.safetensors", 8 * 2000)
    with pytest.raises(ConfigError) as caught:
        go_on(trained)
    said = str(caught.value)
    assert f"{at(trained, 4)}/optimizer.safetensors is damaged" in said
    assert f"the newest good one is {at(trained, 2)}" in said
    assert said.endswith(
        command := f"with python train.py run_dir={trained} train.resume={at(trained, 2)}"
    )
    damaged = (at(trained, 4) / "optimizer.safetensors").read_bytes()
    go_on(trained, command.split()[-1])
    names = {path.name for path in (trained / "checkpoints").iterdir()}
    assert {f"set_aside_step_0000000{step}" for step in (3, 4)} < names
    assert [path.name for path in list_checkpoints(trained / "checkpoints")] == [
        f"step_0000000{step}" for step in (1, 2, 3, 4, 5)
    ]
    aside = trained / "checkpoints" / "set_aside_step_00000004" / "optimizer.safetensors"
    assert aside.read_bytes() == damaged
    assert [row["step"] for row in rows(trained)] == ["1", "2", "3", "4", "5"]


def test_there_may_be_no_good_one(trained):
    for step in (1, 2, 3, 4):
        (at(trained, step) / "ema.safetensors").unlink()
    with pytest.raises(
        ConfigError, match="ema.safetensors is missing; there is no good checkpoint"
    ):
        go_on(trained)


def test_the_same_command_again_goes_on_where_it_stopped(trained, kept, tmp_path):
    """An earlier checkpoint, or one of another run, is gone back to once."""
    command = f"train.resume={at(trained, 2)}"
    go_on(trained, command, steps=3)
    go_on(trained, command, steps=5)
    aside = [p.name for p in (trained / "checkpoints").iterdir() if p.name.startswith("set")]
    assert sorted(aside) == ["set_aside_step_00000003", "set_aside_step_00000004"]
    for steps in (5, 6):
        go_on(tmp_path / "other", f"train.resume={kept}", steps=steps)
    assert [p.name for p in list_checkpoints(tmp_path / "other" / "checkpoints")] == [
        "step_00000005",
        "step_00000006",
    ]
    with pytest.raises(ConfigError, match="already holds step_00000006"):
        go_on(tmp_path / "other", f"train.resume={at(trained, 2)}", steps=7)


def test_stray_folders_do_not_block(trained):
    folder = trained / "checkpoints"
    for name in ("step_old", "step_00000004.bak", "step_9", "notes", "step_00000099"):
        (folder / name).mkdir()
    shutil.copytree(at(trained, 2), folder / "step_00000002 (copy)")
    (folder / "step_00000098").touch()
    with pytest.warns(UserWarning, match="step_00000099 is empty and is skipped"):
        go_on(trained)
    assert at(trained, 5).is_dir()
    assert (folder / "step_old").is_dir() and (folder / "step_00000002 (copy)").is_dir()


def test_steps_of_nine_digits_are_newer(tmp_path):
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step, flat_parameters())
    assert checkpoint_folder.latest_checkpoint(tmp_path).name == "step_100000000"


def test_a_folder_of_a_checkpoints_name_is_whole_at_every_moment(tmp_path, monkeypatch):
    """Cut off before each deletion and renaming of a rotation."""
    save(tmp_path, 1, flat_parameters())
    calls = 0

    class Killed(BaseException):
        pass

    def killed_at(count, function):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == count:
                raise Killed
            return function(*arguments, **options)

        return call

    for count in range(1, 40):
        calls = 0
        with monkeypatch.context() as patched:
            for name in ("replace", "unlink", "rmdir", "mkdir", "fsync"):
                patched.setattr(os, name, killed_at(count, getattr(os, name)))
            try:
                save(tmp_path, count + 1, flat_parameters(), keep=1)
            except Killed:
                pass
            else:
                break
        for path in list_checkpoints(tmp_path):
            ckpt.verify_checkpoint(path)
    assert count > 15
    checkpoint_folder.clean_up(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"step_{count + 1:08d}"]


def test_what_a_killed_run_left_is_deleted_at_the_start(trained):
    folder = trained / "checkpoints"
    shutil.copytree(at(trained, 1), folder / ".writing_step_00000009")
    shutil.copytree(at(trained, 1), folder / ".removing_step_00000000")
    (at(trained, 4) / ".writing_ema_0.5.safetensors").touch()
    go_on(trained)
    assert not list(folder.rglob(".*"))


def test_config_of_the_checkpoint_is_that_of_the_run(trained):
    assert yaml.safe_load((at(trained, 4) / "config.yaml").read_text()) == composed(*FOUR)


def test_data_of_another_size_are_said(trained, capsys):
    go_on(trained, "dataset.count=13")
    assert "note: the data set has 13 images, and had 12 when the check" in capsys.readouterr().out


def test_a_table_that_is_no_text_is_one_line(tmp_path):
    (path := tmp_path / "metrics.csv").write_bytes(b"step,loss\r\n1,0.5\r\n\xff\xfe\x00")
    with pytest.raises(ConfigError, match="metrics.csv is damaged: .*; put it aside"):
        read_rows(path)
    # a row that was cut off does not count, nor one in which a failing disk has left other bytes
    for wrong in (b"2", b"2,0.\x00\x00\r\n", b"2,x\r\n"):
        path.write_bytes(b"step,loss\r\n1,0.5\r\n" + wrong)
        assert read_rows(path) == [{"step": "1", "loss": "0.5"}]
