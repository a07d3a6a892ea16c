"""Parsers of answers: however the text is cut, the same comes out, and nothing is lost."""

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raysonar.serving.parsers import (
    CALLS,
    CALLS_END,
    THINK,
    THOUGHT,
    TOOL_FORMATS,
    AnswerParser,
    Part,
    ReasoningParser,
    ReasoningTokens,
    ToolFormatName,
    ToolParser,
    tool_format_of,
)

FORMATS = sorted(TOOL_FORMATS)
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def spell(form: str, name: str, arguments: str) -> str:
    """A call as the model writes it."""
    if form == "deepseek_v3":
        return f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"
    return f"{CALL}{name}{SEPARATOR}{arguments}{CALL_END}"


def section(form: str, *calls: tuple[str, str]) -> str:
    between = "\n" if form == "deepseek_v3" else ""
    return CALLS + between.join(spell(form, *call) for call in calls) + CALLS_END


def joined(parts: list[Part]) -> list[Part]:
    """Neighbours of a kind as one part."""
    out: list[Part] = []
    for part in parts:
        if out and out[-1].kind == part.kind and part.kind != "call":
            out[-1] = Part(part.kind, out[-1].text + part.text)
        else:
            out.append(part)
    return out


def parsed(
    form: ToolFormatName | None, pieces: list[str], *, reasons: bool = False, opened: bool = False
) -> list[Part]:
    parser = AnswerParser(
        ReasoningParser(opened=opened) if reasons or opened else None, ToolParser(TOOL_FORMATS[form]) if form else None
    )
    parts = [part for piece in pieces for part in parser.add(piece)] + parser.end()
    assert all(part.text for part in parts)
    return joined(parts)


MARKS = [
    THINK,
    THOUGHT,
    CALLS,
    CALLS_END,
    CALL,
    CALL_END,
    SEPARATOR,
    "function",
    "\n```json\n",
    "\n```",
    "\n",
    "get",
    "{}",
]
texts = st.lists(
    st.sampled_from(MARKS)
    | st.sampled_from(MARKS).flatmap(lambda mark: st.integers(0, len(mark)).map(lambda size: mark[:size]))
    | st.text('a<｜`{" 🙂\n', max_size=6)
    | st.sampled_from([section(form, ("f", '{"a": 1}'), ("g", "{}")) for form in FORMATS])
    | st.sampled_from([spell(form, "get", '{"b": "```"}') for form in FORMATS]),
    max_size=12,
).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=24)))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=400, deadline=None)
@given(form=st.sampled_from([None, *FORMATS]), cut=cut_texts(), reasons=st.booleans(), opened=st.booleans())
@example("deepseek_v3", (CALLS + "\n", [CALLS, "\n"]), False, False)
def test_cuts_change_nothing(form: ToolFormatName | None, cut: tuple[str, list[str]], reasons: bool, opened: bool):
    text, pieces = cut
    whole = parsed(form, [text], reasons=reasons, opened=opened)
    assert parsed(form, pieces, reasons=reasons, opened=opened) == whole
    assert parsed(form, list(text), reasons=reasons, opened=opened) == whole


@settings(max_examples=400, deadline=None)
@given(form=st.sampled_from(FORMATS), text=texts, opened=st.booleans())
def test_nothing_is_lost(form: ToolFormatName, text: str, opened: bool):
    """Whatever the model writes, its words are all in some part, in their order; only marks and spaces may go."""
    marks = "|".join(re.escape(mark) for mark in [*MARKS[:7], "function", "```json", "```"])
    words = re.sub(rf"{marks}|\s", "", text)
    parts = parsed(form, [text], opened=opened)
    assert re.sub(rf"{marks}|\s", "", "".join(part.text for part in parts)) == words


@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_text_without_a_whole_call_comes_as_it_is(text: str):
    for form in FORMATS:
        parts = parsed(form, [text])
        if not any(part.kind == "call" for part in parts):
            assert "".join(part.text for part in parts) == text
            assert {part.kind for part in parts} <= {"content"}


names = st.text("abcXYZ019_-.", min_size=1, max_size=64)
arguments = st.dictionaries(st.text(max_size=4), st.text(max_size=8) | st.integers(), max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)


@settings(max_examples=200, deadline=None)
@given(
    form=st.sampled_from(FORMATS),
    calls=st.lists(st.tuples(names, arguments), min_size=1, max_size=3),
    before=st.text("ab \n🙂", max_size=8),
    after=st.sampled_from(["", "done"]),
)
def test_calls_come_with_their_names_and_arguments(
    form: ToolFormatName, calls: list[tuple[str, str]], before: str, after: str
):
    expected = [Part("content", before)] if before else []
    for name, text in calls:
        expected += [Part("call", name), Part("arguments", text)]
    expected += [Part("content", after)] if after else []
    assert parsed(form, list(before + section(form, *calls) + after)) == expected


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "broken",
    [
        f"{CALLS}",
        f"{CALLS}{CALLS_END}",
        f"{CALLS}{CALL}",
        f"{CALLS}hello",
        f"{CALLS}{CALL}function{CALL_END}{CALLS_END}",
        f"{CALLS}{CALL}two words{SEPARATOR}{{}}{CALL_END}",
        f"{CALLS}{CALL}{'x' * 200}",
        f"{CALLS_END}{CALL}{CALL_END}",
        f"{CALLS[:-1]}",
    ],
)
def test_a_malformed_section_is_content_with_its_marks(form: ToolFormatName, broken: str):
    assert parsed(form, ["so: ", broken]) == [Part("content", "so: " + broken)]


@pytest.mark.parametrize("form", FORMATS)
def test_a_name_that_never_ends_is_not_waited_for(form: ToolFormatName):
    parser = ToolParser(TOOL_FORMATS[form])
    assert parser.add(CALLS + TOOL_FORMATS[form].before_name + "x" * 100) == []
    assert joined(parser.add("y" * 100))[0].text.endswith("y" * 100)


@pytest.mark.parametrize("form", FORMATS)
def test_what_follows_a_call_and_is_none_is_content(form: ToolFormatName):
    text = CALLS + spell(form, "f", "{}") + "oops" + CALLS_END
    assert parsed(form, [text]) == [Part("call", "f"), Part("arguments", "{}"), Part("content", "oops" + CALLS_END)]


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_that_is_cut_off_keeps_what_came(form: ToolFormatName):
    text = CALLS + spell(form, "f", '{"a": 1}').removesuffix(CALL_END)[:-1]
    name, rest = parsed(form, [text])
    assert name == Part("call", "f")
    assert rest.kind == "arguments"
    assert rest.text.startswith('{"a": 1')


def test_v3_arguments_may_hold_code_fences_and_lack_their_own():
    text = '{"code": "```json\\n```"}'
    assert parsed("deepseek_v3", [section("deepseek_v3", ("f", text))])[1] == Part("arguments", text)
    bare = f"{CALLS}{CALL}function{SEPARATOR}f\n```json\n{{}}{CALL_END}{CALLS_END}"
    assert parsed("deepseek_v3", [bare]) == [Part("call", "f"), Part("arguments", "{}")]


@settings(max_examples=200, deadline=None)
@given(form=st.sampled_from(FORMATS), data=st.data())
def test_marks_in_strings_of_arguments_that_are_sure_to_be_json_are_no_marks(form: ToolFormatName, data: st.DataObject):
    odd = st.lists(st.sampled_from([*MARKS, "```" + CALL_END, '"', "\\", "a"]), max_size=6).map("".join)
    values = [json.dumps({data.draw(odd): data.draw(odd)}, ensure_ascii=False) for _ in range(2)]
    text = section(form, ("f", values[0]), ("g", values[1]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=24)))
    parser = ToolParser(TOOL_FORMATS[form], held=True)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parts = [part for piece in pieces for part in parser.add(piece)] + parser.end()
    expected = [("call", "f"), ("arguments", values[0]), ("call", "g"), ("arguments", values[1])]
    assert joined(parts) == [Part(*part) for part in expected]


def test_a_name_comes_as_soon_as_it_is_whole_and_arguments_as_they_come():
    parser = ToolParser(TOOL_FORMATS["deepseek_v3.1"])
    assert parser.add(f"{CALLS}{CALL}f{SEPARATOR}") == [Part("call", "f")]
    assert parser.add('{"a"') == [Part("arguments", '{"a"')]
    assert parser.add(": 1}" + CALL_END[:3]) == [Part("arguments", ": 1}")]
    assert parser.add(CALL_END[3:]) == []


@pytest.mark.parametrize(
    ("opened", "text", "expected"),
    [
        (False, "<think>\nhm\n</think>\n\nyes", [("reasoning", "\nhm\n"), ("content", "\n\nyes")]),
        (False, " \n<think>hm</think>yes", [("reasoning", "hm"), ("content", "yes")]),
        (True, "hm</think>yes", [("reasoning", "hm"), ("content", "yes")]),
        (True, "hm", [("reasoning", "hm")]),
        (True, "</think>yes", [("content", "yes")]),
        (False, "yes <think>no</think>", [("content", "yes <think>no</think>")]),
        (False, "yes</think>", [("content", "yes</think>")]),
        (False, "<thin", [("content", "<thin")]),
        (False, "  ", [("content", "  ")]),
        (True, "hm</thin", [("reasoning", "hm</thin")]),
        (True, "a</think>b</think>c", [("reasoning", "a"), ("content", "b</think>c")]),
    ],
)
def test_reasoning(opened: bool, text: str, expected: list[tuple[str, str]]):
    assert parsed(None, list(text), reasons=True, opened=opened) == [Part(*part) for part in expected]


def test_calls_inside_of_reasoning_are_reasoning():
    text = section("deepseek_v3", ("f", "{}"))
    assert parsed("deepseek_v3", [f"<think>{text}</think>{text}"], reasons=True) == [
        Part("reasoning", text),
        Part("call", "f"),
        Part("arguments", "{}"),
    ]


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "é", "<", "\n"]), max_size=12), st.booleans(), st.data()
)
def test_reasoning_tokens_are_those_up_to_its_end(tokens: list[str], opened: bool, data: st.DataObject):
    """Whatever the tokens and the groups they come in; characters of several tokens too."""
    pieces = [
        piece
        for token in tokens
        for piece in ([bytes([b]) for b in token.encode()] if token == "é" else [token.encode()])
    ]
    texts = [token for token in pieces if token.strip()]
    if not opened and texts[:1] != [b"<think>"]:
        expected = 0
    else:
        end = pieces.index(b"</think>") + 1 if b"</think>" in pieces else len(pieces)
        expected = end
    counter, at, count = ReasoningTokens(opened=opened), 0, 0
    while at < len(pieces):
        size = data.draw(st.integers(1, len(pieces) - at))
        count += counter.add(pieces[at : at + size])
        at += size
    assert count == expected


def test_the_format_is_known_by_the_template():
    assert tool_format_of(["{{ messages }}"]) is None
    assert tool_format_of([f"'{CALLS}' + name + '\\n' + '```json'"]) == "deepseek_v3"
    assert tool_format_of([f"'{CALLS}{CALL}' + name + '{SEPARATOR}'"]) == "deepseek_v3.1"
