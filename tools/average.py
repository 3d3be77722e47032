"""Make another average of weights: python tools/average.py ckpt=RUN decay=0.9995, or sigma_rel=0.1.

Of the averages in the checkpoints that a run has kept. See configs/average.yaml.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from triton_diffusion.commands import run

if __name__ == "__main__":
    run("average")
