"""Compare drawn images with the data: python tools/evaluate.py ckpt=RUN n=10000 metrics=[fid,kid].

Prints FID and KID and appends them, with all that they depend on, to RUN/evaluations.csv. Several
GPUs draw under torchrun. See configs/evaluate.yaml.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from triton_diffusion.commands import run

if __name__ == "__main__":
    run("evaluate")
