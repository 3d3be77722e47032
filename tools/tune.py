"""Measure which tiles are fastest on this GPU: python tools/tune.py model=unet64 batch=128.

See configs/tune.yaml.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from triton_diffusion.commands import run

if __name__ == "__main__":
    run("tune")
