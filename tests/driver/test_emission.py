"""What one answer gives out, step by step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_rank import rank_info
from support.planning import limits_of

from raysonar.driver.emission import Emitter, ResultLogprobs
from raysonar.driver.outputs import Acceptance, Delta, TokenLogprob, origins_of
from raysonar.driver.params import SamplingParams
from raysonar.driver.request import make_request
from raysonar.step import StepResult

EOS = frozenset({1})


class Letters:
    """Token 4 is "a", 5 is "b" and so on."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + token - 4) for token in ids if token >= 4)


def answer_of(prompt=(4, 5, 6, 7, 8), **params):
    limits = limits_of(rank_info(vocab=30))
    values = SamplingParams(**{"temperature": 0, "max_tokens": 6, **params})
    request = make_request(
        request_id="a", prompt=None, prompt_token_ids=list(prompt), params=values, limits=limits, sink=print
    )
    return request.answers[0]


@pytest.mark.parametrize("cuts", [[7], [1] * 7, [2, 5], [3, 4], [6, 1]])
@pytest.mark.parametrize(
    ("params", "tokens", "text", "count", "reason"),
    [
        ({}, [4, 5, 6, 7, 8, 9, 10], "abcdef", 6, ("length", None)),
        ({}, [4, 5, 1, 7, 8, 9, 10], "ab", 3, ("stop", None)),
        ({"ignore_eos": True}, [4, 5, 1, 7, 8, 9, 10], "abdef", 6, ("length", None)),
        ({"stop_token_ids": [6]}, [4, 5, 6, 7, 8, 9, 10], "ab", 3, ("stop", 6)),
        ({"stop_token_ids": [1], "ignore_eos": True}, [4, 5, 1, 7, 8, 9, 10], "ab", 3, ("stop", 1)),
        ({"stop": "cd"}, [4, 5, 6, 7, 8, 9, 10], "ab", 4, ("stop", "cd")),
        ({"stop": "cd", "include_stop_str_in_output": True}, [4, 5, 6, 7, 8, 9, 10], "abcd", 4, ("stop", "cd")),
        ({"stop": "fz"}, [4, 5, 6, 7, 8, 9, 10], "abcdef", 6, ("length", None)),
        ({"stop": "f"}, [4, 5, 6, 7, 8, 9, 10], "abcde", 6, ("stop", "f")),
        ({"stop": "bz"}, [4, 5, 1, 7, 8, 9, 10], "ab", 3, ("stop", None)),
        ({"stop": "c", "min_tokens": 4}, [4, 5, 6, 7, 6, 9, 10], "abcd", 5, ("stop", "c")),
        ({"stop": "d", "min_tokens": 4}, [4, 5, 6, 7, 8, 9, 10], "abc", 4, ("stop", "d")),
    ],
)
def test_how_a_run_of_tokens_is_cut_into_steps_does_not_matter(cuts, params, tokens, text, count, reason):
    emitter, said, ids, logprobs, last = Emitter(answer_of(**params), Letters(), EOS), "", [], [], None
    for size in cuts:
        run, tokens = tokens[:size], tokens[size:]
        last = emitter.advance(run, [TokenLogprob(token, -1.0) for token in run])
        said, ids, logprobs = said + last.text, ids + last.token_ids, logprobs + last.logprobs
        if last.finish_reason is not None:
            break
    assert (said, len(ids), last.finish_reason, last.stop_reason) == (text, count, *reason)
    assert [each.token_id for each in logprobs] == ids


def test_an_abort_lets_go_of_text_that_was_held_back():
    emitter = Emitter(answer_of(stop="abz"), Letters(), EOS)
    assert emitter.advance([4, 5], None).text == ""
    last = emitter.abort()
    assert (last.text, last.token_ids, last.finish_reason) == ("ab", [], "abort")


@pytest.mark.parametrize(
    ("tokens", "drafts", "origins"),
    [
        (1, 0, ["plain"]),
        (1, 1, ["recovered"]),
        (2, 1, ["accepted", "bonus"]),
        (2, 3, ["accepted", "recovered"]),
        (4, 3, ["accepted", "accepted", "accepted", "bonus"]),
    ],
)
def test_where_a_steps_tokens_come_from(tokens, drafts, origins):
    assert origins_of(tokens, drafts) == origins


def test_origins_end_with_the_token_that_ends_the_answer():
    delta = Emitter(answer_of(), Letters(), EOS).advance([4, 1, 6, 7], None, 3)
    assert (delta.token_ids, delta.origins, delta.lengths) == ([4, 1], ["accepted", "accepted"], [1, 0])


STEPS = st.lists(st.tuples(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(0, 3)), max_size=6)


@given(steps=STEPS, stop=st.sampled_from([(), ("ab",), ("d", "cde")]), logprobs=st.booleans())
def test_token_by_token_a_delta_says_the_same(steps, stop, logprobs):
    emitter = Emitter(answer_of(stop=stop, max_tokens=20), Letters(), EOS)
    for tokens, drafts in steps:
        scored = [TokenLogprob(token, -1.0 - token) for token in tokens] if logprobs else None
        delta = emitter.advance(tokens, scored, max(drafts, len(tokens) - 1))
        parts = list(delta.by_token())
        assert all(len(part.token_ids) == len(part.origins) == 1 for part in parts)
        assert "".join(part.text for part in parts) == delta.text
        for name in ("token_ids", "origins", "lengths", *(["logprobs"] if logprobs else [])):
            assert [each for part in parts for each in getattr(part, name)] == getattr(delta, name)
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [delta.finish_reason]
        assert parts[-1].stop_reason == delta.stop_reason
        if delta.finish_reason is not None:
            break


def test_what_is_on_a_requests_first_or_last_delta_stays_there():
    delta = Delta(0, "ab", [4, 5], None, "stop", None, [7], [None], 3, Acceptance((1,), (1,)), None, [], [1, 1])
    first, last = delta.by_token()
    assert (first.prompt_token_ids, first.prompt_logprobs, first.cached_tokens, first.acceptance) == (
        [7],
        [None],
        3,
        None,
    )
    assert (last.prompt_token_ids, last.prompt_logprobs, last.cached_tokens) == (None, None, 0)
    assert (last.acceptance, last.finish_reason) == (Acceptance((1,), (1,)), "stop")
    alone = Delta(0, "", [], finish_reason="abort")
    assert list(alone.by_token()) == [alone]


def prompt_result(counts, values):
    return ResultLogprobs(
        StepResult(
            prompt_count=np.array(counts, np.int32),
            prompt_logprob=np.array(values, np.float32),
            prompt_top_token=np.zeros((len(values), 0), np.int32),
            prompt_top_logprob=np.zeros((len(values), 0), np.float32),
        )
    )


def test_a_prompt_computed_again_after_preemption_adds_only_what_is_missing():
    answer = answer_of(prompt_logprobs=0)
    prompt_result([0, 2], [-1, -2]).of_prompt(1, 0, answer)
    assert [each and each.logprob for each in answer.prompt_logprobs] == [None, -1, -2]
    prompt_result([3, 1], [-9, -9, -3, 0]).of_prompt(0, 0, answer)
    prompt_result([1], [-4]).of_prompt(0, 3, answer)
    assert [each and each.logprob for each in answer.prompt_logprobs] == [None, -1, -2, -3, -4]
    assert [each and each.token_id for each in answer.prompt_logprobs] == [None, 5, 6, 7, 8]
    assert not answer.awaits_prompt_logprobs
