"""A histogram says of every bucket what Prometheus would."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysonar.observe.histogram import Histogram

BOUNDS = (0.5, 1.0, 4.0)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 0.7, 1.0, 3.0, 4.0, 9.0]), st.integers(0, 5))))
def test_each_bucket_holds_the_values_up_to_its_bound(observed: list[tuple[float, int]]):
    histogram = Histogram(BOUNDS)
    for value, times in observed:
        histogram.observe(value, times)
    values = [value for value, times in observed for _ in range(times)]
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))
    expected = [sum(value <= bound for value in values) for bound in (*BOUNDS, float("inf"))]
    assert [count for _, count in histogram.cumulative()] == expected
    assert [end for end, _ in histogram.cumulative()] == ["0.5", "1.0", "4.0", "+Inf"]


def test_a_copy_does_not_grow_with_the_original():
    histogram = Histogram(BOUNDS)
    histogram.observe(1.0)
    copy = histogram.copy()
    histogram.observe(1.0)
    assert (copy.count, histogram.count) == (1, 2)
