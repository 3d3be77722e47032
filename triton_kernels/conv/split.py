"""Split-K: a convolution whose sum over taps and channels is cut into parts, for small images.

One image of 8x8 pixels and 256 channels is four tiles, each a chain of 36 products, on a GPU with
room for hundreds of programs. Cut into S parts, the chains are S times shorter, and there are S
times as many programs. This launch does not add the parts. The norm that follows
(`norm_single_cta`) reads the whole image anyway, adds the parts, the bias, the embedding and the
residual, and multiplies by the factor.

    parts[s, n, co, p]   float32; their sum over s is conv(x) + the 1x1 convolutions of `extra`
"""

import math
from collections.abc import Sequence

import triton
from torch import Tensor

from ..registry.choose import select
from ..registry.kernel import Op
from ..registry.spec import FEW_IMAGES, ConvSpec
from ..runtime.device import Device, describe
from .fused_spec import forward_spec
from .hopper import one_row
from .hopper.tiles import tile_mma
from .plain import small_batch, split_k
from .plain.parts import LEAST_STEPS, SplitOperands, refuse_boxes
from .plain.pointers import pointer_split

_MAX_PIXELS = 1024  # of an image, since the norm that follows holds a group of all its pixels


def _apart(spec: ConvSpec, gpu: Device) -> str | None:
    """Parts are faster where whole tiles would leave multiprocessors idle, and each tile is a long
    chain of products."""
    if one_row.refuse(spec, gpu) is None:
        more = one_row.count_parts(spec, gpu) > 1
        return None if more else "rows of pixels keep enough multiprocessors busy"
    block_c, block_m, block_k, *_ = split_k.tiles(spec, gpu)[0]
    programs = split_k.programs(spec, block_c, block_m)
    # kernels of `conv.hopper`, in TF32 `tile_mma` alone, take less than half as long per product
    quick = gpu.hopper and spec.itemsize == 2 and spec.stride == 1
    quick = quick or tile_mma.refuse(spec, gpu) is None
    quick = quick and spec.n > FEW_IMAGES and refuse_boxes(spec, gpu) is None
    if programs > gpu.num_sms // (4 if quick else 1):
        return f"{programs} whole tiles keep {gpu.num_sms} multiprocessors busy"
    if (pixels := math.prod(spec.size)) > _MAX_PIXELS:
        return f"the norm behind it reads {pixels} pixels; at most {_MAX_PIXELS}"
    steps = spec.taps * triton.cdiv(spec.k, block_k)
    return f"{steps} products are no long chain" if steps < 2 * LEAST_STEPS else None


CONV_SPLIT = Op(
    "conv_split",
    ("h", "w", "k", "c", "r", "s", "dtype", "extra"),
    (one_row.PARTS, small_batch.KERNEL, split_k.KERNEL, pointer_split.KERNEL),
    similar=False,
    apart=_apart,
)


def conv_split(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of x
    *,
    extra: Sequence[tuple[Tensor, Tensor]] = (),  # up to two: [N, H, W, C], [CO, C]
    stride: int = 1,  # 2: of even H and W, of which P and Q are half; without `extra`
    padding: int | None = None,  # above and left of the image; None: R // 2; below as P and Q need
    allow_tf32: bool = True,  # of float32
    config: tuple | None = None,  # of a kernel of `CONV_SPLIT`
) -> Tensor:  # float32 [S, N, CO, P * Q]
    """The parts of conv(x), with square filters, and of 1x1 convolutions of other tensors. No
    kernel may write filters while earlier ones of the stream are under way: some read them ahead.
    """
    n, h, w, _ = x.shape
    co, _, r, s = weight.shape
    assert x.is_contiguous() and x.dtype == weight.dtype and len(extra) <= 2
    assert weight.permute(0, 2, 3, 1).is_contiguous() and r == s and r % 2 == 1
    assert stride == 1 or (h % 2 == w % 2 == 0 and not extra)
    for other, w1x1 in extra:
        assert other.is_contiguous() and other.shape[:3] == x.shape[:3]
        assert w1x1.shape == (co, other.shape[3]) and w1x1.stride(1) == 1
    spec = split_spec(x, weight, extra, stride, padding, allow_tf32)
    operands = SplitOperands(x, weight, extra, spec)
    if n == 0:
        return operands.parts(1)
    if config is None:

        def run(c: tuple) -> Tensor:
            return CONV_SPLIT.kernel_of(c).launch(c, operands).sum(0)

        config = select(CONV_SPLIT, spec, describe(x.device), run).config
    return CONV_SPLIT.kernel_of(config).launch(config, operands)


def split_spec(
    x: Tensor,
    weight: Tensor,
    extra: Sequence[tuple[Tensor, Tensor]] = (),
    stride: int = 1,
    padding: int | None = None,
    allow_tf32: bool = True,
) -> ConvSpec:
    """The spec of `conv_split` with these arguments."""
    halved = {}
    if stride == 2:
        n, h, w, _ = x.shape
        halved = {"p": h // 2, "q": w // 2, "stride": 2}
        halved["padding"] = None if padding is None else (padding, padding)
    others = [other for other, _ in extra]
    return forward_spec(x, weight, extra=others, allow_tf32=allow_tf32, **halved)
