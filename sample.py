"""Draw images from a trained model: python sample.py ckpt=RUN_OR_CHECKPOINT [key=value ...].

See configs/sample.yaml.
"""

import hydra
from omegaconf import DictConfig

from configs.entry import choose_out, exit_codes, plain, run_entry


@hydra.main(version_base=None, config_path="configs", config_name="sample")
def main(config: DictConfig) -> None:
    """Draw as configured and say where the pictures are."""
    from diffusion.runs.sampling import sample  # after the command line is known to be right

    with exit_codes():
        settings = plain(config)
        sample(settings | {"out": choose_out(settings)})


if __name__ == "__main__":
    run_entry(main, "sample")
