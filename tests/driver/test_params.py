"""SamplingParams refuse what cannot be honoured, naming the field."""

import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysonar.driver.params import SamplingParams
from raysonar.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("logit_bias", {3: 101}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: "much"}),
        ("logit_bias", {"three": 1}),
        ("logit_bias", [3]),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", [5]),
        ("stop", [str(number) for number in range(257)]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [True]),
        ("min_tokens", -1),
        ("max_tokens", 0),
        ("logprobs", 101),
        ("prompt_logprobs", -1),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=name) as refused:
        SamplingParams(**{name: value})
    assert refused.value.field == name


ANYTHING = st.one_of(
    st.integers(), st.integers(-(10**400), 10**400), st.floats(), st.text(), st.none(), st.booleans(), st.binary()
)


@given(
    name=st.sampled_from([field.name for field in fields(SamplingParams)]),
    value=ANYTHING | st.lists(ANYTHING, max_size=2) | st.dictionaries(ANYTHING, ANYTHING, max_size=2),
)
def test_any_value_is_taken_or_refused_by_name(name, value):
    fault = None
    try:
        SamplingParams(**{name: value})
    except InvalidRequestError as refused:
        fault = refused.field
    assert fault in (None, name)


@pytest.mark.parametrize("name", ["n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "max_tokens"])
@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000, math.inf], ids=["large", "low", "huge", "inf"])
def test_numbers_beyond_every_machine_type_are_refused(name, value):
    with pytest.raises(InvalidRequestError, match=f"{name} must be"):
        SamplingParams(**{name: value})


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(InvalidRequestError, match=r"min_tokens \(5\) must not be more than max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_values_are_brought_into_one_form():
    params = SamplingParams(stop="a", stop_token_ids=[7, 3] * 1000, top_k=-1)
    assert (params.stop, params.stop_token_ids, params.top_k) == (("a",), (7, 3), 0)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (1.0, False)])
def test_temperature_zero_is_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy
