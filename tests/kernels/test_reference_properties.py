"""What the reference's group_norm is for any input: exact to float32, and blind to what a norm
takes out of its input."""

import pytest

from triton_kernels import reference

from .test_reference_exact import ROUNDINGS, check_norm, norm_case, relative_error

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

any_case = hypothesis.given(
    n=st.integers(1, 3),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    groups=st.integers(1, 4),
    channels=st.integers(1, 9),  # a group
    magnitude=st.floats(-4, 4),
    deviation=st.floats(-3, 3),
    seed=st.integers(0, 99),
)
alike = hypothesis.settings(max_examples=200, deadline=None, derandomize=True)


@alike
@any_case
def test_norm_is_exact(n, height, width, groups, channels, magnitude, deviation, seed):
    """Mean and deviation are powers of ten. Both sides see what float32 holds of x, so a mean of
    10^7 deviations is a fair case, too."""
    shape = (n, height, width, groups * channels)
    check_norm(norm_case(shape, 10**magnitude, 10**deviation, seed), groups)


@alike
@any_case
def test_norm_is_blind_to_mean_and_power(
    n, height, width, groups, channels, magnitude, deviation, seed
):
    """norm(2^k x + c) = norm(x) where neither rounds x and eps does not count, as for x of whole
    numbers and eps = 0; with a thousand of them between its mean and its deviation."""
    shape = (n, height, width, groups * channels)
    x = norm_case(shape, 0, 100, seed)[0].round()
    shift, power = 1000 * round(magnitude), 2.0 ** round(deviation)
    y, moved = (reference.group_norm(v, groups, eps=1e-12) for v in (x, (x + shift) * power))
    assert relative_error(moved, y.double()) < ROUNDINGS
