"""One training step: data, noise, forward, loss, backward, all-reduce, update."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from triton_kernels.noise.philox import LATENT

from ..data.autoencoder import draw_codes
from ..data.batches import Batches
from ..models.conditions import Conditions, Given, learned_and_given, with_null_token, with_presence
from ..models.flat_parameters import FlatParameters
from ..process.objective import Objective
from ..runtime.backward import run_backward
from ..runtime.cuda_graph import captured
from .beside import Beside
from .gradient_sum import GradientSum
from .optimizer import Optimizer

_EAGER_STEPS = 2  # before the capture: they compile kernels and fill the allocator


class TrainStep:
    """Runs update number `step` and leaves its loss and gradient norm on the device.

    Everything random is keyed by (seed, step, position in the global batch), so a step is a
    function of the parameters and its number alone. What changes from step to step is written into
    device tensors first; the rest has no host synchronisation and, on a GPU, is captured once in a
    CUDA graph and replayed.
    """

    def __init__(
        self,
        # called as UNet.forward_nhwc; it may say how to `forget_gradients` and want to know of
        # `timesteps_known`, see TrainingUNet
        network: Callable[..., Tensor],
        objective: Objective,
        batches: Batches,
        flat: FlatParameters,
        optimizer: Optimizer,
        gradient_sum: GradientSum,  # the one that `network` was told of
        *,
        seed: int,
        steps: int,
        accumulate: int = 1,  # micro-batches a step
        flip: bool = False,  # mirror half of the images
        condition_dropout: float = 0.0,  # how often no condition is given
        capture: bool = True,  # in a CUDA graph, on a GPU
    ) -> None:
        self.network, self.objective, self.batches = network, objective, batches
        self.flat, self.optimizer, self.gradient_sum = flat, optimizer, gradient_sum
        self.seed, self.steps, self.accumulate, self.flip = seed, steps, accumulate, flip
        self.condition_dropout = condition_dropout
        device = flat.param.device
        self.loss = torch.zeros(1, device=device)  # mean over the global batch
        self.norm = optimizer.norm.norm  # float32 [1], of the gradient, before clipping
        self._rng = torch.zeros(2, dtype=torch.int64, device=device)
        self._aside = Beside(device)  # for what only the end of backward waits for
        # the gradient of the batch's loss by that of a sample
        shape = (batches.count // accumulate,)
        self._share = torch.full(shape, 1 / batches.batch_size, device=device)
        self._capture = capture and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager_steps = 0

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns (loss, gradient norm), float32 [1] each, overwritten by the next step."""
        self._load(step)
        if self._graph is None and self._capture and self._eager_steps == _EAGER_STEPS:
            torch.cuda.empty_cache()  # the graph has a memory pool of its own
            self._graph = torch.cuda.CUDAGraph()
            # another thread may look after collectives meanwhile
            with captured(self._graph, capture_error_mode="thread_local"):
                self._compute()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()
            self._eager_steps += 1
        return self.loss, self.norm

    def release(self) -> None:
        """Let go of the captured step; another call captures anew. Before processes part, since
        NCCL does not leave a group while a graph holds its work."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def _load(self, step: int) -> None:
        """Write what depends on the number of the step."""
        self.batches.load(step)
        self.optimizer.load(step, self.steps)
        rng = torch.tensor([self.seed, step])
        self._rng.copy_(rng.pin_memory() if self._rng.is_cuda else rng, non_blocking=True)

    def _compute(self) -> None:
        self._aside.run(self._forget)  # beside the forward pass
        size = self.batches.count // self.accumulate
        for start in range(0, self.batches.count, size):
            losses = self._losses(start, size)
            self._aside.join()
            last = start + size >= self.batches.count
            self._aside.run(partial(self._add_loss, last), losses.detach())
            run_backward(losses, self._share.to(losses.dtype))
        self._aside.join()
        self.gradient_sum.finish()
        if self.objective.timesteps is not None:
            self.objective.timesteps.finish(self._rng)
        self.optimizer.update()

    def _forget(self) -> None:
        getattr(self.network, "forget_gradients", self.flat.grad.zero_)()
        self.loss.zero_()

    def _add_loss(self, last: bool, losses: Tensor) -> None:
        self.loss += losses.sum() / self.batches.batch_size
        if last:
            timesteps = self.objective.timesteps
            losses_of_all = () if timesteps is None else (timesteps.losses,)
            self.gradient_sum.begin(self.loss, *losses_of_all)

    def _codes(self, moments: Tensor, index: Tensor | None, first: int) -> Tensor:
        """Latents of the part, drawn from their moments [M, H, W, 2 C]: float32 [N, H, W, C]."""
        moments = moments if index is None else moments.index_select(0, index)
        *shape, channels = moments.shape
        noise = self.objective.backend.ops.normal(
            (*shape, channels // 2), self._rng, stream=LATENT, first=first
        )
        return draw_codes(moments, noise)

    def _losses(self, start: int, count: int) -> Tensor:
        """The loss of each of positions start .. start + count of this process's share."""
        images, index, labels = self.batches.part(start, count)
        first = self.batches.first + start
        if self.batches.are_moments:
            images, index = self._codes(images, index, first), None
        flip = None
        if self.flip:
            flip = self.objective.backend.ops.draw_flips(self._rng, count, first=first)
        image, vectors = None, self.batches.vectors(start, count)
        if self.batches.given_channels:
            both = self.objective.backend.ops.gather_images(images, index, flip)
            images, image = learned_and_given(both, self.batches.given_channels)
            index, flip = None, None
        sequences = self.batches.sequences(start, count)
        given = Conditions(
            labels,
            image,
            None if vectors is None else with_presence(vectors),
            *(() if sequences is None else with_null_token(*sequences)),
        )
        given = given.dropped(self._rng, self.condition_dropout, first=first).shortest()

        def denoiser(x: Tensor, t: Tensor, given: Given) -> Tensor:
            if isinstance(given, Conditions):
                x, given = given.beside(x)
            return self.network(x, t, given, rng=self._rng, first=first)

        losses, _ = self.objective.loss(
            denoiser,
            images,
            self._rng,
            index=index,
            flip=flip,
            labels=given,
            first=first,
            timesteps_known=getattr(self.network, "timesteps_known", None),
        )
        return losses
