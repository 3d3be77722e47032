"""Put a folder of images into one file: python tools/prepare.py src=FOLDER out=FILE [size=64].

The file loads at once with dataset=packed dataset.path=FILE. See configs/prepare.yaml. Memory stays
small whatever the folder holds: an image is written as soon as it is decoded.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from triton_diffusion.commands import run

if __name__ == "__main__":
    run("prepare")
