"""What rows ask for, and how they are read."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from raysonar.batch.place import Place
from raysonar.batch.rows import CHAT, COMPLETIONS, Asking, Request, Row, RowError, Source, format_of, request_of
from raysonar.errors import ConfigurationError

HELLO = [{"role": "user", "content": "hello"}]


def ask(content: object, *, chat: bool = True, **defaults: Any) -> Request:
    return request_of(Row(7, json.dumps(content).encode()), Asking(defaults), chat=chat)


def test_a_row_of_openais_format_is_taken_as_it_is_with_defaults_where_it_says_nothing():
    row = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "x", "top_p": 0.5}}
    assert ask(row) == Request("a", COMPLETIONS, {"prompt": "x", "top_p": 0.5})
    assert ask(row, top_p=0.9, seed=1).body == {"prompt": "x", "top_p": 0.5, "seed": 1}


def test_a_prompt_is_a_message_or_continued_greedily_unless_it_says_otherwise():
    assert ask({"prompt": "hello"}) == Request("row-7", CHAT, {"temperature": 0.0, "messages": HELLO})
    assert ask("hello") == ask({"prompt": "hello"})
    raw = {"temperature": 0.0, "max_tokens": 256, "prompt": "hello"}
    assert ask({"prompt": "hello", "custom_id": "mine"}, chat=False) == Request("mine", COMPLETIONS, raw)
    assert ask({"prompt": [1, 2]}).url == COMPLETIONS
    own = ask({"prompt": "hello", "max_tokens": 5, "temperature": 0.5}, chat=False, max_tokens=9, seed=3)
    assert own.body == {"temperature": 0.5, "max_tokens": 5, "seed": 3, "prompt": "hello"}
    assert ask({"messages": HELLO, "n": 2}).body == {"temperature": 0.0, "messages": HELLO, "n": 2}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "not list"),
        (b"{}", "this one has nothing"),
        (b'{"text": "x"}', "this one has text"),
        (b'{"body": 1}', "body must be an object, not int"),
        (b'{"body": {}, "method": "GET"}', "method must be POST, not 'GET'"),
        (b'{"body": {}, "url": "/v1/embeddings"}', "not '/v1/embeddings'"),
        (b'{"body": {}, "max_tokens": 3}', "max_tokens is unknown"),
    ],
)
def test_a_row_that_asks_for_nothing_is_refused_with_the_reason(line: bytes, reason: str):
    with pytest.raises(RowError, match=re.escape(reason)):
        request_of(Row(0, line), Asking(), chat=True)


def contents(file: Path) -> list[object]:
    source = Source(Place.of(str(file)), format_of(file.name))
    rows = list(source)
    assert [row.index for row in rows] == list(range(len(rows)))
    assert source.fraction == 1.0
    return [request_of(row, Asking(), chat=False).body["prompt"] for row in rows]


def test_json_lines_text_and_parquet_hold_the_same_rows(tmp_path: Path):
    prompts = ["one", "zwei \u2028 drei", "日本"]
    lines = "\n\n".join(json.dumps({"prompt": prompt}) for prompt in prompts)
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines, encoding="utf-8")
    (tmp_path / "a.txt").write_text("\r\n".join(prompts) + "\n", encoding="utf-8", newline="")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    parquet.write_table(pa.table({"prompt": prompts, "seed": [None, 1, 2]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.txt", "a.jsonl.gz", "a.parquet"):
        assert contents(tmp_path / name) == prompts


def test_parquet_rows_may_be_openais_with_the_body_as_a_struct_or_as_json(tmp_path: Path):
    body = {"messages": HELLO, "seed": 3}
    for number, column in enumerate(([body], [json.dumps(body)])):
        file = tmp_path / f"{number}.parquet"
        parquet.write_table(pa.table({"custom_id": ["x"], "body": column}), file)
        [row] = Source(Place.of(str(file)), "parquet")
        assert request_of(row, Asking(), chat=True) == Request("x", CHAT, body)
    parquet.write_table(pa.table({"text": ["x"]}), file)
    with pytest.raises(ConfigurationError, match="no column body, messages or prompt, only text"):
        list(Source(Place.of(str(file)), "parquet"))


def test_the_fingerprint_is_that_of_the_contents(tmp_path: Path):
    first, same, other = tmp_path / "1.txt", tmp_path / "2.txt", tmp_path / "3.txt"
    first.write_text("abc")
    same.write_text("abc")
    other.write_text("abd")
    prints = [Source(Place.of(str(file)), "text").fingerprint() for file in (first, same, other)]
    assert prints[0] == prints[1] != prints[2]


def test_a_line_that_is_too_long_costs_no_memory_and_not_the_rows_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("raysonar.batch.rows._LONGEST_LINE", 64)
    lines = ['{"prompt": "a"}', json.dumps({"prompt": "x" * 500}), '{"prompt": "b"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    rows = list(Source(Place.of(str(tmp_path / "in.jsonl")), "jsonl"))
    assert [row.index for row in rows] == [0, 1, 2]
    assert len(rows[1].content) == 64
    with pytest.raises(RowError, match="longer than 64 bytes"):
        request_of(rows[1], Asking(), chat=True)
    assert request_of(rows[2], Asking(), chat=False).body["prompt"] == "b"


def test_a_name_that_says_nothing_needs_a_format():
    with pytest.raises(ConfigurationError, match="say it with --format"):
        format_of("s3://bucket/rows.v2/part")
