"""Say what this machine has and which kernels are on: python tools/doctor.py.

See configs/doctor.yaml.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from triton_diffusion.commands import run

if __name__ == "__main__":
    run("doctor")
