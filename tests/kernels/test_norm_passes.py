"""norm_passes and norm_tables against float64 compositions: statistics from tiles, the apply pass,
and the way back through autograd."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.activations import ACTIVATIONS
from triton_kernels.noise.dropout import Mask
from triton_kernels.norm import (
    pass_grid,
    passes as norm_passes,
    sums as norm_sums,
    tables as norm_tables,
)
from triton_kernels.reductions import row_sums
from triton_kernels.runtime.dependent_launch import dependent_launches
from triton_kernels.runtime.device import Device

from .masks import stored
from .norm_cases import (
    CASES,
    EPS,
    MODEL_CASES,
    assert_near,
    make_case,
    make_halves,
    partials_of,
    randn,
    reference_forward,
    second_half,
)
from .norm_pass_checks import (
    by_kernels,
    check_backward,
    check_dx_times_a_number,
    check_dx_without_sums,
    check_upsampled,
    table_of,
)

# exp of the interpreter's NumPy warns where infinity is the right value
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")


@pytest.mark.parametrize(("shape", "channels", "ks", "groups"), CASES)
def test_forward(shape, channels, ks, groups, device):
    halves, weight, bias = make_halves(shape, channels, device=device)
    table = table_of(halves, ks, groups, weight, bias)
    a = norm_passes.apply(halves[0], second_half(halves), table, "silu")
    low, exact = (
        reference_forward(halves, groups, weight, bias, "silu", dtype)
        for dtype in (None, torch.float64)
    )
    assert a.shape == exact.shape and a.dtype == halves[0].dtype
    assert_near("a", a, exact, low)


@pytest.mark.parametrize("channels", [(20,), (40, 24)], ids=["one", "two-halves"])
def test_tensors_of_other_types(channels, device):
    """A pass computes in float32: it rounds what it writes, and nothing that it reads."""
    shape, c = (3, 5, 7), sum(channels)
    halves, weight, bias = make_halves(shape, channels, device=device)
    table = table_of(halves, (1,) * len(halves), 4, weight, bias)
    x1, x2, low = halves[0], second_half(halves), torch.float16
    a = norm_passes.apply(x1, x2, table, "silu", dtype=low)
    assert torch.equal(a, norm_passes.apply(x1, x2, table, "silu").to(low))
    dz, add1, again = (randn(*shape, n, dtype=low, device=device) for n in (c, *channels[:1] * 2))
    add2 = None if x2 is None else randn(*shape, channels[1], dtype=low, device=device)
    coeff, out = randn(3, 3, c, device=device), torch.empty_like(x1, dtype=low)
    mixed = norm_passes.norm_dx(dz, x1, x2, coeff, add1, add2, again, out=out)
    wide = (None if x is None else x.float() for x in (add1, add2, again))
    exact = norm_passes.norm_dx(dz.float(), x1, x2, coeff, *wide)
    assert mixed[0] is out and torch.equal(out, exact[0].to(low))
    assert x2 is None or torch.equal(mixed[1], exact[1])


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((3, 5, 7), (20,)), ((2, 3, 5), (40, 24)), ((1, 30, 8), (136,)), ((2, 33, 32), (64,))],
    ids=["one", "two-halves", "blocks", "chunks"],
)
def test_apply_drops_what_dropout_drops(shape, channels, device):
    halves, weight, bias = make_halves(shape, channels, device=device)
    table = table_of(halves, (1,) * len(halves), 4, weight, bias)
    rng = torch.tensor([0x1234_5678_9ABC, 7], device=device)
    a = norm_passes.apply(halves[0], second_half(halves), table, "silu")
    got = norm_passes.apply(
        halves[0], second_half(halves), table, "silu", mask=Mask(0.3, rng, layer=9, first=5)
    )
    torch.testing.assert_close(got, reference.dropout(a, 0.3, rng, layer=9, first=5))
    assert torch.equal(got == 0, reference.dropout(a, 0.3, rng, layer=9, first=5) == 0)


@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        *(((3, 5, 7), (64,)), ((2, 3, 5), (40, 24)), ((1, 30, 8), (192,)), ((2, 33, 32), (64, 64))),
        *(((3, 5, 7), (8,)), ((2, 3, 5), (72,)), ((2, 3, 5), (40, 16))),
    ],
    ids=["one", "two-halves", "blocks", "chunks", "part-of-a-word", "words-and-part", "ragged"],
)
def test_apply_writes_what_it_keeps(shape, channels, device):
    """A bit for each channel, and a is the same."""
    halves, weight, bias = make_halves(shape, channels, device=device)
    table = table_of(halves, (1,) * len(halves), 4, weight, bias)
    mask = Mask(0.3, torch.tensor([0x1234_5678_9ABC, 7], device=device), layer=9, first=5)
    words = torch.full((*shape, -(-sum(channels) // 64)), -1, device=device)
    given = halves[0], second_half(halves), table, "silu"
    a = norm_passes.apply(*given, mask=mask._replace(words=words))
    assert torch.equal(a, norm_passes.apply(*given, mask=mask))
    there, kept = (stored(mask._replace(p=p), (*shape, sum(channels))).words for p in (0.0, mask.p))
    assert torch.equal(words & there, kept)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act, device):
    halves, weight, bias = make_halves((1, 3, 3), (12,), device=device)
    a = norm_passes.apply(halves[0], None, table_of(halves, (1,), 4, weight, bias), act)
    low, exact = (
        reference_forward(halves, 4, weight, bias, act, dtype) for dtype in (None, torch.float64)
    )
    assert_near("a", a, exact, low)


@pytest.mark.parametrize(
    ("shape", "pixels_of_a_tile"),
    [
        pytest.param((2, 4, 4, 8), 16, id="one-tile"),
        pytest.param((1, 24, 32, 5), 256, id="three-tiles"),
        pytest.param((1, 11, 53, 3), 583, id="tiles-divide-the-image"),
        pytest.param((2, 1, 1, 7), 1, id="one-pixel"),
        pytest.param((1, 3, 3, 136), 9, id="masked-second-block"),
        pytest.param((0, 4, 4, 8), 16, id="empty-batch"),
    ],
)
def test_tensor_partials(shape, pixels_of_a_tile, device):
    x = randn(*shape, device=device, offset=3)
    got = norm_sums.tensor_partials(x)
    k = shape[1] * shape[2] // pixels_of_a_tile
    assert got.shape == (shape[0], k, 2, shape[3])
    assert_near("partials", got, partials_of(x, k))


@pytest.mark.parametrize(
    ("pixels", "wanted", "chunks"),
    [(4096, 16, 16), (1600, 7, 5), (127 * 127, 64, 127), (1009, 16, 1), (4096, 5000, 4096)],
)
def test_chunks_are_of_one_size(pixels, wanted, chunks):
    """Also of images whose pixels few numbers divide."""
    assert pass_grid.divisor_near(pixels, wanted) == chunks


@pytest.mark.parametrize(("h", "w"), [(3, 5), (1, 1), (4, 8)])
def test_upsampled_half(h, w, device):
    check_upsampled(2, h, w, 12, 8, torch.float32, device)


@pytest.mark.parametrize(("shape", "channels", "ks", "groups"), CASES)
def test_backward(shape, channels, ks, groups, device):
    check_backward(make_case(shape, channels, groups, device=device), ks)


def test_backward_with_scale_and_shift(device):
    check_backward(make_case((3, 4, 3), (12,), 3, film=True, device=device), (4,))


def test_fp16(device):
    """Parameters and statistics stay float32."""
    case = make_case((2, 5, 6), (28, 20), 4, dtype=torch.float16, device=device)
    check_backward(case, (3, 2))
    halves, _, weight, bias, *_ = case
    a = norm_passes.apply(*halves, table_of(halves, (3, 2), 4, weight, bias), "silu")
    low, exact = (
        reference_forward(halves, 4, weight, bias, "silu", dtype) for dtype in (None, torch.float64)
    )
    assert a.dtype == torch.float16
    assert_near("a", a, exact, low)


@pytest.mark.parametrize("channels", [(12,), (12, 6)], ids=["one", "two-halves"])
def test_large_mean(channels, device):
    """Mean 1e3, deviation 1: float32 holds the mean to 3e-5 of a deviation; no more is lost."""
    case = make_case((2, 20, 19), channels, 3, device=device, offset=1e3)
    ks = (19, 5)[: len(channels)]
    halves, _, weight, bias, *_ = case
    a = norm_passes.apply(
        halves[0], second_half(halves), table_of(halves, ks, 3, weight, bias), "silu"
    )
    assert_near(
        "a", a, reference_forward(halves, 3, weight, bias, "silu", torch.float64), floor=1e-4
    )
    check_backward(case, ks, floor=1e-4)


def test_gradients_accumulate(device):
    case = make_case((3, 4, 3), (12,), 3, device=device)
    first, second = (by_kernels(*case, (4,), accumulate=again) for again in (False, True))
    for name in ("weight", "bias", "conv_bias", "sums"):
        assert torch.equal(second[name], first[name] + 1), name


_SUMMED = ("weight", "bias", "conv_bias", "sums")


def test_all_gradients_by_one_launch(device):
    """The first pass learns what is wanted, the others are one launch with the same bits; a smaller
    batch between is another thing to learn."""
    cases = [make_case((n, 4, 3), (20,), 2, device=device) for n in (3, 2)]
    sums = row_sums.RowSums(torch.ones(80, device=device))
    bits = {}
    for i in (0, 0, 1, 0, 1):
        want = by_kernels(*cases[i], (4,), accumulate=True)
        learnt = len(sums.tables)
        sums.grad.fill_(1)
        got = by_kernels(*cases[i], (4,), accumulate=True, sums=sums)
        assert torch.equal(sums.grad, torch.ones_like(sums.grad))  # not yet
        sums.flush()
        for name in _SUMMED:
            assert_near(name, got[name], want[name])
        assert torch.equal(sums.grad, bits.setdefault(i, sums.grad.clone()))
        assert len(sums.tables) == max(learnt, i + 1)


def test_one_launch_over_many_rows(device):
    """More rows than a round has, columns that are no multiple of a block, rows within rows."""
    sums = row_sums.RowSums(torch.zeros(100, device=device))
    for _ in range(2):
        sums.grad.zero_()
        many, few, none = sums.rows(1100, 21), sums.rows(1, 64), sums.rows(0, 8)
        many.copy_(randn(1100, 21, device=device))
        few.copy_(randn(1, 64, device=device))
        sums.add(many, 2, sums.grad[5:24])
        sums.add(few, 0, sums.grad[30:94])
        sums.add(none, 0, sums.grad[94:])
        want = torch.zeros(100, device=device, dtype=torch.float64)
        want[5:24], want[30:94] = many.double().sum(0)[2:], few[0]
        sums.flush()
        assert_near("sums", sums.grad, want)
    assert sums.rows(4, 4).data_ptr() == sums.workspaces[-1].data_ptr()
    with pytest.raises(AssertionError, match="two sums for one gradient"):
        for _ in range(2):
            sums.add(many, 0, sums.grad[:21])


def test_passes_that_share_what_they_have_learnt(device):
    """A table stays where it is, as a graph may read it; rows are each pass's own."""
    tables, learnt = {}, []
    before = [row_sums.RowSums(torch.zeros(4, device=device), tables) for _ in range(2)]
    for k in range(3):
        sums = before[k] if k < 2 else row_sums.RowSums(torch.zeros(4, device=device), tables)
        rows = sums.rows(3, 4)
        rows.fill_(k)
        sums.add(rows, 0, sums.grad)
        assert sums.scattered == (k < 2)
        sums.flush()
        assert sums.grad.tolist() == [3 * k] * 4
        learnt += [table.data_ptr() for table, _ in tables.values()]
    assert learnt == learnt[:1] * 3


@pytest.mark.parametrize("captured", [False, True])
def test_rows_that_no_graph_knows_are_not_kept(captured, device, monkeypatch):
    """Of a pass that adds in two turns the first turn's are let go of, unless it was captured."""
    sums, row = row_sums.RowSums(torch.zeros(8, device=device)), torch.arange(8.0, device=device)

    def turn(first, last):
        rows = sums.rows(16, 4)
        rows[:] = row[first : first + 4]
        sums.add(rows, 0, sums.grad[first : first + 4])
        sums.flush(last)

    for want in range(2):
        turn(0, False)
        sums.captured |= captured and want == 0
        turn(4, True)
        assert torch.equal(sums.grad, 16 * (want + 1) * row)
        assert [w.numel() for w in sums.workspaces] == ([64, 128] if captured else [128])


@pytest.mark.parametrize("count", [0, 1, 256, 320, 1025])
def test_bias_grad(count, device):
    rows, out = randn(count, 40, device=device), torch.ones(40, device=device)
    row_sums.bias_grad(rows, out, accumulate=True)
    assert_near("accumulated", out, 1 + rows.double().sum(0))
    row_sums.bias_grad(rows, out)
    assert_near("overwritten", out, rows.double().sum(0))


@pytest.mark.parametrize("channels", [(12,), (28, 20)], ids=["one", "two-halves"])
def test_dx_alone(channels, device):
    check_dx_without_sums(make_case((2, 5, 3), channels, 2, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("upsample1", [False, True])
@pytest.mark.parametrize("channels", [(12,), (28, 20)], ids=["one", "two-halves"])
def test_dx_times_a_number(channels, upsample1, dtype, device):
    check_dx_times_a_number(2, 6, 10, channels, upsample1, dtype, device)


def test_dx_in_place_of_dz(device):
    dz, x, coeff = (randn(*s, device=device) for s in ((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 8)))
    want, _, rows = norm_passes.norm_dx(dz, x, None, coeff)
    assert rows is None
    got, _, _ = norm_passes.norm_dx(dz, x, None, coeff, out=dz)
    assert got is dz and torch.equal(got, want)


def test_only_the_gradients_that_are_wanted(device):
    case = make_case((2, 4, 3), (12,), 3, device=device)
    halves, groups, weight, bias, dz, *_ = case
    table = table_of(halves, (4,), groups, weight, bias)
    of_dz = partials_of(dz, 2, dz), table, 12, groups
    sums = row_sums.RowSums(torch.zeros(24, device=device))
    d_bias, conv_bias = sums.grad.split(12)
    coeff = norm_tables.norm_grad_table(*of_dz, norm_tables.NormGrads(bias=d_bias), sums=sums)
    sums.flush()
    assert_near("d_bias", d_bias, dz.double().sum((0, 1, 2)))
    into, of_x = norm_tables.NormGrads(input_bias=conv_bias), partials_of(halves[0], 3)
    again = norm_tables.norm_grad_table(*of_dz, into, sums=sums, input_partials=of_x)
    sums.flush()
    assert_near("coeff", again, coeff, floor=1e-6)
    dx, _, _ = norm_passes.norm_dx(dz, halves[0], None, coeff)
    assert_near("conv_bias", conv_bias, dx.double().sum((0, 1, 2)), floor=2e-5)


def test_same_bits_again(device):
    case = make_case((2, 6, 4), (28, 20), 4, device=device)
    first, second = (by_kernels(*case, (3, 2)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_channel_border_may_not_matter(device):
    """Two halves give what their concatenation gives."""
    (x1, x2), weight, bias = make_halves((2, 4, 4), (32, 32), device=device)
    tables = [
        table_of(h, (4,) * len(h), 4, weight, bias) for h in ((x1, x2), (torch.cat((x1, x2), 3),))
    ]
    assert_near("table", *tables, floor=1e-6)
    whole = norm_passes.apply(torch.cat((x1, x2), 3), None, tables[0], "silu")
    assert_near("a", norm_passes.apply(x1, x2, tables[0], "silu"), whole, floor=1e-6)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"activation": "swish"}, "'swish'; expected one of", id="activation"),
        pytest.param({"x2": torch.ones(2, 4, 3, 8)}, r"x2 has shape \(2, 4, 3, 8\)", id="x2"),
        pytest.param({"x1": torch.ones(2, 8, 4, 4).permute(0, 2, 3, 1)}, "NHWC", id="layout"),
        pytest.param({"table": torch.ones(2, 4, 8)}, r"expected \(2, 4, 16\)", id="table"),
    ],
)
def test_errors(change, message):
    x = torch.ones(2, 4, 4, 8)
    arguments = {"x1": x, "x2": x, "table": torch.ones(2, 4, 16), "activation": "silu"} | change
    with pytest.raises(ValueError, match=message):
        norm_passes.apply(**arguments)


# --- on the GPU: bf16, the model's shapes, every entry of the config lists -----------------------


def _tables_and_passes(case, ks, bits=3):
    """Forward and backward within budget, and the same bits every time."""
    halves, groups, weight, bias, *_ = case
    a = [
        norm_passes.apply(
            halves[0], second_half(halves), table_of(halves, ks, groups, weight, bias), "silu"
        )
        for _ in range(bits)
    ]
    low, exact = (
        reference_forward(halves, groups, weight, bias, "silu", dtype)
        for dtype in (None, torch.float64)
    )
    assert_near("a", a[0], exact, low)
    check_backward(case, ks)
    grads = [by_kernels(*case, ks) for _ in range(bits)]
    for again in range(1, bits):
        assert torch.equal(a[0], a[again])
        assert all(torch.equal(grads[0][name], grads[again][name]) for name in grads[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "channels", "ks"), MODEL_CASES, ids=str)
def test_model_shapes(shape, channels, ks, dtype, device):
    case = make_case(shape, channels, 32, dtype=dtype, device=device)
    _tables_and_passes(case, ks)
    x = case[0][0]
    partials = norm_sums.tensor_partials(x)
    assert_near("partials", partials, partials_of(x, partials.shape[1]), floor=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "channels", "ks"), [MODEL_CASES[1], ((3, 33, 31), (40, 24), (1, 3))]
)
def test_large_tiles(shape, channels, ks, device, monkeypatch):
    monkeypatch.setattr(Device, "busy", 1)
    case = make_case(shape, channels, 32, dtype=torch.bfloat16, device=device)
    _tables_and_passes(case, ks)
    check_dx_without_sums(case)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 32, 32, 192, 128), (3, 7, 5, 40, 20)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_upsampled_half_on_the_gpu(shape, dtype, device):
    check_upsampled(*shape, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("upsample1", [False, True])
@pytest.mark.parametrize("shape", [(16, 32, 32, (256,)), (5, 14, 10, (40, 20))], ids=str)
def test_dx_times_a_number_on_the_gpu(shape, upsample1, device):
    check_dx_times_a_number(*shape, upsample1, torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 64, 64, 64, 128), (3, 14, 10, 40, 20)], ids=str)
def test_pixels_read_before_the_table(shape, device):
    """The launch in front makes the table, and the one before it the pixels."""
    n, h, w, c1, c2 = shape
    small = randn(n, h // 2, w // 2, c1, dtype=torch.bfloat16, device=device)
    x1, x2 = (randn(n, h, w, c, dtype=torch.bfloat16, device=device) for c in (c1, c2))
    weight, bias = torch.randn(2, c1 + c2, device=device)

    def run(early, x, apply):
        x, y = x + 1, x2 + 1  # newest
        partials = (partials_of(x, 1), partials_of(y, 1))
        pixels = (x.shape[1] * x.shape[2], h * w)
        table = norm_tables.norm_table(partials, pixels, 4, weight, bias, EPS)
        return apply(x, y, table, "silu", early=early)

    for given in ((x1, norm_passes.apply), (small, norm_passes.apply_upsampled)):
        want = run(False, *given)
        with dependent_launches():
            got = run(True, *given)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.gpu
def test_one_launch_in_a_graph(device):
    """Captured after the first pass, as a training step is."""
    case = make_case((4, 16, 16), (64,), 8, dtype=torch.bfloat16, device=device)
    sums = row_sums.RowSums(torch.ones(256, device=device))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        by_kernels(*case, (4,), accumulate=True, sums=sums)
        sums.flush()
    torch.cuda.current_stream().wait_stream(stream)
    want = sums.grad.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        by_kernels(*case, (4,), accumulate=True, sums=sums)
        sums.flush()
    for _ in range(3):
        sums.grad.fill_(1)
        graph.replay()
        torch.testing.assert_close(sums.grad, want, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
def test_captured_in_a_graph(device):
    case = make_case((4, 16, 16), (40, 24), 8, dtype=torch.bfloat16, device=device)
    want = by_kernels(*case, (4, 2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        by_kernels(*case, (4, 2))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = by_kernels(*case, (4, 2))
    graph.replay()
    assert all(torch.equal(got[name], want[name]) for name in want)
