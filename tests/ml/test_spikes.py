"""Which norms are spikes, against NumPy; and the window as state."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgather.ml.trainer.step_guard import NormWindow

NORMS = st.lists(st.floats(1e-6, 1e6), min_size=0, max_size=80)


@given(NORMS, st.integers(4, 40), st.floats(1.0, 12.0))
def test_the_limit_is_mean_and_deviation_of_the_last_norms(norms, size, threshold):
    window = NormWindow(size=size, threshold=threshold)
    for norm in norms:
        window.add(norm)
    last = np.array(norms[-size:], dtype=np.longdouble)
    if len(last) < max(2, size // 2):
        assert window.limit is None
    else:
        assert window.limit == pytest.approx(float(last.mean() + threshold * last.std(ddof=1)), rel=1e-12)


@pytest.mark.parametrize("sigmas", [5.999, 6.001])
def test_six_sigma_are_told_to_three_digits(sigmas):
    rng = np.random.default_rng(0)
    window = NormWindow(size=128, threshold=6.0)
    norms = rng.lognormal(0.0, 0.2, 300)
    for norm in norms:
        window.add(norm)
    last = norms[-128:]
    assert (last.mean() + sigmas * last.std(ddof=1) > window.limit) == (sigmas > 6)


def test_equal_norms_are_no_spikes():
    window = NormWindow(size=8, threshold=1.0)
    for _ in range(8):
        window.add(0.1)
    assert window.limit == pytest.approx(0.1) and window.limit >= 0.1


@given(NORMS, NORMS)
def test_a_window_goes_on_as_it_was(before, after):
    one, other = NormWindow(size=16, threshold=6.0), NormWindow(size=16, threshold=6.0)
    for norm in before:
        one.add(norm)
    other.load_state_dict(one.state_dict())
    for norm in after:
        one.add(norm)
        other.add(norm)
    assert one.state_dict() == other.state_dict()
    assert one.limit == other.limit


def test_a_smaller_window_keeps_the_last_norms():
    one, other = NormWindow(size=8, threshold=6.0), NormWindow(size=4, threshold=6.0)
    for norm in range(8):
        one.add(float(norm))
    other.load_state_dict(one.state_dict())
    assert {"norms": [4.0, 5.0, 6.0, 7.0]} == other.state_dict()
    assert math.isfinite(other.limit)
