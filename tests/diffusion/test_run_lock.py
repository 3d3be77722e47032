"""One run, one process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from diffusion.errors import ConfigError
from diffusion.formats.checkpoint_folder import latest_checkpoint, step_in_name
from diffusion.runs import lock as run_lock
from diffusion.runs.lock import RunLock
from diffusion.runs.training import train
from diffusion.runtime import file_lock

from ..end_to_end.processes import finish, signal_all, started
from ..end_to_end.run import TINY, begin, begin_together, environment, rows, run
from ..test_configs import composed

HOLDER = """
import sys, time
from pathlib import Path
from diffusion.runs.lock import RunLock
RunLock(Path(sys.argv[1])).take()
print("held", flush=True)
time.sleep(600)
"""


def test_it_is_held_once_and_leaves_nothing(tmp_path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.take()
    first.take()  # is held
    with pytest.raises(ConfigError, match=f"is being trained by process {os.getpid()} on .*since"):
        second.take()
    first.release()
    assert not list(tmp_path.iterdir())
    second.take()
    second.release()
    second.release()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_death_releases_it(tmp_path, number):
    holder = started(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, env=environment()
    )
    assert holder.stdout.readline() == b"held\n"
    lock = RunLock(tmp_path)
    with pytest.raises(ConfigError, match=f"by process {holder.pid} on"):
        lock.take()
    holder.send_signal(number)
    holder.communicate(timeout=60)
    assert (tmp_path / "lock").exists()
    lock.take()
    lock.release()


def note(path, beat):
    path.write_text(json.dumps({"host": "far", "pid": 7, "boot": "another", "beat": beat}))


def test_another_host_is_known_by_its_signs_of_life(tmp_path, monkeypatch):
    """Where the file system does not carry locks from host to host: nobody here holds this one."""
    monkeypatch.setattr(run_lock, "PATIENCE", 60.0)  # its sign comes sooner, or other jobs run
    path, ended = tmp_path / "lock", threading.Event()
    note(path, 0)

    def live():
        beat = 0
        while not ended.wait(0.1):
            beat += 1
            note(path, beat)

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="by process 7 on far"):
            RunLock(tmp_path).take()
    finally:
        ended.set()
        thread.join()
    monkeypatch.setattr(run_lock, "PATIENCE", 0.5)
    lock, began = RunLock(tmp_path), time.monotonic()
    lock.take()  # it is dead now
    assert time.monotonic() - began >= 0.5
    lock.release()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    lock = RunLock(tmp_path)
    lock.take()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    lock.release()


def test_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.02)
    lock = RunLock(tmp_path)
    lock.take()
    until = time.monotonic() + 30
    while json.loads((tmp_path / "lock").read_text())["beat"] < 3:
        assert time.monotonic() < until
        time.sleep(0.02)
    lock.release()


@pytest.mark.parametrize("content", [b"\xff{", b"[" * 100_000], ids=["no text", "deep"])
def test_a_damaged_lock_file_is_taken_over(tmp_path, content):
    (tmp_path / "lock").write_bytes(content)
    lock = RunLock(tmp_path)
    lock.take()
    lock.release()


@pytest.mark.parametrize("count", [1, 2], ids=["alone", "two processes"])
def test_a_second_run_is_refused_while_the_first_lives(tmp_path, count):
    run_dir = tmp_path / "run"
    command = (*TINY, f"run_dir={run_dir}", "train.steps=100000", "train.sample_every=0")
    alone = count == 1
    first = [begin("train.py", *command)] if alone else begin_together("train.py", *command)
    until = time.monotonic() + 120
    while not (run_dir / "metrics.csv").exists() or len(rows(run_dir)) < 2:
        assert all(p.poll() is None for p in first) and time.monotonic() < until
        time.sleep(0.05)
    code, _, err = run("train.py", *command)
    assert code == 2 and "is being trained by process" in err and err.count("\n") == 1
    if not alone:
        signal_all([p.pid for p in first], signal.SIGSTOP)  # or they train while the second begins
        second = begin_together("train.py", *command)
        _, err = finish(second[0], 120)
        second[1].kill()  # as torchrun does
        signal_all([p.pid for p in first], signal.SIGCONT)
        assert second[0].returncode != 0 and "is being trained by process" in err
    assert all(p.poll() is None for p in first)
    for process in first:
        process.send_signal(signal.SIGKILL if alone else signal.SIGTERM)
    for process in first:
        finish(process, 60)
    saved = latest_checkpoint(run_dir / "checkpoints")  # none if it was killed
    assert (saved is None) == alone
    steps = 1 if alone else step_in_name(saved) + 1
    train(composed(*command, f"train.steps={steps}"), run_dir)
    assert not (run_dir / "lock").exists()


def test_a_run_that_ends_with_an_error_gives_it_back(tmp_path):
    train(composed(*TINY, "train.steps=1"), tmp_path / "run")
    for _ in range(2):
        with pytest.raises(ConfigError, match="already holds step_00000001"):
            train(composed(*TINY, "train.resume=none"), tmp_path / "run")
        assert not (tmp_path / "run" / "lock").exists()
