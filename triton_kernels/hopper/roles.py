"""Assignment of roles to the warps of a Gluon kernel."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin


# (What Triton calls a builtin is no part of a kernel's hash: whoever changes what it does renames
# it.)
@builtin
def launch_roles(
    consume,
    consumer_args,
    produce,
    producer_args,
    consumers,
    registers,
    _semantic=None,
    _generator=None,
):
    """`consumers` warpgroups run consume(GROUP, *consumer_args), GROUP from 0 on, and one warp
    beside them produce(*producer_args). `registers`: of a thread of a consumer but the first, which
    keeps what the launch gave it, and of the producer."""
    count = _value(consumers)
    of_consumer, of_producer = map(_value, _value(registers))
    roles = [(_value(consume), _arguments(consumer_args, gl.constexpr(i))) for i in range(count)]
    roles.append((_value(produce), _arguments(producer_args)))
    warps = [4] * (count - 1) + [1]
    limits = [of_consumer] * (count - 1) + [of_producer]
    gl.warp_specialize(roles, warps, limits, _semantic=_semantic, _generator=_generator)


def _arguments(args, *first):
    return gl.tuple([*first, *(gl.constexpr(None) if arg is None else arg for arg in args)])


def _value(x):
    return x.value if isinstance(x, gl.constexpr) else x
