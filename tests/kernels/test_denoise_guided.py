"""denoise_step with guidance and with what is known of the image, against the reference and against
the papers' formulas in float64. Tolerances are those of test_denoise."""

import pytest
import torch

import triton_kernels as ops
from triton_kernels import reference
from triton_kernels.noise.philox import KNOWN

from .test_denoise import DTYPES, GPU_DTYPES, SHAPES, STEPS, Batch, assert_rounded, reverse_table

SCALES = torch.tensor([3.0, 0.0, 1.0, -0.5, 7.5, 1.0, 2.0, 2.0, 2.0, 2.0])  # of the STEPS


def guided(batch, c, *, learned=False, wide=False, dtype=torch.float32, rescale=0.0):
    """(positional, by name) of a guided step; wide: among other channels, as a head leaves it."""
    co = 2 * c if learned else c
    outputs = [batch.randn(16 if wide else co, dtype) for _ in range(2)]
    output, negative = (
        (outputs[0][..., :co], outputs[1][..., :c]) if wide else (outputs[0], outputs[1])
    )
    device = batch.images.device
    positional = (batch.randn(c), output, reverse_table(device))
    return positional, {"negative": negative, "scales": SCALES.to(device), "rescale": rescale}


def partly_known(batch, c):
    device, shape = batch.images.device, (batch.n, *batch.shape[:2])
    gray = torch.rand(shape, generator=batch.generator)
    mask = (torch.rand(shape, generator=batch.generator) < 0.5).float()
    mask.view(-1)[::3] = gray.view(-1)[::3]
    levels = torch.rand(STEPS, 2, generator=batch.generator)
    return {"known": batch.randn(c), "mask": mask.to(device), "levels": levels.to(device)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("learned", [False, True], ids=["C", "2C"])
@pytest.mark.parametrize("rescale", [0.0, 0.7])
@pytest.mark.parametrize("known", [False, True], ids=["drawn", "partly known"])
def test_against_the_reference(shape, learned, rescale, known, device):
    batch, c = Batch(shape, device), shape[2]
    positional, options = guided(batch, c, learned=learned, rescale=rescale)
    options |= partly_known(batch, c) if known else {}
    for k in (0, 2, STEPS - 1):
        row = torch.tensor([k], device=device)
        results = [
            module.denoise_step(*positional, row, batch.rng, first=4, **options)
            for module in (ops, reference)
        ]
        assert_rounded(*results, torch.float32, scale=30)


@pytest.mark.parametrize("dtype", DTYPES + GPU_DTYPES, ids=str)
@pytest.mark.parametrize("learned", [False, True], ids=["C", "2C"])
def test_outputs_among_other_channels(dtype, learned, device):
    batch = Batch(SHAPES["odd"], device)
    positional, options = guided(batch, 3, learned=learned, wide=True, dtype=dtype, rescale=0.3)
    row = torch.tensor([4], device=device)
    x_prev = ops.denoise_step(*positional, row, batch.rng, **options)
    expected = reference.denoise_step(*positional, row, batch.rng, **options)
    assert_rounded(x_prev, expected, torch.float32, scale=30)
    x, output, table = positional
    alone = options | {"negative": options["negative"].contiguous()}
    again = ops.denoise_step(x, output.contiguous(), table, row, batch.rng, **alone)
    assert torch.equal(x_prev, again)


@pytest.mark.parametrize("module", [ops, reference], ids=["triton", "torch"])
@pytest.mark.parametrize("rescale", [0.0, 0.7, 1.0])
def test_the_formulas_of_the_papers(module, rescale, device):
    batch = Batch(SHAPES["several programs"], device)
    (x, output, table), options = guided(batch, 3, rescale=rescale)
    table = torch.zeros_like(table)
    table[:, 1] = table[:, 2] = 1.0  # x_prev is the output itself
    for k, scale in ((0, 3.0), (1, 0.0), (4, 7.5)):
        row = torch.tensor([k], device=device)
        found = module.denoise_step(x, output, table, row, batch.rng, clip=None, **options)
        positive, negative = output.double(), options["negative"].double()
        cfg = negative + scale * (positive - negative)  # Lin et al., 2023, algorithm 2
        std = [y.std(dim=(1, 2, 3), keepdim=True) for y in (positive, cfg)]
        expected = rescale * (cfg * (std[0] / std[1])) + (1 - rescale) * cfg
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", [ops, reference], ids=["triton", "torch"])
@pytest.mark.parametrize("rescale", [0.0, 0.7])
def test_a_scale_of_1_is_no_guidance(module, rescale, device):
    batch = Batch(SHAPES["odd"], device)
    positional, options = guided(batch, 3, learned=True, rescale=rescale)
    row = torch.tensor([2], device=device)
    found = module.denoise_step(*positional, row, batch.rng, **options)
    plain = module.denoise_step(*positional, row, batch.rng)
    if rescale == 0:
        assert torch.equal(found, plain)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", [ops, reference], ids=["triton", "torch"])
def test_outputs_of_one_value_have_no_deviation(module, device):
    x = torch.full((1, 2, 2, 1), 0.5, device=device)
    table = torch.tensor([[0.0, 1, 1, 0, 0, 0, 0, 0]], device=device)
    row, rng = (torch.zeros(k, dtype=torch.int64, device=device) for k in (1, 2))
    found = module.denoise_step(
        x, x, table, row, rng, negative=0 * x, scales=torch.tensor([1.5], device=device),
        rescale=1.0,
    )  # fmt: skip
    assert (found == 0.75).all()


@pytest.mark.parametrize("module", [ops, reference], ids=["triton", "torch"])
def test_what_is_known_has_the_noise_of_its_level(module, device):
    batch = Batch(SHAPES["several programs"], device)
    x, output, known = (batch.randn(3) for _ in range(3))
    mask = torch.zeros(batch.n, *batch.shape[:2], device=device)
    mask[:, :, ::2] = 1
    levels = torch.tensor([[0.6, 0.8]] * STEPS, device=device)
    row = torch.tensor([5], device=device)
    arguments = (x, output, reverse_table(device), row, batch.rng)
    found = module.denoise_step(*arguments, first=4, known=known, mask=mask, levels=levels)
    noise = reference.normal(
        x.shape, batch.rng + torch.tensor([0, 5], device=device), stream=KNOWN, first=4
    )
    expected = 0.6 * known + 0.8 * noise
    torch.testing.assert_close(found[:, :, ::2], expected[:, :, ::2], rtol=1e-5, atol=1e-5)
    plain = module.denoise_step(*arguments, first=4)
    assert torch.equal(found[:, :, 1::2], plain[:, :, 1::2])


@pytest.mark.parametrize("module", [ops, reference], ids=["triton", "torch"])
def test_between_drawn_and_known_is_the_noise_of_the_level(module, device):
    """The noise of both is independent: a mean of the two would have less of it."""
    batch, signal, noise = Batch((64, 64, 1), device), 0.6, 0.8
    image = batch.randn(1)
    x = signal * image + noise * batch.randn(1)
    table = torch.zeros(1, 8, device=device)
    table[:, 3] = 1  # x_prev is x
    row = torch.zeros(1, dtype=torch.int64, device=device)
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        mask = torch.full(x.shape[:3], share, device=device)
        levels = torch.tensor([[signal, noise]], device=device)
        found = module.denoise_step(
            x, 0 * x, table, row, batch.rng, known=image, mask=mask, levels=levels
        )
        left = (found - signal * image).double()
        assert left.std().item() == pytest.approx(noise, rel=0.03), share
        assert left.mean().item() == pytest.approx(0, abs=0.02), share


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": None}, "negative and scales go together; one is None"),
        ({"scales": torch.ones(3)}, r"scales has shape \(3,\); expected \(10,\)"),
        ({"scales": torch.ones(10).half()}, "scales is torch.float16"),
        ({"rescale": 1.5}, "rescale is 1.5; expected a number from 0 to 1"),
        ({"negative": torch.zeros(3, 5, 7, 4)}, "output has 4 channels; expected 3 or 6"),
        ({"negative": torch.zeros(3, 7, 5, 3).transpose(1, 2)}, "expected contiguous NHWC"),
        ({"known": torch.zeros(3, 5, 7, 3)}, "known, mask and levels go together"),
        ({"mask": torch.zeros(3, 5, 7, 1)}, "known, mask and levels go together"),
        (
            {
                "known": torch.zeros(3, 5, 7, 3),
                "mask": torch.zeros(3, 5, 7, 1),
                "levels": torch.zeros(10, 2),
            },
            "mask has shape",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(change, message):
    x = torch.zeros(3, 5, 7, 3)
    row, rng = (torch.zeros(k, dtype=torch.int64) for k in (1, 2))
    arguments = {"x": x, "output": x, "table": reverse_table("cpu"), "row": row, "rng": rng}
    arguments |= {"negative": x, "scales": torch.ones(10)}
    with pytest.raises(ValueError, match=message):
        ops.denoise_step(**{**arguments, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 16, 64])
def test_the_model_s_shapes(n, device):
    batch = Batch((64, 64, 3), device, n=n)
    positional, options = guided(batch, 3, wide=True, dtype=torch.bfloat16, rescale=0.7)
    options |= partly_known(batch, 3)
    for k in range(3):
        row = torch.tensor([k], device=device)
        results = [m.denoise_step(*positional, row, batch.rng, **options) for m in (ops, reference)]
        assert_rounded(*results, torch.float32, scale=30)
