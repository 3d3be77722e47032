"""Draws what settings ask for, by one process or several, with progress shown."""

import atexit
import time
from collections.abc import Callable, Iterator
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from ..formats.trained import Trained
from ..models.conditions import Given, parts_of, zeros_given
from ..plan.inference import InferenceUNet, sampling_network
from ..runtime.distributed import Processes
from ..runtime.precompile import DRAWN, compile_ahead
from ..runtime.progress import Progress
from ..sampling.draw import cut, draw_batches, rehearse
from ..sampling.sampler import Sampler
from .classes import choose_labels
from .draw_settings import DrawSettings
from .guiding import Guide


def draw_all(
    settings: DrawSettings,
    trained: Trained,
    sampler: Sampler,
    labels: Given,  # int64 [n], or more that is given
    finish: Callable[[Tensor], np.ndarray] | None = None,  # of a batch; None: what the data want
) -> np.ndarray | None:
    """[n, H, W, C] as `finish` makes them, with progress shown; under torchrun every process draws
    a share, the first has them all and the others None."""
    images = draw_share(settings, trained, sampler, labels, finish)
    processes = Processes(next(trained.model.parameters()).device)
    gathered = processes.gather(torch.from_numpy(images))
    return None if gathered is None else gathered[: settings.n].numpy()


def draw_share(
    settings: DrawSettings,
    trained: Trained,
    sampler: Sampler,
    labels: Given,  # int64 [n], or more that is given
    finish: Callable[[Tensor], np.ndarray] | None = None,  # of a batch; None: what the data want
) -> np.ndarray:
    """This process's share of the images, [share, H, W, C] as `finish` makes them; those of all
    processes, one behind the other, are n or some more."""
    drawing = Drawing(settings, trained, sampler, labels)
    return np.concatenate(list(drawing.batches(finish)))[: drawing.share]


class Drawing:
    """What is about to be drawn, by how many processes."""

    def __init__(
        self, settings: DrawSettings, trained: Trained, sampler: Sampler, given: Given
    ) -> None:
        self.settings, self.trained, self.sampler, self.given = settings, trained, sampler, given
        self.processes = Processes(next(trained.model.parameters()).device)
        atexit.register(self.processes.close)  # the next job of a sweep draws in this group
        self.share = -(-settings.n // self.processes.count)  # images of this process
        self.guide, self.edit = settings.guide_of(trained), settings.edit_of(trained)

    def numbers(self, batch: int) -> list[int]:
        """Of the images of a batch, those of all processes one behind the other; n for what goes
        beyond a process's share, or is n or more."""
        _, count = cut(self.share, self.settings.batch_size)
        places = range(batch * count, (batch + 1) * count)
        firsts = [rank * self.share for rank in range(self.processes.count)]
        n, share = self.settings.n, self.share
        return [first + i if i < share else n for first in firsts for i in places]

    def batches(
        self, finish: Callable[[Tensor], np.ndarray] | None, done: int = 0
    ) -> Iterator[np.ndarray]:
        """This process's batches as they are done, but for those that are already; progress is
        shown. See `draw_batches`."""
        settings, trained, guide, labels = self.settings, self.trained, self.guide, self.given
        processes, share, n = self.processes, self.share, settings.n
        backend, first = trained.model.backend, processes.rank * share
        network, weaker = sampling_network(trained.model.eval()), guide.network()
        if processes.is_first:
            how = "the fused plan" if isinstance(network, InferenceUNet) else "layer by layer"
            how += f", {processes.count} processes" if processes.count > 1 else ""
            dtype = str(backend.dtype).removeprefix("torch.")
            print(f"sampling in {dtype} with backend {backend.name}, {how}")
        if isinstance(network, InferenceUNet):
            context = parts_of(labels).context
            tokens = 0 if context is None else context.shape[1] - 1
            _compile_ahead(settings, trained, guide, share, tokens)
            processes.wait()  # for the first of each machine, which compiles
        began, drawn = time.monotonic(), 0
        with Progress(unit="step") as progress:
            for images in draw_batches(
                trained.model,
                self.sampler,
                share,
                trained.image_shape,
                seed=settings.seed,
                first=first,
                labels=None if labels is None else labels[torch.arange(first, first + share) % n],
                guidance=guide.guidance,
                weaker=weaker,
                batch_size=settings.batch_size,
                done=done,
                progress=progress.reach,
                network=network,
                finish=finish or trained.values.finish,
                edit=self.edit,
            ):
                drawn += len(images)
                yield images
        if processes.is_first and drawn:
            seconds = time.monotonic() - began  # capture of the chain's graph included
            drawn = min(drawn * processes.count, n)
            print(f"sampled in {seconds:.1f} s, {drawn / seconds:.3g} images/s", flush=True)


def rehearse_drawing(settings: DrawSettings, tokens: int = 0) -> None:
    """Launch what `draw_all` launches for these settings, of one process, with so many tokens of a
    context; see `triton_kernels.runtime.launch_recorder`."""
    trained, sampler = settings.load_and_choose()
    guide, given = settings.guide_of(trained), choose_labels(None, settings.n, trained)
    given = zeros_given(settings.n, given, trained.image_shape[:2], trained.model, tokens)
    rehearse(
        trained.model,
        sampler,
        settings.n,
        trained.image_shape,
        labels=given,
        guidance=guide.guidance,
        batch_size=settings.batch_size,
        network=sampling_network(trained.model.eval()),
        weaker=guide.network(),
    )


def _compile_ahead(
    settings: DrawSettings,
    trained: Trained,
    guide: Guide,
    share: int,  # images of this process
    tokens: int,  # of a context
) -> None:
    """So that the first chain does not begin with minutes of compiling. The kernel or two that
    another sampler has, or another number of steps, are not worth a look by many processes."""
    job = {field.name: getattr(settings, field.name) for field in fields(DrawSettings)}
    job["n"], job["tokens"], model = share, tokens, trained.model
    kernels_of = {
        "model": trained.settings,
        "image": trained.image_shape,
        "variance": trained.process.variance,
        "precision": model.backend.precision,
        "images": cut(share, settings.batch_size)[1],
        "tokens": tokens,
        "guided": settings.guidance != 1,
        "guide": None if guide.weaker is None else guide.weaker.settings,
    }
    device = next(model.parameters()).device
    compile_ahead("sample", job, kernels_of, device, DRAWN * model.num_parameters)
