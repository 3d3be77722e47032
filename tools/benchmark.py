"""Time drawing images with a trained network: python tools/benchmark.py ckpt=RUN n=16 steps=50.

PyTorch, torch.compile, this project's kernels, ONNX Runtime and TensorRT, whichever can run here.
See configs/benchmark.yaml and docs/interchange.md.
"""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.entry import exit_codes, plain, run_entry


@hydra.main(version_base=None, config_path="../configs", config_name="benchmark")
def main(config: DictConfig) -> None:
    """Measure as configured, print the table and say where it is."""
    # after the command line is known to be right
    from diffusion.runs.benchmark import benchmark

    with exit_codes():
        benchmark(plain(config))


if __name__ == "__main__":
    run_entry(main, "benchmark")
