"""Kernels and configurations that a test wants taken, whatever the registry would."""

from collections.abc import Callable

from triton_kernels.registry import choose
from triton_kernels.registry.kernel import Choice, Op
from triton_kernels.registry.spec import Spec
from triton_kernels.runtime.device import Device

Wanted = tuple | str | Callable[[Spec], tuple | None]


def take(monkeypatch, **wanted: Wanted) -> None:
    """For the ops of these names: a configuration; the name of a kernel, whose first one is taken
    and which may not refuse; or a function of the spec, which returns one or None."""
    measured = choose._measured

    def found(op: Op, spec: Spec, gpu: Device) -> Choice | None:
        config = wanted.get(op.name)
        if callable(config):
            config = config(spec)
        if config is None:
            return measured(op, spec, gpu)
        if isinstance(config, tuple):
            return Choice(op.kernel_of(config), config, "wanted")
        kernel = op.kernel(config)
        reason = op.why_not(kernel, spec, gpu)
        assert reason is None, f"{config} is wanted: {reason}"
        return Choice(kernel, kernel.configs(spec, gpu)[0], "wanted")

    monkeypatch.setattr(choose, "_measured", found)
    monkeypatch.setattr(choose, "_decided", {})
