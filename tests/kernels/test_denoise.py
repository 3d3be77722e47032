"""triton_kernels.denoise against the reference, and what must hold whatever the reference says.

Tolerances. The float32 arithmetic is a handful of operations on numbers of order one, on normals
that agree to 4e-6 (test_philox), hence 1e-5. A result in 16 bits may be off by its own rounding on
top.
"""

import math

import pytest
import torch
import triton

import triton_kernels as ops
from triton_kernels import reference
from triton_kernels.denoise import loss as loss_module
from triton_kernels.noise.philox import REVERSE

from .distinct import distinct
from .taken import take

SHAPES = {
    "odd": (5, 7, 3),
    "1-D": (1, 17, 2),
    "several programs": (40, 37, 3),  # a partial third chunk, and a second one of the loss
    "one element": (1, 1, 1),
}
M, N, STEPS = 6, 3, 10
DTYPES = [torch.float32, torch.float16]
GPU_DTYPES = [pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


class Batch:
    """Images, timesteps and so on, the same for every test that asks for the same."""

    def __init__(self, shape, device, *, uint8=True, index=True, flip=True, n=N, m=M):
        generator = torch.Generator().manual_seed(0)
        if uint8:
            images = torch.randint(0, 256, (m, *shape), dtype=torch.uint8, generator=generator)
        else:
            images = torch.randn((m, *shape), generator=generator)
        n = n if index else m
        self.images = images.to(device)
        self.index = torch.randint(0, m, (n,), generator=generator).to(device) if index else None
        self.flip = (torch.arange(n) % 2 == 0).to(device) if flip else None
        self.t = torch.randint(0, STEPS, (n,), generator=generator).to(device)
        angle = torch.linspace(0.1, 1.5, STEPS)
        self.table = torch.stack((torch.cos(angle), torch.sin(angle)), dim=1).to(device)
        self.rng = torch.tensor([2**40 + 5, 11], device=device)
        self.shape, self.n, self.generator = shape, n, generator

    def q_sample(self, ops, **options):
        batch = (self.images, self.t, self.table, self.rng)
        return ops.q_sample(*batch, first=9, index=self.index, flip=self.flip, **options)

    def loss(self, ops, output, **options):
        batch = (self.images, self.t, self.table, self.rng)
        return ops.denoise_loss(
            output, *batch, first=9, index=self.index, flip=self.flip, **options
        )

    def randn(self, channels, dtype=torch.float32):
        x = torch.randn((self.n, *self.shape[:2], channels), generator=self.generator)
        return x.to(self.images.device, dtype)


def reverse_table(device):
    """Steps of plausible size: a, b, c, d, e, sigma, log_min, log_max."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(STEPS, 8, generator=generator)
    table[:, 5] = table[:, 5].abs()
    table[:, 6], table[:, 7] = -4.0, -0.5
    return table.to(device)


def assert_rounded(result, exact, dtype, scale=1.0):
    """`result` is `exact` up to 1e-5 `scale` and one rounding to dtype."""
    assert result.dtype == dtype
    error = (result.float() - exact).abs()
    ulp = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    floor = 0.0 if dtype == torch.float32 else torch.finfo(dtype).smallest_normal * ulp
    assert (error <= 1e-5 * scale + (1e-5 + ulp / 2) * exact.abs() + floor).all(), error.max()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("uint8", "index", "flip"),
    # every pair of two options
    [(True, True, True), (True, False, False), (False, True, False), (False, False, True)],
    ids=["uint8, index, flip", "uint8", "float32, index", "float32, flip"],
)
def test_gather_and_q_sample(shape, uint8, index, flip, device):
    batch = Batch(shape, device, uint8=uint8, index=index, flip=flip)
    x0 = ops.gather_images(batch.images, batch.index, batch.flip)
    expected = reference.gather_images(batch.images, batch.index, batch.flip)
    torch.testing.assert_close(x0, expected, rtol=0, atol=2e-7)
    assert_rounded(batch.q_sample(ops), batch.q_sample(reference), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[1:] + GPU_DTYPES, ids=str)
def test_q_sample_in_16_bits(dtype, device):
    batch = Batch(SHAPES["odd"], device)
    assert_rounded(batch.q_sample(ops, dtype=dtype), batch.q_sample(reference), dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("learned", [False, True], ids=["C", "2C"])
@pytest.mark.parametrize("prediction", loss_module.PREDICTIONS)
def test_loss_and_gradient(shape, learned, prediction, device):
    check_loss(Batch(shape, device), learned, prediction, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[1:] + GPU_DTYPES, ids=str)
@pytest.mark.parametrize("learned", [False, True], ids=["C", "2C"])
def test_loss_and_gradient_in_16_bits(learned, dtype, device):
    check_loss(Batch(SHAPES["several programs"], device), learned, "v_prediction", dtype)


def check_loss(batch, learned, prediction, dtype):
    c, elements = batch.shape[2], math.prod(batch.shape)
    output = batch.randn(2 * c if learned else c, dtype).requires_grad_()
    exact = output.detach().float().requires_grad_()
    loss = batch.loss(ops, output, prediction=prediction)
    expected = batch.loss(reference, exact, prediction=prediction)
    assert loss.shape == (batch.n,)
    # the noise is known to 1e-6, so a mean square of differences d to 2e-6 d
    error = (loss - expected).abs()
    assert (error <= 1e-5 * expected + 2e-6 * expected.sqrt() + 1e-9).all(), error.max()

    dloss = torch.randn(batch.n, generator=batch.generator).to(loss.device) * 100
    loss.backward(dloss)
    expected.backward(dloss)
    scale = 2 * dloss.abs().max().item() / elements
    assert_rounded(output.grad, exact.grad, dtype, scale)
    assert (output.grad[..., c:] == 0).all()


@pytest.mark.parametrize("config", distinct(loss_module._LOSS_CONFIGS), ids=str)
def test_every_config_of_the_loss(config, device, monkeypatch):
    """Of which some take all of a sample in one program; several times, with the memory of the last
    time full of NaN."""
    take(monkeypatch, denoise_loss=config)
    batch = Batch((64, 43, 3) if device.type == "cuda" else (33, 43, 3), device)
    output = batch.randn(3)
    expected = batch.loss(reference, output, prediction="v_prediction")
    for keep in (False, True):
        args = (output, batch.images, batch.index, batch.flip, batch.t, batch.table, batch.rng)
        for _ in range(3 if device.type == "cuda" else 2):
            loss, difference = loss_module._loss(*args, 9, "v_prediction", keep=keep)
            error = (loss - expected).abs()
            assert (error <= 1e-5 * expected + 2e-6 * expected.sqrt()).all(), error.max()
            if keep:
                assert_close_squares(difference, expected)
            loss.fill_(torch.nan), difference.fill_(torch.nan)


def assert_close_squares(difference, expected):
    """The differences are those whose mean square is the loss."""
    torch.testing.assert_close(
        difference.square().mean(dim=(1, 2, 3)), expected, rtol=2e-5, atol=1e-6
    )


def test_a_sample_has_a_limited_number_of_programs(device, monkeypatch):
    """The last program adds up the parts of all, and Triton 3.6 limits their number: for a larger
    sample each program takes more of it."""
    take(monkeypatch, denoise_loss=loss_module._LossConfig(128, 1, 4))
    batch = Batch((105, 105, 3), device)
    elements, most = 105 * 105 * 3, loss_module._MOST_CHUNKS
    assert elements > 4 * 128 * most and triton.next_power_of_2(most + 1) == 64
    launched = []
    kernel = loss_module.denoise_loss_fwd_kernel

    class Noted:
        def __getitem__(self, grid):
            return lambda *args, **options: (
                launched.append(options),
                kernel[grid](*args, **options),
            )

    monkeypatch.setattr(loss_module, "denoise_loss_fwd_kernel", Noted())
    output = batch.randn(3)
    expected = batch.loss(reference, output, prediction="epsilon")
    loss = batch.loss(ops, output, prediction="epsilon")
    assert [(options["BLOCKS"], options["SLOTS"]) for options in launched] == [(2, 64)]
    error = (loss - expected).abs()
    assert (error <= 1e-5 * expected + 2e-6 * expected.sqrt()).all(), error.max()


def test_gradient_of_the_mean(device):
    """Its upstream gradient is one number seen N times, with stride 0."""
    batch = Batch(SHAPES["odd"], device)
    output = batch.randn(3).requires_grad_()
    batch.loss(ops, output).mean().backward()
    exact = output.detach().requires_grad_()
    batch.loss(reference, exact).mean().backward()
    torch.testing.assert_close(output.grad, exact.grad, rtol=1e-5, atol=1e-6)


def test_loss_of_the_noise_itself_is_zero(device):
    batch = Batch(SHAPES["several programs"], device)
    noise = reference.normal((N, *batch.shape), batch.rng, first=9)
    assert batch.loss(ops, noise).max() < 1e-10


def test_loss_does_not_depend_on_the_batch_or_the_run(device):
    batch = Batch(SHAPES["several programs"], device)
    output = batch.randn(3)
    loss = batch.loss(ops, output)
    assert torch.equal(batch.loss(ops, output), loss)
    last = ops.denoise_loss(
        output[2:], batch.images, batch.t[2:], batch.table, batch.rng,
        first=11, index=batch.index[2:], flip=batch.flip[2:],
    )  # fmt: skip
    assert torch.equal(last, loss[2:])


def test_black_and_white_are_minus_one_and_one(device):
    images = torch.tensor([0, 255], dtype=torch.uint8, device=device).view(2, 1, 1, 1)
    assert ops.gather_images(images).view(2).tolist() == [-1.0, 1.0]


def test_flipping_twice_is_nothing(device):
    batch = Batch(SHAPES["odd"], device, uint8=False, index=False)
    once = ops.gather_images(batch.images, None, batch.flip)
    assert torch.equal(ops.gather_images(once, None, batch.flip), batch.images)
    assert torch.equal(once[0], batch.images[0].flip(1))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("learned", [False, True], ids=["C", "2C"])
@pytest.mark.parametrize("clip", [1.0, 0.25, None], ids="clip={}".format)
def test_denoise_step(shape, learned, clip, device):
    batch = Batch(shape, device)
    c = shape[2]
    x, output = batch.randn(c), batch.randn(2 * c if learned else c)
    table = reverse_table(device)
    for k in (0, STEPS - 1):
        row = torch.tensor([k], device=device)
        arguments = (x, output, table, row, batch.rng)
        x_prev = ops.denoise_step(*arguments, first=4, clip=clip)
        expected = reference.denoise_step(*arguments, first=4, clip=clip)
        assert_rounded(x_prev, expected, torch.float32, scale=10)


@pytest.mark.parametrize("learned", [False, True], ids=["C", "2C"])
def test_denoise_step_of_an_output_among_other_channels(learned, device):
    """As a head's convolution leaves it, whose few channels are padded."""
    batch = Batch(SHAPES["odd"], device)
    x, wide = batch.randn(3), batch.randn(16)
    output = wide[..., : 6 if learned else 3]
    arguments = (reverse_table(device), torch.tensor([1], device=device), batch.rng)
    x_prev = ops.denoise_step(x, output, *arguments)
    assert torch.equal(x_prev, ops.denoise_step(x, output.contiguous(), *arguments))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_denoise_step_of_a_solver(shape, device):
    """`first` on the device, as a captured graph has it, and the x0 of the step before."""
    batch = Batch(shape, device)
    x, output, memory = (batch.randn(shape[2]) for _ in range(3))
    arguments = (x, output, reverse_table(device), torch.tensor([2], device=device), batch.rng)
    first, twin = torch.tensor([4], device=device), memory.clone()
    x_prev = ops.denoise_step(*arguments, first=first, memory=memory)
    expected = reference.denoise_step(*arguments, first=4, memory=twin)
    assert_rounded(x_prev, expected, torch.float32, scale=10)
    assert_rounded(memory, twin, torch.float32, scale=10)
    on_device = reference.denoise_step(*arguments, first=first)
    assert torch.equal(on_device, reference.denoise_step(*arguments, first=4))


@pytest.mark.parametrize("dtype", DTYPES[1:] + GPU_DTYPES, ids=str)
def test_denoise_step_of_16_bit_tensors(dtype, device):
    batch = Batch(SHAPES["odd"], device)
    row = torch.tensor([3], device=device)
    arguments = (batch.randn(3, dtype), batch.randn(6, dtype), reverse_table(device), row)
    x_prev = ops.denoise_step(*arguments, batch.rng)
    expected = reference.denoise_step(*arguments, batch.rng)
    assert_rounded(x_prev, expected, torch.float32, scale=10)


def test_noise_of_a_step_is_keyed_by_its_row(device):
    batch = Batch(SHAPES["odd"], device)
    zero = torch.zeros((N, *batch.shape), device=device)
    table = torch.zeros(STEPS, 8, device=device)
    table[:, 5] = 1.0
    for k in (0, 7):
        row = torch.tensor([k], device=device)
        z = ops.denoise_step(zero, zero, table, row, batch.rng)
        step_rng = batch.rng + torch.tensor([0, k], device=device)
        expected = reference.normal(z.shape, step_rng, stream=REVERSE)
        torch.testing.assert_close(z, expected, rtol=0, atol=4e-6)


def test_clipping_lets_a_nan_through(device):
    x = torch.tensor([math.nan, 1e30, -1e30, 0.5], device=device).view(1, 1, 1, 4)
    table = torch.tensor([[1.0, 0, 1, 0, 0, 0, 0, 0]], device=device)
    row, rng = (torch.zeros(k, dtype=torch.int64, device=device) for k in (1, 2))
    x_prev = ops.denoise_step(x, torch.zeros_like(x), table, row, rng, clip=1.0).view(4)
    assert x_prev[0].isnan()
    assert x_prev[1:].tolist() == [1.0, -1.0, 0.5]


def test_empty_batch(device):
    batch = Batch(SHAPES["odd"], device, n=0)
    output = batch.randn(6).requires_grad_()
    assert batch.q_sample(ops).shape == (0, 5, 7, 3)
    loss = batch.loss(ops, output)
    assert loss.shape == (0,)
    loss.sum().backward()
    assert output.grad.shape == output.shape
    row = torch.tensor([0], device=device)
    x = batch.randn(3)
    assert ops.denoise_step(x, output, reverse_table(device), row, batch.rng).shape == x.shape


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prediction": "score"}, "'score'; expected one of epsilon, sample, v_prediction"),
        ({"output": torch.zeros(3, 5, 7, 4)}, "output has 4 channels; expected 3 or 6"),
        ({"output": torch.zeros(2, 5, 7, 3)}, r"output has shape \(2, 5, 7, 3\); expected"),
        ({"output": torch.zeros(3, 7, 5, 3).transpose(1, 2)}, "expected contiguous NHWC"),
        ({"images": torch.zeros(6, 5, 7, 3).half()}, "images is torch.float16"),
        ({"images": torch.zeros(6, 7, 5, 3).transpose(1, 2)}, "images has strides"),
        ({"t": torch.zeros(4, dtype=torch.int64)}, r"t has shape \(4,\); expected \(3,\)"),
        ({"t": torch.zeros(3)}, "t is torch.float32"),
        ({"table": torch.zeros(10, 3)}, r"table is .* expected float32 \[steps, 2\]"),
        ({"table": torch.zeros(2, 10).t()}, "table has strides"),
        ({"rng": torch.zeros(2)}, "rng is torch.float32"),
        ({"index": torch.zeros(3, dtype=torch.int32)}, "index is torch.int32"),
        ({"flip": torch.zeros(3)}, "flip is torch.float32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_of_the_loss_are_refused(change, message):
    batch = Batch(SHAPES["odd"], "cpu")
    arguments = {
        "output": torch.zeros(3, 5, 7, 3),
        "images": batch.images,
        "t": batch.t,
        "table": batch.table,
        "rng": batch.rng,
        "index": batch.index,
        "flip": batch.flip,
    }
    with pytest.raises(ValueError, match=message):
        ops.denoise_loss(**{**arguments, **change})


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": -1.0}, "clip is -1.0"),
        ({"row": torch.zeros(1)}, r"row is .* expected int64 \[1\]"),
        ({"table": torch.zeros(10, 2)}, r"expected float32 \[steps, 8\]"),
        ({"output": torch.zeros(3, 5, 7, 9)}, "output has 9 channels; expected 3 or 6"),
        ({"x": torch.zeros(5, 7, 3)}, "x has shape"),
        ({"output": torch.zeros(3, 7, 5, 3).transpose(1, 2)}, "expected contiguous NHWC"),
        ({"first": torch.zeros(2)}, r"first is .* expected int64 \[1\]"),
        ({"memory": torch.zeros(2, 5, 7, 3)}, r"memory has shape \(2, 5, 7, 3\); expected"),
        ({"memory": torch.zeros(3, 5, 7, 3).half()}, "memory is torch.float16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_of_a_step_are_refused(change, message):
    x = torch.zeros(3, 5, 7, 3)
    row, rng = (torch.zeros(k, dtype=torch.int64) for k in (1, 2))
    arguments = {"x": x, "output": x, "table": reverse_table("cpu"), "row": row, "rng": rng}
    with pytest.raises(ValueError, match=message):
        ops.denoise_step(**{**arguments, **change})


@pytest.mark.usefixtures("no_launch")
def test_unknown_dtype_of_q_sample_is_refused():
    with pytest.raises(ValueError, match="dtype is torch.float64"):
        Batch(SHAPES["odd"], "cpu").q_sample(ops, dtype=torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 32, 128])
@pytest.mark.parametrize("learned", [False, True], ids=["C", "2C"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_model_s_shapes(n, learned, dtype, device):
    batch = Batch((64, 64, 3), device, n=n, m=200)
    for _ in range(3):
        assert_rounded(batch.q_sample(ops, dtype=dtype), batch.q_sample(reference), dtype)
        for prediction in loss_module.PREDICTIONS:
            check_loss(batch, learned, prediction, dtype)
        batch.rng[1] += 1


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 16, 64])
def test_reverse_steps_of_the_model_s_shape(n, device):
    batch = Batch((64, 64, 3), device, n=n)
    table = reverse_table(device)
    for k in range(3):
        row = torch.tensor([k], device=device)
        arguments = (batch.randn(3), batch.randn(6, torch.bfloat16), table, row, batch.rng)
        x_prev = ops.denoise_step(*arguments)
        assert_rounded(x_prev, reference.denoise_step(*arguments), torch.float32, scale=10)


@pytest.mark.gpu
def test_a_replayed_graph_follows_its_device_scalars(device):
    batch = Batch((64, 64, 3), device, n=8)
    output = batch.randn(3).requires_grad_()
    dloss = torch.ones(8, device=device)
    table, row = reverse_table(device), torch.zeros(1, dtype=torch.int64, device=device)
    x = batch.randn(3)

    def work(ops):
        loss = batch.loss(ops, output)
        (doutput,) = torch.autograd.grad(loss, output, dloss)
        x_prev = ops.denoise_step(x, output.detach(), table, row, batch.rng)
        return batch.q_sample(ops), loss.detach(), doutput * 64 * 64 * 3, x_prev

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work(ops)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work(ops)
    for _ in range(3):
        batch.rng[1] += 1
        batch.t.copy_((batch.t + 1) % STEPS)
        batch.index.copy_((batch.index + 1) % M)
        batch.flip.logical_not_()
        row += 1
        graph.replay()
        for result, expected in zip(results, work(reference), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)
