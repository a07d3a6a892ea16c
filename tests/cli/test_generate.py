"""`raysonar generate`: what it prints is what the engine says."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_deepseek_v3, make_llama
from support.tokenizers import write_tokenizer

from raysonar import Engine, SamplingParams
from raysonar.cli import main

COMMAND = Path(sys.executable).parent / "raysonar"
TIMEOUT_S = 120
MESSAGE = "What is the capital of Norway?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_deepseek_v3(tmp_path_factory.mktemp("cli") / "tiny", mtp=1)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.from_folder(folder, threads=1, speculative_tokens=2) as engine:
        yield engine


def arguments(folder: Path, *more: str) -> list[str]:
    common = ["--model", str(folder), "--threads", "1", "--max-tokens", "12", "--ignore-eos"]
    return ["generate", *common, "--speculative-tokens", "2", *more]


def params(**changed: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | changed)


def chat(engine: Engine, message: str) -> list[int]:
    return engine.tokenizer.render_chat([{"role": "user", "content": message}])


def test_one_prompts_answer_goes_to_stdout_and_the_figures_to_stderr(
    folder: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments(folder, "--prompt", MESSAGE)) == 0
    printed = capsys.readouterr()
    assert printed.out == engine.generate(chat(engine, MESSAGE), params())[0].text + "\n"
    figures = printed.err.strip().splitlines()[-1]
    assert figures.startswith("[12 tokens in ")
    for words in ("tokens/s", "first token after", "drafts accepted by position: ", "% at 1, ", "% at 2]"):
        assert words in figures


def test_several_answers_come_in_order_under_their_prompts(
    folder: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments(folder, "--prompt", "one", "--prompt", "two")) == 0
    texts = [engine.generate(chat(engine, prompt), params())[0].text for prompt in ("one", "two")]
    assert capsys.readouterr().out == f"> one\n{texts[0]}\n> two\n{texts[1]}\n"


def test_json_is_an_object_a_prompt_and_a_summary(folder: Path, engine: Engine, capsys: pytest.CaptureFixture[str]):
    prompts = [MESSAGE, "Grüße"]
    assert main(arguments(folder, "--json", *(word for prompt in prompts for word in ("--prompt", prompt)))) == 0
    *objects, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    results = [engine.generate(chat(engine, prompt), params())[0] for prompt in prompts]
    for place, (got, want) in enumerate(zip(objects, results, strict=True)):
        assert (got["index"], got["prompt"], got["text"]) == (place, prompts[place], want.text)
        assert (got["token_ids"], got["finish_reason"]) == (want.token_ids, "length")
        assert got["prompt_tokens"] == len(want.prompt_token_ids)
        assert got["acceptance"]["drafted"] == list(want.acceptance.drafted)
        assert got["acceptance"]["accepted"] == list(want.acceptance.accepted)
    figures = summary["summary"]
    assert (figures["prompts"], figures["completion_tokens"]) == (2, 24)
    assert figures["tokens_per_second"] == pytest.approx(24 / figures["seconds"])
    assert 0 < figures["first_token_seconds"] <= figures["seconds"]
    assert figures["acceptance"]["drafted"] == [
        sum(each["acceptance"]["drafted"][place] for each in objects) for place in (0, 1)
    ]


def test_trace_answers_as_generate_does_and_writes_the_trace(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _, *options = arguments(folder, "--prompt", MESSAGE)
    assert main(["generate", *options]) == 0
    answer = capsys.readouterr().out
    file = tmp_path / "trace.json"
    assert main(["trace", "--output", str(file), *options]) == 0
    assert capsys.readouterr().out == answer
    assert {"target", "experts", "accept"} <= {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert main(["trace", "--output", str(tmp_path), *options]) == 2
    assert re.fullmatch(r"raysonar: cannot write the trace: .*Is a directory.*\n", capsys.readouterr().err)


def test_prompts_are_read_from_a_file_or_the_standard_input_a_line_each(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "prompts.txt"
    lines = "\ufeffone\n\n  two  \r\nthr\u2028ee\x0c\n"  # other separators than line feeds are part of a prompt
    file.write_text(lines, encoding="utf-8", newline="")
    assert main(arguments(folder, "--json", "--input", str(file))) == 0
    from_file = capsys.readouterr().out.splitlines()
    monkeypatch.setattr("sys.stdin", io.StringIO(lines, newline=None))
    assert main(arguments(folder, "--json")) == 0
    from_stdin = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["prompt"] for line in from_file[:-1]] == ["one", "  two  ", "thr\u2028ee\x0c"]
    assert from_stdin[:-1] == from_file[:-1]


def test_raw_continues_the_prompt_and_is_what_a_folder_without_a_template_does(
    folder: Path, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    raw = engine.generate(MESSAGE, params())[0].text
    assert raw != engine.generate(chat(engine, MESSAGE), params())[0].text
    assert main(arguments(folder, "--raw", "--prompt", MESSAGE)) == 0
    assert capsys.readouterr().out == raw + "\n"
    plain = make_deepseek_v3(tmp_path / "plain", mtp=1)
    write_tokenizer(plain, template=None)
    assert main(arguments(plain, "--prompt", MESSAGE)) == 0
    assert capsys.readouterr().out == raw + "\n"
    assert main(arguments(plain, "--chat", "--prompt", MESSAGE)) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_sampling_options_reach_the_engine(folder: Path, engine: Engine, capsys: pytest.CaptureFixture[str]):
    options = {
        "temperature": 1.5,
        "seed": 5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    }
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(arguments(folder, "--raw", "--prompt", MESSAGE, *words)) == 0
    expected = engine.generate(MESSAGE, params(**options))[0].text
    assert capsys.readouterr().out == expected + "\n"
    assert expected != engine.generate(MESSAGE, params(temperature=1.5, seed=5))[0].text
    stop = expected[4:6]
    assert main(arguments(folder, "--raw", "--prompt", MESSAGE, *words, "--stop", stop)) == 0
    assert capsys.readouterr().out == expected[: expected.index(stop)] + "\n"


def test_speculation_changes_no_text(folder: Path, capsys: pytest.CaptureFixture[str]):
    outputs = set()
    for tokens in ("0", "1", "4"):
        assert main([*arguments(folder, "--prompt", MESSAGE), "--speculative-tokens", tokens]) == 0
        outputs.add(capsys.readouterr().out)
    assert len(outputs) == 1


def test_a_draft_model_changes_no_text(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(arguments(folder, "--prompt", MESSAGE)) == 0
    with_module = capsys.readouterr().out
    drafting = ["--draft-model", str(make_llama(tmp_path / "draft")), "--speculative-tokens", "5"]
    assert main([*arguments(folder, "--prompt", MESSAGE), *drafting]) == 0
    printed = capsys.readouterr()
    assert printed.out == with_module
    assert len(re.findall(r"\d%", printed.err.partition("by position")[2])) == 5


@pytest.mark.usefixtures("ray_cluster")
def test_a_group_of_ranks_changes_no_text(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(arguments(folder, "--prompt", MESSAGE)) == 0
    alone = capsys.readouterr().out
    layout = ["--tensor-parallel", "2", "--data-parallel", "2", "--micro-batching", "always"]
    assert main(arguments(folder, "--prompt", MESSAGE, *layout)) == 0
    assert capsys.readouterr().out == alone


def test_a_group_that_starts_ray_by_itself_ends_it_too(folder: Path):
    """In a process of its own: no other test's Ray is there."""
    words = [*arguments(folder, "--prompt", "hi"), "--data-parallel", "2", "--micro-batching", "never"]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stderr
    assert "GCS" not in done.stderr


def test_speculation_is_one_token_where_there_is_an_mtp_module_and_none_where_there_is_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    common = ["--prompt", "hi", "--max-tokens", "12", "--ignore-eos"]
    assert main(["generate", "--model", str(folder), *common, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])["summary"]
    assert len(summary["acceptance"]["drafted"]) == 1
    llama = make_llama(tmp_path / "llama")
    assert main(["generate", "--model", str(llama), *common]) == 0
    assert "drafts accepted by position: none were made" in capsys.readouterr().err


def test_speculation_that_was_asked_of_a_model_without_an_mtp_module_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    llama = make_llama(tmp_path / "llama")
    assert main(arguments(llama, "--prompt", "hi")) == 2
    assert f"raysonar: speculation.tokens: {llama} has no MTP module" in capsys.readouterr().err


def finish(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The one answer of a command without --max-tokens."""
    assert main(["generate", "--model", str(folder), "--json", "--ignore-eos", *words]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[0])


def test_a_chats_answer_runs_until_it_ends_or_the_models_length_is_reached(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    answer = finish(folder, capsys, "--prompt", "hi", "--max-model-len", "400")
    assert answer["finish_reason"] == "length"
    assert answer["prompt_tokens"] + len(answer["token_ids"]) == 400
    free = ["generate", "--model", str(folder), "--json", "--temperature", "2", "--seed", "3", "--prompt", "hi"]
    assert main(free) == 0
    ended = json.loads(capsys.readouterr().out.splitlines()[0])
    assert ended["finish_reason"] == "stop"
    assert ended["prompt_tokens"] + len(ended["token_ids"]) < 512


def test_a_raw_prompt_is_continued_for_256_tokens_or_up_to_the_models_length(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert len(finish(folder, capsys, "--raw", "--prompt", "hi")["token_ids"]) == 256
    clipped = finish(folder, capsys, "--raw", "--prompt", "hi", "--max-model-len", "100")
    assert clipped["prompt_tokens"] + len(clipped["token_ids"]) == 100
    words = ["generate", "--model", str(folder), "--raw", "--prompt", "hi " * 300, "--max-model-len", "100"]
    assert main(words) == 2
    assert "100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature must be from 0.0 to 100.0"),
        (["--max-tokens", "0"], "max_tokens must be from 1"),
        (["--max-tokens", "4096"], "max_tokens is 4096"),
        (["--speculative-tokens", "5"], "engine.speculation: Value error, tokens: 5 is for a draft model"),
        (["--draft-model", "/does/not/exist"], "/does/not/exist: expected a model folder"),
        (["--max-tokens", "1" + "0" * 400], "max_tokens must be from 1 to 2147483647, got a number of 1329 bits"),
        (["--threads", "100000"], "engine.threads: Input should be less than or equal to 1024"),
        (["--device", "meta"], "device: 'meta' is not supported"),
        (["--device", "nonsense"], "device: 'nonsense' is not a device"),
        (["--model", "x" * 5000], "File name too long"),
        (["--input", "/does/not/exist"], "cannot read prompts from /does/not/exist"),
        (["--model", "/does/not/exist"], "/does/not/exist"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    prompt = [] if "--input" in options else ["--prompt", "hi"]
    assert main([*arguments(folder), *prompt, *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.strip().splitlines()[-1]
    assert last.startswith("raysonar: ")
    assert message in last
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("words", [[], ["nope"], ["generate", "--nope"], ["generate", "--max-tokens", "x"]])
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: raysonar" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"raysonar {version('raysonar')}\n"


def long_command(folder: Path) -> subprocess.Popen[str]:
    """The command with far more to say than a pipe holds."""
    prompts = [word for number in range(60) for word in ("--prompt", str(number))]
    words = [*arguments(folder, "--json", *prompts), "--max-tokens", "100", "--max-running", "2"]
    pipe = subprocess.PIPE
    return subprocess.Popen([str(COMMAND), *words], stdout=pipe, stderr=pipe, text=True, env=os.environ)


def test_a_reader_that_leaves_ends_it_quietly(folder: Path):
    with long_command(folder) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["index"] == 0
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(TIMEOUT_S) == 0
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


@pytest.mark.parametrize("redirection", ["<&-", ">&-", ">/dev/full", "</dev/null", "< <(printf '\\xff')"])
def test_streams_that_are_closed_full_or_binary_are_said_in_one_line(folder: Path, redirection: str):
    given = [] if redirection.startswith("<") else ["--prompt", "hi"]
    command = shlex.join([str(COMMAND), *arguments(folder, *given)])
    ended = subprocess.run(["bash", "-c", f"{command} {redirection}"], capture_output=True, timeout=TIMEOUT_S)
    errors = ended.stderr.decode()
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert errors.splitlines()[-1].startswith("raysonar: ")
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


def test_text_and_json_can_be_written_in_any_locale(folder: Path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [str(COMMAND), *arguments(folder, "--prompt", "Grüße", "--prompt", "日本")]
    text = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, env=environment, check=True)
    assert text.stdout.decode("ascii").startswith("> Gr??e\n")
    lines = subprocess.run([*command, "--json"], capture_output=True, timeout=TIMEOUT_S, env=environment, check=True)
    objects = [json.loads(line) for line in lines.stdout.decode("ascii").splitlines()]
    assert [each["prompt"] for each in objects[:-1]] == ["Grüße", "日本"]


def test_an_interrupt_ends_it_quietly(folder: Path):
    with long_command(folder) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["index"] == 0
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        errors = process.stderr.read()
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGINT
    assert "Traceback" not in errors


def test_an_answer_can_be_held_to_a_schema_or_an_expression(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"a": {"enum": [1, "é"]}}, "required": ["a"]}')
    words = ["generate", "--model", str(folder), "--threads", "1", "--prompt", MESSAGE, "--max-tokens", "40"]
    assert main([*words, "--json-schema", str(schema)]) == 0
    assert json.loads(capsys.readouterr().out)["a"] in (1, "é")
    assert main([*words, "--regex", "[ab]{3}x"]) == 0
    assert re.fullmatch("[ab]{3}x\n", capsys.readouterr().out)
    schema.write_text('{"not": {}}')
    assert main([*words, "--json-schema", str(schema)]) == 2
    assert "json-schema: the schema cannot be kept exactly: not is not supported, at $" in capsys.readouterr().err
    assert main([*words, "--json-schema", str(tmp_path / "gone")]) == 2
    assert "cannot read the schema" in capsys.readouterr().err
