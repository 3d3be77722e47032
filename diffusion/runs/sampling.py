"""A sampling run from a plain dict: load the network, draw, save."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.autoencoder import autoencoder_digest
from ..data.values import Latents, Values
from ..errors import counted, writing
from ..formats.trained import Trained
from ..models.conditions import Given
from ..sampling.conditioning import beside_condition
from ..sampling.draw import cut
from ..sampling.sampler import Sampler
from ..settings import construct
from .classes import choose_labels
from .conditioning import load_conditions
from .draw_settings import SampleSettings
from .drawing import Drawing, draw_all
from .outputs import check_out, choose_values, default_out, is_folder, save
from .picture_folder import PictureFolder, digest_of


def sample(config: dict[str, Any]) -> Path:
    """Draw as configured; returns the path of the picture, file or folder."""
    settings = construct(SampleSettings, config, "")
    trained, sampler = settings.load_and_choose()
    values = choose_values(settings.decoder, trained)
    out = Path(settings.out or default_out(settings, trained, values))
    check_out(out, values, trained.image_shape[2])
    labels = choose_labels(settings.label, settings.n, trained)
    given = load_conditions(
        settings.condition, settings.vector, settings.context, labels, settings.n, trained
    )
    shown = partial(beside_condition, conditions=given, given=trained.condition)
    if is_folder(out):
        said = _draw_into(out, settings, trained, sampler, given, values, shown)
    else:
        finish = values.picture if out.suffix == ".png" else values.finish
        images = draw_all(settings, trained, sampler, given, finish)
        said = images is not None
        if said:
            with writing(out):
                save(images, out, None if labels is None else labels.cpu().numpy(), shown)
    if said:
        print(f"{counted(settings.n, 'images')} of {settings.ckpt} in {out}")
    return out


def _draw_into(
    out: Path,
    settings: SampleSettings,
    trained: Trained,
    sampler: Sampler,
    given: Given,
    values: Values,
    shown: Callable[[np.ndarray], np.ndarray],  # of those in the grid
) -> bool:
    """Draw into a folder, each batch as soon as it is done, and go on where the same drawing was
    stopped. Whether this process is the first, which writes."""
    drawing = Drawing(settings, trained, sampler, given)
    processes, folder, done = drawing.processes, None, 0
    batches, _ = cut(drawing.share, settings.batch_size)
    with ExitStack() as held:
        if processes.is_first:
            with writing(out):
                folder = PictureFolder(out, _identity(drawing, values), settings.n)
                held.callback(folder.close)
                done = folder.begin([drawing.numbers(batch) for batch in range(batches)])
            if done:
                print(f"{out} has {done} of {batches} batches of this drawing, which goes on")
        done = processes.of_first(done)
        try:
            for images in drawing.batches(values.finish, done):
                gathered = processes.gather(torch.from_numpy(images))
                if folder is not None:
                    with writing(out):
                        folder.write(drawing.numbers(done), gathered.numpy())
                done += 1
        except KeyboardInterrupt:
            if folder is not None and done:
                said = f"{done} of {batches} batches are in {out}; the same command goes on"
                print(said, flush=True)
            raise
        if folder is not None:
            with writing(out):
                folder.finish(shown)
    return processes.is_first


def _identity(drawing: Drawing, values: Values) -> str:
    """A digest of all that images of a folder depend on."""
    settings, trained, guide = drawing.settings, drawing.trained, drawing.guide
    said = {field.name: getattr(settings, field.name) for field in fields(settings)}
    said |= {"out": None, "device": None, "backend": trained.model.backend.name}
    said |= {"precision": trained.model.backend.precision, "processes": drawing.processes.count}
    if isinstance(values, Latents):
        said["autoencoder"] = autoencoder_digest(values.autoencoder)
    weaker = None if guide.weaker is None else guide.weaker.model
    return digest_of(said, trained.model, weaker, drawing.given, drawing.edit)
