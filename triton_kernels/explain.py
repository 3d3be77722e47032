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

import dataclasses
import difflib
import re
import signal
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from .activations import ACTIVATIONS
from .attention.configs import ATTENTION, ATTENTION_GRAD, CROSS_ATTENTION, CROSS_ATTENTION_GRAD
from .conv import forward
from .conv.fused import FORWARD, INPUT_GRAD
from .conv.weight_grad import WEIGHT_GRAD
from .conv1d.conv1d import CONV_STAGE
from .conv1d.stage_spec import StageSpec
from .fused_ops import OPS
from .norm.channel_norm import CHANNEL_NORM, CHANNEL_NORM_GRAD
from .norm.from_partials import NORM_OF_SUMS
from .norm.group_norm import GROUP_NORM, GROUP_NORM_GRAD
from .registry.chips import CHIPS, chip, floor
from .registry.choose import Considered, explain
from .registry.kernel import Op
from .registry.spec import (
    FORWARD_TERMS,
    GRAD_TERMS,
    TERMS,
    AttentionSpec,
    ChannelNormSpec,
    ConvSpec,
    NormSpec,
    Spec,
)
from .runtime.device import Device

_OPS = {"forward": FORWARD, "input_grad": INPUT_GRAD, "weight_grad": WEIGHT_GRAD}
_UNFUSED = {"forward": forward.FORWARD, "input_grad": forward.INPUT_GRAD}
_JOINED = {name: op for name, op in OPS.items() if "conv" in name or "linear" in name}
_PASSES = tuple(_OPS)
_BACKWARD = "backward"  # the word for input_grad where there is one backward pass
_DTYPES = ("bf16", "fp16", "tf32", "fp32")
_WORDS = (*_PASSES, _BACKWARD, *_DTYPES)  # of every line
_FLAGS = tuple(  # terms of an epilogue that are there or not
    field.name
    for field in dataclasses.fields(ConvSpec)
    if field.name in TERMS and field.default is False
)
WIDTH = 100  # columns of a page
_UNDER = 24  # where a kernel's words begin, from its mark on
_EXAMPLE = "conv forward 128x64x64 64->64 3x3 bf16 stats"


def parse(text: str) -> tuple[Op, Spec]:
    """An operation and a spec. ValueError: a word that means nothing, or one that is missing."""
    family, *words = text.split() or [""]
    if family not in _FAMILIES:
        raise ValueError(f"{family!r} is no operation; choose one of {', '.join(_FAMILIES)}")
    return _FAMILIES[family](words)


def _read(words: Sequence[str], shape: dict[str, Any], needed: dict[str, str], example: str):
    """The pass, and what words of these shapes say. `shape` has patterns and the names of what
    they match, `needed` an example of a word for each name that has to be there."""
    given, said = {}, defaultdict(list)
    for word in words:
        if word in _WORDS:
            what = "dtype" if word in _DTYPES else "pass"
            given[what], most = word, 1
        else:
            what, most = _put(word, given, shape, example)
        said[what].append(word)
        if len(said[what]) > most:
            both = " and ".join(said[what])
            raise ValueError(f"{both}: one of these is too many; an example: {example!r}")
    if absent := [like for key, like in needed.items() if key not in given]:
        raise ValueError(f"something like {absent[0]} is missing; an example: {example!r}")
    if "pass" not in given:
        raise ValueError(f"the pass is missing; choose one of {', '.join(_PASSES)}")
    return given.pop("pass"), given


def _put(word: str, given: dict[str, Any], shape: dict[str, Any], example: str) -> tuple[str, int]:
    """Put what a word says into `given`; what it is about, and how often there may be such."""
    for pattern, names in shape.items():
        if match := re.fullmatch(pattern, word):
            if any(number.isdecimal() and int(number) == 0 for number in match.groups()):
                raise ValueError(f"{word}: numbers of at least 1 are expected")
            if not callable(names):
                given |= dict(zip(names, map(int, match.groups()), strict=True))
                return pattern, 1
            names(given, *match.groups())
            return (word, 1) if names is _flags else (pattern, _MOST.get(names, 1))
    known = [*_WORDS, *(form for pattern in shape for form in _forms(pattern))]
    near = difflib.get_close_matches(word.lower(), known, 1)
    raise ValueError(
        f"{word!r} means nothing here; {f'did you mean {near[0]}? ' if near else ''}"
        f"valid: {', '.join(known)}; an example: {example!r}"
    )


def _forms(pattern: str) -> list[str]:
    """The words that a pattern matches, N for a number: "stride=N"."""
    text = re.sub(r"\(\\d\+\)", "N", pattern).replace(r"(\w+)", "NAME")
    return text.strip("()").split("|")


def _appends(name: str) -> Callable[..., None]:
    """For numbers of which there may be two."""

    def append(given: dict[str, Any], number: str) -> None:
        given[name] = (*given.get(name, ()), int(number))

    return append


def _activation(given: dict[str, Any], word: str) -> None:
    if word not in ACTIVATIONS:
        raise ValueError(f"activation={word} is unknown; choose one of {', '.join(ACTIVATIONS)}")
    given["activation"] = word


def _op(given: dict[str, Any], word: str) -> None:
    if word not in _JOINED:
        raise ValueError(f"op={word} is unknown; choose one of {', '.join(_JOINED)}")
    given["op"] = word


def _flags(given: dict[str, Any], word: str) -> None:
    given[word] = True


def _of_heads(given: dict[str, Any], first: str, second: str) -> None:
    """Samples and positions, then heads and channels."""
    names = ("heads", "d") if "n" in given else ("n", "t")
    given |= dict(zip(names, (int(first), int(second)), strict=True))


_EXTRA, _TILES = _appends("extra"), _appends("tiles")
_MOST = {_EXTRA: 2, _TILES: 2, _of_heads: 2}  # how often a word of this kind may be there
_CONV = {
    "|".join(("unfused", *_FLAGS)).join("()"): _flags,
    r"(\d+)x(\d+)x(\d+)": ("n", "h", "w"),
    r"(\d+)->(\d+)": ("k", "c"),
    r"(\d+)x(\d+)": ("r", "s"),
    r"stride=(\d+)": ("stride",),
    r"extra=(\d+)": _EXTRA,
    r"first=(\d+)": ("first",),
    r"activation=(\w+)": _activation,
    r"groups=(\d+)": ("groups",),
    r"tiles=(\d+)": _TILES,
    r"op=(\w+)": _op,
}
_NORM = {
    r"(\d+)x(\d+)x(\d+)": ("n", "h", "w"),
    r"(\d+)": ("c",),
    r"groups=(\d+)": ("groups",),
    r"first=(\d+)": ("first",),
    r"tiles=(\d+)": _TILES,
    "|".join(ACTIVATIONS).join("()"): _activation,
}
_CHANNEL_NORM = {name: _NORM[name] for name in (r"(\d+)x(\d+)x(\d+)", r"(\d+)")} | {
    "(centred)": _flags,
    "|".join(ACTIVATIONS).join("()"): _activation,
}
_ATTENTION = {
    r"(\d+)x(\d+)": _of_heads,
    r"keys=(\d+)": ("keys",),
    "(masked)": _flags,
}


def _conv(words: Sequence[str]) -> tuple[Op, ConvSpec]:
    needed = {"n": "128x64x64", "k": "64->64", "dtype": "bf16"}
    which, given = _read(words, _CONV, needed, _EXAMPLE)
    if which == _BACKWARD:
        raise ValueError("a convolution has two backward passes; choose input_grad or weight_grad")
    unfused, name = given.pop("unfused", False) and which in _UNFUSED, given.pop("op", None)
    _check_terms(which, given, unfused, name)
    if "stride" in given:
        if not unfused and which != "weight_grad":
            raise ValueError("stride= is for weight gradients, and for others that are `unfused`")
        given |= _size_of_result(given, which == "input_grad")
    if unfused:
        return _UNFUSED[which], _of_one(ConvSpec(**given))
    op = _OPS[which] if name is None else _JOINED[name]
    if name is not None:
        given = {"groups": 32, "tiles": (4,)} | given
    if op is INPUT_GRAD:
        given = {"activation": "silu", "first": given["c"]} | given
        if given["first"] > given["c"]:
            raise ValueError(f"first={given['first']} of {given['c']} channels; expected fewer")
    return op, ConvSpec(**given)


def _check_terms(which: str, given: dict[str, Any], unfused: bool, name: str | None) -> None:
    """ValueError: a term of an epilogue, or of a norm, that what is asked for does not have."""
    terms = {"forward": FORWARD_TERMS, "input_grad": (*GRAD_TERMS, "first"), "weight_grad": ()}
    known = () if unfused else terms[which]
    if name is not None:
        wanted = "input_grad" if name.endswith("input_grad") else "forward"
        if which != wanted or unfused:
            raise ValueError(f"op={name} is {wanted}, and not `unfused`")
        known = (*TERMS, "first", "groups", "tiles")
    for term in (*TERMS, "first", "groups", "tiles"):
        if term in given and term not in known:
            what = f"{'unfused ' * unfused}{which}"
            has = f"; it has {', '.join(known)}" if known else ""
            needs = " without op=" if term in ("groups", "tiles") else ""
            raise ValueError(f"{term} is no term of {what}{needs}{has}")
    if "drawn" in given and "mask" not in given:
        raise ValueError("drawn, but there is no mask; give mask as well")


def _size_of_result(given: dict[str, Any], grad: bool) -> dict[str, int]:
    """Rows and columns, of a stride that may be other than 1; the gradient of an image has as many
    as it can have."""
    stride, sides = given["stride"], (given["h"], given["w"])
    if grad:
        return {"p": stride * sides[0], "q": stride * sides[1]}
    odd = (given.get(side, 3) % 2 for side in "rs")  # with zeros as in `ConvSpec.pads`
    p, q = ((size - one) // stride + 1 for size, one in zip(sides, odd, strict=True))
    return {"p": p, "q": q}


def _is_grad(which: str, why: str) -> bool:
    """Whether it is the backward pass, of what has one. ValueError: it is that of weights."""
    if which == "weight_grad":
        raise ValueError(f"{why}; choose forward or backward")
    return which != "forward"


def _norm(words: Sequence[str]) -> tuple[Op, NormSpec]:
    example = "norm forward 32x64x64 128 groups=32 bf16 silu"
    needed = {"n": "32x64x64", "c": "128", "dtype": "bf16"}
    which, given = _read(words, _NORM, needed, example)
    c = given.pop("c")
    first = given.pop("first", c)
    groups = given.get("groups", 32)
    grad = _is_grad(which, "a norm has one backward pass")
    if first > c:
        raise ValueError(f"first={first} of {c} channels; expected fewer")
    if c % groups:
        raise ValueError(f"{c} channels are not divided by groups={groups}")
    spec = NormSpec(**given, c1=first, c2=c - first, grad=grad)
    if spec.tiles and not spec.grad:
        if len(spec.tiles) != 1 + (spec.c2 > 0):
            tensors = 1 + (spec.c2 > 0)
            raise ValueError(f"{len(spec.tiles)} numbers of tiles=, and {tensors} tensors to norm")
        return NORM_OF_SUMS, spec
    return (GROUP_NORM_GRAD if spec.grad else GROUP_NORM), spec


def _channel_norm(words: Sequence[str]) -> tuple[Op, ChannelNormSpec]:
    example = "channel_norm forward 32x64x64 128 bf16 silu"
    needed = {"n": "32x64x64", "c": "128", "dtype": "bf16"}
    which, given = _read(words, _CHANNEL_NORM, needed, example)
    pixels, grad = given.pop("h") * given.pop("w"), _is_grad(which, "a norm has one backward pass")
    spec = ChannelNormSpec(**given, pixels=pixels, grad=grad)
    return (CHANNEL_NORM_GRAD if grad else CHANNEL_NORM), spec


def _attention(words: Sequence[str]) -> tuple[Op, AttentionSpec]:
    example = "attention forward 32x256 6x32 bf16"
    needed = {"n": "32x256", "heads": "6x32", "dtype": "bf16"}
    which, given = _read(words, _ATTENTION, needed, example)
    grad = _is_grad(which, "attention has no weights")
    given["n"] *= given.pop("heads")
    spec = AttentionSpec(**given, grad=grad)
    if spec.keys is not None:
        return (CROSS_ATTENTION_GRAD if grad else CROSS_ATTENTION), spec
    if spec.masked:
        raise ValueError("masked, but positions see themselves all; give keys=N as well")
    return (ATTENTION_GRAD if grad else ATTENTION), spec


_STAGE = {
    r"(\d+)x(\d+)": ("n", "t"),
    r"(\d+)->(\d+)": ("channels", "rows"),
    r"taps=(\d+)": ("taps",),
    r"stride=(\d+)": ("stride",),
    "(side|transposed|batched)": _flags,
}


def _stage(words: Sequence[str]) -> tuple[Op, StageSpec]:
    example = "stage forward 64x16 256->512 taps=5 bf16 side batched"
    needed = {"n": "64x16", "rows": "256->512", "taps": "taps=5", "dtype": "bf16"}
    which, given = _read(words, _STAGE, needed, example)
    if which != "forward":
        raise ValueError("stages are of inference; choose forward")
    return CONV_STAGE, StageSpec(**given, by_tap=True)


_FAMILIES = {
    "conv": _conv,
    "conv2d": _conv,
    "norm": _norm,
    "channel_norm": _channel_norm,
    "attention": _attention,
    "stage": _stage,
}


def _of_one(spec: ConvSpec) -> ConvSpec:
    """As `conv.forward.spec_of` has it: of a matrix product all pixels are one row."""
    if spec.pointwise and spec.dtype != "fp32":
        pixels = spec.n * spec.h * spec.w
        spec = dataclasses.replace(spec, n=1, h=1, w=pixels, p=1, q=pixels)
    p, q = spec.size
    return dataclasses.replace(spec, p=p, q=q, padding=spec.pads)


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
        print(f'usage: python -m triton_kernels.explain "{_EXAMPLE}" [gpu=NAME]', file=sys.stderr)
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
