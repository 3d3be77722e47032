"""Gradients of filters that wait for others like them, to be made in one launch."""

from types import ModuleType
from typing import Protocol

from torch import Tensor

from .side_stream import SideStream

_MOST = 4  # that `kernels.conv_weight_grads` can do at once
# Of the multiprocessors: a launch writes fewer parts of sums, and kernels of the main stream find
# others free. See docs/tried.md
SHARE = 0.5
_BUDGET = 192 * 2**20  # bytes that they read together, which stay allocated meanwhile


class Plan(Protocol):
    """What they are made with."""

    kernels: ModuleType  # `triton_kernels.fused_ops` or its reference
    aside: SideStream
    accumulates: bool  # whether gradients of filters are added to what is there


class WeightGrads:
    """Collects gradients of filters of one size over images of one size, and gives them to the side
    stream when there are enough, when images of another size follow, or at `flush`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._waiting: dict[tuple[int, ...], list[tuple[Tensor, Tensor, Tensor]]] = {}
        self.waits = True  # for gradients of other layers, or those of one `add` alone
        self.alone = False  # or much runs beside what is started now

    def add(
        self,
        *gradients: tuple[Tensor, Tensor, Tensor],  # x [N, H, W, CI], dy [N, H, W, CO], `out`
    ) -> None:
        """Make the gradient of the weight in y = conv(x), into or added to `out` [CO, CI, R, S],
        now or later; of several such convolutions together. Nothing may overwrite x and dy."""
        x, _, out = gradients[0]
        if any(group[0][0].shape[:3] != x.shape[:3] for group in self._waiting.values()):
            self.flush()
        size = tuple(out.shape[2:])
        if len(self._waiting.get(size, ())) + len(gradients) > _MOST:
            self._start(self._waiting.pop(size))
        group = self._waiting.setdefault(size, [])
        group += gradients
        read = sum(t.nbytes for t in _reads(group))
        if not self.waits or len(group) == _MOST or read >= _BUDGET:
            self._start(self._waiting.pop(size))

    def flush(self) -> None:
        """Give all that wait to the side stream."""
        while self._waiting:
            self._start(self._waiting.pop(next(iter(self._waiting))))

    def _start(self, group: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        plan, share = self._plan, 1.0 if self.alone else SHARE

        def work(*_: Tensor) -> None:
            plan.kernels.conv_weight_grads(*group, accumulate=plan.accumulates, share=share)

        plan.aside.run(work, *_reads(group))


def _reads(group: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """The tensors that it reads, each once: the convolutions of two inputs may share a dy."""
    return list({id(t): t for x, dy, _ in group for t in (x, dy)}.values())
