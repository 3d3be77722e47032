"""Processes that are killed are started again and go on; a process that hangs ends the others."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from diffusion.runtime import distributed

from .processes import finish, ranks, started
from .run import ROOT, TINY, environment, rows, start, start_together

SETTINGS = (*TINY, "train.steps=40", "train.save_every=5", "train.sample_every=0")
_PATIENCE = 180  # seconds
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_for(condition, *processes):
    waiting = time.monotonic() + _PATIENCE
    while not condition():
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < waiting
        time.sleep(0.05)


@pytest.mark.slow
def test_two_nodes_go_on_after_a_process_is_killed(tmp_path):
    """Two agents of torchrun on this host, as on two nodes. The one whose process is killed counts
    a restart, the other one only sees that the members have changed."""
    run_dir = tmp_path / "run"
    torchrun = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")
    torchrun += ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=a")
    torchrun += ("--max-restarts=3", "--local-addr=127.0.0.1", str(ROOT / "train.py"))
    agents = [start(*torchrun, *SETTINGS, f"run_dir={run_dir}") for _ in range(2)]
    wait_for((run_dir / "checkpoints" / "step_00000005").exists, *agents)
    found = ranks(agents[0].pid) | ranks(agents[1].pid)
    os.kill(found[0], signal.SIGKILL)
    said = [finish(agent, _PATIENCE) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sum(out.count("resuming from") for out, _ in said) == 1
    assert len(rows(run_dir)) == 40


@pytest.mark.slow
@DEVICES
def test_processes_of_one_node_go_on_after_one_is_killed(tmp_path, device):
    """The first one, which saves; over gloo, and over NCCL with captured steps."""
    run_dir = tmp_path / "run"
    agent = start_together(*SETTINGS, f"device={device}", f"run_dir={run_dir}", restarts=3)
    wait_for((run_dir / "checkpoints" / "step_00000005").exists, agent)
    os.kill(ranks(agent.pid)[0], signal.SIGKILL)
    out, err = finish(agent, _PATIENCE)
    assert agent.returncode == 0, err
    assert out.count("resuming from") == 1 and len(rows(run_dir)) == 40


@pytest.mark.slow
@DEVICES
def test_a_process_that_hangs_ends_the_others(tmp_path, device):
    """Suspended in the middle of training."""
    port, processes = free_port(), []
    for rank in range(2):
        told = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        told["TRITON_DIFFUSION_HANG_SECONDS"] = 6
        command = (sys.executable, str(ROOT / "train.py"), *SETTINGS, "train.steps=100000")
        command += (f"device={device}",)
        processes.append(
            started(
                [*command, f"run_dir={tmp_path}/run"],
                env=environment() | {key: str(value) for key, value in told.items()},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    first, second = processes
    try:
        wait_for((tmp_path / "run" / "checkpoints" / "step_00000005").exists, *processes)
        os.kill(second.pid, signal.SIGSTOP)
        _, err = finish(first, 30)
    finally:
        for process in processes:
            process.kill()
    assert first.returncode == 1
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: process 1 has not been heard of for 6 s: it hangs, is suspended")


def test_what_an_earlier_round_left_is_not_answered(monkeypatch):
    """The store of torchrun outlives the processes: their questions and answers are still there."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 3)]))
    names = []
    for _ in range(3):
        if names:
            store.set("ask/1", "of a process that is dead")
        met = [None] * 3

        def come(rank, met=met):
            met[rank] = distributed._meet(rank, 3).round

        threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in (0, 1, 2)]
        for thread in threads:
            thread.start()
            time.sleep(0.1)  # the first one is there before the others have asked
        for thread in threads:
            thread.join(timeout=10)
        assert met[0] is not None and len(set(met)) == 1
        names.append(met[0])
    assert len(set(names)) == 3
