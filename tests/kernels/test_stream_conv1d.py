"""The stages of a 1-D UNet at batch 1, against their twins in plain PyTorch."""

import pytest
import torch

from triton_kernels.stream import conv1d as stream_conv1d
from triton_kernels.stream import reference as stream_reference
from triton_kernels.stream.conv1d import Activation, Film, Norm, Stem, Sums, pack_conv


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel does not write is NaN; and the reference on a GPU is float32 throughout."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(
        stream_conv1d,
        "_empty",
        lambda *args, **kwargs: torch.empty(*args, **kwargs).fill_(torch.nan),
    )


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def make(
    device,
    n,
    t,
    c,
    *,
    norm=None,
    film=None,
    residual=None,
    stem=False,
    splits=3,
    row=True,
    cond=True,
) -> Activation:
    """An activation of random parts."""

    def randn(*shape):
        return torch.randn(shape, device=device)

    x = randn(n, t, 3)
    source = Stem(x, randn(3, 5, c), randn(c)) if stem else Sums(randn(splits, n, c, t), randn(c))
    residuals = {
        "tensor": lambda: randn(n, c, t),
        "sums": lambda: Sums(randn(2, n, c, t), randn(c)),
        "stem": lambda: Stem(x, randn(3, 1, c), randn(c)),
        None: lambda: None,
    }
    columns = 16 + 2 * c  # this block's are not the first
    return Activation(
        source,
        None if norm is None else Norm(norm, randn(c), randn(c), 1e-5),
        None
        if film is None
        else Film(
            randn(4 if row else n, columns),
            randn(n, columns) if cond else None,
            16,
            film == "scale",
            torch.tensor([2], device=device) if row else None,
        ),
        residuals[residual](),
    )


INPUTS = {
    "plain": {},
    "norm": {"norm": 4},
    "norm of a group a slice": {"norm": 2, "splits": 1},
    "scale and shift of a row": {"norm": 4, "film": "scale"},
    "scale and shift by sample": {"norm": 4, "film": "scale", "row": False},
    "shift, unconditional": {"norm": 4, "film": "shift", "cond": False},
    "stem": {"stem": True, "norm": 4, "film": "scale"},
    "residual": {"norm": 4, "residual": "tensor"},
    "residual of sums": {"norm": 4, "residual": "sums"},
    "residual of a stem": {"norm": 4, "residual": "stem"},
}


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize("options", INPUTS.values(), ids=INPUTS.keys())
def test_inputs(device, options, batched):
    """The activation that a stage makes, and the convolution of it: an odd length, two samples."""
    torch.manual_seed(0)
    n, t, c, co = 2, 7, 32, 16
    activation = make(device, n, t, c, **options)
    weight, side = torch.randn(co, c, 3, device=device), torch.randn(co, c, 1, device=device)
    conv = pack_conv(weight, side, torch.float32, slice_channels=16, block=16)
    expected = stream_reference.conv_stage(activation, conv, keep=True)
    ours = stream_conv1d.conv_stage(activation, conv, keep=True, batched=batched)
    assert relative(ours.kept, expected.kept) < 1e-5
    assert relative(ours.partial.sum(0), expected.partial.sum(0)) < 1e-5
    assert relative(ours.side.sum(0), expected.side.sum(0)) < 1e-5


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize("t", [1, 2, 3, 4, 8, 16])
def test_several_groups_in_a_slice(device, t, batched):
    """Whatever the length, and so the lanes that a group's numbers are in."""
    torch.manual_seed(0)
    activation = make(device, 2, t, 64, norm=8)
    weight = torch.randn(16, 64, 3, device=device)
    conv = pack_conv(weight, None, torch.float32, slice_channels=32, block=16)
    expected = stream_reference.conv_stage(activation, conv, keep=True)
    ours = stream_conv1d.conv_stage(activation, conv, keep=True, batched=batched)
    assert relative(ours.kept, expected.kept) < 1e-5


CONVS = {
    "1 tap": {"taps": 1},
    "5 taps, wider than the input": {"taps": 5, "t": 2},
    "7 taps, one a tile": {"taps": 7, "widest": 1},
    "9 taps": {"taps": 9},
    "stride 2": {"stride": 2},
    "stride 2, odd length": {"stride": 2, "t": 5},
    "transposed": {"transposed": True, "taps": 4, "co": 32},
    "skip connection": {"skip": True},
    "one position": {"t": 1},
}


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize("options", CONVS.values(), ids=CONVS.keys())
def test_convolutions(device, options, batched):
    torch.manual_seed(0)
    given = {
        "taps": 3,
        "stride": 1,
        "transposed": False,
        "t": 4,
        "co": 48,
        "skip": False,
        "widest": 4,
    }
    given |= options
    n, c, t, co, taps = 3, 32, given["t"], given["co"], given["taps"]
    activation = make(device, n, t, c)
    skip = torch.randn(n, 16, t, device=device) if given["skip"] else None
    ci = c if skip is None else c + 16
    shape = (ci, co, taps) if given["transposed"] else (co, ci, taps)
    conv = pack_conv(
        torch.randn(shape, device=device), None, torch.float32, slice_channels=16, block=16,
        stride=given["stride"], transposed=given["transposed"], widest=given["widest"],
    )  # fmt: skip
    expected = stream_reference.conv_stage(activation, conv, skip=skip)
    ours = stream_conv1d.conv_stage(activation, conv, skip=skip, batched=batched)
    assert ours.kept is None and ours.side is None
    assert ours.partial.shape[1:] == expected.partial.shape[1:]
    assert relative(ours.partial.sum(0), expected.partial.sum(0)) < 1e-5


def test_the_twin_against_pytorch():
    """Of which the kernels' order of weights is inverted."""
    torch.manual_seed(0)
    x = torch.randn(2, 32, 6, dtype=torch.float64)
    activation = Activation(Sums(x[None], torch.zeros(32, dtype=torch.float64)))
    for transposed, shape in ((False, (16, 32, 5)), (True, (32, 32, 4))):
        weight = torch.randn(shape, dtype=torch.float64)
        conv = pack_conv(
            weight, None, torch.float64, slice_channels=16, block=16, transposed=transposed
        )
        function = torch.nn.functional.conv_transpose1d if transposed else torch.conv1d
        options = {"stride": 2, "padding": 1} if transposed else {"padding": 2}
        y = stream_reference.conv_stage(activation, conv).partial[0]
        torch.testing.assert_close(y, function(x, weight, **options))


@pytest.mark.parametrize("n", [1, 3])
def test_head(device, n):
    torch.manual_seed(0)
    activation = make(device, n, 5, 32, norm=8)
    weight, bias = torch.randn(3, 32, device=device), torch.randn(3, device=device)
    expected = stream_reference.head(activation, weight, bias)
    assert relative(stream_conv1d.head(activation, weight, bias), expected) < 1e-5


@pytest.mark.parametrize(("r", "e", "f", "bias"), [(1, 5, 70, True), (17, 100, 64, False)])
def test_project(device, r, e, f, bias):
    torch.manual_seed(0)
    z = torch.randn(r, e, device=device)
    weight = torch.randn(f, -(-e // 64) * 64, device=device)
    weight[:, e:] = 0
    b = torch.randn(f, device=device) if bias else None
    expected = stream_reference.project(z, weight, b)
    assert relative(stream_conv1d.project(z, weight, b), expected) < 1e-5


def test_float16(device):
    """Rounded where it is multiplied, and nowhere else: as far from exact as the twin."""
    torch.manual_seed(0)
    activation = make(device, 1, 8, 32, norm=4, film="scale")
    weight = torch.randn(16, 32, 3, device=device)
    options = {"slice_channels": 16, "block": 16}
    exact = stream_reference.conv_stage(
        activation, pack_conv(weight, None, torch.float32, **options)
    ).partial.sum(0)
    conv = pack_conv(weight, None, torch.float16, **options)
    theirs = relative(stream_reference.conv_stage(activation, conv).partial.sum(0), exact)
    assert relative(stream_conv1d.conv_stage(activation, conv).partial.sum(0), exact) < 2 * theirs


def test_rounding_to_tf32():
    ulp = 2.0**-10  # of TF32 at 1
    x = torch.tensor([1.0, 1 + 0.49 * ulp, 1 + ulp / 2, -1 - ulp / 2, 0.0, torch.inf])
    expected = torch.tensor([1.0, 1.0, 1 + ulp, -1 - ulp, 0.0, torch.inf])
    assert torch.equal(stream_conv1d.round_to_tf32(x), expected)
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert stream_conv1d.round_to_tf32(nan).isnan().all()
    x = torch.randn(1000)
    error = (stream_conv1d.round_to_tf32(x) - x) / x
    assert error.abs().max() <= ulp / 2 and abs(error.mean()) < ulp / 20


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
def test_tf32_multiplies_rounded_operands(device, batched):
    """So that products of the tensor cores, which cut operands off, are exact."""
    torch.manual_seed(0)
    rounded = stream_conv1d.round_to_tf32
    activation = make(device, 2, 7, 32, norm=4, film="scale")
    weight = rounded(torch.randn(16, 32, 3, device=device))
    conv = pack_conv(weight, None, torch.float32, slice_channels=16, block=16)
    a = rounded(stream_reference.make(activation))
    expected = stream_reference.conv_stage(Activation(Sums(a[None], a.new_zeros(32))), conv)
    ours = stream_conv1d.conv_stage(activation, conv, batched=batched, allow_tf32=True)
    # activations are off by 1e-6, which makes the other of two neighbours nearer in one of the 448,
    # and each such moves the whole by 2^-10 / sqrt(448) = 5e-5
    assert relative(ours.partial.sum(0), expected.partial.sum(0)) < 1e-4
    exact = stream_reference.conv_stage(activation, conv)
    assert relative(ours.partial.sum(0), exact.partial.sum(0)) > 1e-4


def test_tf32_projects_rounded_operands(device):
    torch.manual_seed(0)
    rounded = stream_conv1d.round_to_tf32
    z, weight = torch.randn(3, 64, device=device), rounded(torch.randn(70, 64, device=device))
    expected = rounded(torch.nn.functional.mish(z)).double() @ weight.double().T
    assert relative(stream_conv1d.project(z, weight, allow_tf32=True), expected) < 1e-4


def test_a_skip_of_another_length():
    weight, side = torch.randn(16, 32, 3), torch.randn(16, 32, 1)
    with pytest.raises(ValueError, match="keeps the length"):
        pack_conv(weight, side, torch.float32, slice_channels=16, block=16, stride=2)


def test_weights_that_do_not_divide():
    with pytest.raises(ValueError, match="24 x 32 channels"):
        pack_conv(torch.randn(24, 32, 3), None, torch.float32, slice_channels=16, block=16)
