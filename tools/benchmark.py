"""Time drawing images with a trained network: python tools/benchmark.py ckpt=RUN n=16 steps=50.

PyTorch, torch.compile, this project's kernels, ONNX Runtime and TensorRT, whichever can run here.
See configs/benchmark.yaml and docs/interchange.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from triton_diffusion.commands import run

if __name__ == "__main__":
    run("benchmark")
