"""Two processes of DistributedDataParallel over an accelerated module.

    python -m tests.plan.two_processes FOLDER

writes the gradients that each has as FOLDER/0.pt and 1.pt. They are copies of a process that does
nothing else: a copy of one that has threads may wait for a thread that it does not have.
"""

import sys
from datetime import timedelta

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diffusion import accelerate

_PATIENCE = timedelta(seconds=60)


def small() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 3, 3)
    return nn.Sequential(*layers)


def images() -> torch.Tensor:
    """Of both processes: each has half of them."""
    torch.manual_seed(0)
    return torch.randn(4, 3, 8, 8)


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    met = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": 2}
    torch.distributed.init_process_group("gloo", **met, timeout=_PATIENCE)
    net = DistributedDataParallel(accelerate(small()))
    net(images()[2 * rank : 2 * rank + 2]).square().mean().backward()
    grads = {k.removeprefix("module."): p.grad for k, p in net.named_parameters()}
    torch.save(grads, f"{folder}/{rank}.pt")
    # Or the group, which the module holds, would end with the GIL held, for which its threads may
    # wait: one run in five hung.
    del net
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(_process, (sys.argv[1],), nprocs=2, start_method="fork")
