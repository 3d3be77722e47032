"""What pyproject.toml cannot say: configs/ becomes diffusion/configs/ of a wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """An editable install finds configs/ beside the packages, see diffusion/presets.py."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            there = Path(self.build_lib, "diffusion", "configs")
            shutil.rmtree(there, ignore_errors=True)  # of an earlier build
            shutil.copytree("configs", there, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithConfigs})
