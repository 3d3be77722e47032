"""Let a trained policy act: python tools/rollout.py ckpt=RUN env=push_disc n=50 out=FILE.gif.

Prints its success rate and its latency; see configs/rollout.yaml.
"""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.entry import choose_out, exit_codes, plain, run_entry


@hydra.main(version_base=None, config_path="../configs", config_name="rollout")
def main(config: DictConfig) -> None:
    """Roll out as configured."""
    # after the command line is known to be right
    from diffusion.runs.rollout import rollout

    with exit_codes():
        settings = plain(config)
        rollout(settings | {"out": choose_out(settings)})


if __name__ == "__main__":
    run_entry(main, "rollout")
