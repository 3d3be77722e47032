"""Write a trained network in another format: python tools/export.py ckpt=RUN format=onnx out=PATH.

See configs/export.yaml and docs/interchange.md.
"""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.entry import exit_codes, plain, run_entry


@hydra.main(version_base=None, config_path="../configs", config_name="export")
def main(config: DictConfig) -> None:
    """Export as configured and say what was compared."""
    from diffusion.export.run import export  # after the command line is known to be right

    with exit_codes():
        export(plain(config))


if __name__ == "__main__":
    run_entry(main, "export")
