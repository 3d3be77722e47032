r"""Which kernel would run, and why the others would not.

    python -m triton_kernels.explain \
        "conv forward 128x64x64 64->64 3x3 bf16 residual stats" gpu=h100

Needs no GPU. The words are the pass (forward, input_grad or weight_grad), the batch and the rows
and columns of an image, channels multiplied and of the result, the filter, the type, and what the
epilogue adds: `emb`, `residual`, `stats`, `mask`, `extra=64` (a 1x1 convolution of so many
channels; may be given twice), `first=192` (of an input gradient: channels of the first of two
tensors), `activation=silu`. A weight gradient reads x of the channels that are multiplied.
`unfused` asks for the kernels of the public `conv2d`, which have no epilogue.
"""

import dataclasses
import re
import sys
from collections.abc import Sequence

from .conv import forward
from .conv.fused import FORWARD, INPUT_GRAD
from .conv.weight_grad import WEIGHT_GRAD
from .registry.chips import CHIPS, chip, floor
from .registry.choose import Considered, explain
from .registry.kernel import Op
from .registry.spec import ConvSpec

_OPS = {"forward": FORWARD, "input_grad": INPUT_GRAD, "weight_grad": WEIGHT_GRAD}
_UNFUSED = {"forward": forward.FORWARD, "input_grad": forward.INPUT_GRAD}
_DTYPES = ("bf16", "fp16", "tf32", "fp32")
_FLAGS = ("emb", "residual", "stats", "mask")
_EXAMPLE = "conv forward 128x64x64 64->64 3x3 bf16 residual stats"


def parse(text: str) -> tuple[Op, ConvSpec]:
    """An operation and a spec. ValueError: a word that means nothing, or one that is missing."""
    which, unfused, given = None, False, {}
    extra: tuple[int, ...] = ()
    for word in text.split():
        if word in ("conv", "conv2d"):
            continue
        if word in _OPS:
            which = word
        elif word == "unfused":
            unfused = True
        elif word in _DTYPES:
            given["dtype"] = word
        elif word in _FLAGS:
            given[word] = True
        elif match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", word):
            given |= dict(zip(("n", "h", "w"), map(int, match.groups()), strict=True))
        elif match := re.fullmatch(r"(\d+)->(\d+)", word):
            given |= dict(zip(("k", "c"), map(int, match.groups()), strict=True))
        elif match := re.fullmatch(r"(\d+)x(\d+)", word):
            given |= dict(zip(("r", "s"), map(int, match.groups()), strict=True))
        elif match := re.fullmatch(r"extra=(\d+)", word):
            extra += (int(match[1]),)
        elif match := re.fullmatch(r"first=(\d+)", word):
            given["first"] = int(match[1])
        elif match := re.fullmatch(r"activation=(\w+)", word):
            given["activation"] = match[1]
        else:
            raise ValueError(f"{word!r} means nothing here; an example: {_EXAMPLE!r}")
    missing = {"n": "128x64x64", "k": "64->64", "dtype": "bf16"}
    if absent := [example for key, example in missing.items() if key not in given]:
        raise ValueError(f"something like {absent[0]} is missing; an example: {_EXAMPLE!r}")
    if which is None:
        raise ValueError(f"the pass is missing; choose one of {', '.join(_OPS)}")
    if unfused and which in _UNFUSED:
        return _UNFUSED[which], _of_one(ConvSpec(**given))
    op = _OPS[which]
    if op is INPUT_GRAD:
        given = {"activation": "silu", "first": given["c"]} | given
    return op, ConvSpec(extra=extra, **given)


def _of_one(spec: ConvSpec) -> ConvSpec:
    """As `conv.forward.spec_of` has it: of a matrix product all pixels are one row."""
    if spec.taps == 1 and spec.dtype != "fp32":
        spec = dataclasses.replace(spec, n=1, h=1, w=spec.n * spec.h * spec.w)
    return dataclasses.replace(spec, p=spec.h, q=spec.w, padding=spec.pads)


def report(op: Op, spec: ConvSpec, name: str) -> str:
    """A line for every kernel of the operation."""
    product = chip(name)
    lines = [f"{op.name} on {name}", f"  {_text(spec)}"]
    at_best = floor(product, spec.flops, spec.bytes)
    rates = "measured" if product.measured else "by its data sheet"
    lines.append(f"  floor {at_best:.1f} us ({spec.flops / 1e9:.2f} GFLOP, rates {rates})")
    lines += [f"  {_line(c)}" for c in explain(op, spec, product.gpu)]
    return "\n".join(lines)


def _text(spec: ConvSpec) -> str:
    terms = [f for f in _FLAGS if getattr(spec, f)] + [f"extra={c}" for c in spec.extra]
    shape = f"{spec.n}x{spec.h}x{spec.w} {spec.k}->{spec.c} {spec.r}x{spec.s} {spec.dtype}"
    return " ".join([shape, *terms])


def _line(c: Considered) -> str:
    mark = "->" if c.chosen else "  "
    if c.refused is not None:
        return f"{mark} {c.kernel:20s} no: {c.refused}"
    fields = () if c.config is None else zip(c.config._fields, c.config, strict=True)
    config = " ".join(f"{key}={value}" for key, value in fields)
    predicted = "" if c.predicted is None else f"{c.predicted:8.1f} us predicted"
    why = f"taken: {c.chosen}" if c.chosen else "can, where it was measured to be faster"
    if c.predicted is not None and not c.chosen:
        why = "can"
    return f"{mark} {c.kernel:20s} {why}; {config} {predicted}".rstrip("; ")


def main(arguments: Sequence[str]) -> int:
    """Print the report; 2 for a line that is not understood."""
    words = [word for word in arguments if not word.startswith("gpu=")]
    names = [word.removeprefix("gpu=") for word in arguments if word.startswith("gpu=")]
    if len(words) != 1 or len(names) > 1:
        print(f'usage: python -m triton_kernels.explain "{_EXAMPLE}" gpu=h100', file=sys.stderr)
        print(f"  gpu: {', '.join(CHIPS)}", file=sys.stderr)
        return 2
    try:
        print(report(*parse(words[0]), *(names or ["h100"])))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
