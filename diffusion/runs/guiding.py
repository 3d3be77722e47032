"""How a drawing is guided: by its classes, or by a weaker network."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..formats.checkpoint import Average
from ..formats.trained import Trained, load_trained
from ..plan.inference import sampling_network
from ..process.objective import Denoiser
from ..sampling.chain import TabulatedDenoiser
from ..sampling.guidance import Guidance
from ..settings import shown
from .classes import class_number

# settings of `load_guide`
GUIDED = ("guidance", "guidance_interval", "guidance_rescale", "negative", "guide", "guide_ema")


@dataclass(frozen=True)
class Guide:
    """How a drawing is guided, see `load_guide`."""

    guidance: Guidance
    weaker: Trained | None = None

    def network(self) -> Denoiser | TabulatedDenoiser | None:
        """What the weaker network's outputs come from."""
        return None if self.weaker is None else sampling_network(self.weaker.model.eval())


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
