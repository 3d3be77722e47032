"""One process or several under torchrun; what differs is a rank, a count and a sum."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError


class Processes:
    """The processes of this run. Alone unless started by torchrun; for no device, alone anyway."""

    group: dist.ProcessGroup | None = None  # what sums; None: the group of all

    def __init__(self, device: torch.device | None) -> None:
        self.count = 1 if device is None else int(os.environ.get("WORLD_SIZE", 1))
        self.rank = 0 if device is None else own_rank()
        self._vote: tuple[Tensor, dist.Work] | None = None
        if self.count == 1 or dist.is_initialized():
            return
        if device.type == "cuda":
            # votes go over the CPU; a device that is known connects now, before any capture
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        else:
            dist.init_process_group("gloo")

    @property
    def is_first(self) -> bool:
        """The process that logs, saves and draws."""
        return self.rank == 0

    def share_of(self, batch_size: int) -> tuple[int, int]:
        """(first position, count) of this process in the global batch."""
        if batch_size % self.count:
            raise ConfigError(
                f"train.batch_size={batch_size} does not divide among {self.count} processes"
            )
        share = batch_size // self.count
        return self.rank * share, share

    def start_sum(self, x: Tensor) -> Callable[[], object]:
        """Begin to sum `x` over the processes, in place, after what the current stream has been
        given; what is returned lets the stream that is current then wait for it."""
        if self.count == 1:
            return lambda: None
        return dist.all_reduce(x, group=self.group, async_op=True).wait

    def gather(self, x: Tensor) -> Tensor | None:
        """Tensors of one shape in the memory of the host, those of all processes one behind the
        other, for the first process; None for the others. Alone: `x`."""
        if self.count == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.count)] if self.is_first else None
        dist.gather(x, parts)
        return None if parts is None else torch.cat(parts)

    def vote(self, flag: bool) -> bool:
        """Whether the flag was set in at least one process at the vote before this one: the answer
        comes one vote late, so that no process waits for the others or for its GPU. Alone: `flag`.
        """
        if self.count == 1:
            return flag
        before, votes = self._vote, torch.tensor([int(flag)])
        self._vote = votes, dist.all_reduce(votes, async_op=True)
        if before is None:
            return False
        votes, work = before
        work.wait()
        return votes.item() > 0

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.count > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the group, if there is one. NCCL waits until every CUDA graph that it has been
        captured in is gone, see `TrainStep.release`."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()


def own_rank() -> int:
    """The number of this process among those of torchrun, which is known before they meet; 0 if it
    is alone."""
    return int(os.environ.get("RANK", 0))


def choose_device(name: str) -> torch.device:
    """Resolve `auto` (CUDA if there is one); under torchrun each process takes its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device={name} is unknown; choose auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name} is not supported; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={name}, but PyTorch sees no CUDA device; use device=cpu")
        index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", 0))
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device={name} is number {index}, but there are {torch.cuda.device_count()} GPUs"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device
