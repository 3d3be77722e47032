"""On a GPU a run gives the bits of the same run again, also of one that was interrupted."""

import pytest
import torch
from safetensors.torch import load_file

from .processes import finish
from .run import rows, start, start_together

IMAGES = (
    *("model=unet64", "model.channel_mult=[1,2]", "model.num_res_blocks=1", "model.dropout=0.1"),
    *("model.attention_resolutions=[2]", "model.num_classes=3", "model.label_dropout=0.3"),
    *("dataset=elephants", "dataset.size=32", "dataset.count=70", "train.batch_size=32"),
)
ACTIONS = (
    *("experiment=push_disc", "dataset.episodes=20", "model.down_dims=[64,128]"),
    *("optim.decay=none", "train.batch_size=64"),
)
CASES = {
    "bf16": (*IMAGES, "train.precision=bf16"),
    "tf32": (*IMAGES, "train.precision=tf32"),
    "fp32": (*IMAGES, "train.precision=fp32"),
    "bf16, recomputed micro-batches": (*IMAGES, "train.recompute=true", "train.accumulate=2"),
    "bf16, no graph": (*IMAGES, "train.cuda_graph=false", "train.deterministic=true"),
    "bf16, PyTorch's kernels": (*IMAGES, "backend=torch", "train.deterministic=true"),
    "actions in bf16": (*ACTIONS, "train.precision=bf16"),
    "actions in fp32": (*ACTIONS, "train.precision=fp32"),
}
STEPS, HALF = 12, 6
PATIENCE = 600  # seconds: each process compiles, maybe beside a whole test suite


def check(begin, settings, tmp_path):
    """A run, and beside it the same one that ends half-way and is resumed."""
    settings = (
        *settings,
        *("device=cuda", "optim.warmup=4", "train.log_every=1", "train.sample_every=0"),
        *("train.tensorboard=false", f"train.save_every={HALF}"),
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    both = (
        begin(*settings, f"run_dir={whole}", f"train.steps={STEPS}"),
        begin(*settings, f"run_dir={parts}", f"train.steps={HALF}"),
    )
    for process in both:
        _, err = finish(process, PATIENCE)
        assert process.returncode == 0, err
    _same(whole, parts, HALF)  # two processes, one beside the other
    last = begin(*settings, f"run_dir={parts}", f"train.steps={STEPS}")
    _, err = finish(last, PATIENCE)
    assert last.returncode == 0, err
    _same(whole, parts, STEPS)


def _same(one, other, step):
    for name in ("model", "ema", "optimizer"):
        a, b = (
            load_file(run_dir / "checkpoints" / f"step_{step:08d}" / f"{name}.safetensors")
            for run_dir in (one, other)
        )
        assert a.keys() == b.keys()
        assert [key for key in a if not torch.equal(a[key], b[key])] == [], name
    a, b = (
        [(row["loss"], row["grad_norm"]) for row in rows(run_dir)[:step]]
        for run_dir in (one, other)
    )
    assert len(a) == step and a == b and len(set(a)) == step


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_interrupted_or_not(case, tmp_path):
    check(lambda *settings: start("train.py", *settings), CASES[case], tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("case", ["bf16", "fp32"])
def test_interrupted_or_not_on_two_gpus(case, tmp_path):
    check(start_together, CASES[case], tmp_path)
