"""Small runs of networks that are given something: their settings, data and samples."""

from pathlib import Path

import numpy as np
import torch

import diffusion
from diffusion.runs.training import train

from ...end_to_end.run import rows
from ...test_configs import composed

CPU = torch.device("cpu")
SIZE = 8
SMALL = (
    *("device=cpu", "model=unet_tiny", "model.model_channels=8", "model.channel_mult=[1]"),
    *("model.num_res_blocks=1", "model.attention_resolutions=[]", "model.num_groups=4"),
    "model.num_head_channels=8",
    *("train.precision=fp32", "train.batch_size=4", "train.log_every=1", "train.tensorboard=false"),
    *("train.sample_count=4", "train.sample_steps=2", "diffusion.prediction=sample"),
)


def pixels(n: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Of which no pixel tells anything of another."""
    shape = (n, SIZE, SIZE, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def of_pairs(pairs: tuple[Path, Path], *more: str) -> tuple[str, ...]:
    path, condition = pairs
    data = ("dataset=pairs", f"dataset.path={path}", f"dataset.condition={condition}")
    return (*data, f"dataset.size={SIZE}", *SMALL, *more)


def drawn(run_dir: Path, **options) -> np.ndarray:
    return diffusion.sample(run_dir, **{"n": 3, "steps": 2, "device": "cpu", "seed": 1} | options)


def high_noise_loss(run_dir: Path) -> float:
    return float(rows(run_dir / "held_out.csv")[-1]["sigma_3.5_10"])


def words(n: int, most: int = 5, dim: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n, most, dim] in 16 bits, with rubbish behind their ends, and lengths."""
    random = np.random.default_rng(seed)
    tokens = random.normal(size=(n, most, dim)).astype(np.float16)
    lengths = random.integers(0, most + 1, n)
    tokens[np.arange(most) >= lengths[:, None]] = np.nan
    return tokens, lengths


def telling(model: torch.nn.Module) -> torch.nn.Module:
    """With other parameters than those of a fresh network, which says zero."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def check_goes_on(settings: tuple[str, ...], folder: Path) -> None:
    """A run of four steps has the same bits as one that stopped after two, in folder/parts."""
    train(composed(*settings, "train.steps=4"), folder / "whole")
    train(composed(*settings, "train.steps=2"), folder / "parts")
    train(composed(*settings, "train.steps=4"), folder / "parts")
    for name in ("model", "ema"):
        whole, parts = (
            (folder / run / "checkpoints/step_00000004" / f"{name}.safetensors").read_bytes()
            for run in ("whole", "parts")
        )
        assert whole == parts


def check_same(models: list[torch.nn.Module], outputs: list[torch.Tensor]) -> None:
    """Two networks, one on the kernels, agree in what they said and in their gradients."""
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-3, msg=name)
