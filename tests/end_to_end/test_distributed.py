"""Two processes under torchrun train as one does: same batches, same noise, one set of files."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from diffusion.data.batches import Batches
from diffusion.data.elephants import elephants
from diffusion.errors import ConfigError
from diffusion.runtime.distributed import Processes
from diffusion.training.held_out_loss import BANDS

from .processes import finish
from .run import TINY, rows, run, run_together, start_together

# everything that is keyed by the position in the global batch: noise, timesteps, flips, dropped
# labels, dropout; 11 images beside those held out, so that epochs end within batches; and the
# losses of all, which say what timesteps are drawn
SETTINGS = (
    *TINY,
    *("dataset.count=16", "dataset.held_out=5", "train.eval_every=2"),
    *("model.dropout=0.1", "model.num_classes=3", "model.label_dropout=0.3"),
    *("train.steps=3", "train.batch_size=8", "train.accumulate=2", "train.save_every=2"),
    "diffusion.timestep_sampler=loss_second_moment",
)


JOBS = ("train.sample_steps=2,3",)  # a sweep of two that train the same


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of a run of one process, and of one of two: the first job of a sweep."""
    folder = tmp_path_factory.mktemp("runs")
    code, _, err = run("train.py", *SETTINGS, f"run_dir={folder}/one")
    assert code == 0, err
    two = start_together("-m", *SETTINGS, f"run_dir={folder}/two", *JOBS)
    out, err = finish(two, 240)
    assert two.returncode == 0, err
    assert out.count("2 processes") == 2 and out.count("step 3/3") == 2
    return folder / "one", job(folder / "two", 0)


def job(sweep, number):
    """The folder of one of the JOBS."""
    (folder,) = sweep.glob(f"train.sample_steps={number + 2}-*")
    return folder


def test_the_parameters_are_the_same(runs):
    """Up to the order in which float32 gradients are summed; Adam's moments are compared too."""
    for name in ("model", "ema", "optimizer", "timesteps"):
        one, two = (
            load_file(run_dir / "checkpoints" / "step_00000003" / f"{name}.safetensors")
            for run_dir in runs
        )
        assert one.keys() == two.keys()
        for key in one:
            torch.testing.assert_close(
                two[key], one[key], rtol=1e-5, atol=1e-5, msg=f"{name} {key}"
            )


def test_the_losses_are_the_same(runs):
    one, two = (rows(run_dir) for run_dir in runs)
    assert [row["step"] for row in two] == ["1", "2", "3"]
    assert [row["images"] for row in two] == [row["images"] for row in one]
    for name in ("loss", "grad_norm"):
        a, b = (torch.tensor([float(row[name]) for row in table]) for table in (one, two))
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_the_losses_on_what_is_held_out_are_the_same(runs):
    """Of five images in batches of four, one batch a process; up to what the parameters differ."""
    one, two = (rows(run_dir / "held_out.csv") for run_dir in runs)
    assert [row["step"] for row in two] == ["2", "3"] and two[0]["images"] == "5"
    for a, b in zip(one, two, strict=True):
        assert (a["data"], a["levels"]) == (b["data"], b["levels"])
        for name in ("held_out", *BANDS):
            assert float(b[name]) == pytest.approx(float(a[name]), rel=1e-4)
    recorded = [json.loads((job(runs[1].parent, i) / "job.json").read_text()) for i in (0, 1)]
    assert [j["loss"] for j in recorded] == pytest.approx([float(two[-1]["held_out"])] * 2)


def test_the_next_job_of_a_sweep_begins_anew(runs):
    """In the same group of processes."""
    first, second = (rows(job(runs[1].parent, number)) for number in (0, 1))
    assert [row["loss"] for row in second] == [row["loss"] for row in first]


def test_only_the_first_process_writes(runs):
    one, two = (sorted(str(p.relative_to(d)) for p in d.rglob("*")) for d in runs)
    assert [name for name in two if name != "job.json"] == one  # of a sweep
    assert sum(name.endswith("metrics.csv") for name in two) == 1


def test_two_processes_draw_the_images_of_one(runs, tmp_path):
    """Five images, so that one share goes beyond them; of every class, with guidance."""
    settings = (f"ckpt={runs[0]}", "n=5", "steps=3", "eta=1", "guidance=2", "device=cpu")
    settings += ("batch_size=2",)
    code, _, err = run("sample.py", *settings, f"out={tmp_path}/one.npz")
    assert code == 0, err
    said = run_together("sample.py", *settings, f"out={tmp_path}/two.npz")
    assert all(code == 0 for code, _, _ in said), said
    out = "".join(out for _, out, _ in said)
    assert out.count("2 processes") == out.count("5 images of") == 1
    one, two = (np.load(tmp_path / name)["arr_0"] for name in ("one.npz", "two.npz"))
    # in a batch of another size a level may be rounded the other way
    assert one.shape == (5, 8, 8, 3) and np.abs(one.astype(int) - two).max() <= 1
    said = run_together("sample.py", *settings, f"out={tmp_path}/all")
    assert all(code == 0 for code, _, _ in said), said
    names = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert names == [*(f"{i:06d}.png" for i in range(5)), "grid.png"]
    files = [np.asarray(Image.open(tmp_path / "all" / name)) for name in names[:5]]
    assert np.array_equal(two, files)


@pytest.mark.parametrize("count", [2, 4])
def test_the_shares_are_the_batch(count):
    data, device = elephants(count=11, size=8), torch.device("cpu")
    whole = Batches(data, 8, seed=3, device=device)
    share = 8 // count
    parts = [Batches(data, 8, 3, device, first, share) for first in range(0, 8, share)]
    for step in range(4):
        for batches in (whole, *parts):
            batches.load(step)
        _, index, labels = whole.part(0, 8)
        split = [batches.part(0, share) for batches in parts]
        assert torch.equal(torch.cat([part[1] for part in split]), index)
        assert torch.equal(torch.cat([part[2] for part in split]), labels)


def test_a_batch_that_does_not_divide_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="train.batch_size=7 does not divide among 2 processes"):
        Processes(torch.device("cpu")).share_of(7)


def test_a_vote_is_answered_one_vote_later(monkeypatch):
    """And is waited for only then, so that a step does not wait for another process."""
    given, waited = iter([0, 1, 0]), []

    class Work:
        def wait(self):
            waited.append(True)

    def all_reduce(votes, async_op):
        assert async_op and votes.device.type == "cpu"
        votes += next(given)  # by the other process
        return Work()

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    processes = Processes(torch.device("cpu"))
    assert not processes.vote(False) and not waited
    assert not processes.vote(False) and len(waited) == 1
    assert processes.vote(False)
    assert Processes(None).vote(True) and not Processes(None).vote(False)
