r"""Print which kernel would run, and why the others would not:

    python -m triton_kernels.explain \
        "conv forward 128x64x64 64->64 3x3 bf16 residual stats" gpu=h100

It needs no GPU. The words are the pass (forward, input_grad or weight_grad), the batch with the
rows and columns of an image, the channels multiplied and those of the result, the filter, the type,
and the terms of the epilogue: `emb`, `residual`, `stats`, `mask` (with `drawn`, if its bits are
not stored), `extra=64` (a 1x1 convolution of 64 channels; may be given twice), `first=192` (for an
input gradient: channels of the first of two tensors), `activation=silu`. A weight gradient reads x
of the channels that are multiplied, and has no epilogue.
`unfused` selects the kernels of the public `conv2d`, which have no epilogue; those and weight
gradients may have `stride=2`, and in an input gradient the pixels are those of the image that is
read, which has half the rows and columns of the result. `op=conv_norm`, or
another convolution of `fused_ops.OPS`, selects launches that do more, with the `groups` of a norm
and the `tiles` of its statistics.

    python -m triton_kernels.explain "norm forward 32x64x64 128 groups=32 bf16 silu"
    python -m triton_kernels.explain "attention input_grad 32x256 6x32 bf16"

A norm has images, channels and `groups`; `first=64` makes it the norm of two tensors, and `tiles=4`
computes its statistics from the partial sums of 4 tiles per image (given twice: of both tensors).
Without groups, and over the channels of each pixel, it is a `channel_norm`, `centred` or not.
Attention has samples and positions, heads and channels of a head. Both have one backward pass, for
which `backward` is a word too.

    python -m triton_kernels.explain "stage forward 64x16 256->512 taps=5 bf16 side batched"

A stage is a convolution over short rows, with samples and positions; the rows of a `transposed` one
are twice the output channels.

It ends with 1 if no kernel can do it, with 2 if the line is not understood. `python -m
diffusion.plan` with `node=` prints the same for the launches of a part of a network.
"""

import signal
import sys
import textwrap
from collections.abc import Sequence

from .explain_words import EXAMPLE, parse
from .fused_ops import OPS
from .registry.chips import CHIPS, chip, floor
from .registry.choose import Considered, explain
from .registry.kernel import Op
from .registry.spec import Spec
from .runtime.device import Device

WIDTH = 100  # columns of a page
_UNDER = 24  # where a kernel's words begin, from its mark on


def report(op: Op, spec: Spec, name: str, text: str) -> list[str]:
    """Lines: what is asked for, and one for every kernel of the operation that `text` asks for."""
    product = chip(name)
    at_best = floor(product, spec.flops, spec.bytes, spec.itemsize)
    rates = "measured" if product.measured else "by its data sheet"
    lines = [
        f"{op.name} on {name}",
        folded(f"  {text}", 4),
        f"  floor {at_best:.1f} us ({spec.flops / 1e9:.2f} GFLOP, rates {rates})",
    ]
    apart = op.why_apart(spec, product.gpu)
    if apart is not None and op.name in OPS:
        lines.append(folded(f"  several launches: {apart}", 4))
        if op.refuse(spec, product.gpu) is not None:
            return lines
    return lines + kernels_of(op, spec, product.gpu)


def kernels_of(op: Op, spec: Spec, gpu: Device, indent: int = 2) -> list[str]:
    """A line for every kernel of an operation: why it cannot do it, or what it would take."""
    found = (" " * indent + _line(considered) for considered in explain(op, spec, gpu))
    return [folded(line, indent + _UNDER) for line in found]


def _line(c: Considered) -> str:
    mark = "->" if c.chosen else "  "
    if c.refused is not None:
        return f"{mark} {c.kernel:20s} no: {c.refused}"
    predicted = "" if c.predicted is None else f"{c.predicted:.1f} us predicted"
    why = f"taken: {c.chosen}" if c.chosen else "can, where it was measured to be faster"
    if c.predicted is not None and not c.chosen:
        why = "can"
    fields = () if c.config is None else zip(c.config._fields, c.config, strict=True)
    config = " ".join(f"{key}={value}" for key, value in fields)
    return f"{mark} {c.kernel:20s} {'; '.join(filter(None, (why, predicted, config)))}"


def folded(line: str, under: int) -> str:
    """A line, and under it, so many columns from the left, what is too much for a page."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * under, **options)


def main(arguments: Sequence[str]) -> int:
    """Print the report; 1 if no kernel can do it, 2 for a line that is not understood."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        print(folded(f"gpu: {', '.join(CHIPS)}", 5))
        return 0
    words = [word for word in arguments if not word.startswith("gpu=")]
    names = [word.removeprefix("gpu=") for word in arguments if word.startswith("gpu=")]
    if len(words) != 1 or len(names) > 1:
        print(f'usage: python -m triton_kernels.explain "{EXAMPLE}" [gpu=NAME]', file=sys.stderr)
        print(folded(f"  gpu: {', '.join(CHIPS)}", 7), file=sys.stderr)
        return 2
    try:
        op, spec = parse(words[0])
        lines = report(op, spec, *(names or ["h100"]), words[0])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0 if any("-> " in line[:5] or "several launches" in line for line in lines) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads may have read enough, such as head
    sys.exit(main(sys.argv[1:]))
