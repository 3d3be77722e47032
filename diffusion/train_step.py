"""One training step: data, noise, forward, loss, backward, all-reduce, update."""

import torch
from torch import Tensor, nn

from .data.batches import Batches
from .distributed import Processes
from .flat import FlatParameters
from .objective import Objective
from .optimizer import Optimizer


class TrainStep:
    """Runs update number `step` and leaves its loss and gradient norm on the device.

    Everything random is keyed by (seed, step, position in the global batch), so a step is a
    function of the parameters and its number alone.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        batches: Batches,
        flat: FlatParameters,
        optimizer: Optimizer,
        processes: Processes,
        *,
        seed: int,
        steps: int,
        accumulate: int = 1,  # micro-batches a step
        flip: bool = False,  # mirror half of the images
    ) -> None:
        self.model, self.objective, self.batches = model, objective, batches
        self.flat, self.optimizer, self.processes = flat, optimizer, processes
        self.seed, self.steps, self.accumulate, self.flip = seed, steps, accumulate, flip
        self.first, self.count = processes.share_of(batches.batch_size)
        device = flat.param.device
        self._rng = torch.zeros(2, dtype=torch.int64, device=device)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns (mean loss over the global batch, gradient norm), float32 [1] each."""
        self._rng.copy_(torch.tensor([self.seed, step]), non_blocking=True)
        self.flat.grad.zero_()
        total = torch.zeros(1, device=self._rng.device)
        size = self.count // self.accumulate
        for first in range(self.first, self.first + self.count, size):
            total += self._backward(step, first, size)
        self.processes.sum(self.flat.grad)
        self.processes.sum(total)
        return total, self.optimizer.step(step, self.steps)

    def _backward(self, step: int, first: int, count: int) -> Tensor:
        """Add the gradient of positions first .. first + count; returns their share of the loss."""
        images, index, labels = self.batches.take(step, first, count)
        flip = None
        if self.flip:
            flip = self.objective.backend.ops.draw_flips(self._rng, count, first=first)

        def denoiser(x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
            return self.model.forward_nhwc(x, t, labels, rng=self._rng, first=first)

        losses, _ = self.objective.loss(
            denoiser, images, self._rng, index=index, flip=flip, labels=labels, first=first
        )
        loss = losses.sum() / self.batches.batch_size
        loss.backward()
        return loss.detach()
