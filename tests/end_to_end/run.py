"""Start an entry script the way a user does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TINY = (
    "experiment=demo",
    "device=cpu",
    "dataset.size=8",
    "dataset.count=12",
    "model.model_channels=32",
    "model.channel_mult=[1,2]",
    "model.attention_resolutions=[2]",
    "model.num_res_blocks=1",
    "train.batch_size=4",
    "train.log_every=1",
    "train.sample_count=4",
    "train.sample_steps=2",
    "train.tensorboard=false",
    "optim.warmup=2",
)


def environment() -> dict[str, str]:
    """As a user has it: no interpreter of Triton, few threads."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return env | {"OMP_NUM_THREADS": "1"}


def start(script: str, *arguments: str, cwd: Path | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=cwd or ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script: str, *arguments: str, cwd: Path | None = None) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    process = start(script, *arguments, cwd=cwd)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err
