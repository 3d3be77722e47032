"""Write a trained network in another format: python tools/export.py ckpt=RUN format=onnx out=PATH.

See configs/export.yaml and docs/interchange.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from triton_diffusion.commands import run

if __name__ == "__main__":
    run("export")
