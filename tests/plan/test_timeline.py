"""When lines of a page begin and end, and what is written over the bars."""

from dataclasses import replace

import pytest

from diffusion.plan.printed.kernels import Launched
from diffusion.plan.printed.page import Line, Page
from diffusion.plan.printed.timeline import _family, _runs, draw, times
from diffusion.plan.schedule.moves import MAIN, SECOND, THIRD
from triton_kernels.registry.chips import chip


def line(us, stream=MAIN, op="conv_fused", pass_="backward", waits=(), image="", flops=1):
    return Line("", op, pass_, Launched(()), stream, 0, flops, us, waits=waits, image=image)


PAGE = Page(
    [
        line(9, pass_="parameters"),  # no call launches it
        line(10, pass_="forward", image="8x8"),
        line(5, pass_="forward", op="norm", flops=0),
        line(20, pass_="forward", image="8x8"),
        line(2, image="4x4"),
        line(30, SECOND, "conv_dw", waits=(3,)),
        line(7, image="4x4"),
        line(4, THIRD, "sums", flops=0),  # behind what the main stream has been given
        line(6, SECOND, "linear_dw", waits=(6,)),
        line(1, waits=(8,), image="4x4"),
    ],
    "memory: 1 MB",
    chip("h100").gpu,
)


def test_times():
    """One after the other on a stream, behind what a line waits for."""
    assert times(PAGE) == [
        (0, 0), (0, 10), (10, 15), (15, 35), (35, 37), (35, 65), (37, 44), (44, 48), (65, 71),
        (71, 72),
    ]  # fmt: skip


def test_spans():
    """Of neighbours on the main stream: a norm between two images of one size parts nothing."""
    spans = times(PAGE)
    assert list(_runs(PAGE, spans, "pass_")) == [("forward", (0, 35)), ("backward", (35, 72))]
    assert list(_runs(PAGE, spans, "image")) == [("8x8", (0, 35)), ("4x4", (35, 72))]


@pytest.mark.parametrize(
    ("op", "flops", "family"),
    [
        ("conv_dw", 1, "weight gradient"),
        ("linear_dw", 1, "weight gradient"),
        ("projected_attention", 1, "attention"),
        ("norm_conv", 1, "convolution"),
        ("conv_norm", 1, "convolution"),
        ("norm_of_upsampled", 0, "norm"),
        ("skip_backward", 1, "norm"),
        ("linear_dx", 1, "linear"),
        ("stage", 1, "convolution"),
        ("avg_pool", 0, "other"),
    ],
)
def test_families(op, flops, family):
    assert _family(line(1, op=op, flops=flops)) == family


def test_a_picture_of_few_lines(tmp_path):
    draw(PAGE, tmp_path / "plan.png", "title")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_said_of_memory_is_within_the_picture(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    long = "34 MB at the peak of a step, of what it needs; " * 9
    draw(replace(PAGE, memory=long), tmp_path / "a.png", "t")
    (figure,) = drawn
    figure.draw_without_rendering()
    title, page = figure._suptitle.get_window_extent(), figure.bbox
    assert page.x0 <= title.x0 and title.x1 <= page.x1
    assert title.y1 <= page.y1 and not title.overlaps(figure.axes[0].get_tightbbox())
