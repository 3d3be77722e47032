"""A sampling run from a plain dict: load the network, draw, save."""

import atexit
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.autoencoder import autoencoder_digest, missing_autoencoder
from ..data.values import Latents, Values
from ..errors import ConfigError, check_writable, counted, writing
from ..factory import check_sampler
from ..formats.checkpoint import Average
from ..formats.trained import Trained, TrainedSettings, load_trained
from ..models.conditions import Given, parts_of, zeros_given
from ..plan.inference import InferenceUNet, sampling_network
from ..process.objective import Denoiser
from ..runtime.distributed import Processes, choose_device
from ..runtime.precompile import DRAWN, compile_ahead
from ..runtime.progress import Progress
from ..sampling.chain import TabulatedDenoiser
from ..sampling.conditioning import beside_condition
from ..sampling.draw import cut, draw_batches, rehearse
from ..sampling.edit import Edit
from ..sampling.guidance import Guidance
from ..sampling.sampler import Sampler
from ..settings import check_seed, construct, shown
from ..tracking.pictures import grid
from .conditioning import load_conditions
from .editing import edited_options, load_edit
from .picture_folder import PictureFolder, digest_of

_FILES = (".png", ".npz", ".npy")
_NAMED = 40  # letters of a setting, at most, in the name of a picture
# settings of `load_guide`
GUIDED = ("guidance", "guidance_interval", "guidance_rescale", "negative", "guide", "guide_ema")


@dataclass(frozen=True)
class Guide:
    """How a drawing is guided, see `guide`."""

    guidance: Guidance
    weaker: Trained | None = None

    def network(self) -> Denoiser | TabulatedDenoiser | None:
        """What the weaker network's outputs come from."""
        return None if self.weaker is None else sampling_network(self.weaker.model.eval())


@dataclass(frozen=True, kw_only=True)
class DrawSettings(TrainedSettings):
    """What the configurations of `sample.py` and `tools/evaluate.py` say of how to draw."""

    n: int = 16
    sampler: str = "ddim"
    steps: int | str | list[int] | None = 50
    spacing: str | None = None
    eta: float = 0.0
    clip: float | str | None = "auto"
    seed: int = 0
    guidance: float = 1.0
    guidance_interval: tuple[float, float] | None = None
    guidance_rescale: float = 0.0
    negative: Any = None  # name or number of a class
    guide: str | None = None
    guide_ema: Average = True
    batch_size: int = 64
    backend: str = "auto"
    device: str = "auto"
    precision: str | None = None

    def __post_init__(self) -> None:
        for key in ("n", "batch_size"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)}; expected at least 1")
        check_seed(self.seed)
        check_sampler(self.sampler)
        if self.guide is None:  # before anything is loaded
            if self.guide_ema is not True:
                raise ConfigError(
                    f"guide_ema={shown(self.guide_ema)} goes with guide=CHECKPOINT, which is not"
                    " given"
                )
            Guidance(self.guidance, self.guidance_interval, self.guidance_rescale, self.negative)

    def guide_of(self, trained: Trained) -> Guide:
        """How these settings guide it. Raises ConfigError."""
        return load_guide(trained, **{key: getattr(self, key) for key in GUIDED})

    def load_and_choose(self) -> tuple[Trained, Sampler]:
        """The network on its device, and what draws with it. Raises ConfigError."""
        device = choose_device(self.device)
        trained = self.load(device, backend=self.backend, precision=self.precision)
        return trained, trained.sampler(
            device,
            sampler=self.sampler,
            steps=self.steps,
            spacing=self.spacing,
            eta=self.eta,
            clip=self.clip,
            **self.edited(),
        )

    def edited(self) -> dict[str, Any]:
        """Further settings of the sampler."""
        return {}

    def edit_of(self, trained: Trained) -> Edit | None:
        """Images to begin from, or to keep in part. Raises ConfigError."""
        return None


@dataclass(frozen=True, kw_only=True)
class SampleSettings(DrawSettings):
    """The configuration; see configs/sample.yaml."""

    label: Any = None  # name or number of a class
    condition: str | None = None  # file or folder
    vector: Any = None  # numbers, or a file of them
    context: str | None = None  # file of sequences
    decoder: str | None = None  # folder of an autoencoder, or none
    init: str | None = None  # file or folder of images
    mask: str | None = None  # the same
    strength: float | None = None
    resample: int = 1
    out: str | None = None

    def edited(self) -> dict[str, Any]:
        return edited_options(self.init, self.mask, self.strength, self.resample)

    def edit_of(self, trained: Trained) -> Edit | None:
        return load_edit(self.init, self.mask, self.n, trained, self.decoder)


def guidance_shown(settings: DrawSettings) -> str:
    """All that is said of guidance, in one text: the scale, and what is not as it usually is."""
    others = {key: getattr(settings, key) for key in GUIDED[1:]}
    given = [f"{k}={shown(v)}" for k, v in others.items() if v != getattr(DrawSettings, k)]
    return " ".join((shown(settings.guidance), *given))


def load_guide(
    trained: Trained,
    guidance: float = 1.0,
    guidance_interval: tuple[float, float] | None = None,
    guidance_rescale: float = 0.0,
    negative: Any = None,  # name or number of a class
    guide: str | Path | Trained | None = None,
    guide_ema: Average = True,
) -> Guide:
    """With the second network, if there is one, on the device of the first. ConfigError: there is
    no such class, or the two say different things."""
    if guide is not None and (guidance == 1 or negative is not None):
        why = "has no effect with guidance=1" if guidance == 1 else "goes without negative"
        raise ConfigError(f"guide={guide} {why}; give guidance=2 to 5, and no negative")
    if negative is not None:
        negative = class_number("negative", negative, trained)
    how, model = Guidance(guidance, guidance_interval, guidance_rescale, negative), trained.model
    if guide is None:
        return Guide(how)
    weaker = guide
    if not isinstance(weaker, Trained):
        device, backend = next(model.parameters()).device, model.backend
        weaker = load_trained(
            guide, device, ema=guide_ema, backend=backend.name, precision=backend.precision
        )
    name = guide if weaker is not guide else weaker.name
    for what, theirs, ours in (
        ("images of shape", list(weaker.image_shape), list(trained.image_shape)),
        ("a number of classes of", weaker.model.num_classes, model.num_classes),
        ("prediction", weaker.process.prediction, trained.process.prediction),
        ("sigma_data", weaker.process.sigma_data, trained.process.sigma_data),
        ("vectors of", weaker.model.vector_dim, model.vector_dim),
        ("tokens of", weaker.model.context_dim, model.context_dim),
        ("given", str(weaker.condition), str(trained.condition)),
    ):
        if theirs != ours:
            raise ConfigError(
                f"guide={name} has {what} {shown(theirs)}; {trained.name} has {shown(ours)}, and"
                " both have to say the same"
            )
    if not weaker.process.same_levels(trained.process):
        raise ConfigError(
            f"guide={name} was trained on other levels of noise than {trained.name}; expected the"
            " same diffusion.schedule and num_timesteps"
        )
    return Guide(how, weaker)


def sample(config: dict[str, Any]) -> Path:
    """Draw as configured; returns the path of the picture, file or folder."""
    settings = construct(SampleSettings, config, "")
    trained, sampler = settings.load_and_choose()
    values = choose_values(settings.decoder, trained)
    out = Path(settings.out or _default_out(settings, trained, values))
    _check_out(out, values, trained.image_shape[2])
    labels = choose_labels(settings.label, settings.n, trained)
    given = load_conditions(
        settings.condition, settings.vector, settings.context, labels, settings.n, trained
    )
    shown = partial(beside_condition, conditions=given, given=trained.condition)
    if _is_folder(out):
        said = _draw_into(out, settings, trained, sampler, given, values, shown)
    else:
        finish = values.picture if out.suffix == ".png" else values.finish
        images = draw_all(settings, trained, sampler, given, finish)
        said = images is not None
        if said:
            with writing(out):
                _save(images, out, None if labels is None else labels.cpu().numpy(), shown)
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
    drawing = _Drawing(settings, trained, sampler, given)
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


def _identity(drawing: "_Drawing", values: Values) -> str:
    """A digest of all that images of a folder depend on."""
    settings, trained, guide = drawing.settings, drawing.trained, drawing.guide
    said = {field.name: getattr(settings, field.name) for field in fields(settings)}
    said |= {"out": None, "device": None, "backend": trained.model.backend.name}
    said |= {"precision": trained.model.backend.precision, "processes": drawing.processes.count}
    if isinstance(values, Latents):
        said["autoencoder"] = autoencoder_digest(values.autoencoder)
    weaker = None if guide.weaker is None else guide.weaker.model
    return digest_of(said, trained.model, weaker, drawing.given, drawing.edit)


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
    drawing = _Drawing(settings, trained, sampler, labels)
    return np.concatenate(list(drawing.batches(finish)))[: drawing.share]


class _Drawing:
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


def choose_values(decoder: str | None, trained: Trained) -> Values:
    """What drawn numbers become: what the data were, or those of latents by another autoencoder;
    none: the latents themselves. ConfigError: there is no such autoencoder, or nothing to decode.
    """
    values = trained.values
    if not isinstance(values, Latents):
        if decoder is not None:
            raise ConfigError(
                f"decoder={decoder}, but the model was not trained on latents; leave it out"
            )
        return values
    if decoder == "none":
        return values.codes
    if decoder is not None:
        values = replace(values, autoencoder=decoder)
    missing = missing_autoencoder(values.autoencoder)
    if missing:
        raise ConfigError(
            f"{missing}; give decoder=FOLDER, or decoder=none for the latents themselves"
        )
    if autoencoder_digest(values.autoencoder) != values.digest:
        warnings.warn(
            f"{values.autoencoder} is not the autoencoder that encoded the data"
            f" ({values.digest[:8]}), unless only its decoder was trained on",
            stacklevel=2,
        )
    return values


def _default_out(settings: SampleSettings, trained: Trained, values: Values) -> Path:
    """Beside the run, named after the weights and how the pictures are drawn with them: what is
    drawn otherwise does not replace them."""
    steps = settings.steps or ""
    steps = "-".join(map(str, steps)) if isinstance(steps, list) else str(steps)
    ema = "" if settings.ema is True else f"_ema{settings.ema or '-false'}"
    name = f"{trained.name}{ema}_{settings.sampler}"
    name += f"-{steps}" if steps[:1].isalpha() else steps
    edited = ("condition", "vector", "context", "decoder", "init", "mask", "strength", "resample")
    for key in ("spacing", "eta", "clip", "label", *GUIDED, *edited):
        value = getattr(settings, key)
        if value != getattr(SampleSettings, key):
            text = shown(value)[-_NAMED:]  # of a path its end
            name += f"_{key}{'' if type(value) in (int, float) else '-'}{text}"
    suffix = ".png" if values.is_image else ".npz"
    name = f"{name}_{settings.seed}{suffix}".replace("/", "-")  # of a class's name
    if trained.run_dir is None:
        return Path(name)
    return trained.run_dir / "samples" / f"sample_{name}"


def choose_labels(label: Any, n: int, trained: Trained) -> Tensor | None:
    """Of n images the class, by name or number, or all in turn; None if the network has none.
    ConfigError: there is no such class."""
    num_classes = trained.model.num_classes
    device = next(trained.model.parameters()).device
    if num_classes is None:
        if label is not None:
            raise ConfigError(f"label={label}, but the model has no classes; leave it out")
        return None
    if label is None:
        return torch.arange(n, device=device) % num_classes
    return torch.full((n,), class_number("label", label, trained), device=device)


def class_number(key: str, label: Any, trained: Trained) -> int:
    """Of a class by its name or number. ConfigError: there is none."""
    num_classes = trained.model.num_classes
    if num_classes is None:
        raise ConfigError(f"{key}={label}, but the model has no classes; leave it out")
    names = trained.class_names or ()
    if str(label) in names:
        label = names.index(str(label))
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < num_classes:
        valid = ", ".join(names) if names else f"0 to {num_classes - 1}"
        classes = counted(num_classes, "classes")
        raise ConfigError(f"{key}={label} is unknown; the model has {classes}: {valid}")
    return label


def _is_folder(out: Path) -> bool:
    """Whether one PNG an image goes there. The name of a folder may have a dot if it exists."""
    return not out.suffix or (out.suffix not in _FILES and out.is_dir())


def _check_out(out: Path, values: Values, channels: int) -> None:
    if _is_folder(out):
        if not values.is_image:
            raise ConfigError(
                f"out={out}: a PNG does not hold measured numbers; expected a .npy, a .npz or, to"
                " look at them, a .png"
            )
        if channels > 4 and not isinstance(values, Latents):
            raise ConfigError(f"out={out}: a PNG has no {channels} channels; expected a .npz")
        if out.is_file():
            raise ConfigError(f"out={out} is a file; expected a folder, a .png (grid) or a .npz")
        check_writable(out / "0.png")
        return
    if out.suffix not in _FILES:
        raise ConfigError(
            f"out={out}; expected a .png (grid), a .npz, a .npy or a folder (one whose name has a"
            " dot has to be there)"
        )
    if out.is_dir():
        raise ConfigError(f"out={out} is a folder; expected a file")
    check_writable(out)


def _save(
    images: np.ndarray,  # [N, H, W, C], for a grid uint8
    out: Path,
    labels: np.ndarray | None = None,  # int64 [N]
    shown: Callable[[np.ndarray], np.ndarray] = lambda images: images,  # of those in a grid
) -> None:
    """As a grid, a .npy or guided-diffusion's .npz."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".writing_{out.name}")  # on a full disk, what is there stays
    try:
        if out.suffix == ".png":
            grid(shown(images)).save(aside)
        elif out.suffix == ".npy":
            np.save(aside, images)
        else:
            np.savez(aside, images, *([] if labels is None else [labels]))  # arr_0, arr_1
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)
