"""The line of words that `triton_kernels.explain` is given, as an op and a spec."""

import dataclasses
import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from .activations import ACTIVATIONS
from .attention.launch import ATTENTION, ATTENTION_GRAD, CROSS_ATTENTION, CROSS_ATTENTION_GRAD
from .conv import forward
from .conv.fused import FORWARD, INPUT_GRAD
from .conv.weight_grad import WEIGHT_GRAD
from .conv1d.conv1d import CONV_STAGE
from .conv1d.stage_spec import StageSpec
from .fused_ops import OPS
from .norm.channel_norm import CHANNEL_NORM, CHANNEL_NORM_GRAD
from .norm.from_partials import NORM_OF_SUMS
from .norm.group_norm import GROUP_NORM, GROUP_NORM_GRAD
from .registry.kernel import Op
from .registry.spec import (
    GRAD_TERMS,
    TERMS,
    AttentionSpec,
    ChannelNormSpec,
    ConvSpec,
    NormSpec,
    Spec,
)

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
EXAMPLE = "conv forward 128x64x64 64->64 3x3 bf16 stats"


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
_ACTIVATION = {"|".join(ACTIVATIONS).join("()"): _activation}
_NORM = _ACTIVATION | {
    r"(\d+)x(\d+)x(\d+)": ("n", "h", "w"),
    r"(\d+)": ("c",),
    r"groups=(\d+)": ("groups",),
    r"first=(\d+)": ("first",),
    r"tiles=(\d+)": _TILES,
}
_CHANNEL_NORM = _ACTIVATION | {
    r"(\d+)x(\d+)x(\d+)": ("n", "h", "w"),
    r"(\d+)": ("c",),
    "(centred)": _flags,
}
_ATTENTION = {
    r"(\d+)x(\d+)": _of_heads,
    r"keys=(\d+)": ("keys",),
    "(masked)": _flags,
}


def _conv(words: Sequence[str]) -> tuple[Op, ConvSpec]:
    needed = {"n": "128x64x64", "k": "64->64", "dtype": "bf16"}
    which, given = _read(words, _CONV, needed, EXAMPLE)
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
    of_forward = tuple(term for term in TERMS if term not in GRAD_TERMS)
    terms = {"forward": of_forward, "input_grad": (*GRAD_TERMS, "first"), "weight_grad": ()}
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
