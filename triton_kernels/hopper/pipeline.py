"""Rings of shared memory that pass data between the warps of a Gluon kernel, and their barriers.

A ring has several slots, which one part of a program fills in order and others read in order. Item
`count`, counted from 0, is in slot count % SLOTS. Every slot has two barriers: its bytes complete
`full`, and each of its readers arrives at `empty`. A barrier distinguishes only even from odd
phases, so no part may be two rounds ahead of another.

A kernel must not create a barrier that it does not use to its end or invalidate. The compiler
reuses the memory of an unused barrier for later allocations, but to the chip it remains a barrier:
when the GPU switches to another process, the chip writes the barrier's state over the data there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from .compat import aggregate, sync_threads


@gluon.jit
def new_barriers(COUNT: gl.constexpr):
    """A barrier for each of COUNT things, which waits for one arrival."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@aggregate
class Ring:
    """Slots of shared memory, and a barrier each that says they are full, or empty."""

    bufs: gl.shared_memory_descriptor  # or several, whose slots are filled together
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr

    @gluon.jit
    def acquire(self, count, BYTES: gl.constexpr = None):
        """Of a producer: the slot that is filled next, once it is free, and the barrier that its
        BYTES complete; or, without them, `hand_over`."""
        slot = count % self.SLOTS
        bar = self.full.index(slot)
        mbarrier.wait(self.empty.index(slot), (count // self.SLOTS & 1) ^ 1)
        if BYTES is not None:
            mbarrier.expect(bar, BYTES)
        return slot, bar

    @gluon.jit
    def hand_over(self, count):
        """Of a producer whose threads have written the slot themselves: it is full."""
        fence_async_shared()
        sync_threads()
        mbarrier.arrive(self.full.index(count % self.SLOTS), count=1)

    @gluon.jit
    def wait(self, count, pred=True):
        """Of a consumer: the slot that is read next, once it is full."""
        slot = count % self.SLOTS
        mbarrier.wait(self.full.index(slot), count // self.SLOTS & 1, pred=pred)
        return slot

    @gluon.jit
    def release(self, count, pred=True):
        """Of a consumer: the slot that was filled `count`-th may be filled again."""
        mbarrier.arrive(self.empty.index(count % self.SLOTS), count=1, pred=pred)

    @gluon.jit
    def release_before(self, count, pred=True):
        """The same of the slot in front of that one. (`count` is never negative.)"""
        self.release(count + self.SLOTS - 1, pred)


@gluon.jit
def new_ring(bufs, SLOTS: gl.constexpr, READERS: gl.constexpr = 1, WRITERS: gl.constexpr = 1):
    """A ring over memory that is there, of which so many arrive at each of its barriers."""
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], LAYOUT)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], LAYOUT)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=WRITERS)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(bufs, full, empty, SLOTS)


@aggregate
class Turns:
    """Of warpgroups that use the tensor cores in turn, a barrier each."""

    bars: gl.shared_memory_descriptor
    GROUPS: gl.constexpr

    @gluon.jit
    def wait(self, GROUP: gl.constexpr, phase):
        """Until it is GROUP's, which has had as many turns as `phase` says, even or odd. The first
        one's first turn is there from the beginning."""
        FIRST: gl.constexpr = 1 if GROUP == 0 else 0
        mbarrier.wait(self.bars.index(GROUP), phase ^ FIRST)

    @gluon.jit
    def give(self, GROUP: gl.constexpr):
        """To the next one."""
        mbarrier.arrive(self.bars.index((GROUP + 1) % self.GROUPS), count=1)


@gluon.jit
def new_turns(GROUPS: gl.constexpr):
    return Turns(new_barriers(GROUPS), GROUPS)


@gluon.jit
def wait_for(pending: gl.constexpr, accs, COUNT: gl.constexpr):
    """`accs`, a tuple of COUNT, when at most `pending` products are under way."""
    done = warpgroup_mma_wait(pending, deps=accs)
    if COUNT == 1:  # then it is not a tuple
        return (done,)
    else:
        return done
