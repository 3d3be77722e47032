"""One process or several under torchrun; what differs is a rank, a count and a sum."""

import os
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from . import watch

# in which all processes have to come; and that a collective of gloo or NCCL waits for the slowest:
# hours, since the first process draws, scores and saves alone. `watch` sees who hangs
_MEET = timedelta(minutes=5)
_COLLECTIVE = timedelta(hours=4)
_LOOK = 0.05  # seconds between looks for the others
_HANGS_AFTER = "TRITON_DIFFUSION_HANG_SECONDS"  # in the environment, instead of watch.SECONDS

T = TypeVar("T")

_watch: watch.Watch | None = None  # of this process, while it is in a group


class Processes:
    """The processes of this run. Alone unless started by torchrun; for no device, alone anyway."""

    group: dist.ProcessGroup | None = None  # what sums; None: the group of all

    def __init__(self, device: torch.device | None) -> None:
        self.count = 1 if device is None else int(os.environ.get("WORLD_SIZE", 1))
        self.rank = 0 if device is None else own_rank()
        self._vote: tuple[Tensor, dist.Work] | None = None
        if self.count == 1 or dist.is_initialized():
            return
        store = _meet(self.rank, self.count)
        joined = {"store": store, "rank": self.rank, "world_size": self.count}
        if device.type == "cuda":
            # votes go over the CPU; a device that is known connects now, before any capture
            joined |= {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
        else:
            joined["backend"] = "gloo"
        dist.init_process_group(**joined, timeout=_COLLECTIVE)
        _begin_to_watch(store.round, self.rank, self.count)

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
        with self.alone():
            dist.gather(x, parts)
        return None if parts is None else torch.cat(parts)

    def of_first(self, value: T) -> T:
        """What the first process gives, in every process; it has to be plain data."""
        if self.count == 1:
            return value
        held = [value]
        with self.alone():
            dist.broadcast_object_list(held, src=0, device=torch.device("cpu"))
        return held[0]

    def vote(self, flag: bool) -> bool:
        """Whether the flag was set in at least one process at the vote before this one: the answer
        comes one vote late, so that no process waits for the others or for its GPU. Alone: `flag`.
        """
        if self.count == 1:
            return flag
        if _watch is not None:
            _watch.step()
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
            with self.alone():
                dist.barrier()

    def alone(self) -> AbstractContextManager[None]:
        """Around what one process does while the others wait, such as drawing, or where it waits:
        it may take as long as it takes."""
        return nullcontext() if _watch is None else _watch.pause()

    def close(self) -> None:
        """Leave the group, if there is one. NCCL waits until every CUDA graph that it has been
        captured in is gone, see `TrainStep.release`. Where an exception ends the process the others
        are not to go on without it."""
        global _watch
        if self.count > 1 and dist.is_initialized():
            if _watch is not None:
                _watch.close(well=sys.exc_info()[0] is None)
                _watch = None
            dist.destroy_process_group()


class _Round(dist.PrefixStore):
    """A store of one round: what an earlier one left in it is not seen."""

    def __init__(self, name: str, store: dist.Store) -> None:
        super().__init__(name, store)
        self.round = name


def _meet(rank: int, count: int) -> _Round:
    """The store that the processes of torchrun or Slurm share, for this round alone.

    torchrun keeps its store when it starts the processes again, with the addresses of those that
    died, to which gloo would connect. TORCHELASTIC_RESTART_COUNT does not tell rounds apart:
    of several nodes only the one on which a process failed counts. So the first process names the
    round and answers the others, each of which asks with a number that is new."""
    store, _, _ = next(dist.rendezvous("env://", rank, count, timeout=_MEET))
    deadline = time.monotonic() + _MEET.total_seconds()
    if rank:
        asked = uuid.uuid4().hex
        store.set(f"ask/{rank}", asked)
        name = store.get(f"answer/{asked}").decode()  # waits
        store.set(f"{name}/here/{rank}", "")
        return _Round(name, store)
    name, missing = uuid.uuid4().hex, set(range(1, count))
    while missing:
        for other in sorted(missing):
            if store.check([f"{name}/here/{other}"]):
                missing.remove(other)
            elif store.check([f"ask/{other}"]):  # maybe that of a process which is dead
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", name)
        if time.monotonic() > deadline:
            raise RuntimeError(f"of {count} processes {sorted(missing)} did not come in {_MEET}")
        time.sleep(_LOOK)
    return _Round(name, store)


def _begin_to_watch(name: str, rank: int, count: int) -> None:
    """On a connection of its own: that of the group waits with the main thread."""
    global _watch
    store, _, _ = next(dist.rendezvous("env://", rank, count, timeout=_MEET))
    seconds = float(os.environ.get(_HANGS_AFTER, watch.SECONDS))
    _watch = watch.Watch(dist.PrefixStore(f"{name}/watch", store), rank, count, seconds)


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
