"""The ops of attention: of positions to themselves and to others, and their gradients. Each kernel
is a row beside what launches it."""

from ..registry.kernel import Op
from ..registry.spec import AttentionSpec
from ..runtime.device import Device
from . import hopper
from .few_keys import FEW_KEYS, FEW_KEYS_GRAD
from .relayed import RELAYED
from .streamed import KEPT, STREAMED
from .tile_launch import TILES, TILES_GRAD


def _similar(spec: AttentionSpec, gpu: Device) -> bool:
    """Whether rows of other lengths count: where a head fits shared memory."""
    return hopper.refuse(spec, gpu) is None


_KEY = ("t", "d", "dtype")
ATTENTION = Op("attention", _KEY, (TILES, hopper.HEAD, KEPT, STREAMED), _similar)
ATTENTION_GRAD = Op("attention_bwd", _KEY, (TILES_GRAD, hopper.HEAD_GRAD, RELAYED), _similar)

_CROSS_KEY = ("t", "keys", "d", "dtype")
CROSS_ATTENTION = Op("cross_attention", _CROSS_KEY, (TILES, FEW_KEYS), similar=False)
CROSS_ATTENTION_GRAD = Op(
    "cross_attention_bwd", _CROSS_KEY, (TILES_GRAD, FEW_KEYS_GRAD), similar=False
)
