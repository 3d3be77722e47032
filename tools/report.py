"""Show runs side by side: python tools/report.py runs=runs/sweep-... sort=loss out=report.md.

Prints the settings in which they differ, and what came of them. See configs/report.yaml.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from triton_diffusion.commands import run

if __name__ == "__main__":
    run("report")
