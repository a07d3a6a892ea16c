"""Function calls and reasoning over HTTP, with OpenAI's own client: the model says what each test tells it to."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from support.scripted import TEMPLATES, say
from support.service import Service

V3, V31 = "deepseek_v3", "deepseek_v3.1"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "How it is.", "parameters": {"type": "object", "properties": {}}},
}
KOELN, LIMA = '{"city": "Köln 🙂"}', '{"city": "Lima", "days": [1, 2]}'


class Weather(BaseModel):
    """The weather of a city."""

    city: str


def written(form: str, *calls: tuple[str, str]) -> str:
    """A section of calls as a model of this format writes it."""
    if form == V3:
        spelt = "\n".join(f"{CALL}function{SEPARATOR}{name}\n```json\n{text}\n```{CALL_END}" for name, text in calls)
    else:
        spelt = "".join(f"{CALL}{name}{SEPARATOR}{text}{CALL_END}" for name, text in calls)
    return CALLS + spelt + CALLS_END


@pytest.fixture(scope="module")
def services(start_scripted: Callable[..., Service]) -> dict[str, Service]:
    """One of each format; the marks are special tokens in V3.1's vocabulary, so they have to be asked for."""
    return {
        form: start_scripted(form, (TEMPLATES / f"{form}.jinja").read_text(), special=form == V31) for form in (V3, V31)
    }


@pytest.fixture(params=[V3, V31])
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def client(services: dict[str, Service], form: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{services[form].url}/v1", api_key="any", max_retries=0, timeout=60.0) as client:
        yield client


def ask(client: openai.OpenAI, form: str, text: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": say(text)}]
    return client.chat.completions.create(**{"model": form, "messages": messages, "tools": [WEATHER], **options})


def added_up(stream: Any) -> tuple[dict[int, dict[str, Any]], list[Any]]:
    """Each choice's words, reasoning, calls and finish reason, put together from a stream; and its chunks."""
    chunks = list(stream)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            empty = {"content": "", "reasoning": "", "calls": [], "finish": None}
            said = choices.setdefault(choice.index, empty)
            said["content"] += choice.delta.content or ""
            said["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            said["finish"] = choice.finish_reason or said["finish"]
            for call in choice.delta.tool_calls or []:
                if call.function.name is not None:
                    assert (call.index, call.type) == (len(said["calls"]), "function")
                    assert call.id
                    said["calls"].append([call.function.name, ""])
                assert call.index == len(said["calls"]) - 1
                said["calls"][call.index][1] += call.function.arguments or ""
    return choices, chunks


def calls_of(answer: ChatCompletion) -> list[list[str]]:
    return [[call.function.name, call.function.arguments] for call in answer.choices[0].message.tool_calls or []]


def test_calls_are_found_whole_and_streamed(client: openai.OpenAI, form: str):
    text = "I'll look.\n\n" + written(form, ("weather", KOELN), ("weather", LIMA))
    expected = [["weather", KOELN], ["weather", LIMA]]
    answer = ask(client, form, text)
    assert calls_of(answer) == expected
    assert answer.choices[0].message.content == "I'll look.\n\n"
    assert answer.choices[0].finish_reason == "tool_calls"
    ids = [call.id for call in answer.choices[0].message.tool_calls]
    assert len(set(ids)) == 2
    choices, chunks = added_up(ask(client, form, text, stream=True, n=2))
    said = {"content": "I'll look.\n\n", "reasoning": "", "calls": expected, "finish": "tool_calls"}
    assert choices == {0: said, 1: said}
    pieces = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert all(not call.function.arguments for call in pieces if call.function.name)
    assert len(pieces) > 8, "arguments come in pieces"
    assert answer.usage.completion_tokens > 8


def test_an_answer_of_calls_only_has_no_content(client: openai.OpenAI, form: str):
    message = ask(client, form, written(form, ("weather", "{}"))).choices[0].message
    assert message.content is None
    assert message.tool_calls[0].function.arguments == "{}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_section_comes_as_content(client: openai.OpenAI, form: str, stream: bool):
    text = f"well {CALLS}oops{CALLS_END}"
    if stream:
        choices, _ = added_up(ask(client, form, text, stream=True))
        assert choices[0] == {"content": text, "reasoning": "", "calls": [], "finish": "stop"}
    else:
        choice = ask(client, form, text).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_calls_cut_off_by_the_length_keep_what_came(client: openai.OpenAI, form: str):
    answer = ask(client, form, written(form, ("weather", KOELN)), max_tokens=30 if form == V3 else 16)
    assert answer.choices[0].finish_reason == "length"
    [[name, arguments]] = calls_of(answer)
    assert name == "weather"
    assert KOELN.startswith(arguments.rstrip("\n`"))


def test_without_tools_or_with_none_chosen_nothing_is_looked_for(client: openai.OpenAI, form: str):
    text = written(form, ("weather", "{}"))
    for options in ({"tools": openai.omit}, {"tool_choice": "none"}):
        message = ask(client, form, text, **options, extra_body={"skip_special_tokens": False}).choices[0].message
        assert (message.content, message.tool_calls) == (text, None)


def test_without_parallel_calls_only_the_first_is_passed_on(client: openai.OpenAI, form: str):
    text = written(form, ("weather", KOELN), ("weather", LIMA))
    assert calls_of(ask(client, form, text, parallel_tool_calls=False)) == [["weather", KOELN]]
    choices, _ = added_up(ask(client, form, text, parallel_tool_calls=False, stream=True))
    assert choices[0]["calls"] == [["weather", KOELN]]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"type": "function", "function": {"name": "other"}}, "tools does not have other"),
        ({"type": "function", "name": "weather"}, "must be one of auto, none, required"),
        ({"type": "allowed_tools", "allowed_tools": {}}, "must be one of auto, none, required"),
        ("any", "must be one of auto, none, required"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(client: openai.OpenAI, form: str, choice: object, words: str):
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        ask(client, form, "hi", tool_choice=choice)
    assert refused.value.param == "tool_choice"


def test_a_call_cannot_be_forced_without_functions(client: openai.OpenAI, form: str):
    with pytest.raises(openai.BadRequestError, match="does not have any function") as refused:
        ask(client, form, "hi", tools=openai.omit, tool_choice="required")
    assert refused.value.param == "tool_choice"


def test_a_conversation_goes_on_with_the_tools_answers(client: openai.OpenAI, form: str):
    """The message goes back as the client has it, and the template writes it as the model did."""
    first = ask(client, form, "Looking. " + written(form, ("weather", LIMA))).choices[0].message
    messages = [
        {"role": "user", "content": "How is Lima?"},
        first,
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": say("Sunny.")},
    ]
    answer = client.chat.completions.create(model=form, messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "Sunny."


def test_the_streaming_helper_parses_pydantic_tools(client: openai.OpenAI, form: str):
    text = written(form, ("Weather", KOELN))
    with client.chat.completions.stream(
        model=form,
        messages=[{"role": "user", "content": say(text)}],
        tools=[openai.pydantic_function_tool(Weather)],
        stream_options={"include_usage": True},
    ) as stream:
        events = [event.type for event in stream]
        completion = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in events
    assert "tool_calls.function.arguments.done" in events
    [call] = completion.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Köln 🙂")
    assert completion.usage.completion_tokens > 0


def test_the_parse_helper_parses_pydantic_tools(client: openai.OpenAI, form: str):
    completion = client.chat.completions.parse(
        model=form,
        messages=[{"role": "user", "content": say(written(form, ("Weather", KOELN)))}],
        tools=[openai.pydantic_function_tool(Weather)],
    )
    [call] = completion.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Köln 🙂")
    messages = [
        {"role": "user", "content": "hi"},
        completion.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": say("Sunny.")},
    ]
    answer = client.chat.completions.create(model=form, messages=messages)
    assert answer.choices[0].message.content == "Sunny."


THINKING = {"chat_template_kwargs": {"thinking": True}}


@pytest.mark.parametrize("form", [V31], indirect=True)
@pytest.mark.parametrize("tools", [True, False])
def test_reasoning_comes_apart_from_the_answer(client: openai.OpenAI, form: str, tools: bool):
    calls = written(form, ("weather", LIMA)) if tools else ""
    text = f"\nHm, é?\n</think>\n\nIt is so.{calls}"
    options = {"extra_body": THINKING, "tools": [WEATHER] if tools else openai.omit}
    answer = ask(client, form, text, **options)
    message = answer.choices[0].message
    assert message.reasoning_content == "\nHm, é?\n"
    assert message.content == "\n\nIt is so."
    assert calls_of(answer) == ([["weather", LIMA]] if tools else [])
    usage = answer.usage.completion_tokens_details
    assert 0 < usage.reasoning_tokens < answer.usage.completion_tokens
    stream = ask(client, form, text, **options, stream=True, stream_options={"include_usage": True})
    choices, chunks = added_up(stream)
    assert choices[0]["reasoning"] == message.reasoning_content
    assert choices[0]["content"] == message.content
    assert choices[0]["calls"] == calls_of(answer)
    assert choices[0]["finish"] == answer.choices[0].finish_reason == ("tool_calls" if tools else "stop")
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == usage.reasoning_tokens


@pytest.mark.parametrize("form", [V31], indirect=True)
def test_an_answer_that_opens_its_reasoning_itself(client: openai.OpenAI, form: str):
    message = ask(client, form, "<think>Hm.</think>Yes.").choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    plain = ask(client, form, "Yes.").choices[0].message
    assert (plain.reasoning_content, plain.content) == (None, "Yes.")


@pytest.mark.parametrize("form", [V31], indirect=True)
def test_reasoning_can_be_left_out_but_is_counted(client: openai.OpenAI, form: str):
    answer = ask(client, form, "Hm.</think>Yes.", extra_body={**THINKING, "include_reasoning": False})
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == (None, "Yes.")
    assert answer.usage.completion_tokens_details.reasoning_tokens > 1


@pytest.mark.parametrize("form", [V31], indirect=True)
def test_logprobs_cover_every_token_of_a_parsed_answer(client: openai.OpenAI, form: str):
    text = "Hm.</think>Yes." + written(form, ("weather", LIMA))
    options = {"logprobs": True, "extra_body": THINKING}
    answer = ask(client, form, text, **options)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    assert b"".join(bytes(token.bytes) for token in tokens).decode().startswith(text)
    _, chunks = added_up(ask(client, form, text, **options, stream=True))
    streamed = [
        token for chunk in chunks for choice in chunk.choices if choice.logprobs for token in choice.logprobs.content
    ]
    assert streamed == tokens


@pytest.mark.parametrize("form", [V31], indirect=True)
def test_a_message_that_goes_on_inside_its_reasoning(client: openai.OpenAI, form: str):
    messages = [
        {"role": "user", "content": say("hm.</think>Yes.")},
        {"role": "assistant", "content": "<think>Hm, "},
    ]
    answer = client.chat.completions.create(model=form, messages=messages, extra_body={"continue_final_message": True})
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm.", "Yes.")


def test_tools_are_in_the_prompt_as_they_were_sent(client: openai.OpenAI, form: str, services: dict[str, Service]):
    import httpx

    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
    tokens = httpx.post(f"{services[form].url}/tokenize", json=body).json()["tokens"]
    text = httpx.post(f"{services[form].url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    function = json.dumps(WEATHER["function"]) if form == V3 else "### weather\nDescription: How it is."
    assert function in text
    assert text.endswith("<｜Assistant｜>" + ("</think>" if form == V31 else ""))
