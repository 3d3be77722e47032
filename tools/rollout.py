"""Let a trained policy act: python tools/rollout.py ckpt=RUN env=push_disc n=50 out=FILE.gif.

Prints its success rate and its latency; see configs/rollout.yaml.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from triton_diffusion.commands import run

if __name__ == "__main__":
    run("rollout")
