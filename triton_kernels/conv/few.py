"""`conv_forward` where nothing runs beside it: there are other kernels for few images, and for few
tiles of 1x1 filters."""

from typing import Any

from torch import Tensor

from ..registry.choose import select
from ..registry.cost import Work
from ..registry.kernel import Kernel, Op
from ..registry.spec import FORWARD_TERMS, ConvSpec
from ..runtime.device import Device, describe
from .fused import FORWARD, conv_forward, forward_operands
from .fused_spec import Terms, forward_spec
from .hopper import one_row, single_tile


def _forward_work(spec: ConvSpec, gpu: Device, _: tuple) -> Work | None:
    """Of the kernel that `conv_forward` takes. Its epilogue makes a trip to memory of its own for a
    residual, as that of an input gradient does for x."""
    choice = select(FORWARD, spec, gpu)
    work = choice.kernel.work
    if work is None:
        return None
    return work(spec, gpu, choice.config)._replace(grad=spec.residual)


def _forward_cost(spec: ConvSpec, gpu: Device, _: tuple) -> float:
    choice = select(FORWARD, spec, gpu)
    return choice.kernel.predict(spec, gpu, choice.config)


CONV_FEW = Op(
    "conv_few",
    ("h", "w", "k", "c", "r", "s", "dtype", "emb", "residual", "extras", "stats"),
    (
        one_row.WHOLE,
        single_tile.KERNEL,
        Kernel(
            "conv_forward",
            cost=_forward_cost,
            adds=FORWARD_TERMS,
            work=_forward_work,
            fitted_by=("pointwise",),
            delegates=True,
        ),
    ),
    similar=False,
)


def conv_few(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    stats: bool = False,
    width: int | None = None,
    allow_tf32: bool = True,  # of float32
    tf32: bool = False,
    config: tuple | None = None,  # of a kernel of `CONV_FEW`
    **terms: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `conv_forward`, whose arguments these are. No kernel may write weights and biases while
    earlier ones of the stream are under way: they are read ahead."""
    _, h, w, _ = x.shape
    added, options = Terms(**terms), {"width": width, "allow_tf32": allow_tf32, "tf32": tf32}
    if config is None:
        asked = added.asked | {"stats": stats, "allow_tf32": allow_tf32}
        spec = forward_spec(x, weight, width, **asked)
        config = select(CONV_FEW, spec, describe(x.device)).config
    if config.kernel == "conv_forward":
        return conv_forward(x, weight, bias, stats=stats, **options, **terms)
    pixels = w if config.kernel == "one_row" else single_tile.PIXELS  # of a tile
    tiles = h * w // pixels if stats else None
    given = forward_operands(x, weight, bias, tiles, added, **options)
    if len(x):
        CONV_FEW.kernel_of(config).launch(config, given)
    return given.y, given.partials
