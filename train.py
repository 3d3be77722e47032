"""Train a diffusion model: python train.py [key=value ...]. See configs/train.yaml."""

import hydra
from omegaconf import DictConfig

from configs.entry import choose_run_dir, exit_codes, in_sweep, plain, run_entry


@hydra.main(version_base=None, config_path="configs", config_name="train")
def main(config: DictConfig) -> float:
    """Train as configured; returns the final loss, which Hydra's sweepers minimise."""
    from diffusion.runs.training import train  # after the command line is known to be right

    with exit_codes():
        settings = plain(config)
        return train(settings, choose_run_dir(settings), sweep=in_sweep())


if __name__ == "__main__":
    run_entry(main, "train")
