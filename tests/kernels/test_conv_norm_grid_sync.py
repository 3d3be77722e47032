"""A convolution and the norm behind it in one launch where tiles of an image meet: a model of who
waits for whom, and the kernel on a Hopper GPU."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from triton_kernels import reference
from triton_kernels.conv import conv_norm as conv_norm_module
from triton_kernels.conv.conv_norm import NextNorm
from triton_kernels.conv.conv_norm_grid_sync import CONV_NORM_GRID_SYNC, conv_norm_grid_sync
from triton_kernels.conv.fused import conv_forward
from triton_kernels.conv.fused_spec import forward_spec
from triton_kernels.conv.hopper import tile_mma
from triton_kernels.registry.chips import chip
from triton_kernels.registry.choose import select
from triton_kernels.registry.spec import ConvSpec
from triton_kernels.runtime.device import describe

from .chips import HOPPER
from .conv_fused_cases import ROUNDING, Shape, extra_case, forward_case, relative
from .poison import poison_outputs
from .test_conv_hopper import gpu, repeatedly

# --- who waits for whom ---------------------------------------------------------------------------

Waits = Iterator[Callable[[], bool]]  # of a warp: what it waits for, one after the other


class Barrier:
    """`mbarrier` for one arrival: who waits names a phase by its parity."""

    def __init__(self) -> None:
        self.done = 0

    def arrive(self) -> None:
        self.done += 1

    def passed(self, parity: int) -> Callable[[], bool]:
        return lambda: self.done & 1 != parity


def program(
    pid: int, programs: int, tiles: int, of_image: int, blocks: int, slots: int, words: set[int]
) -> list[Waits]:
    """The warps of `conv_tile_mma_kernel`: one loads so many blocks a tile into a ring of slots,
    two take every other tile. `words` are the tiles whose sums are in memory."""
    full, empty = ([Barrier() for _ in range(slots)] for _ in range(2))
    turns = Barrier(), Barrier()
    held: list[tuple[int, int] | None] = [None] * slots  # tile and block

    def load() -> Waits:
        count = 0
        for tile in range(pid, tiles, programs):
            for block in range(blocks):
                slot = count % slots
                yield empty[slot].passed(count // slots & 1 ^ 1)
                assert held[slot] is None
                held[slot] = tile, block
                full[slot].arrive()
                count += 1

    def multiply(group: int) -> Waits:
        count, phase = group * blocks, 0
        for tile in range(pid + group * programs, tiles, 2 * programs):
            yield turns[group].passed(phase ^ (1 - group))
            for block in range(blocks):
                slot = count % slots
                yield full[slot].passed(count // slots & 1)
                assert held[slot] == (tile, block)
                held[slot] = None
                empty[slot].arrive()
                count += 1
            turns[1 - group].arrive()
            count += blocks
            words.add(tile)
            first = tile // of_image * of_image
            yield lambda first=first: all(i in words for i in range(first, first + of_image))
            phase ^= 1

    return [load(), multiply(0), multiply(1)]


def run(warps: list[Waits], rng: random.Random) -> bool:
    """Whether all of them come to their end, whoever has time first."""
    waiting = []
    for warp in warps:
        if (condition := next(warp, None)) is not None:
            waiting.append((warp, condition))
    while waiting:
        able = [i for i, (_, condition) in enumerate(waiting) if condition()]
        if not able:
            return False
        first, last = able[0], able[-1]  # warps run far ahead of others, or side by side
        i = rng.choice((first, last, rng.choice(able)))
        warp, _ = waiting[i]
        condition = next(warp, None)
        waiting[i : i + 1] = [] if condition is None else [(warp, condition)]
    return True


@pytest.mark.parametrize(
    ("programs", "images", "of_image"),
    [(6, 1, 6), (6, 5, 6), (7, 6, 3), (5, 7, 4), (4, 9, 3), (1, 3, 1)],
    ids=str,
)
def test_everybody_comes(programs, images, of_image):
    for seed in range(20):
        rng, words, tiles = random.Random(seed), set(), images * of_image
        blocks, slots = rng.randint(1, 4), rng.randint(2, 6)
        warps = [
            warp
            for pid in range(programs)
            for warp in program(pid, programs, tiles, of_image, blocks, slots, words)
        ]
        rng.shuffle(warps)
        assert run(warps, rng) and len(words) == tiles


@pytest.mark.parametrize(
    ("programs", "of_image", "begun"), [(3, 7, 3), (6, 6, 5)], ids=["fewer than tiles", "one late"]
)
def test_the_model_sees_who_would_wait_for_ever(programs, of_image, begun):
    """An image of more than two waves of tiles, and a program that never begins."""
    words, warps = set(), []
    for pid in range(begun):
        warps += program(pid, programs, 2 * of_image, of_image, 2, 3, words)
    assert not run(warps, random.Random(0))


# --- on the GPU -----------------------------------------------------------------------------------

CONFIGS = list(tile_mma.TILES)
SHAPES = {  # and channels of a group
    "a tile of two": (Shape(1, 16, 16, 64, 64), 2),
    "groups across blocks": (Shape(37, 16, 16, 128, 192), 6),
    "larger images": (Shape(9, 32, 32, 64, 128), 4),
    "rows of 8": (Shape(3, 32, 8, 64, 64), 1),
    "large groups": (Shape(2, 8, 32, 64, 256), 16),
}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    poison_outputs(monkeypatch, conv_norm_module)


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("config", [None, CONFIGS[0], CONFIGS[2], CONFIGS[4]], ids=str)
    @pytest.mark.parametrize(
        ("name", "keep", "count", "offset", "dtype"),
        [
            ("a tile of two", False, 0, 0.0, torch.float16),
            ("groups across blocks", False, 0, 0.0, torch.bfloat16),
            ("groups across blocks", True, 1, 1000.0, torch.bfloat16),
            ("larger images", True, 0, 0.0, torch.bfloat16),
            ("rows of 8", True, 2, 0.0, torch.bfloat16),
            ("large groups", False, 0, 1000.0, torch.bfloat16),
        ],
    )
    def test_norm(self, name, keep, count, offset, dtype, config, device):
        """y and its partials as without the norm, to the bit, and the norm of y, rounded once."""
        shape, channels = SHAPES[name]
        x, weight, bias, emb, residual = forward_case(shape, dtype, device)
        groups, bias = shape.co // channels, bias + offset
        terms = {"emb": emb, "residual": residual}
        if count:
            extra = extra_case(shape, 128, 64, dtype, device)[:count]
            terms = {"extra": extra, "extra_bias": torch.randn(shape.co, device=device)}
        others = [other for other, _ in terms.get("extra", ())]
        added = {"emb": "emb" in terms, "residual": "residual" in terms, "keep": keep}
        spec, gpu = forward_spec(x, weight, extra=others, groups=groups, **added), describe(device)
        if config is not None and config not in CONV_NORM_GRID_SYNC.kernels[0].configs(spec, gpu):
            pytest.skip("not a tile of one image, or too many of them")
        tile = config or select(CONV_NORM_GRID_SYNC, spec, gpu).config
        exact_y, exact_sums = conv_forward(x, weight, bias, **terms, stats=True, config=tile)
        g, b = torch.randn(2, shape.co, device=device)
        activation = "silu" if offset == 0 else "identity"
        norm = NextNorm(g, b, groups, 1e-5, activation, keep, keep)
        exact = reference.group_norm(
            exact_y.double(), groups, g.double(), b.double(), activation=activation
        )

        def check():
            y, sums, a = conv_norm_grid_sync(x, weight, bias, norm, **terms, config=config)
            assert torch.equal(y, exact_y) if keep else y is None
            assert torch.equal(sums, exact_sums) if keep else sums is None
            assert relative(a, exact) <= ROUNDING[dtype] + 1e-5
            return (a,)

        repeatedly(check, 20)

    def test_numbers_that_are_not_finite(self, device):
        """They come to the others as well: nobody waits for them for ever."""
        shape, channels = SHAPES["groups across blocks"]
        x, weight, bias, *_ = forward_case(shape._replace(n=4), torch.bfloat16, device)
        x[1, 3, 3, 5], x[2, 15, 15, 7] = torch.nan, torch.inf
        norm = NextNorm(bias, bias, shape.co // channels, 1e-5, "silu", True, False)
        y, _, a = conv_norm_grid_sync(x, weight, bias, norm)
        assert y[1].isnan().any() and a[1:3].isnan().all() and a[::3].isfinite().all()

    def test_zeros_of_somebody_else(self, device):
        shape, channels = SHAPES["larger images"]
        x, weight, bias, *_ = forward_case(shape, torch.bfloat16, device)
        words = torch.zeros(2**18, dtype=torch.int64, device=device)
        asked = []

        def zeros(count, where):
            asked.append(count)
            assert where == x.device
            return words[1024 : 1024 + count]

        norm = NextNorm(bias, bias, shape.co // channels, 1e-5, "silu", False, False)
        a = conv_norm_grid_sync(x, weight, bias, norm, zeros=zeros)[2]
        assert torch.equal(a, conv_norm_grid_sync(x, weight, bias, norm)[2])
        assert words[1024 : 1024 + asked[0]].all() and words.count_nonzero() == asked[0]

    def test_an_empty_batch(self, device):
        shape = SHAPES["groups across blocks"][0]._replace(n=0)
        x, weight, bias, _, _ = forward_case(shape, torch.bfloat16, device)
        norm = NextNorm(bias, bias, 32, 1e-5, "silu", True, True)
        y, sums, a = conv_norm_grid_sync(x, weight, bias, norm)
        assert y.shape == a.shape == (0, 16, 16, 192) and sums.shape[2:] == (2, 192)


def applies(shape: Shape, num_groups: int, dtype=torch.bfloat16, gpu=HOPPER) -> bool:
    n, h, w, ci, co, kernel = shape
    x = torch.empty((n, h, w, ci), dtype=dtype, device="meta")
    spec = forward_spec(x, x.new_empty((co, ci, kernel, kernel)), groups=num_groups)
    return CONV_NORM_GRID_SYNC.refuse(spec, gpu) is None


def test_slow_tiles_do_not_meet():
    """Of 8x8 pixels a tile has 64, which costs more than a launch for the norm where there are many
    channels (measured: 42.6 us for 26.8)."""
    for side, channels, joined in ((8, 768, False), (16, 192, True)):
        size = {"h": side, "w": side, "k": channels, "c": channels}
        spec = ConvSpec(16, "bf16", **size, filters=(channels, channels), groups=32)
        assert CONV_NORM_GRID_SYNC.refuse(spec, HOPPER) is None
        assert (CONV_NORM_GRID_SYNC.why_apart(spec, HOPPER) is None) == joined


def test_what_applies():
    assert all(applies(shape, shape.co // channels) for shape, channels in SHAPES.values())
    shape = SHAPES["groups across blocks"][0]
    assert not applies(shape, 3)  # groups of 64: too much for a thread
    assert not applies(shape._replace(kernel=1), 32)
    assert not applies(shape._replace(ci=96), 32)
    assert not applies(shape, 32, torch.float32)
    assert not applies(Shape(2, 64, 64, 64, 64), 8)  # 16 tiles an image or more
    assert not applies(shape, 32, gpu=chip("a100").gpu)
