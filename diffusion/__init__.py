"""Diffusion models over `triton_kernels`: the UNet, the processes, the data, the trainer.

Nothing here imports hydra or omegaconf: the entry scripts turn the configuration into keyword
arguments.
"""
