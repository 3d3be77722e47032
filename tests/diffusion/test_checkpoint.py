"""Checkpoints: complete or absent, exact, and clear when they do not fit."""

import errno
import json
import re
import resource
import shutil

import pytest
import torch
from torch import nn

from diffusion.errors import ConfigError
from diffusion.formats import checkpoint as ckpt
from diffusion.models.flat_parameters import FlatParameters


def flat_parameters(width: int = 4, seed: int = 0) -> FlatParameters:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, width, 3).to(memory_format=torch.channels_last))
    flat = FlatParameters(model)
    for buffer in (flat.exp_avg, flat.exp_avg_sq, flat.ema):
        for view in flat.views(buffer).values():
            view.copy_(torch.randn(view.shape))
    return flat


CONFIG = {"model": {"name": "x"}, "diffusion": {}, "train": {"seed": 0}}


def save(folder, step, flat, keep=3):
    return ckpt.save_checkpoint(folder, flat, {"step": step}, CONFIG, keep)


def test_round_trip_is_exact(tmp_path):
    flat, other = flat_parameters(), flat_parameters(seed=1)
    path = save(tmp_path, 7, flat)
    ckpt.load_into(path, other)
    for name in ("param", "ema", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(flat, name), getattr(other, name)), name
    state, config = ckpt.read_state(path)
    assert state["step"] == 7 and config == CONFIG


def test_further_averages(tmp_path):
    flat, other = flat_parameters(), flat_parameters(seed=1)
    for parameters in (flat, other):
        parameters.keep_averages([0.999, 0.9])
    flat.averages[0.9].add_(1)
    path = save(tmp_path, 7, flat)
    ckpt.load_into(path, other)
    for decay, average in flat.averages.items():
        stored, loaded = ckpt.read_weights(path, decay), other.views(other.averages[decay])
        for name, x in flat.views(average).items():
            assert torch.equal(x, stored[name]) and torch.equal(x, loaded[name])
    with pytest.raises(ConfigError, match="no average of decay 0.5; .* those of 0.9, 0.999"):
        ckpt.read_weights(path, 0.5)
    other.keep_averages([0.5])
    with pytest.raises(ConfigError, match="no average of decay 0.5"):
        ckpt.load_into(path, other)


def test_the_last_k_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step, flat_parameters(), keep=2)
    assert [p.name for p in ckpt.list_checkpoints(tmp_path)] == ["step_00000003", "step_00000010"]


def test_found_from_run_folder_and_from_itself(tmp_path):
    path = save(tmp_path / "checkpoints", 5, flat_parameters())
    for start in (tmp_path, tmp_path / "checkpoints", path):
        assert ckpt.find_checkpoint(start) == path


def test_missing_and_empty_are_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        ckpt.find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no checkpoint.*NNNNNNNN$"):
        ckpt.find_checkpoint(tmp_path)


def test_a_run_that_is_near_is_named(tmp_path):
    for name in ("first", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    near = f"did you mean {tmp_path}/first? other runs: {tmp_path}/other; expected a run's folder"
    with pytest.raises(ConfigError, match=f"frist does not exist; {re.escape(near)}"):
        ckpt.find_checkpoint(tmp_path / "frist")
    with pytest.raises(ConfigError, match="no/frist does not exist; expected a run's folder"):
        ckpt.find_checkpoint(tmp_path / "no" / "frist")


def test_the_runs_of_a_folder_without_a_checkpoint_are_named(tmp_path):
    for name in "bac":
        save(tmp_path / name / "checkpoints", 5, flat_parameters())
    runs = ", ".join(str(tmp_path / name) for name in "abc")
    with pytest.raises(ConfigError, match=f"holds no checkpoint.*; runs in it: {runs}$"):
        ckpt.find_checkpoint(tmp_path)
    for i in range(9):
        (tmp_path / f"d{i}" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="d4, ...$"):
        ckpt.find_checkpoint(tmp_path)


def test_truncated_tensors_are_named(tmp_path):
    path = save(tmp_path, 1, flat_parameters())
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="model.safetensors is damaged"):
        ckpt.read_weights(path, ema=False)
    with pytest.raises(ConfigError, match="model.safetensors cannot be read"):
        ckpt.read_state(path)  # seen at once, before the data are loaded


@pytest.mark.parametrize("name", ["state.json", "ema.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    path = save(tmp_path, 1, flat_parameters())
    (path / name).unlink()
    with pytest.raises(ConfigError, match=name):
        ckpt.read_state(path)


DEEP = "[" * 100_000


@pytest.mark.filterwarnings("ignore:.* was written without digests")
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("state.json", "{", "cannot be read: Expecting property name"),
        ("state.json", '{"step": 1}', "does not say 'format'"),
        ("state.json", '{"format": 3, "step": 1}', "format 3; this version reads format 2"),
        ("state.json", '{"format": 2, "step": 1}', "incomplete: SHA256SUMS is missing"),
        ("state.json", '{"format": [], "step": 1}', r"format \[\]; this version"),
        ("state.json", '{"format": 1, "step": "x"}', "step x in state.json"),
        ("state.json", '{"format": 1, "step": true}', "step true in state.json"),
        ("state.json", '{"format": 1, "step": -1}', "step -1 in state.json; .* at least 0"),
        ("state.json", '{"format": 1, "step": 1e300}', "step 1e.300 in state.json"),
        ("state.json", f'{{"format": 1, "step": {2**64}}}', "step 1844674407"),
        ("state.json", f'{{"format": 1, "step": {"9" * 5000}}}', "cannot be read"),
        ("state.json", '{"format": 1, "step": 1, "skipped_steps": 2}', "2 skipped steps of 1"),
        ("state.json", '{"format": 1, "step": 1, "skipped_steps": "0"}', "skipped_steps 0 in"),
        ("state.json", '{"format": 1, "step": 1, "dataset_size": 0}', "dataset_size 0 .* least 1"),
        ("state.json", '{"format": 1, "step": 1, "seed": null}', "seed null in state.json"),
        ("state.json", '{"format": 1, "step": 1, "seed": 5}', "seed 5 in .* 0 in config.yaml"),
        ("state.json", '{"format": 1, "step": 1, "policy": []}', r"policy \[\] in state.json"),
        ("state.json", "[]", "expected a group of values"),
        ("state.json", DEEP, "nested too deeply"),
        ("state.json", '{"format": 1, "step": 1, "x": "\udcff"}', "cannot be read"),
        ("config.yaml", "model: {}\ntrain: {}", "does not say 'diffusion'"),
        ("config.yaml", "model: {}\ntrain: {}\ndiffusion: 1", "expected the groups model, diff"),
        ("config.yaml", "[]", "cannot be read"),
        ("config.yaml", "a: b: c", "cannot be read"),
        ("config.yaml", DEEP, "nested too deeply"),
    ],
    ids=lambda value: value[:40],
)
def test_damaged_words_are_named(tmp_path, name, text, words):
    """Where there is no digest that would have told."""
    path = save(tmp_path, 1, flat_parameters())
    (path / "SHA256SUMS").unlink()
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 1}))
    ckpt.read_state(path)
    (path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=words) as caught:
        ckpt.read_state(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_another_model_is_named_and_nothing_is_loaded(tmp_path):
    path = save(tmp_path, 1, flat_parameters(width=4))
    other = flat_parameters(width=6)
    before = other.param.clone()
    with pytest.raises(ConfigError, match="another model: 0.weight is"):
        ckpt.load_into(path, other)
    assert torch.equal(other.param, before)


def test_disk_full_keeps_the_last_good_one(tmp_path, monkeypatch):
    good = save(tmp_path, 1, flat_parameters())

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ckpt, "save_file", full)
    with pytest.raises(ConfigError, match=r"No space left.*last good checkpoint stays.*00000001"):
        save(tmp_path, 2, flat_parameters())
    assert ckpt.latest_checkpoint(tmp_path) == good
    assert [p.name for p in tmp_path.iterdir()] == [good.name]


def test_a_file_size_limit_is_met_like_a_full_disk(tmp_path):
    """A real refusal of the system, in the middle of a file."""
    good = save(tmp_path, 1, flat_parameters())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
    try:
        with pytest.raises(ConfigError, match="cannot save.*step_00000002.*File too large"):
            save(tmp_path, 2, flat_parameters(width=64))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in tmp_path.iterdir()] == [good.name]
    ckpt.load_into(good, flat_parameters())


def test_a_half_written_one_is_not_seen(tmp_path):
    good = save(tmp_path, 1, flat_parameters())
    shutil.copytree(good, tmp_path / ".writing_step_00000002")
    assert ckpt.latest_checkpoint(tmp_path) == good
