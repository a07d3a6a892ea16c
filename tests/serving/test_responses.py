"""Answers are the same whole and in pieces, however the deltas were cut."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysonar.driver.outputs import Acceptance, Delta, FinishReason, Origin, TokenLogprob
from raysonar.serving.generation import Vocabulary
from raysonar.serving.ingress import _events
from raysonar.serving.parsers import TOOL_FORMATS, AnswerFormat
from raysonar.serving.problems import Problem, ProblemError
from raysonar.serving.protocol import ChatBody, CompletionBody
from raysonar.serving.responses import Answer, ChatAnswer, CompletionAnswer

VOCABULARY = Vocabulary([bytes([byte]) for byte in range(256)])
TEXT = "Grüße, 東京 🙂!"
PROMPT = "né"
ORIGINS: tuple[Origin, ...] = ("plain", "accepted", "bonus", "recovered", "accepted")


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -token / 100, {65: -0.5, 66: float("-inf")})


def origins_of(tokens: int) -> list[Origin]:
    """Those that `deltas_of` gives so many tokens."""
    return [ORIGINS[place % len(ORIGINS)] for place in range(tokens)]


def deltas_of(
    n: int, cuts: list[int], logprobs: bool, text: str = TEXT, prompt: str = PROMPT, reason: FinishReason = "length"
) -> list[tuple[int, Delta]]:
    """A text as byte tokens, cut in pieces of `cuts` tokens; text that would end inside a character is held back."""
    tokens, news, start, told, first = list(text.encode()), [], 0, 0, True
    for cut in [*cuts, len(tokens)]:
        end = min(start + cut, len(tokens))
        texts = [bytes(tokens[:at]).decode("utf-8", "ignore") for at in range(start, end + 1)]
        known = texts[-1]
        last = end == len(tokens)
        for index in range(n):
            delta = Delta(
                index,
                known[told:],
                tokens[start:end],
                [logprob(token) for token in tokens[start:end]] if logprobs else None,
                reason if last else None,
                None,
                list(prompt.encode()) if first else None,
                [None, *map(logprob, prompt.encode()[1:])] if first and logprobs else None,
                1 if first else 0,
                Acceptance((3, 2), (2, 1)) if last else None,
                origins=origins_of(len(tokens))[start:end],
                lengths=[len(after) - len(before) for before, after in itertools.pairwise(texts)],
            )
            first = False
            news.append((0, delta))
        start, told = end, len(known)
        if last:
            return news
    raise AssertionError


def streamed(answer: Answer, news: list[tuple[int, Delta]], together: int) -> list[dict[str, Any]]:
    """The stream's objects, checked for framing."""
    batches = [news[at : at + together] for at in range(0, len(news), together)]
    data = answer.opening() + b"".join(map(answer.events, batches)) + answer.closing()
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def chat_body(**options: Any) -> ChatBody:
    return ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **options})


def completion_body(**options: Any) -> CompletionBody:
    return CompletionBody.model_validate({"model": "m", "prompt": PROMPT, **options})


cuttings = st.lists(st.integers(1, 6), max_size=8)


@given(n=st.integers(1, 3), cuts=cuttings, together=st.integers(1, 5), logprobs=st.booleans())
def test_a_chat_stream_adds_up_to_the_whole_answer(n: int, cuts: list[int], together: int, logprobs: bool):
    options = {"n": n, "logprobs": logprobs}
    whole: Any = ChatAnswer(chat_body(**options), VOCABULARY).whole(deltas_of(n, cuts, logprobs))
    body = chat_body(**options, stream=True, stream_options={"include_usage": True})
    *chunks, usage = streamed(ChatAnswer(body, VOCABULARY), deltas_of(n, cuts, logprobs), together)
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert whole["usage"]["completion_tokens"] == n * len(TEXT.encode())
    assert whole["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 3 * n,
        "rejected_prediction_tokens": 2 * n,
    }
    for index, choice in enumerate(whole["choices"]):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"] == TEXT
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        if logprobs:
            content = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
            assert content == choice["logprobs"]["content"]
            assert [entry["bytes"] for entry in content] == [[byte] for byte in TEXT.encode()]
        else:
            assert choice["logprobs"] is None


@given(
    n=st.integers(1, 3),
    cuts=cuttings,
    together=st.integers(1, 5),
    logprobs=st.sampled_from([None, 2]),
    echo=st.booleans(),
)
def test_a_completion_stream_adds_up_to_the_whole_answer(
    n: int, cuts: list[int], together: int, logprobs: int | None, echo: bool
):
    options = {"n": n, "logprobs": logprobs, "echo": echo}
    news = deltas_of(n, cuts, logprobs is not None)
    whole: Any = CompletionAnswer(completion_body(**options), VOCABULARY).whole(news)
    chunks = streamed(CompletionAnswer(completion_body(**options, stream=True), VOCABULARY), news, together)
    assert not any("usage" in chunk for chunk in chunks)
    text = PROMPT + TEXT if echo else TEXT
    for index, choice in enumerate(whole["choices"]):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"] == text
        assert choice["finish_reason"] == "length"
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        for key, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][key]] == values
            assert len(values) == len(text.encode())
        starts = choice["logprobs"]["text_offset"]
        assert [text[start] for start in starts] == [char for char in text for _ in char.encode()]


@given(cuts=cuttings, together=st.integers(1, 5), echo=st.booleans(), logprobs=st.booleans())
def test_a_streams_events_say_of_each_token_where_it_comes_from(
    cuts: list[int], together: int, echo: bool, logprobs: bool
):
    """An event a token, with the text that the token let out."""
    expected = origins_of(len(TEXT.encode()))
    given = {"return_token_origins": True, "n": 2}
    completion = {**given, "echo": echo, "logprobs": 0 if logprobs else None}
    for answer, whole in (
        (
            ChatAnswer(chat_body(**given, logprobs=logprobs, stream=True), VOCABULARY),
            ChatAnswer(chat_body(**given), VOCABULARY),
        ),
        (
            CompletionAnswer(completion_body(**completion, stream=True), VOCABULARY),
            CompletionAnswer(completion_body(**completion), VOCABULARY),
        ),
    ):
        news = deltas_of(2, cuts, logprobs)
        chunks, all_of_it = streamed(answer, news, together), whole.whole(news)
        for index in (0, 1):
            choice: Any = all_of_it["choices"][index]  # type: ignore[index]
            assert choice["token_origins"] == expected
            parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
            told = [part for part in parts if part.get("token_origins")]
            assert [part["token_origins"] for part in told] == [[origin] for origin in expected]
            texts = [part["text"] if "text" in part else part["delta"].get("content", "") for part in told]
            assert texts == [part for char in TEXT for part in [""] * (len(char.encode()) - 1) + [char]]
            if logprobs:
                assert all(part["logprobs"] for part in told)


def test_an_echo_reaches_every_choice_of_its_own_prompt():
    body = completion_body(prompt=[list(b"one"), list(b"two")], n=2, echo=True)
    deltas = [
        (prompt, Delta(index, "!", [33], finish_reason="stop", prompt_token_ids=[1] if index == 0 else None))
        for prompt in (1, 0)
        for index in (0, 1)
    ]
    whole: Any = CompletionAnswer(body, VOCABULARY).whole(deltas)
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [
        (0, "one!"),
        (1, "one!"),
        (2, "two!"),
        (3, "two!"),
    ]


def test_infinite_logprobs_are_json():
    whole = ChatAnswer(chat_body(logprobs=True, top_logprobs=2), VOCABULARY).whole(deltas_of(1, [], True))
    assert "Infinity" not in json.dumps(whole)
    entry = json.loads(json.dumps(whole))["choices"][0]["logprobs"]["content"][0]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -9999.0]


def test_a_token_that_is_no_whole_character_keeps_its_bytes_apart():
    whole: Any = CompletionAnswer(completion_body(logprobs=0), VOCABULARY).whole(deltas_of(1, [], True))
    assert whole["choices"][0]["logprobs"]["tokens"][2:4] == ["bytes:\\xc3", "bytes:\\xbc"]


@pytest.mark.parametrize("error", [ProblemError(Problem(503, "gone", "server_error")), RuntimeError("inside")])
def test_an_error_amid_a_stream_is_its_last_event(error: Exception):
    first, *rest = deltas_of(1, [3, 3], False)

    async def batches() -> AsyncGenerator[list[tuple[int, Delta]]]:
        yield rest[:1]
        raise error

    async def chunks() -> list[bytes]:
        return [chunk async for chunk in _events(ChatAnswer(chat_body(stream=True), None), [first], batches())]

    *_, last = asyncio.run(chunks())
    body = json.loads(last.decode().removeprefix("data: "))
    assert body["error"]["type"] == "server_error"
    assert "inside" not in last.decode()


FORMATTED = (
    'Hm, é? </think>So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "🙂"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


@given(cuts=st.lists(st.integers(1, 30), max_size=20), together=st.integers(1, 5), reasoning=st.booleans())
def test_tokens_of_reasoning_calls_and_marks_come_from_somewhere_too(cuts: list[int], together: int, reasoning: bool):
    """Also those whose text nobody sees."""
    form = AnswerFormat(TOOL_FORMATS["deepseek_v3.1"], reasons=True)
    news = deltas_of(1, cuts, False, text=FORMATTED, prompt="x<think>\n", reason="stop")
    tools = [{"type": "function", "function": {"name": "f"}}]
    options = {"return_token_origins": True, "tools": tools, "include_reasoning": reasoning}
    chunks = streamed(ChatAnswer(chat_body(**options, stream=True), VOCABULARY, form), news, together)
    whole: Any = ChatAnswer(chat_body(**options), VOCABULARY, form).whole(news)
    told = [chunk["choices"][0].get("token_origins", []) for chunk in chunks]
    assert max(map(len, told)) == 1
    expected = origins_of(len(FORMATTED.encode()))
    assert [each for origins in told for each in origins] == whole["choices"][0]["token_origins"] == expected


@given(n=st.integers(1, 3), cuts=st.lists(st.integers(1, 30), max_size=20), together=st.integers(1, 5))
def test_calls_and_reasoning_of_a_stream_add_up_to_the_whole_answer(n: int, cuts: list[int], together: int):
    """However the deltas were cut; every choice has its own calls, and every token its log-probability once."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    form = AnswerFormat(TOOL_FORMATS["deepseek_v3.1"], reasons=True)
    news = deltas_of(n, cuts, True, text=FORMATTED, prompt="x<think>\n", reason="stop")
    options = {"n": n, "logprobs": True, "tools": tools}
    whole: Any = ChatAnswer(chat_body(**options), VOCABULARY, form).whole(news)
    body = chat_body(**options, stream=True, stream_options={"include_usage": True})
    *chunks, usage = streamed(ChatAnswer(body, VOCABULARY, form), news, together)
    assert usage["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == n * len("Hm, é? </think>".encode())
    ids = set()
    for choice in whole["choices"]:
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm, é? ", "So:")
        assert [call["function"] for call in message["tool_calls"]] == [
            {"name": "f", "arguments": '{"a": "🙂"}'},
            {"name": "g", "arguments": "{}"},
        ]
        ids |= {call["id"] for call in message["tool_calls"]}
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        deltas = [part["delta"] for part in parts]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, é? "
        assert "".join(delta.get("content", "") for delta in deltas) == "So:"
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        for index, call in enumerate(message["tool_calls"]):
            first, *others = [each for each in calls if each["index"] == index]
            assert first["function"] == {"name": call["function"]["name"], "arguments": ""}
            assert "".join(each["function"]["arguments"] for each in others) == call["function"]["arguments"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["tool_calls"]
        content = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]
        assert len(content) == len(FORMATTED.encode())
    assert len(ids) == 2 * n
