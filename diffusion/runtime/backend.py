"""The choice of the backend, made once: who computes the ops, and in which precision."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

import triton_kernels
from triton_kernels import reference
from triton_kernels.canary import Crashed, kernels_off, settle_compiler
from triton_kernels.runtime.cache_keys import settle_cache_folder, settle_cache_keys
from triton_kernels.runtime.device import on_gpu

from ..errors import ConfigError

log = logging.getLogger(__name__)

PRECISIONS = {"bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}


@dataclass(frozen=True)
class Backend:
    """`ops` has every public op of `triton_kernels`; activations are kept in `dtype`."""

    name: str  # triton | torch
    ops: ModuleType
    dtype: torch.dtype = torch.float32
    allow_tf32: bool = False
    # (precision on a GPU, precision elsewhere) of a network that takes the backend of the device
    # that it is moved to; None: this one everywhere
    follows: tuple[str, str] | None = field(default=None, compare=False)

    def on(self, device: torch.device) -> "Backend":
        """The backend of a layer whose parameters are there now."""
        return self if self.follows is None else following(device, *self.follows)

    @property
    def precision(self) -> str:
        """As the configuration calls it: bf16, tf32 or fp32."""
        if self.dtype == torch.float32:
            return "tf32" if self.allow_tf32 else "fp32"
        return next(name for name, dtype in PRECISIONS.items() if dtype == self.dtype)

    def __deepcopy__(self, memo: dict) -> "Backend":
        return self  # so that models can be copied: a module cannot

    def __reduce__(self) -> tuple:
        """For torch.save of a whole model: a module cannot be pickled, but its name can."""
        options = self.dtype, self.allow_tf32, self.follows
        return _unpickled, (self.name, self.ops.__name__, *options)


def _unpickled(name: str, ops: str, *options: Any) -> Backend:
    return Backend(name, import_module(ops), *options)


TORCH_FP32 = Backend("torch", reference)


def choose_backend(
    name: str, precision: str, device: torch.device, setting: str = "train.precision"
) -> Backend:
    """Resolve `auto` (triton on CUDA, torch elsewhere). Sets, for the whole process, PyTorch's TF32
    switches to match the precision and, for the kernels, what Triton's cache keys depend on
    (`settle_cache_keys`), the folder of its cache and its assembler; `determinism` puts the
    switches back. `setting` is what the user calls the precision. On a GPU the kernels are tried
    first, and a line of the log names those that are off; where none is right, `auto` is torch."""
    return tried(untried_backend(name, precision, device, setting), device, name == "triton")


def untried_backend(
    name: str, precision: str, device: torch.device, setting: str = "train.precision"
) -> Backend:
    """As `choose_backend`, for a caller who passes the result to `tried` before anything is
    launched: trying takes seconds where nothing is compiled yet."""
    if name not in ("auto", "triton", "torch"):
        raise ConfigError(f"backend={name} is unknown; choose one of auto, triton, torch")
    if precision not in PRECISIONS:
        raise ConfigError(
            f"{setting}={precision} is unknown; choose one of {', '.join(PRECISIONS)}"
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if name == "triton" and not on_gpu(device) and not interpreted:
        raise ConfigError(
            f"backend=triton needs a CUDA device, and device is {device}; use backend=auto or torch"
        )
    if name == "auto":
        name = "triton" if on_gpu(device) else "torch"
    if name == "triton":
        _settle(device)
    if name == "triton" and interpreted and precision == "bf16":
        raise ConfigError("Triton's interpreter computes bf16 wrongly; use fp32")
    allow_tf32 = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    torch.backends.cudnn.allow_tf32 = allow_tf32
    ops = triton_kernels if name == "triton" else reference
    return Backend(name, ops, PRECISIONS[precision], allow_tf32)


def _settle(device: torch.device) -> None:
    """What names and contents of compiled kernels depend on, before the first of them, which trying
    them launches."""
    settle_cache_folder()
    settle_cache_keys()
    if device.type == "cuda":  # not in a rehearsal, which stands for a GPU
        with _wrong_names():
            settle_compiler(device)


@lru_cache  # every new plan asks
def ready_kernels(device: torch.device) -> None:
    """What `choose_backend` does for the kernels on a GPU, for a caller who has no backend. The log
    names those that are off. ConfigError: none is right there."""
    _settle(device)
    try:
        with _wrong_names():
            off = kernels_off(device)
    except RuntimeError as error:
        raise ConfigError(f"the kernels cannot be used on {device}: {error}") from None
    for line in off:
        log.warning("%s", line)


def tried(backend: Backend, device: torch.device, required: bool) -> Backend:
    """The backend, if there are kernels that compute on this device what they should; otherwise
    torch, or where the kernels are `required`, or one has crashed, a ConfigError."""
    if backend.name != "triton" or device.type != "cuda":  # the interpreter, or a rehearsal
        return backend
    try:
        with _wrong_names():
            off = kernels_off(device)
    except Crashed as error:  # PyTorch's own kernels would fail too
        raise ConfigError(str(error)) from None
    except RuntimeError as error:
        if required:
            raise ConfigError(f"backend=triton cannot be used here: {error}") from None
        log.warning("backend=torch is used, which is slower: %s", error)
        return replace(backend, name="torch", ops=reference)
    for line in off:
        log.warning("%s", line)
    return backend


@lru_cache  # every layer asks
def following(device: torch.device, on_a_gpu: str, elsewhere: str) -> Backend:
    """What `auto` is there, in one of two precisions; it follows a network that moves."""
    precision = on_a_gpu if on_gpu(device) else elsewhere
    return replace(choose_backend("auto", precision, device), follows=(on_a_gpu, elsewhere))


@contextmanager
def _wrong_names() -> Iterator[None]:
    """A kernel that there is not, in TRITON_KERNELS_OFF, is the user's mistake."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


def precision_on(device: torch.device, trained: str) -> str:
    """The precision to draw in if nobody says: as trained, on a CPU fp32, for bf16 gains nothing
    there."""
    return trained if on_gpu(device) else "fp32"


@contextmanager
def determinism(required: bool) -> Iterator[None]:
    """Within the block as `require_determinism` says, if so; behind it these switches and those of
    TF32 are as they were: the next job of a sweep, or the caller's own work, is in this process."""
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    )
    if required:
        require_determinism()
    try:
        yield
    finally:
        if torch.are_deterministic_algorithms_enabled() != before[0]:
            torch.use_deterministic_algorithms(before[0])  # imports PyTorch's compiler, for seconds
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
        torch.backends.cudnn.benchmark = before[2]
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def require_determinism() -> None:
    """Let PyTorch's own kernels give the same bits every time, or raise. The Triton kernels always
    do: they have no atomics, and sums have one order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
