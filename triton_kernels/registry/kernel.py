"""`Kernel`, a row of the registry, and `Op`, an operation that several kernels can compute."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..runtime import device
from ..runtime.device import Device
from .cost import Work, microseconds, name, parameters
from .spec import Spec

CLOCKS = 1755.0  # a microsecond, of an H100: only ratios of costs decide


def configures(name: str) -> Callable[[type], type]:
    """A configuration's class, a NamedTuple, is that of the kernel of this name: its members equal
    no tuple of another kind, whatever their numbers."""

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
    config: type[C]  # of which every configuration is one
    # why it cannot compute this on this GPU, or None; without one it computes everything
    refuse: Callable[[Spec, Device], str | None] = lambda spec, gpu: None
    # those that can; asked only if not refused. Without one there is a single configuration
    configs: Callable[[Spec, Device], Sequence[C]] | None = None
    # microseconds that a configuration is predicted to take; None: taken only where measured
    cost: Callable[[Spec, Device, C], float] | None = None
    launch: Callable[..., Any] | None = None  # of a configuration and the op's operands
    # what the programs of a configuration do, where times were fitted to it (`registry.cost`; None:
    # nobody knows), and the fields of a configuration or spec that have parameters of their own
    work: Callable[[Spec, Device, C], Work | None] | None = None
    fitted_by: tuple[str, ...] = ()
    # the architecture whose parameters chips have that nobody has fitted, in their own waves
    borrows: int | None = None
    # microseconds, by what was fitted to kernels that it consists of, or whose programs are its own
    alike: Callable[[Spec, Device, C], float | None] | None = None
    # whether it asks the registry again, for each of several operations
    delegates: bool = False
    # why it is not to be taken, though it can compute this: nobody has measured that it pays
    untimed: Callable[[Spec, Device], str | None] | None = None
    adds: tuple[str, ...] = ()  # terms of an epilogue, of `spec.TERMS`; it refuses all others

    def __post_init__(self) -> None:
        if self.configs is None:
            object.__setattr__(self, "configs", lambda spec, gpu: [self.config()])

    def model(self, spec: Spec, gpu: Device, config: C) -> float | None:
        """Microseconds by parameters that were fitted to times; None: there are none."""
        if self.alike is not None:
            return self.alike(spec, gpu, config)
        return self._fitted(gpu.arch, spec, gpu, config)

    def _fitted(self, arch: int, spec: Spec, gpu: Device, config: C) -> float | None:
        """By the parameters of that architecture."""
        if self.work is None:
            return None
        fitted = parameters(arch).get(name(self.name, self.fitted_by, spec, config))
        work = None if fitted is None else self.work(spec, gpu, config)
        return None if work is None else microseconds(fitted, work, gpu)

    def predict(self, spec: Spec, gpu: Device, config: C) -> float:
        """Microseconds; infinite if it is to be taken only where it was measured."""
        us = self.model(spec, gpu, config)
        if us is None and self.borrows is not None:
            us = self._fitted(self.borrows, spec, gpu, config)
        if us is None and self.cost is not None:
            us = self.cost(spec, gpu, config)
        return math.inf if us is None else us

    def meant(self, row: dict[str, Any], listed: Sequence[C]) -> C | None:
        """The configuration that a measured row names, if it is listed."""
        if set(row) != set(self.config._fields):
            return None  # as another version of this package had it
        config = self.config(**row)
        if config in listed:
            return config
        if self.config._fields[-1:] != ("splits",):
            return None
        # into how many parts a sum is cut depends on the shape: the nearest number of that tile
        tile = [c for c in listed if c[:-1] == config[:-1]]
        return min(tile, key=lambda c: abs(math.log(c.splits / config.splits)), default=None)


@dataclass(frozen=True)
class Op:
    """Kernels that compute the same thing, the strongest safe choice of which is a matter of
    measurement."""

    name: str
    # attributes of a spec on which a measurement depends, beside its `n`; or names and values of it
    key: tuple[str, ...] | Callable[[Spec], dict[str, Any]]
    kernels: tuple[Kernel, ...]
    # whether rows of other shapes say something about a shape
    similar: bool | Callable[[Spec, Device], bool] = True
    # of what several launches can do as well: why these are better, though a kernel could, or None
    apart: Callable[[Spec, Device], str | None] | None = None

    def __post_init__(self) -> None:
        names = [kernel.name for kernel in self.kernels]
        assert len(set(names)) == len(names), f"{self.name}: two kernels have one name: {names}"
        device.kernels.update(names, (f"{self.name}/{name}" for name in names))

    def __hash__(self) -> int:
        return hash(self.name)

    def why_not(self, kernel: Kernel, spec: Spec, gpu: Device) -> str | None:
        """Why one of the kernels is not to compute this on this GPU, or None."""
        reason = self.cannot(kernel, spec, gpu)
        if reason is None and kernel.untimed is not None:
            reason = kernel.untimed(spec, gpu)
        return reason

    def cannot(self, kernel: Kernel, spec: Spec, gpu: Device) -> str | None:
        """Why one of the kernels cannot compute this on this GPU, or is switched off, or None."""
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
        """Why several launches are to compute this: no kernel can, or they are faster. None: one
        launch is to."""
        reason = self.refuse(spec, gpu)
        return self.apart(spec, gpu) if reason is None and self.apart is not None else reason

    def counts_similar(self, spec: Spec, gpu: Device) -> bool:
        """Whether rows of other shapes count for this one."""
        return self.similar(spec, gpu) if callable(self.similar) else self.similar

    def kernel(self, name: str) -> Kernel | None:
        """The one of this name."""
        return next((kernel for kernel in self.kernels if kernel.name == name), None)

    def kernel_of(self, config: tuple) -> Kernel:
        """The one that a configuration belongs to."""
        return next(kernel for kernel in self.kernels if type(config) is kernel.config)

    def shape(self, spec: Spec) -> tuple[tuple[str, Any], ...]:
        """What a measurement depends on, by name."""
        if callable(self.key):
            return tuple(self.key(spec).items())
        return tuple((name, getattr(spec, name)) for name in self.key)

    def wrong_names(
        self,
        fields: Iterable[str],  # of the shape of a spec
        given: Iterable[str],  # of that of a row
        kernel: str,
        config: dict[str, Any],
    ) -> str | None:
        """What a row names that this op does not have, or lacks; None: nothing. An op on several
        layers may have numbered fields, as many as there are layers."""
        if callable(self.key):
            fields, given = (
                sorted({name.rstrip("0123456789") for name in names}) for names in (fields, given)
            )
        found = self.kernel(kernel)
        if found is None:
            known = ", ".join(kernel.name for kernel in self.kernels)
            return f"kernel is {kernel!r}; {self.name} has {known}"
        return _misnamed(self.name, given, fields) or _misnamed(
            f"the configuration of {kernel}", config, found.config._fields
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
