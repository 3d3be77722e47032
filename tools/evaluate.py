"""Compare drawn images with the data: python tools/evaluate.py ckpt=RUN n=10000 metrics=[fid,kid].

Prints FID and KID and appends them, with all that they depend on, to RUN/evaluations.csv. Several
GPUs draw under torchrun. See configs/evaluate.yaml.
"""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.entry import exit_codes, plain, run_entry


@hydra.main(version_base=None, config_path="../configs", config_name="evaluate")
def main(config: DictConfig) -> None:
    """Evaluate as configured."""
    from diffusion.runs.evaluation import evaluate  # after the command line is known to be right

    with exit_codes():
        evaluate(plain(config))


if __name__ == "__main__":
    run_entry(main, "evaluate")
