"""OpenAI's own client, unchanged, against the service: what it returns is what the engine says in this process."""

import math

import openai
import pytest
from support.service import MODEL, Service

from raysonar import Engine, SamplingParams

PROMPT = "The capital of Peru is"
MESSAGES = [{"role": "user", "content": "What is the capital of Norway?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def chat_tokens(engine: Engine) -> list[int]:
    return engine.tokenizer.render_chat(MESSAGES)


def test_the_model_is_listed_and_found(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_completion_equals_the_engines(client: openai.OpenAI, engine: Engine):
    expected = engine.generate(PROMPT, GREEDY)[0]
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=24, extra_body={"ignore_eos": True}
    )
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, "length")
    assert answer.choices[0].logprobs is None
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(expected.prompt_token_ids), 24)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    assert details is not None
    drafted, accepted = sum(expected.acceptance.drafted), sum(expected.acceptance.accepted)
    assert drafted > 0
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (accepted, drafted - accepted)


def test_completions_stop_after_16_tokens_unless_told_otherwise(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, seed=1, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_streamed_completion_is_the_whole_one_in_pieces(client: openai.OpenAI, engine: Engine):
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    *chunks, last = stream
    assert len(chunks) > 3
    assert "".join(chunk.choices[0].text for chunk in chunks) == engine.generate(PROMPT, GREEDY)[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk.id for chunk in chunks} == {last.id}
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 24


def test_a_chat_answer_equals_the_engines(client: openai.OpenAI, engine: Engine):
    expected = engine.generate(chat_tokens(engine), GREEDY)[0]
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=24, extra_body={"ignore_eos": True}
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(chat_tokens(engine))


def test_a_streamed_chat_answer_starts_with_the_role(client: openai.OpenAI, engine: Engine):
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24, stream=True, extra_body={"ignore_eos": True}
    )
    first, *chunks = list(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert first.object == "chat.completion.chunk"
    assert all(chunk.choices[0].delta.role is None and chunk.usage is None for chunk in chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == engine.generate(chat_tokens(engine), GREEDY)[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_chat_answer_runs_to_the_models_length_unless_it_ends(client: openai.OpenAI, engine: Engine):
    long = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}, timeout=120
    )
    assert long.usage is not None
    assert long.usage.total_tokens == engine.info.max_model_len
    assert long.choices[0].finish_reason == "length"


def test_n_choices_differ_by_their_seed_and_repeat_with_it(client: openai.OpenAI, engine: Engine):
    params = SamplingParams(n=2, seed=11, max_tokens=12, ignore_eos=True)
    expected = [each.text for each in engine.generate(PROMPT, params)[0].completions]
    assert expected[0] != expected[1]
    whole = client.completions.create(
        model=MODEL, prompt=PROMPT, n=2, seed=11, max_tokens=12, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in whole.choices] == expected
    assert [choice.index for choice in whole.choices] == [0, 1]
    streamed = ["", ""]
    for chunk in client.completions.create(
        model=MODEL, prompt=PROMPT, n=2, seed=11, max_tokens=12, stream=True, extra_body={"ignore_eos": True}
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == expected


def test_prompts_of_every_shape_give_their_own_choices(client: openai.OpenAI, engine: Engine):
    tokens = [engine.tokenizer.encode(text) for text in (PROMPT, "Name three rivers:")]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = [result.text for result in engine.generate(tokens, greedy)]
    assert expected[0] != expected[1]
    for prompt in (tokens, [PROMPT, "Name three rivers:"]):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=6, extra_body={"ignore_eos": True}
        )
        assert [choice.text for choice in answer.choices] == expected
    answer = client.completions.create(
        model=MODEL, prompt=tokens[0], temperature=0, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in answer.choices] == expected[:1]


def test_chat_logprobs(client: openai.OpenAI, engine: Engine):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    expected = engine.generate(chat_tokens(engine), params)[0]
    assert expected.logprobs is not None
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
    for got, want in zip(logprobs.content, expected.logprobs, strict=True):
        assert bytes(got.bytes or []) == engine.tokenizer.token_bytes(want.token_id)
        assert math.isclose(got.logprob, want.logprob, abs_tol=1e-3)
        assert [bytes(top.bytes or []) for top in got.top_logprobs] == [
            engine.tokenizer.token_bytes(token) for token in want.top
        ]
    joined = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert joined.decode("utf-8", "replace") == expected.text


def test_completion_logprobs_with_echo_cover_the_prompt(client: openai.OpenAI, engine: Engine):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    expected = engine.generate(PROMPT, params)[0]
    assert expected.prompt_logprobs is not None
    assert expected.logprobs is not None
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        temperature=0,
        max_tokens=4,
        echo=True,
        logprobs=2,
        extra_body={"ignore_eos": True},
    )
    choice = answer.choices[0]
    assert choice.text == PROMPT + expected.text
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs[0] is None
    wanted = [entry.logprob for entry in [*expected.prompt_logprobs, *expected.logprobs] if entry is not None]
    assert logprobs.token_logprobs[1:] == pytest.approx(wanted, abs=1e-3)
    assert len(logprobs.text_offset) == len(logprobs.tokens or []) == len(logprobs.top_logprobs) == 1 + len(wanted)
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1:])


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, engine: Engine):
    text = engine.generate(PROMPT, GREEDY)[0].text
    stop = text[6:9]
    expected = text[: text.index(stop)]
    whole = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=24, stop=[stop, "~~~"])
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")
    chunks = list(
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=24, stop=stop, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logit_bias_and_stop_token_ids_reach_the_sampler(client: openai.OpenAI, engine: Engine):
    token = engine.tokenizer.encode("a", add_special_tokens=False)[0]
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=5, logit_bias={str(token): 100}
    )
    assert answer.choices[0].text == "aaaaa"
    stopped = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        temperature=0,
        max_tokens=5,
        logit_bias={str(token): 100},
        extra_body={"stop_token_ids": [token]},
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == ""


def test_the_prefix_cache_shows_in_the_usage(client: openai.OpenAI):
    prompt = "Name three rivers: the Nile, the Amazon and the Danube. " * 3
    for _ in range(2):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert 16 <= cached < answer.usage.prompt_tokens


def test_errors_are_openais_exceptions(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt=PROMPT)
    assert (missing.value.status_code, missing.value.code, missing.value.param) == (404, "model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as invalid:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=-1)
    assert (invalid.value.param, invalid.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 600, stream=True)
    assert long.value.param == "prompt"
    assert "600" in long.value.message
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert tools.value.param == "tools"


def test_one_bad_prompt_among_several_refuses_the_request_and_frees_the_rest(client: openai.OpenAI, service: Service):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=[[5, 6], [5] * 600], max_tokens=8)
    assert refused.value.param == "prompt"
    service.wait_until_idle()
