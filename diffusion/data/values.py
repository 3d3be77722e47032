"""What the numbers of a data set mean, and how those of the network become them again.

A network learns numbers of about one unit. Images of 8 bits are x / 127.5 - 1, which the training
kernels compute. Measured data are (x - mean) / deviation of each channel, and what is drawn is
brought back into the data's units and into the order of axes that its file has. Latents are
decoded by the autoencoder that made them.
"""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor

from ..tracking.pictures import to_uint8
from .autoencoder import decode

LAYOUTS = {  # axes of an array -> how to bring [M, H, W, C] into that order
    "nhwc": (0, 1, 2, 3),
    "nchw": (0, 3, 1, 2),
    "nhw": (0, 1, 2),  # of the one channel
}
_SHOWN_DEVIATIONS = 3.0  # from the mean to black or white in a picture
_SHOWN_CHANNELS = 8  # in a picture, side by side


class Values(Protocol):
    """What a data set says of its numbers."""

    clip: float | None  # limit of the clean sample in drawing, if nobody says another; None: none
    is_image: bool  # whether a sample is a picture of 8 bits as it is drawn
    mirrors: bool  # whether a mirrored sample is as likely a sample

    def finish(self, x: Tensor) -> np.ndarray:
        """Drawn [N, H, W, C] as the data have it."""

    def picture(self, x: Tensor) -> np.ndarray:
        """Drawn [N, H, W, C] for people to see: uint8 [N, H', W', C']."""

    def state(self) -> dict[str, Any]:
        """For a checkpoint's state.json; `values_from_state` reads it."""


def in_layout(images: np.ndarray, layout: str) -> np.ndarray:
    """[N, H, W, C] with the axes of `layout`."""
    if layout == "nhw":
        images = images[..., 0]
    return np.ascontiguousarray(images.transpose(LAYOUTS[layout]))


@dataclass(frozen=True)
class Pixels:
    """Numbers of 8 bits, 0 to 255, which the network sees as -1 to 1."""

    layout: str = "nhwc"

    clip: ClassVar[float | None] = 1.0
    mirrors: ClassVar[bool] = True

    @property
    def is_image(self) -> bool:
        return self.layout == "nhwc"

    def finish(self, x: Tensor) -> np.ndarray:
        return in_layout(to_uint8(x), self.layout)

    def picture(self, x: Tensor) -> np.ndarray:
        return to_uint8(x)

    def state(self) -> dict[str, Any]:
        return {"kind": "pixels", **asdict(self)}

    def __str__(self) -> str:
        return "images of 8 bits"


@dataclass(frozen=True)
class Units:
    """Measured numbers: (x - mean) / deviation of each channel, for the network."""

    mean: tuple[float, ...]  # [C]
    deviation: tuple[float, ...]  # [C], above 0
    layout: str = "nhwc"
    dtype: str = "float32"  # of what is drawn: float32, or uint8, rounded
    limit: float | None = None  # deviations from the mean that a number has at most, if known

    is_image: ClassVar[bool] = False
    mirrors: ClassVar[bool] = True

    @property
    def clip(self) -> float | None:
        """A first guess of x_0 out of noise is off by hundreds of deviations."""
        return self.limit

    def normalise(self, rows: np.ndarray) -> np.ndarray:  # [..., C], numbers of any kind -> float32
        # in double precision: of 101,325 Pa with a deviation of 5, float32 keeps three digits
        return ((rows - np.asarray(self.mean)) / np.asarray(self.deviation)).astype(np.float32)

    def finish(self, x: Tensor) -> np.ndarray:
        values = x.double().cpu().numpy() * np.asarray(self.deviation) + np.asarray(self.mean)
        if self.dtype == "uint8":
            values = np.rint(values).clip(0, 255)
        return in_layout(values.astype(self.dtype), self.layout)

    def picture(self, x: Tensor) -> np.ndarray:
        return strips(x)

    def state(self) -> dict[str, Any]:
        return {"kind": "units", **asdict(self)}

    def __str__(self) -> str:
        pairs = zip(self.mean[:4], self.deviation[:4], strict=True)
        shown = ", ".join(f"{mean:.6g} and {deviation:.6g}" for mean, deviation in pairs)
        return f"mean and deviation {shown}" + ", ..." * (len(self.mean) > 4)


def strips(x: Tensor) -> np.ndarray:
    """[N, H, W, C] of about one unit as uint8 [N, H, W * channels, 1]: the channels side by side,
    as gray; three as one coloured picture [N, H, W, 3]."""
    pixels = to_uint8(x / _SHOWN_DEVIATIONS)
    if pixels.shape[3] == 3:
        return pixels
    shown = pixels[..., :_SHOWN_CHANNELS]
    return np.concatenate(np.split(shown, shown.shape[3], axis=3), axis=2)


@dataclass(frozen=True)
class Latents:
    """Codes of an autoencoder of diffusers, (z - mean) / deviation of each channel."""

    autoencoder: str  # its folder
    digest: str  # of its files, when it encoded
    mean: tuple[float, ...]  # [C]
    deviation: tuple[float, ...]  # [C], above 0
    factor: int = 8  # pixels of an image's side for each of a code's

    clip: ClassVar[float | None] = None
    is_image: ClassVar[bool] = True
    mirrors: ClassVar[bool] = False  # latents cannot be mirrored

    @property
    def codes(self) -> Units:
        """For the codes themselves, as the autoencoder's decoder takes them."""
        return Units(self.mean, self.deviation)

    def finish(self, x: Tensor) -> np.ndarray:
        z = x.float() * x.new_tensor(self.deviation) + x.new_tensor(self.mean)
        return to_uint8(decode(self.autoencoder, z))

    def picture(self, x: Tensor) -> np.ndarray:
        return self.finish(x)

    def state(self) -> dict[str, Any]:
        return {"kind": "latents", **asdict(self)}

    def __str__(self) -> str:
        return f"latents of the autoencoder {self.autoencoder} ({self.digest[:8]})"


_KINDS = {"pixels": Pixels, "units": Units, "latents": Latents}


def values_from_state(state: dict[str, Any] | None) -> Values:
    """What `state` returned, exactly; of a checkpoint that says nothing, images of 8 bits.
    ValueError: it is damaged."""
    if state is None:
        return Pixels()
    try:
        rest = {k: tuple(v) if isinstance(v, list) else v for k, v in state.items() if k != "kind"}
        return _KINDS[state["kind"]](**rest)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"values {state} ({error!r})") from None
