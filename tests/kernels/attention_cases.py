"""What attention is compared with: float64, and independent implementations of low precision,
which say how far a result may be off."""

import math

import torch

from triton_kernels import reference
from triton_kernels.attention import attention, attention_backward, attention_fwd
from triton_kernels.attention.launch import attention_bwd
from triton_kernels.reductions.row_sums import RowSums

FLOOR = 1e-6  # of the budget: the precision of float32 statistics

ORDERS = 8  # in which float32 products are added up, to know what is chance

PRECISIONS = {
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
}

RUNS_ON_GPU = 3  # a race shows in one run out of several

# types and packings of q, k and v; kernels compile anew for each
KINDS = {"bf16": (torch.bfloat16, "qkv_heads"), "fp16 legacy": (torch.float16, "heads_qkv")}
OTHER_KINDS = {"fp16": (torch.float16, "qkv_heads"), "bf16 legacy": (torch.bfloat16, "heads_qkv")}


class Launched:
    """Stands for a kernel, and says with what it was launched."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.calls.append((grid, options))


def make(n, t, heads, d, dtype, device):
    """qkv and do; scores have a standard deviation of about 2, so that the softmax is not flat."""
    generator = torch.Generator().manual_seed(n + t + heads + d)
    qkv = math.sqrt(2) * torch.randn(n, t, 3 * heads * d, generator=generator)
    do = torch.randn(n, t, heads * d, generator=generator)
    return qkv.to(device, dtype), do.to(device, dtype)


def make_extreme(d, sign, device):
    """Of one head, with scores past the range of float16 that differ a little from key to key."""
    qkv, do = make(1, 300, 1, d, torch.float16, device)
    qkv[..., :d] = 200
    qkv[..., d : 2 * d] = sign * 250 + qkv[..., d : 2 * d]
    return qkv, do


def run(op, qkv, do, heads, **options):
    """(o, dqkv) of `op`."""
    qkv = qkv.detach().clone().requires_grad_()
    o = op(qkv, heads, **options)
    (dqkv,) = torch.autograd.grad(o, qkv, do)
    return o.detach(), dqkv


def errors(actual, expected):
    """Relative error in the Euclidean norm, and of the worst element against the largest one."""
    difference = actual.double() - expected
    worst = difference.abs().max() / expected.abs().max()
    return (difference.norm() / expected.norm()).item(), worst.item()


def truncated(x):
    """As the matrix units read float32 in TF32: the last 13 bits of the mantissa are dropped."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def one_by_one(a, b):
    """a @ b, each sum from its first product to its last."""
    total = a[..., :1] * b[..., :1, :]
    for i in range(1, a.shape[-1]):
        total = total + a[..., i : i + 1] * b[..., i : i + 1, :]
    return total


class Tf32Matmul(torch.autograd.Function):
    """a @ b, and the products of its gradient, of truncated operands."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return truncated(a) @ truncated(b)

    @staticmethod
    def backward(ctx, g):
        a, b = map(truncated, ctx.saved_tensors)
        g = truncated(g.contiguous())
        return g @ b.mT, a.mT @ g


def heads_of(qkv, heads, order):
    """q, k and v, [N, heads, T, D]."""
    n, t, c3 = qkv.shape
    d = c3 // 3 // heads
    if order == "qkv_heads":
        return qkv.view(n, t, 3, heads, d).permute(2, 0, 3, 1, 4).contiguous()
    return qkv.view(n, t, heads, 3, d).permute(3, 0, 2, 1, 4).contiguous()


def tf32_attention(qkv, heads, *, order):
    """The reference with TF32 products, on any machine."""
    q, k, v = heads_of(qkv, heads, order)
    n, t, c3 = qkv.shape
    p = torch.softmax(Tf32Matmul.apply(q, k.mT.contiguous()) / math.sqrt(q.shape[3]), dim=-1)
    return Tf32Matmul.apply(p, v).transpose(1, 2).reshape(n, t, c3 // 3)


def in_two_passes(q, k, v, do, turn, seen=None):
    """(o, dq, dk, dv) of heads [N, heads, T, D], as kernels compute them. The backward pass makes
    scores and softmax again, and adds up in another order than the forward pass, so they differ: in
    which orders, `turn` says. `seen`: bool [N, 1, 1, keys]."""
    scale, draw = 1 / math.sqrt(q.shape[3]), torch.Generator().manual_seed(turn)

    def product(a, b):
        terms = torch.randperm(a.shape[-1], generator=draw).to(a.device)
        return one_by_one(a[..., terms], b[..., terms, :])

    def scores():
        s = product(q, k.mT) * scale
        return s if seen is None else s.masked_fill(~seen, -1e30)

    def softmax(s):
        p = torch.exp(s - lse)
        return p if seen is None else p * seen

    s = scores()
    lse = s.logsumexp(-1, keepdim=True)
    o = product(softmax(s), v)
    p = softmax(scores())
    ds = p * (product(do, v.mT) - (do * o).sum(-1, keepdim=True)) * scale
    return o, product(ds, k), product(ds.mT, q), product(p.mT, do)


def packed_in_two_passes(qkv, do, heads, order, turn):
    """(o, dqkv)"""
    n, t, c = do.shape
    do = do.view(n, t, heads, -1).transpose(1, 2)
    o, *grads = in_two_passes(*heads_of(qkv, heads, order), do, turn)
    axes = (1, 3, 0, 2, 4) if order == "qkv_heads" else (1, 3, 2, 0, 4)
    dqkv = torch.stack(grads).permute(axes).reshape(qkv.shape)
    return o.transpose(1, 2).reshape(n, t, c), dqkv


def expected_and_budgets(qkv, do, heads, *, order="qkv_heads", allow_tf32=False):
    """(o, dqkv) in float64, and for each the errors that are allowed: twice those of PyTorch in the
    precision under test. Products of TF32 are imitated, since not every one of PyTorch's own
    attentions and shapes uses them. In float32 errors are of the order of summation alone, in which
    PyTorch and the interpreter differ from CPU to CPU: twice the worst of `ORDERS`."""
    exact = run(reference.attention, qkv.double(), do.double(), heads, order=order)
    independent = tf32_attention if allow_tf32 else reference.attention
    low = [run(independent, qkv, do, heads, order=order)]
    if qkv.dtype == torch.float32 and not allow_tf32:
        low += [packed_in_two_passes(qkv, do, heads, order, turn) for turn in range(ORDERS)]
    budgets = []
    for expected, *found in zip(exact, *low, strict=True):
        each = zip(*(errors(x, expected) for x in found), strict=True)
        budgets.append(tuple(max(2 * max(e), FLOOR) for e in each))
    return exact, budgets


def assert_close(name, actual, expected, budget):
    found = errors(actual, expected)
    assert all(e <= b for e, b in zip(found, budget, strict=True)), (
        f"{name}: relative errors {found} (norm, worst element), allowed {budget}"
    )


def check(qkv, do, heads, **options):
    exact, budgets = expected_and_budgets(qkv, do, heads, **options)
    for _ in range(RUNS_ON_GPU if qkv.is_cuda else 1):
        actual = run(attention, qkv, do, heads, **options)
        for name, *case in zip(("o", "dqkv"), actual, exact, budgets, strict=True):
            assert_close(name, *case)
    return actual


def exact_lse(qkv, heads, order):
    """float64 [N, heads, T], in base 2."""
    q, k, _ = heads_of(qkv.double(), heads, order)
    return (q @ k.mT).div(math.sqrt(q.shape[3])).logsumexp(-1) / math.log(2)


def check_output(config, qkv, do, heads, order="qkv_heads", rest=1e-4):
    """Output and logarithms of a configuration, several times on a GPU; all of them."""
    (exact, _), (budget, _) = expected_and_budgets(qkv, do, heads, order=order)
    expected = exact_lse(qkv, heads, order)
    runs = range(RUNS_ON_GPU if qkv.is_cuda else 1)
    made = [attention_fwd(qkv, heads, order, False, config) for _ in runs]
    for o, lse in made:
        assert_close("o", o, exact, budget)
        torch.testing.assert_close(lse.double(), expected, rtol=0, atol=rest)
    return made


def check_gradient(config, qkv, do, heads, order="qkv_heads", forward=None):
    """The gradient of a configuration, several times on a GPU, and rows that add up to it;
    `forward` is the configuration that makes what it reads."""
    (_, exact), (_, budget) = expected_and_budgets(qkv, do, heads, order=order)
    arguments = heads, order, False
    made = attention_fwd(qkv, *arguments, forward)
    for _ in range(RUNS_ON_GPU if qkv.is_cuda else 1):
        assert_close("dqkv", attention_bwd(do, qkv, *made, *arguments, config), exact, budget)
    check_rows(do, qkv, arguments, config)


class _Unwritten(RowSums):
    def rows(self, count, columns):
        return self.grad.new_full((count, columns), torch.nan)


def check_rows(do, qkv, arguments, config):
    """The rows are sums of what was written, before it was rounded."""
    heads, order, allow_tf32 = arguments
    rest = {"allow_tf32": allow_tf32, "config": config}
    o_lse = attention_fwd(qkv, *arguments)
    unwritten = _Unwritten(torch.empty(0, device=qkv.device))
    dqkv, rows = attention_backward(do, qkv, *o_lse, heads, order, unwritten, **rest)
    assert torch.equal(dqkv, attention_bwd(do, qkv, *o_lse, *arguments, config))
    written = dqkv.double()
    error = (rows.double().sum(0) - written.sum((0, 1))).abs()
    # half a unit in the last place each, and subnormals of 16 bits
    info = torch.finfo(dqkv.dtype)
    bound = info.eps * written.abs().sum((0, 1)) + dqkv.shape[0] * dqkv.shape[1] * info.tiny
    assert (error <= bound).all()
