"""`--dry-run`: what a group would hold, without weights, devices or Ray; and serve_configs/, sized so."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ray.serve.schema import ServeDeploySchema

from raysonar.cli import main
from raysonar.config import parse_service_config
from raysonar.ranks.sizing import size_group
from raysonar.serving.app import application_args, with_demo_model

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "support" / "data"
V3 = str(DATA / "deepseek-v3")
CONFIGS = sorted((ROOT / "serve_configs").glob("*.yaml"))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(words)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


LARGE = [V3, "--dry-run", "--device", "cuda", "--tensor-parallel", "8", "--data-parallel", "2"]


def test_serve_prints_a_table_that_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "serve", *LARGE, "--device-memory", "141GB")
    assert (status, err) == (0, "")
    lines = {line[:26].strip(): line[26:].split()[0] for line in out.splitlines() if line.startswith("  ")}
    figures = {name: int(value.replace(",", "")) for name, value in lines.items()}
    assert figures["weights"] + figures["tables"] + figures["KV cache"] == figures["in all"]
    kinds = ("attention", "dense MLP", "routed experts", "shared experts", "embedding", "head", "MTP module", "norms")
    assert sum(figures[kind] for kind in (*kinds, "routers")) == figures["weights"]
    assert figures["may be filled"] == 0.9 * 141e9
    assert "16 ranks (8 tensor x 2 data), bfloat16 on cuda" in out
    assert "note: the checkpoint is fp8; its weights are dequantised to bfloat16 when loaded, and counted so" in out


def test_what_does_not_fit_is_shown_refused_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "serve", *LARGE, "--device-memory", "80GB", "--json")
    assert status == 2
    sizes = json.loads(out)
    assert (sizes["fits"], sizes["memory"]) == (False, 80 * 10**9)
    assert err.startswith(f"raysonar: {V3} does not fit: a rank of 16 would hold 95.3 GB")


@pytest.mark.parametrize("command", [["serve", "--json"], ["generate", "--json"]])
def test_both_commands_size_what_they_would_run(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dry-run", "--device", "cpu", "--max-running", "7", "--device-memory", "1GiB"]
    status, out, _ = run(capsys, *command, *words)
    sizes = json.loads(out)
    assert (status, sizes["slots"], sizes["memory"], sizes["speculative_tokens"]) == (0, 7, 1 << 30, 1)
    expected = size_group(parse_service_config({"engine": with_demo_model({})["engine"]}).engine, memory=1 << 30)
    assert sizes["weights"]["total"] == expected.rank.weight_bytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "x.yaml"], "--config is for a --dry-run; `serve run FILE` serves a file"),
        (["--device-memory", "1GB"], "--device-memory is for a --dry-run"),
        (["--json"], "--json is for a --dry-run"),
        (["--dry-run", "--config", "/does/not/exist"], "/does/not/exist: cannot be read"),
        (["--dry-run", "--config", str(ROOT / "README.md")], "README.md: cannot be read"),
        (["--dry-run", "--config", V3 + "/config.json"], "config.json: not a Serve configuration"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "serve", *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize("text", ["1.5 parsecs", "GB", "-1GB", ""])
def test_a_size_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--dry-run", f"--device-memory={text}"])
    assert "is not a size; write 80GB, 80GiB or a count of bytes" in capsys.readouterr().err


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_serve_configuration_is_one_that_serve_and_raysonar_take(file: Path) -> None:
    values = yaml.safe_load(file.read_text())
    schema = ServeDeploySchema.model_validate(values)
    assert [each.name for each in schema.applications] == ["raysonar"]
    assert schema.http_options.host == "127.0.0.1"
    config = parse_service_config(with_demo_model(application_args(file)))
    assert config.engine.parallel.world == {
        "demo": 1,
        "demo-2-ranks": 2,
        "deepseek-v2-lite-8gpu": 8,
        "deepseek-v2-lite-autoscaling": 8,
    }.get(file.stem, 16)


def dry_run_of(file: Path) -> list[str]:
    """The dry run that a configuration's comment gives."""
    (line,) = [line for line in file.read_text().splitlines() if "--dry-run" in line]
    words = shlex.split(line.removeprefix("#"))
    assert words[:2] == ["raysonar", "serve"]
    return words[1:]


@pytest.mark.parametrize(
    ("stem", "folder"), [("deepseek-v2-lite-8gpu", "deepseek-v2-lite"), ("deepseek-v3-2x8gpu", "deepseek-v3")]
)
def test_the_large_models_fit_as_their_configurations_say(
    stem: str, folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = dry_run_of(ROOT / "serve_configs" / f"{stem}.yaml")
    status, out, err = run(capsys, *words, str(DATA / folder), "--json")
    assert (status, err) == (0, "")
    sizes: dict[str, Any] = json.loads(out)
    assert sizes["device"] == "cuda"
    assert sizes["dtype"] == str(torch.bfloat16).removeprefix("torch.")
    assert sizes["cache"]["pages"] * sizes["cache"]["page_size"] >= sizes["max_model_len"]
    # the memory is used, not wasted: the cache takes most of what is left
    assert sizes["cache"]["pages"] > 0.8 * min(
        sizes["cache"]["pages_that_fit"], sizes["slots"] * sizes["max_model_len"] / sizes["cache"]["page_size"]
    )


def test_the_layouts_in_the_documents_are_sized_as_a_dry_run_sizes_them(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "deployment.md").read_text()
    rows = re.findall(r"^\| (\d+) x (\d+) \| ([\d.]+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.M)
    assert len(rows) == 4
    for tensor, data, weights, of_a_row, of_all in rows:
        layout = ["--tensor-parallel", tensor, "--data-parallel", data, "--device", "cuda", "--device-memory", "141GB"]
        _, out, _ = run(capsys, "serve", V3, "--dry-run", "--json", *layout)
        sizes = json.loads(out)
        tokens = sizes["cache"]["pages_that_fit"] * sizes["cache"]["page_size"]
        assert f"{sizes['weights']['total'] / 1e9:.1f}" == weights
        assert (f"{tokens:,}", f"{tokens * int(data):,}") == (of_a_row, of_all)
