"""Draw images from a trained model: python sample.py ckpt=RUN_OR_CHECKPOINT [key=value ...].

See configs/sample.yaml.
"""

from triton_diffusion.commands import run

if __name__ == "__main__":
    run("sample")
