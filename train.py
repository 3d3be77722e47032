"""Train a diffusion model: python train.py [key=value ...]. See configs/train.yaml."""

from triton_diffusion.commands import run

if __name__ == "__main__":
    run("train")
