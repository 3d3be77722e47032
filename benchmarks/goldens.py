"""What a tree launches and compiles, recorded so that another tree can be held against it.

    python -m benchmarks.goldens launches out=FILE      every launch of training steps, evaluations
                                                        and a policy's call, without a GPU
    python -m benchmarks.goldens ops out=FILE           every launch of the public ops over the
                                                        shapes of a model, pass by pass
    python -m benchmarks.goldens code out=FILE          a hash of the PTX of every compile case
    python -m benchmarks.goldens compare a=FILE b=FILE  what differs; exit 1 if anything does

With only=WORDS, those of launches and code whose names have these words in them. Launches are those
of an h100, by its measured rows, or of another `gpu` of `registry.chips`.

Run it without TRITON_INTERPRET: the interpreter has no compiler. A launch is the kernel's name, its
grid, its constants and what Triton specialises of every other argument, so two equal lists are the
same work in the same order.
"""

import gzip
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from triton.runtime.jit import JITFunction

import triton_kernels
from benchmarks import cases, providers
from diffusion.factory import build_model, build_policy_model
from diffusion.plan.inference import sampling_network
from diffusion.plan.inference1d import real_time
from diffusion.runs.precompile_worker import train
from diffusion.runtime.backend import choose_backend
from triton_kernels.registry.chips import chip
from triton_kernels.runtime.device import Device, standing_for

ROOT = Path(__file__).parents[1]
SIZES = {"unet64": 64, "adm64": 64, "unet32": 32}
TRAINED, DRAWN, ACTED = (1, 8, 32, 64, 128, 512), (1, 4, 5, 16, 64, 256), (1, 2, 8, 64)
_CPU = torch.device("cpu")
_RUN = JITFunction.run


def _model(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / f"configs/model/{name}.yaml").read_text())


def _images(name: str, n: int) -> Callable[[], None]:
    side = SIZES[name]
    settings = {
        "model": _model(name),
        "diffusion": {"schedule": "linear"},
        "optim": {"lr": 1e-4},
        "train": {"batch_size": n, "precision": "bf16"},
        "images": {"shape": [10**5, side, side, 3], "dtype": "uint8"},
        "labels": None,
        "flip": True,
    }
    return lambda: train(settings)


def _actions(n: int) -> Callable[[], None]:
    settings = {
        "model": _model("unet1d"),
        "diffusion": {"schedule": "cosine"},
        "optim": {"lr": 1e-4},
        "train": {"batch_size": n, "precision": "bf16"},
        "images": {"shape": [1000, 1, 16, 2], "dtype": "float32"},
        "labels": {"shape": [1000, 1028], "dtype": "float32"},
        "flip": False,
    }
    return lambda: train(settings)


def _evaluation(name: str, n: int, precision: str = "bf16") -> Callable[[], None]:
    def run() -> None:
        side = SIZES[name]
        backend = choose_backend("triton", precision, _CPU)
        with torch.device("meta"):
            model = build_model(_model(name), backend, (side, side), 3, False, torch.device("meta"))
        network = sampling_network(model.to_empty(device=_CPU).eval())
        tables = network.tabulate(torch.arange(10), None, n)
        network.at_row(torch.empty(n, side, side, 3), torch.zeros(1, dtype=torch.int64), tables)

    return run


def _call(precision: str, n: int) -> Callable[[], None]:
    def run() -> None:
        backend = choose_backend("triton", precision, _CPU)
        meta = torch.device("meta")
        with meta:
            model = build_policy_model(_model("unet1d"), backend, 2, 1028, meta)
        model = real_time(model.to_empty(device=_CPU).eval(), 16)
        tables = model.tabulate(torch.arange(10), torch.empty(n, 1028), n)
        model.at_row(torch.empty(n, 1, 16, 2), torch.zeros(1, dtype=torch.int64), tables)

    return run


def jobs() -> dict[str, Callable[[], None]]:
    """By name; each of them launches."""
    found = {}
    for name in SIZES:
        found |= {f"train {name} {n}": _images(name, n) for n in TRAINED}
        found |= {f"draw {name} {n}": _evaluation(name, n) for n in DRAWN}
    for precision in ("tf32", "fp32"):
        found[f"draw unet64 {precision} 1"] = _evaluation("unet64", 1, precision)
    found |= {f"train unet1d {n}": _actions(n) for n in (64, 256)}
    for precision in ("bf16", "fp32"):
        found |= {f"act unet1d {precision} {n}": _call(precision, n) for n in ACTED}
    return found


@contextmanager
def recorded(gpu: Device) -> Iterator[list[str]]:
    """Within the block nothing is launched; a line for every launch, in order. Within a
    `rehearsal`, this has the launches, too."""
    lines: list[str] = []
    rehearsed = None if JITFunction.run is _RUN else JITFunction.run

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        named = dict(zip(self.arg_names, args, strict=False)) | options
        constants = {p.name for p in self.params if p.is_constexpr}
        told = [
            f"{key}={value!r}" if key in constants or key not in self.arg_names
            else f"{key}:{_kind(value)}"
            for key, value in sorted(named.items())
        ]  # fmt: skip
        grid = grid(named) if callable(grid) else grid
        lines.append(f"{self.fn.__name__} {tuple(grid)} " + " ".join(told))
        if rehearsed is not None:
            rehearsed(self, *args, grid=grid, warmup=warmup, **options)

    with patch.object(JITFunction, "run", note), standing_for(gpu):
        yield lines


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}"
    if hasattr(value, "block_shape"):
        return f"{value.base.dtype}{list(value.shape)}{list(value.block_shape)}"
    return repr(value)


def record_launches(pattern: str, gpu: Device) -> dict[str, list[str]]:
    """Of every job whose name has the pattern in it."""
    found = {}
    for name, job in jobs().items():
        if pattern not in name:
            continue
        with recorded(gpu) as lines:
            job()
        found[name] = lines
        print(name, len(lines), hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12])
        sys.stdout.flush()
    return found


def record_ops(gpu: Device) -> dict[str, list[str]]:
    """Of our convolution, norm and attention, for each row that `benchmarks.run` has of them."""
    found = {}
    for name, run in ops():
        with recorded(gpu) as lines:
            run()
        found[name] = lines
    return found


def ops(
    dtypes: Sequence[str] = ("bf16", "tf32", "fp32"),
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Those rows, and what each of them runs."""
    with ExitStack() as stack:
        for op in (providers.conv, providers.group_norm, providers.attention):
            stack.enter_context(patch.object(op, "drawing", lambda device: _unwritten))
        for name, n in (("unet64", 32), ("unet64", 128), ("unet32", 128)):
            for op in ("conv2d", "group_norm", "attention"):
                for case, _ in cases.model_cases(name, n, op, SIZES[name]):
                    for dtype in dtypes:
                        for row in providers.experiments(case, 1, dtype):
                            run = row.providers["triton"].prepare(row.inputs(_CPU))
                            yield f"{op} {row.shape} {row.dtype} {row.pass_}", run


def _unwritten(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def record_code(pattern: str) -> dict[str, str]:
    """A hash of the PTX of every compile case and chip, without names and line numbers."""
    from tests.kernels import compile_only

    found = {}
    for key, case in compile_only.load_cases().items():
        if pattern in key:
            ptx = compile_only._compile(case)[0]
            found[key] = hashlib.sha256(_code(ptx).encode()).hexdigest()[:16]
    return found


def _code(ptx: str) -> str:
    """What is executed of it."""
    lines = (re.sub(r"//.*", "", line).strip() for line in ptx.split(".section")[0].splitlines())
    kept = (line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp")))
    return re.sub(r"\b_?\w+_kernel\w*", "KERNEL", "\n".join(kept))


def _read(path: str) -> dict[str, Any]:
    return json.loads(gzip.decompress(Path(path).read_bytes()))


def compare(a: dict[str, Any], b: dict[str, Any]) -> int:
    """How many entries differ; says which, and of a list where first."""
    differing = 0
    for key in sorted(set(a) | set(b)):
        if a.get(key) == b.get(key):
            continue
        differing += 1
        print(
            f"{key}: differs"
            if key in a and key in b
            else f"{key}: only in {'a' if key in a else 'b'}"
        )
        if isinstance(a.get(key), list) and isinstance(b.get(key), list):
            print(f"  {len(a[key])} launches, then {len(b[key])}")
            pair = next(((x, y) for x, y in zip(a[key], b[key], strict=False) if x != y), None)
            print(
                *(f"  {side} {line[:600]}" for side, line in zip("ab", pair or (), strict=False)),
                sep="\n",
            )
    print(f"{differing} of {len(set(a) | set(b))} differ")
    return differing


def main() -> None:
    what, *given = sys.argv[1:]
    options = dict(word.split("=", 1) for word in given)
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("goldens are of compiled kernels: unset TRITON_INTERPRET")
    if what == "compare":
        sys.exit(compare(_read(options["a"]), _read(options["b"])) > 0)
    gpu = chip(options.get("gpu", "h100")).gpu
    if what == "launches":
        found = record_launches(options.get("only", ""), gpu)
    elif what == "ops":
        found = record_ops(gpu)
    else:
        found = record_code(options.get("only", ""))
    Path(options["out"]).write_bytes(gzip.compress(json.dumps(found).encode()))


if __name__ == "__main__":
    assert triton_kernels
    main()
