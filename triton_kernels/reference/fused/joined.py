"""Which joined launches a plan on the reference has: some of each kind, at the sizes of tests."""

import math
from collections.abc import Callable

from ...registry.kernel import Kernel, Op
from ...registry.spec import TERMS, Spec

SMALL_NORM = 20_000  # elements


def _op(name: str, fits: Callable[[Spec], bool]) -> Op:
    def refuse(spec, gpu):
        return None if fits(spec) else "the reference has this of other sizes"

    return Op(name, (), (Kernel("reference", tuple, refuse, lambda *_: [()], adds=TERMS),))


_FITS = {
    "conv_norm": lambda s: s.h * s.w <= 96,
    "conv_split": lambda s: math.prod(s.size) <= 24,
    # few channels; of what is added and upsampled on the way, to few channels
    "norm_conv": lambda s: s.c <= 32 if s.upsampled else s.r == 3 and s.k <= 32,
    "norm_single_cta": lambda s: s.pixels * s.c <= 300 * s.groups and min(s.tiles, default=8) >= 8,
    # of few positions without the norm, of more with it, if the number of images is odd
    "projected_attention": lambda s: s.n % 2 == 1 if s.t > 40 else s.groups is None,
    "conv_upsampled": lambda s: s.w // 2 % 2 == 0 and not s.factor,
    "conv_upsampled_input_grad": lambda s: True,
}
OPS = {name: _op(name, fits) for name, fits in _FITS.items()}
