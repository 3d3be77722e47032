"""Sweeps: a job that fails is a row that failed, a job is its settings, a search goes on."""

import json
import signal
import time

import pytest
import torch

from diffusion.runs.report import report

from .processes import finish
from .run import TINY, begin, rows, run, start

ONE_STEP = (*TINY, "train.steps=1", "train.sample_every=0", "-m")
LAUNCHERS = {
    "basic": (),
    "joblib": ("hydra/launcher=joblib",),
    "submitit": ("hydra/launcher=submitit_local",),
}


def jobs(sweep) -> dict[str, dict]:
    """What is written of each job, by the name of its folder."""
    return {path.parent.name: json.loads(path.read_text()) for path in sweep.glob("*/job.json")}


def states(sweep) -> dict[str, str]:
    return {name.rpartition("-")[0]: job["state"] for name, job in jobs(sweep).items()}


def needed(launcher):
    if launcher != "basic":
        pytest.importorskip(f"hydra_plugins.hydra_{launcher}_launcher")


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_fails_is_one_row(tmp_path, monkeypatch, launcher):
    """By what it was told or by what it computes, whatever runs the jobs: the other is done, the
    exit code and the report say which failed. Of joblib's processes each has a GPU of its own, here
    by their names only."""
    needed(launcher)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,9" if launcher == "joblib" else "")
    sweep = tmp_path / "sweep"
    command = ("train.py", *ONE_STEP, *LAUNCHERS[launcher], f"run_dir={sweep}", "device=auto")
    fresh = launcher != "basic"  # processes of joblib and submitit start from the real script
    code, _, err = run(*command, "train.steps=3", "optim.lr=-1,1e-4,1e38", fresh=fresh)
    assert code == 2, err
    expected = {"optim.lr=-1": "failed", "optim.lr=0.0001": "done", "optim.lr=1e+38": "failed"}
    assert states(sweep) == expected
    last = err.splitlines()[-1]
    assert last.startswith("error: 2 of the sweep's jobs failed; tools/report.py runs=")
    assert "optim.lr=-1 is outside [0, inf)" in err and "training has diverged" in err
    told = {float(row["optim.lr"]): row["state"] for row in report({"runs": str(sweep)})}
    assert told[-1] == "failed: optim.lr=-1 is outside [0, inf)" and told[1e-4] == "done"
    assert told[1e38].startswith("failed: the gradient or the model was not finite at step 3")
    if launcher == "joblib":
        taken = {(job["pid"], job["gpu"]) for job in jobs(sweep).values()}
        processes, gpus = (set(column) for column in zip(*taken, strict=True))
        assert len(processes) == len(gpus) == len(taken) and gpus <= {"7", "9"}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_each_job_of_joblib_computes_on_a_gpu_of_its_own(tmp_path):
    needed("joblib")
    sweep, count = tmp_path / "sweep", torch.cuda.device_count()
    seeds = ",".join(map(str, range(count)))
    command = (*ONE_STEP, *LAUNCHERS["joblib"], f"run_dir={sweep}", "device=cuda")
    code, out, err = run("train.py", *command, f"train.seed={seeds}", "train.steps=200")
    assert code == 0 and out.count("backend triton") == count, err
    gpus = [job["gpu"] for job in jobs(sweep).values()]
    assert sorted(gpus) == sorted(map(str, range(count)))


@pytest.mark.long
def test_a_job_is_its_settings_and_not_its_number(tmp_path):
    command = ("train.py", *ONE_STEP, f"run_dir={tmp_path}/sweep")
    code, _, err = run(*command, "optim.lr=1e-4,2e-4", cwd=tmp_path)
    assert code == 0, err
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]  # Hydra's file in it
    first = jobs(tmp_path / "sweep")
    losses = {name: rows(tmp_path / "sweep" / name) for name in first}
    # in another order, with another value, written in another way, of more steps
    code, out, err = run(*command, "optim.lr=3e-4,0.0002,1e-4")
    assert code == 0, err
    assert out.count("done already, after 1 step,") == 2
    after = jobs(tmp_path / "sweep")
    assert len(after) == 3 and set(first) < set(after)
    for name, told in losses.items():
        assert rows(tmp_path / "sweep" / name) == told
    code, out, err = run(*command, "optim.lr=1e-4", "train.steps=2")
    assert code == 0, err
    assert len(jobs(tmp_path / "sweep")) == 4  # nothing is swept, so it is a job of its own
    # another setting of all jobs: none goes on with the weights of another
    code, out, err = run(*command, "optim.lr=1e-4,2e-4", "train.seed=5")
    assert code == 0 and "resuming" not in out and "done already" not in out, err
    assert len(jobs(tmp_path / "sweep")) == 6


def test_more_steps_are_the_same_jobs(tmp_path):
    command = ("train.py", *ONE_STEP, f"run_dir={tmp_path}/sweep", "train.seed=0,1")
    assert run(*command)[0] == 0
    code, out, err = run(*command, "train.steps=2")
    assert code == 0, err
    assert out.count("after step 1") == 2 and len(jobs(tmp_path / "sweep")) == 2


@pytest.mark.long
def test_a_search_goes_on(tmp_path):
    """Optuna's: what is done is not done again, and what failed does not end it."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    sweep = tmp_path / "sweep"
    search = (
        *("train.py", *ONE_STEP, f"run_dir={sweep}", "hydra/sweeper=optuna"),
        *("hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=1"),
        *("optim.lr=interval(-1e-4,1e-3)", "dataset.flip=choice(true,false)"),
    )
    code, _, err = run(*search, "hydra.sweeper.n_trials=3")
    first = jobs(sweep)
    failed = [name for name, job in first.items() if job["state"] == "failed"]
    assert len(first) == 3 and len(failed) < 3
    assert all("optim.lr=-" in name for name in failed)
    assert code == (2 if failed else 0), err
    code, out, err = run(*search, "hydra.sweeper.n_trials=5")
    assert out.count("done already, after 1 step,") == 3 - len(failed), err
    assert len(jobs(sweep)) == 5 and set(first) < set(jobs(sweep))
    best = (sweep / "optimization_results.yaml").read_text()
    losses = [job["loss"] for job in jobs(sweep).values() if job["state"] == "done"]
    assert f"best_value: {min(losses)}" in best
    least = next(name for name, job in jobs(sweep).items() if job.get("loss") == min(losses))
    said = out.splitlines()[-1]
    assert "study" not in err
    assert said == f"best of {len(losses)} jobs: {min(losses):.6g}, {sweep / least}"


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_search_that_was_interrupted_goes_on(tmp_path, number):
    """In the middle of its second trial, which goes on with its weights."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    sweep = tmp_path / "sweep"
    search = (*ONE_STEP, f"run_dir={sweep}", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1")
    search += ("hydra.sweeper.n_trials=2", "optim.lr=interval(1e-4,1e-3)")
    search += ("hydra.sweeper.sampler.seed=1", "train.steps=40", "train.save_every=5")
    process = begin("train.py", *search)
    waiting = time.monotonic() + 120
    while len({path.parts[-3] for path in sweep.glob("*/checkpoints/step_*")}) < 2:
        assert process.poll() is None and time.monotonic() < waiting
        time.sleep(0.02)
    process.send_signal(number)
    _, err = finish(process, 60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), err
    first = jobs(sweep)
    assert sorted(job["state"] == "done" for job in first.values()) == [False, True]
    code, out, err = run("train.py", *search)
    assert code == 0, err
    assert set(states(sweep).values()) == {"done"}
    assert set(first) == set(jobs(sweep))
    assert out.count("done already, after 40 steps,") == out.count("resuming from") == 1


@pytest.mark.long
@pytest.mark.parametrize("tried", ["interval(-2,-1)", "interval(1e38,2e38)"])
def test_a_search_of_which_all_fails(tmp_path, tried):
    """By a wrong setting, or because they diverge."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", f"optim.lr={tried}")
    code, _, err = run("train.py", *ONE_STEP, f"run_dir={tmp_path}/sweep", "train.steps=3", *search)
    assert code == 2 and "error: 2 of the sweep's jobs failed" in err.splitlines()[-1], err


@pytest.mark.long
def test_jobs_of_joblib_save_before_they_stop(tmp_path):
    """And the same command goes on with them."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    sweep = tmp_path / "sweep"
    command = ("train.py", *ONE_STEP, *LAUNCHERS["joblib"], "hydra.launcher.n_jobs=2")
    command += (f"run_dir={sweep}", "train.seed=0,1,2")
    process = start(*command, "train.steps=100000")
    waiting = time.monotonic() + 120
    while len(list(sweep.glob("*/metrics.csv"))) < 2:
        assert process.poll() is None and time.monotonic() < waiting
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = finish(process, 60)
    assert process.returncode == 128 + signal.SIGTERM, err
    stopped = {name: job for name, job in jobs(sweep).items() if "pid" in job}
    assert set(states(sweep).values()) == {"stopped"}
    assert len(list(sweep.glob("*/checkpoints/step_*"))) == 2 <= len(stopped)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit"])
def test_a_search_whose_jobs_run_side_by_side(tmp_path, launcher):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    needed(launcher)
    search = (*ONE_STEP, *LAUNCHERS[launcher], f"run_dir={tmp_path}/sweep", "hydra/sweeper=optuna")
    search += ("hydra.sweeper.n_jobs=2", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler.seed=1")
    code, _, err = run("train.py", *search, "optim.lr=interval(-1e-3,1e-3)", fresh=True)
    failed = {name for name, job in jobs(tmp_path / "sweep").items() if job["state"] == "failed"}
    assert failed == {name for name in jobs(tmp_path / "sweep") if "optim.lr=-" in name} != set()
    assert len(jobs(tmp_path / "sweep")) == 4 > len(failed) and code == 2, err
