"""Rooms import only from rooms nearer the ground, and importing the package is cheap."""

import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
LINES = 450


def test_every_room_imports_only_from_rooms_nearer_the_ground() -> None:
    """In a process of its own: the linter silences every logger there is."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("room", ["kernels", "moe"])
def test_the_linter_sees_the_linked_rooms(room: str) -> None:
    graph = grimp.build_graph("raysonar", cache_dir=None)
    files = {path.stem for path in (ROOT / room).glob("*.py")} - {"__init__"}
    assert files
    assert {f"raysonar.{room}.{name}" for name in files} <= graph.modules


def test_every_room_stands_in_the_layers() -> None:
    """A folder without an __init__.py would be left out of the wheel and of the linter."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {name.strip(" ()") for line in contracts[0]["layers"] for name in line.split(":")}
    rooms = {path.parent.name for path in (ROOT / "raysonar").glob("*/*.py")}
    assert {"kernels", "moe", "model", "driver"} <= rooms <= layers
    assert all((ROOT / "raysonar" / room / "__init__.py").is_file() for room in rooms)


def test_files_fit_the_head() -> None:
    folders = [ROOT / name for name in ("raysonar", "kernels", "moe", "benchmarks")]
    lengths = {path: len(path.read_text().splitlines()) for folder in folders for path in folder.rglob("*.py")}
    assert len(lengths) > 10
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > LINES} == {}


@pytest.mark.parametrize("module", ["raysonar", "raysonar.config", "raysonar.cli"])
def test_import_is_light(module: str) -> None:
    """`raysonar --help` and an import for one name must not pay for torch or Ray."""
    heavy = "{'torch', 'ray', 'transformers', 'fastapi', 'triton', 'tokenizers'}"
    program = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
