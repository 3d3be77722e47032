"""`Kernel`, a row of the registry, and `Op`, an operation that several kernels can compute."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from ..runtime import device
from ..runtime.device import Device
from .cost import Work, microseconds, name, parameters, step_of
from .spec import Spec

CLOCKS = 1755.0  # a microsecond, of an H100: only ratios of costs decide


def configures(name: str) -> Callable[[type], type]:
    """Decorator for the configuration class, a NamedTuple, of the kernel of this name. Its
    instances never equal a tuple of another class, even with the same numbers."""

    def named(kind: type) -> type:
        kind.kernel = name
        kind.__eq__ = lambda self, other: type(other) is kind and tuple.__eq__(self, other)
        kind.__ne__ = lambda self, other: not self == other
        kind.__hash__ = lambda self: hash((name, *self))
        return kind

    return named


C = TypeVar("C", bound=tuple)  # a configuration: a NamedTuple, whose fields a measured row names


@dataclass(frozen=True)
class Kernel(Generic[C]):
    """One way to compute an operation."""

    name: str
    # the class of its configurations; None: there is one, which has no fields
    config: type[C] | None = None
    # why it cannot compute this on this GPU, or None; the default computes everything
    refuse: Callable[[Spec, Device], str | None] = lambda spec, gpu: None
    # configurations that can compute this, if it is not refused. None: there is one, `config()`
    configs: Callable[[Spec, Device], Sequence[C]] | None = None
    # predicted microseconds of a configuration; None: it runs only where it was measured
    cost: Callable[[Spec, Device, C], float] | None = None
    launch: Callable[..., Any] | None = None  # called with a configuration and the op's operands
    # the work of a configuration's programs, for fitted costs (`registry.cost`; None: unknown), and
    # the fields of the configuration or spec that select a set of fitted parameters
    work: Callable[[Spec, Device, C], Work | None] | None = None
    fitted_by: tuple[str, ...] = ()
    # the architecture whose parameters are used on architectures without fitted parameters
    borrows: int | None = None
    # microseconds, by parameters that were fitted to other kernels: those that it launches, or that
    # have the same programs
    alike: Callable[[Spec, Device, C], float | None] | None = None
    # whether it selects other kernels from the registry, for each of several operations
    delegates: bool = False
    # why it is not taken though it can compute this: no measurement shows that it is faster
    untimed: Callable[[Spec, Device], str | None] | None = None
    adds: tuple[str, ...] = ()  # terms of its epilogue, from `spec.TERMS`; it refuses all others

    def __post_init__(self) -> None:
        if self.config is None:
            object.__setattr__(self, "config", configures(self.name)(NamedTuple(self.name, [])))
        if self.configs is None:
            object.__setattr__(self, "configs", lambda spec, gpu: [self.config()])

    def model(self, spec: Spec, gpu: Device, config: C) -> float | None:
        """Microseconds by fitted parameters; None: there are none."""
        if self.alike is not None:
            return self.alike(spec, gpu, config)
        return self._fitted(gpu.arch, spec, gpu, config)

    def _fitted(self, arch: int, spec: Spec, gpu: Device, config: C) -> float | None:
        """Microseconds by the parameters of that architecture; None: there are none."""
        if self.work is None:
            return None
        fitted = parameters(arch).get(name(self.name, self.fitted_by, spec, config))
        work = None if fitted is None else self.work(spec, gpu, config)
        step = step_of(self.name, arch)
        return None if work is None else microseconds(fitted, work, gpu, step)

    def predict(self, spec: Spec, gpu: Device, config: C) -> float:
        """Predicted microseconds; infinite if the kernel runs only where it was measured."""
        us = self.model(spec, gpu, config)
        if us is None and self.borrows is not None:
            us = self._fitted(self.borrows, spec, gpu, config)
        if us is None and self.cost is not None:
            us = self.cost(spec, gpu, config)
        return math.inf if us is None else us

    def whole(self, row: dict[str, Any]) -> dict[str, Any]:
        """The fields of a row, with defaults of those that are newer than it."""
        return self.config._field_defaults | row

    def meant(self, row: dict[str, Any], listed: Sequence[C]) -> C | None:
        """The configuration that a measured row names, if it is listed."""
        row = self.whole(row)
        if set(row) != set(self.config._fields):
            return None  # the row is from another version of this package
        config = self.config(**row)
        if config in listed:
            return config
        if self.config._fields[-1:] != ("splits",):
            return None
        # the number of parts depends on the shape: take the nearest one that is listed for the tile
        tile = [c for c in listed if c[:-1] == config[:-1]]
        return min(tile, key=lambda c: abs(math.log(c.splits / config.splits)), default=None)


@dataclass(frozen=True)
class Op:
    """An operation, and the kernels that can compute it. Measurements and costs choose one."""

    name: str
    # the fields of a spec, besides `n`, on which a measurement depends; or a function that returns
    # their names and values
    key: tuple[str, ...] | Callable[[Spec], dict[str, Any]]
    kernels: tuple[Kernel, ...]
    # whether measured rows of similar shapes count
    similar: bool | Callable[[Spec, Device], bool] = True
    # if several launches can compute it too: why they are faster than one kernel, or None
    apart: Callable[[Spec, Device], str | None] | None = None

    def __post_init__(self) -> None:
        names = [kernel.name for kernel in self.kernels]
        assert len(set(names)) == len(names), f"{self.name}: two kernels have one name: {names}"
        device.kernels.update(names, (f"{self.name}/{name}" for name in names))

    def __hash__(self) -> int:
        return hash(self.name)

    def why_not(self, kernel: Kernel, spec: Spec, gpu: Device) -> str | None:
        """Why this kernel is not taken on this GPU, or None."""
        reason = self.cannot(kernel, spec, gpu)
        if reason is None and kernel.untimed is not None:
            reason = kernel.untimed(spec, gpu)
        return reason

    def cannot(self, kernel: Kernel, spec: Spec, gpu: Device) -> str | None:
        """Why this kernel cannot compute it on this GPU, or that it is switched off; or None."""
        if gpu.off and {kernel.name, f"{self.name}/{kernel.name}"} & set(gpu.off.split(",")):
            return "it is switched off"
        if lacking := [term for term in spec.added if term not in kernel.adds]:
            return f"its epilogue does not add {', '.join(lacking)}"
        return kernel.refuse(spec, gpu)

    def refuse(self, spec: Spec, gpu: Device) -> str | None:
        """Why none of the kernels can compute this on this GPU, or None."""
        reasons = [(kernel.name, self.why_not(kernel, spec, gpu)) for kernel in self.kernels]
        if any(reason is None for _, reason in reasons):
            return None
        return "; ".join(f"{name}: {reason}" for name, reason in reasons)

    def why_apart(self, spec: Spec, gpu: Device) -> str | None:
        """Why several launches compute this: no kernel can, or they are faster. None: one launch
        does."""
        reason = self.refuse(spec, gpu)
        return self.apart(spec, gpu) if reason is None and self.apart is not None else reason

    def counts_similar(self, spec: Spec, gpu: Device) -> bool:
        """Whether rows of other shapes count for this one."""
        return self.similar(spec, gpu) if callable(self.similar) else self.similar

    def kernel(self, name: str) -> Kernel | None:
        """The kernel of this name."""
        return next((kernel for kernel in self.kernels if kernel.name == name), None)

    def kernel_of(self, config: tuple) -> Kernel:
        """The kernel that a configuration belongs to."""
        return next(kernel for kernel in self.kernels if type(config) is kernel.config)

    def shape(self, spec: Spec) -> tuple[tuple[str, Any], ...]:
        """The fields on which a measurement depends, with their names."""
        if callable(self.key):
            return tuple(self.key(spec).items())
        return tuple((name, getattr(spec, name)) for name in self.key)

    def wrong_names(
        self,
        fields: Iterable[str],  # of a spec's shape
        given: Iterable[str],  # of a row's shape
        kernel: str,
        config: dict[str, Any],
    ) -> str | None:
        """What is wrong with the names in a row: one that this op does not have, or one that is
        missing; or None. An op on several layers may have a numbered field per layer."""
        if callable(self.key):
            fields, given = (
                sorted({name.rstrip("0123456789") for name in names}) for names in (fields, given)
            )
        found = self.kernel(kernel)
        if found is None:
            known = ", ".join(kernel.name for kernel in self.kernels)
            return f"kernel is {kernel!r}; {self.name} has {known}"
        return _misnamed(self.name, given, fields) or _misnamed(
            f"the configuration of {kernel}", found.whole(config), found.config._fields
        )


def _misnamed(what: str, given: Iterable[str], right: Iterable[str]) -> str | None:
    unknown, lacking = set(given) - set(right), set(right) - set(given)
    if not unknown | lacking:
        return None
    wrong = f"has no {min(unknown)}" if unknown else f"needs {min(lacking)}"
    return f"{what} {wrong}; its fields are {', '.join(right) or 'none'}"


@dataclass(frozen=True)
class Choice(Generic[C]):
    """What `select` took."""

    kernel: Kernel[C]
    config: C
    why: str  # "measured", "like n=32", "like n=32 k=64", "predicted", "default"
