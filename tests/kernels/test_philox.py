"""Words, normals, timesteps and flips of triton_kernels.noise.philox and .draw."""

import math

import pytest
import torch
import triton
import triton.language as tl

from triton_kernels import reference
from triton_kernels.noise import draw
from triton_kernels.noise.philox import FLIP, INITIAL, NOISE, box_muller, philox_words

RNGS = {  # seed, step
    "zero": (0, 0),
    "small": (1234, 7),
    "wide": (0x123456789ABCDEF0, 2**31 + 5),
    "negative": (-3, 2**32 - 1),
}


@triton.jit
def _words_kernel(arguments_ptr, words_ptr, BLOCK: tl.constexpr):
    """Arguments: seed, step, sample, stream, then BLOCK quads."""
    seed, step = tl.load(arguments_ptr), tl.load(arguments_ptr + 1)
    sample, stream = tl.load(arguments_ptr + 2), tl.load(arguments_ptr + 3)
    offs = tl.arange(0, BLOCK)
    quad = tl.load(arguments_ptr + 4 + offs).to(tl.int32)
    words = philox_words(seed, step, sample, quad, stream.to(tl.int32))
    for i in tl.static_range(4):
        tl.store(words_ptr + 4 * offs + i, words[i].to(tl.int64))


@triton.jit
def _box_muller_kernel(words_ptr, normals_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    even = tl.load(words_ptr + offs).to(tl.uint32)
    odd = tl.load(words_ptr + BLOCK + offs).to(tl.uint32)
    n_even, n_odd = box_muller(even, odd)
    tl.store(normals_ptr + offs, n_even)
    tl.store(normals_ptr + BLOCK + offs, n_odd)


def kernel_words(seed, step, sample, stream, quads, device):
    arguments = torch.tensor([seed, step, sample, stream, *quads], device=device)
    words = torch.empty(len(quads), 4, dtype=torch.int64, device=device)
    _words_kernel[(1,)](arguments, words, BLOCK=len(quads))
    return words.cpu()


def make_rng(name, device):
    return torch.tensor(RNGS[name], device=device)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
def test_known_answers_of_random123(counter, key, words, device):
    c0, c1, c2, c3 = counter
    seed = key[0] | key[1] << 32
    seed -= 2**64 if seed >= 2**63 else 0
    assert tuple(kernel_words(seed, c2, c1, c3, [c0], device)[0].tolist()) == words


@pytest.mark.parametrize("name", RNGS)
@pytest.mark.parametrize("first", [0, 9, 2**31 - 1, 2**40 + 3], ids="first={}".format)
def test_words_equal_the_reference(name, first, device):
    seed, step = RNGS[name]
    for stream in (FLIP, INITIAL, 5 | 300 << 8):
        expected = reference.random_words(torch.tensor(RNGS[name]), 2, 32, stream, first=first)
        for n in range(2):
            words = kernel_words(seed, step, first + n, stream, range(8), device)
            assert torch.equal(words.view(-1), expected[n])


def test_box_muller_over_the_circle_and_at_the_ends(device):
    block = 1024
    odd = torch.arange(block) * (2**32 // block) + torch.tensor([0, 2**31 // block]).repeat(512)
    odd[-1] = 2**32 - 1
    even = torch.randint(0, 2**32, (block,), generator=torch.Generator().manual_seed(0))
    even[:3] = torch.tensor([0, 2**32 - 1, 2**32 - 300])
    words = torch.stack((even, odd))
    normals = torch.empty(2, block, device=device)
    _box_muller_kernel[(1,)](words.to(device), normals, BLOCK=block)

    u, turn = ((even >> 8) + 1).double() * 2.0**-24, (odd >> 8).double() * 2.0**-24
    r, angle = torch.sqrt(-2 * torch.log(u)), 2 * math.pi * turn
    expected = torch.stack((r * torch.cos(angle), r * torch.sin(angle)))
    assert (normals.cpu() - expected).abs().max() < 1.5e-6  # 2 ulp at r = 5.8
    assert normals[:, 1].abs().max() == 0  # u = 1


@pytest.mark.parametrize(
    "shape",
    [(3, 5, 7, 3), (2, 1, 1, 1), (1, 40, 40, 3), (2, 16, 16, 4), (0, 4, 4, 3), (2, 0), (5, 6)],
    ids=str,
)
@pytest.mark.parametrize("name", RNGS)
def test_normal_equals_the_reference(shape, name, device):
    rng = make_rng(name, device)
    z = draw.normal(shape, rng, stream=INITIAL, first=2**33 + 1)
    expected = reference.normal(shape, rng, stream=INITIAL, first=2**33 + 1)
    assert z.shape == shape
    assert z.dtype == torch.float32
    assert z.is_contiguous() and expected.is_contiguous()  # of sizes that fours do not divide, too
    torch.testing.assert_close(z, expected, rtol=0, atol=4e-6)


def test_a_sample_does_not_depend_on_its_batch(device):
    rng = make_rng("small", device)
    whole = draw.normal((4, 5, 7, 3), rng, first=10)
    for n in range(4):
        assert torch.equal(draw.normal((1, 5, 7, 3), rng, first=10 + n)[0], whole[n])


@pytest.mark.parametrize("n", [0, 1, 300])
@pytest.mark.parametrize("num_timesteps", [1, 1000, 2**31 - 1], ids="T={}".format)
def test_timesteps_equal_the_reference(n, num_timesteps, device):
    rng = make_rng("wide", device)
    t = draw.draw_timesteps(rng, n, num_timesteps, first=2**33)
    assert t.dtype == torch.int64
    assert torch.equal(t, reference.draw_timesteps(rng, n, num_timesteps, first=2**33))
    assert ((t >= 0) & (t < num_timesteps)).all()


@pytest.mark.parametrize("n", [0, 1, 300])
def test_flips_equal_the_reference(n, device):
    rng = make_rng("negative", device)
    flip = draw.draw_flips(rng, n, first=5)
    assert flip.dtype == torch.bool
    assert torch.equal(flip, reference.draw_flips(rng, n, first=5))


def test_timesteps_and_flips_are_uniform(device):
    n = 20_000
    t = draw.draw_timesteps(make_rng("small", device), n, 1000).cpu()
    counts = torch.bincount(t // 100, minlength=10).double()
    chi2 = ((counts - n / 10).square() / (n / 10)).sum()
    assert chi2 < 27.9  # 0.1 % of 9 degrees of freedom
    heads = draw.draw_flips(make_rng("small", device), n).sum().item()
    assert abs(heads - n / 2) < 4 * math.sqrt(n) / 2


def test_normals_have_the_moments_of_a_normal(device):
    z = draw.normal((4, 32_768), make_rng("small", device)).cpu().double().view(-1)
    n = z.numel()
    assert abs(z.mean()) < 4 / math.sqrt(n)
    assert abs(z.square().mean() - 1) < 4 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 4 * math.sqrt(96 / n)
    tail = 0.0026998  # P(|z| > 3)
    assert abs((z.abs() > 3).double().mean() - tail) < 4 * math.sqrt(tail / n)
    assert z.abs().max() <= math.sqrt(-2 * math.log(2.0**-24)) + 1e-6


def test_normals_are_uncorrelated(device):
    shape = (2, 32_768)
    rng = make_rng("small", device)
    z = draw.normal(shape, rng).double()
    others = {f"lag {k}": z.roll(k, dims=1) for k in (1, 2, 3, 4, 8)}
    others["next sample"] = z.roll(1, dims=0)
    others["other stream"] = draw.normal(shape, rng, stream=INITIAL)
    others["next step"] = draw.normal(shape, rng + torch.tensor([0, 1], device=device))
    others["next seed"] = draw.normal(shape, rng + torch.tensor([1, 0], device=device))
    for name, other in others.items():
        for f in (
            lambda x: x,
            torch.square,
            torch.abs,
        ):  # uncorrelated, and so are functions of them
            pair = torch.stack((f(z).view(-1), f(other.double()).view(-1)))
            correlation = torch.corrcoef(pair)[0, 1].abs().item()
            assert correlation < 4 / math.sqrt(z.numel()), name


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    "rng",
    [torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)[::2]],
    ids=["float", "three numbers", "strided"],
)
def test_a_wrong_rng_is_refused(rng):
    with pytest.raises(ValueError, match=r"rng is .* expected contiguous int64 \[2\]"):
        draw.normal((1, 4), rng)


@pytest.mark.usefixtures("no_launch")
def test_a_wrong_number_of_timesteps_is_refused():
    with pytest.raises(ValueError, match="num_timesteps is 0"):
        draw.draw_timesteps(torch.zeros(2, dtype=torch.int64), 4, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 64, 64, 3), (7, 33, 31, 3), (32, 16, 2)], ids=str)
def test_normal_on_the_gpu(shape, device):
    rng = make_rng("wide", device)
    for _ in range(3):
        z = draw.normal(shape, rng, stream=NOISE)
        torch.testing.assert_close(z, reference.normal(shape, rng), rtol=0, atol=4e-6)
        cpu = reference.normal(shape, rng.cpu())
        torch.testing.assert_close(z.cpu(), cpu, rtol=0, atol=4e-6)
        rng[1] += 1


@pytest.mark.gpu
def test_a_replayed_graph_draws_anew(device):
    rng = make_rng("small", device)
    draw.normal((4, 100), rng), draw.draw_timesteps(rng, 4, 1000), draw.draw_flips(rng, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z, t = draw.normal((4, 100), rng), draw.draw_timesteps(rng, 4, 1000)
        flip = draw.draw_flips(rng, 4)
    for _ in range(3):
        rng[1] += 1
        graph.replay()
        torch.testing.assert_close(z, reference.normal((4, 100), rng), rtol=0, atol=4e-6)
        assert torch.equal(t, reference.draw_timesteps(rng, 4, 1000))
        assert torch.equal(flip, reference.draw_flips(rng, 4))
