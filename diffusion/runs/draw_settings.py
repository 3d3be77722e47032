"""What configurations say of how to draw."""

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..factory import check_sampler
from ..formats.checkpoint import Average
from ..formats.trained import Trained, TrainedSettings
from ..runtime.distributed import choose_device
from ..sampling.edit import Edit
from ..sampling.guidance import Guidance
from ..sampling.sampler import Sampler
from ..settings import check_seed, shown
from .editing import edited_options, load_edit
from .guiding import GUIDED, Guide, load_guide


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
