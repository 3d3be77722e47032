"""Diffusion models over `triton_kernels`: the UNet, the processes, the data, the trainer.

Nothing here imports hydra or omegaconf: the entry scripts turn the configuration into keyword
arguments.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def accelerate(module: "nn.Module") -> "nn.Module":
    """The module with its forward and backward run by plan (see docs/plan.md): a module with the
    same parameters, arguments and results, which trains, evaluates, and may be wrapped in DDP.

    Its first call for new shapes traces and plans. It raises `diffusion.plan.graph.PlanError` for
    what cannot be planned, with the op and the line that it came from.
    """
    from .plan.accelerate import Accelerated

    return Accelerated(module)
