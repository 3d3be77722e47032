"""`conv_forward` where nothing runs beside it: there are other kernels for few images, and for few
tiles of 1x1 filters."""

from typing import Any, NamedTuple

from torch import Tensor

from ..registry.choose import select
from ..registry.cost import HOPPER, Work
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import FORWARD_TERMS, ConvSpec
from ..runtime.device import Device, describe
from .fused import FORWARD, conv_forward
from .fused_spec import forward_spec
from .hopper import one_row, single_tile
from .plain import small_batch


@configures("one_row")
class OneRow(NamedTuple):
    """Tiles of a row of pixels."""


@configures("early")
class Early(NamedTuple):
    """Tiles of `small_batch.whole_config`."""


@configures("single_tile")
class SingleTile(NamedTuple):
    """Tiles of `single_tile.PIXELS`."""


@configures("conv_forward")
class Forward(NamedTuple):
    """Whatever `conv_forward` takes."""


def _given(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if options.get(name) is not None}


def _one_row(_: OneRow, *tensors: Tensor, **options: Any):
    terms = "emb", "residual", "extra", "extra_bias", "stats"
    return one_row.conv_one_row(*tensors, **_given(options, *terms))


def _early(_: Early, *tensors: Tensor, allow_tf32: bool, **options: Any):
    return small_batch.conv_early(*tensors, **options)


def _single_tile(_: SingleTile, *tensors: Tensor, **options: Any):
    return single_tile.conv_single_tile(*tensors, **_given(options, "residual", "stats"))


def _forward_work(spec: ConvSpec, gpu: Device, _: Forward) -> Work | None:
    """Of the kernel that `conv_forward` takes."""
    choice = select(FORWARD, spec, gpu)
    work = choice.kernel.work
    return None if work is None else work(spec, gpu, choice.config)


def _forward_cost(spec: ConvSpec, gpu: Device, _: Forward) -> float:
    choice = select(FORWARD, spec, gpu)
    return choice.kernel.predict(spec, gpu, choice.config)


CONV_FEW = Op(
    "conv_few",
    ("h", "w", "k", "c", "r", "s", "dtype", "emb", "residual", "extras", "stats"),
    (
        Kernel(
            "one_row",
            OneRow,
            one_row.refuse,
            launch=_one_row,
            adds=FORWARD_TERMS,
            work=lambda spec, gpu, _: one_row.work(spec, 1),
        ),
        Kernel(
            "early",
            Early,
            small_batch.refuse,
            launch=_early,
            adds=FORWARD_TERMS,
            work=lambda spec, gpu, _: small_batch.whole_work(spec),
            untimed=small_batch.untimed,
            borrows=HOPPER,
        ),
        Kernel(
            "single_tile",
            SingleTile,
            single_tile.refuse,
            launch=_single_tile,
            untimed=single_tile.untimed,
            adds=("residual", "stats"),
            work=lambda spec, gpu, _: single_tile.work(spec),
        ),
        Kernel(
            "conv_forward",
            Forward,
            cost=_forward_cost,
            launch=lambda _, *tensors, **options: conv_forward(*tensors, **options),
            adds=FORWARD_TERMS,
            work=_forward_work,
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
    allow_tf32: bool = True,  # of float32
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `conv_forward`, whose arguments these are. No kernel may write weights and biases while
    earlier ones of the stream are under way: they are read ahead."""
    spec = forward_spec(
        x,
        weight,
        options.get("width"),
        emb=options.get("emb") is not None,
        residual=options.get("residual") is not None,
        extra=[other for other, _ in options.get("extra") or ()],
        stats=bool(options.get("stats")),
        allow_tf32=allow_tf32,
    )
    choice = select(CONV_FEW, spec, describe(x.device))
    return choice.kernel.launch(choice.config, x, weight, bias, allow_tf32=allow_tf32, **options)
