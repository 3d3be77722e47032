"""Make another average of weights: python tools/average.py ckpt=RUN decay=0.9995, or sigma_rel=0.1.

Of the averages in the checkpoints that a run has kept. See configs/average.yaml.
"""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.entry import exit_codes, plain, run_entry


@hydra.main(version_base=None, config_path="../configs", config_name="average")
def main(config: DictConfig) -> None:
    """Average as configured."""
    from diffusion.training.averaging import average  # after the command line is known to be right

    with exit_codes():
        average(plain(config))


if __name__ == "__main__":
    run_entry(main, "average")
