"""Gradients that are sums over rows, of many parameters, all by one launch at the end of backward.

The gradient of a norm's weight, or of a bias, is a sum over samples of float32 rows that some
kernel leaves behind. Each alone is a launch of a few microseconds that a training step would wait
for a hundred times. Here rows are kept in one workspace, and a table says what to add up:

    grad[out : out + columns] += sum over m < rows of workspace[start + m stride :][: columns]

The order of the sum is fixed, so the same rows give the same bits.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.layout import check_shape
from .column_sum import sum_partials

# The longest sum sets the time, so few columns a program: 32 bytes, a sector of memory
_BLOCK_M = 256
_BLOCK_C = 8


@triton.jit
def _segment_sums_kernel(
    workspace_ptr,  # float32
    grad_ptr,  # float32
    table_ptr,  # int64 [programs, 5]: start, stride, rows, columns, out
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    table_ptr += tl.program_id(0) * 5
    start, stride = tl.load(table_ptr), tl.load(table_ptr + 1)
    rows = tl.load(table_ptr + 2).to(tl.int32)
    columns, out = tl.load(table_ptr + 3), tl.load(table_ptr + 4)
    offs_m = tl.arange(0, BLOCK_M)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < columns
    offs = offs_m.to(tl.int64)[:, None] * stride + offs_c[None, :]
    before = tl.load(grad_ptr + out + offs_c, mask=mask_c, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for m in range(0, rows, BLOCK_M):
        mask = (offs_m < rows - m)[:, None] & mask_c[None, :]
        acc += tl.load(workspace_ptr + start + m * stride + offs, mask=mask, other=0.0)
    tl.store(grad_ptr + out + offs_c, before + tl.sum(acc, 0), mask=mask_c)


Tables = dict[tuple, tuple[Tensor, int]]  # by what was asked for: a table, and numbers of rows


class RowSums:
    """What is to be added to `grad`, a flat float32 gradient, until `flush`.

    The first pass learns what there is and copies it together; passes that take and add the same in
    the same order need one launch, those of other `RowSums` that share `tables` too. A CUDA graph
    may be captured after the first. In the capture of a pass that is none like the ones before,
    sums are added one by one.
    """

    def __init__(self, grad: Tensor, tables: Tables | None = None) -> None:
        assert grad.dtype == torch.float32 and grad.ndim == 1 and grad.is_contiguous()
        self.grad = grad
        self.tables = {} if tables is None else tables
        size = max((used for _, used in self.tables.values()), default=0)
        # the last is in use; graphs know the others
        self.workspaces = [grad.new_empty((size,), dtype=torch.float32)]
        self.captured = False  # a graph knows the last, too
        self._forget()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept from pass to pass."""
        tables = [table for table, _ in self.tables.values()]
        return sum(kept.nbytes for kept in (*self.workspaces, *tables))

    def rows(self, count: int, columns: int) -> Tensor:  # float32 [count, columns]
        """A place for rows, until `flush`."""
        size, start = count * columns, self.used
        self.used += triton.cdiv(size, 4) * 4  # 16 bytes
        if self.used <= self.workspaces[-1].numel():
            rows = self.workspaces[-1][start : start + size]
        else:
            rows = self.grad.new_empty((size,), dtype=torch.float32)
            self.scattered = True
        self.starts[rows.data_ptr()] = start
        rows = rows.view(count, columns)
        self.kept.append(rows)
        return rows

    def placed(self, rows: Tensor) -> Tensor:
        """These, or a copy of them, in a place for rows."""
        if rows.data_ptr() in self.starts:
            return rows
        return self.rows(*rows.shape).copy_(rows)

    def add(self, rows: Tensor, first: int, out: Tensor) -> None:
        """out += the sum of rows[:, first : first + C], C = out.numel(), at `flush`. `rows` is what
        the method of that name has given, `out` a contiguous part of the gradient. No element of
        the gradient may be asked for twice: programs do not wait for each other."""
        count, stride = rows.shape
        if count == 0:
            return
        offset = (out.data_ptr() - self.grad.data_ptr()) // 4
        assert out.is_contiguous() and 0 <= offset <= self.grad.numel() - out.numel()
        assert offset not in self.outs, "two sums for one gradient"
        self.outs.add(offset)
        start = self.starts[rows.data_ptr()] + first
        self.segments.append((start, stride, count, out.numel(), offset))
        self.parts.append((rows, first, out))

    def flush(self, last: bool = True) -> None:
        """Add all that was asked for, and forget it. Unless it is the last of a pass, rows keep
        their places, for this one may still be reading them when the next rows are written."""
        key, capturing = tuple(self.segments), _capturing(self.grad)
        known = key in self.tables and not self.scattered
        self.captured |= capturing
        if key and not known and capturing:
            for rows, first, out in self.parts:
                out += rows[:, first : first + out.numel()].sum(0).view(out.shape)
        elif key:
            if not known:
                self._plan(key)
                self._gather()
            table, _ = self.tables[key]
            _segment_sums_kernel[(table.shape[0],)](
                self.workspaces[-1],
                self.grad,
                table,
                BLOCK_M=_BLOCK_M,
                BLOCK_C=_BLOCK_C,
                **overlapping(self.grad.device),
            )
        if last:
            self._forget()
        else:
            self.segments, self.parts = [], []

    def _gather(self) -> None:
        """Bring rows that were handed out elsewhere into the workspace, so that the first pass adds
        in the order of all others, and gives the same bits."""
        for rows in self.kept:
            start = self.starts[rows.data_ptr()]
            place = self.workspaces[-1][start : start + rows.numel()]
            if place.data_ptr() != rows.data_ptr():
                place.copy_(rows.view(-1))

    def _plan(self, key: tuple) -> None:
        if self.workspaces[-1].numel() < self.used:
            if not self.captured:
                self.workspaces.pop()
            workspace = self.grad.new_empty((self.used,), dtype=torch.float32)
            self.workspaces.append(workspace)
            self.captured = False
        if key in self.tables:  # which a graph may read
            return
        table = torch.tensor(
            [
                (start + c, stride, rows, min(columns - c, _BLOCK_C), out + c)
                for start, stride, rows, columns, out in sorted(key, key=lambda s: -s[2])
                for c in range(0, columns, _BLOCK_C)
            ],
            device=self.grad.device,
        )
        self.tables[key] = table, self.used

    def _forget(self) -> None:
        self.used, self.scattered = 0, False
        self.starts, self.outs, self.segments, self.parts = {}, set(), [], []
        self.kept: list[Tensor] = []  # all rows that were handed out, which `flush` reads


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def rows_of(sums: RowSums | Tensor, count: int, columns: int) -> Tensor:
    """Where rows go that are summed to gradients: to a place of `sums`, or all of that tensor."""
    if isinstance(sums, RowSums):
        return sums.rows(count, columns)
    check_shape("rows", sums, count, columns)
    return sums


def row_place(
    sums: RowSums | bool | None,  # True: rows in a tensor of their own
    like: Tensor,  # on the same device
) -> Callable[[int, int], Tensor] | None:
    """Where a launch keeps rows, given their number and their columns; None: nowhere."""
    if isinstance(sums, RowSums):
        return sums.rows

    def own(rows: int, columns: int) -> Tensor:
        return like.new_empty((rows, columns), dtype=torch.float32)

    return own if sums else None


def bias_grad(
    rows: Tensor,  # float32 [rows, C], as `norm_dx` returns them
    out: Tensor,  # float32 [C]
    accumulate: bool = False,
    sums: RowSums | None = None,  # the one that `norm_dx` had
) -> None:
    """out = (or +=) the sum of the rows."""
    if sums is not None:
        assert accumulate, "RowSums adds to what is there"
        return sums.add(rows, 0, out)
    count, c = rows.shape
    parts = min(count & -count, 64)
    if count > 256 and parts > 1:  # more than one program should add up
        part = rows.new_empty((parts, c), dtype=torch.float32)
        sum_partials(rows.view(count // parts, parts * c), part.view(-1))
        rows = part
    if count:
        sum_partials(rows, out, accumulate=accumulate)
    elif not accumulate:
        out.zero_()
