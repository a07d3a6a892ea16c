"""Requests are checked before they are queued; what the rank is told of them is what was asked."""

import numpy as np
import pytest

from raysonar.driver.params import SamplingParams
from raysonar.driver.request import Limits, make_request
from raysonar.errors import InvalidRequestError
from raysonar.step import Rule

LIMITS = Limits(vocab=50, max_model_len=20, pages=8, page_size=4, eos_token_ids=frozenset({1}))
SMALL_CACHE = Limits(vocab=50, max_model_len=20, pages=3, page_size=4, eos_token_ids=frozenset({1}))


def request(prompt, limits=LIMITS, **params):
    return make_request(
        request_id="a",
        prompt=None,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        limits=limits,
        sink=lambda _: None,
    )


@pytest.mark.parametrize(
    ("prompt", "limits", "params", "field", "words"),
    [
        ([], LIMITS, {}, "prompt", "the prompt is empty"),
        ([3, 50], LIMITS, {}, "prompt", "token id 50; the model's ids go from 0 to 49"),
        ([-1], LIMITS, {}, "prompt", "token id -1"),
        ([1.5], LIMITS, {}, "prompt", "must hold token ids, got 1.5"),
        ([True], LIMITS, {}, "prompt", "must hold token ids, got True"),
        ([3], LIMITS, {"stop_token_ids": [50]}, "stop_token_ids", "token id 50"),
        ([3], LIMITS, {"logit_bias": {50: 1}}, "logit_bias", "token id 50"),
        ([3], LIMITS, {"logprobs": 51}, "logprobs", "logprobs is 51, the vocabulary has 50 tokens"),
        ([3], LIMITS, {"prompt_logprobs": 51}, "prompt_logprobs", "51"),
        ([3] * 20, LIMITS, {}, "prompt", "the prompt has 20 tokens, the model takes 20 of prompt and answer together"),
        ([3] * 5, LIMITS, {"max_tokens": 16}, "max_tokens", "5 tokens and max_tokens is 16, 21 in all; the model ta"),
        ([3] * 13, SMALL_CACHE, {}, "prompt", r"the KV cache \(3 pages of 4\) holds 13 of prompt and answer together"),
        ([3] * 5, SMALL_CACHE, {"max_tokens": 9}, "max_tokens", r"14 in all; the KV cache \(3 pages of 4\) holds 13"),
    ],
)
def test_what_can_never_be_honoured_is_refused(prompt, limits, params, field, words):
    with pytest.raises(InvalidRequestError, match=words) as refused:
        request(prompt, limits, **params)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("length", "limits", "params", "limit"),
    [
        (19, LIMITS, {}, 20),
        (5, LIMITS, {"max_tokens": 15}, 20),
        (5, LIMITS, {"max_tokens": 3}, 8),
        (5, LIMITS, {}, 20),
        (12, SMALL_CACHE, {}, 13),
    ],
)
def test_the_longest_that_fits_is_taken(length, limits, params, limit):
    assert request(np.full(length, 3, np.int32), limits, **params).answers[0].limit == limit


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ({"temperature": 0}, Rule.GREEDY),
        ({"temperature": 0, "seed": 3}, Rule.GREEDY),
        ({"seed": 3}, Rule.COUPLED),
        ({}, Rule.REJECTION),
    ],
)
def test_the_rule_follows_temperature_and_seed(params, rule):
    record = request([3], **params).answers[0].sampling()
    assert record["rule"] == rule
    assert record["temperature"] == 1


def test_seeded_answers_have_seeds_of_their_own():
    assert [answer.seed for answer in request([3], seed=2**63 - 1, n=3).answers] == [2**63 - 1, -(2**63), 1 - 2**63]
    unseeded = {request([3]).answers[0].seed for _ in range(20)}
    assert len(unseeded) == 20
    assert min(unseeded) >= 0


def test_parameters_reach_the_rank():
    params = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "logprobs": 2,
        "prompt_logprobs": 1,
    }
    record = request([3, 4], min_tokens=5, **params).answers[0].sampling()
    assert {name: record[name].item() for name in params} == params
    assert (record["prompt_tokens"], record["min_length"]) == (2, 7)
    assert request([3, 4]).answers[0].sampling()["min_length"] == 0


@pytest.mark.parametrize(
    ("params", "banned"),
    [
        ({}, ()),
        ({"stop_token_ids": [7]}, ()),
        ({"min_tokens": 2}, (1,)),
        ({"min_tokens": 2, "stop_token_ids": [7, 3]}, (1, 3, 7)),
        ({"min_tokens": 2, "stop_token_ids": [7], "ignore_eos": True}, (7,)),
        ({"min_tokens": 2, "ignore_eos": True}, ()),
    ],
)
def test_tokens_that_would_end_an_answer_are_banned_before_min_tokens(params, banned):
    assert request([3], **params).banned == banned


def test_only_the_first_answer_computes_prompt_log_probabilities():
    first, second = request([3, 4], n=2, prompt_logprobs=2).answers
    assert (first.sampling()["prompt_logprobs"], second.sampling()["prompt_logprobs"]) == (2, -1)
