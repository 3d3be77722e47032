"""Show runs side by side: python tools/report.py runs=runs/sweep-... sort=loss out=report.md.

Prints the settings in which they differ, and what came of them. See configs/report.yaml.
"""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.entry import exit_codes, plain, run_entry


@hydra.main(version_base=None, config_path="../configs", config_name="report")
def main(config: DictConfig) -> None:
    """Report as configured."""
    from diffusion.runs.report import report  # after the command line is known to be right

    with exit_codes():
        report(plain(config))


if __name__ == "__main__":
    run_entry(main, "report")
