"""What README.md and docs/ say is so: commands, configuration, files and tests."""

import re
import subprocess
from pathlib import Path

import pytest
from pydantic import BaseModel

from raysonar.config import ServiceConfig

ROOT = Path(__file__).parents[2]


def readme_command(name: str) -> str:
    """The code block under `<!-- NAME -->`."""
    found = re.search(rf"^<!-- {name} -->\n```sh\n(.*?)\n```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert found, f"README.md has no command marked {name}"
    return found[1]


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci/run").read_text()
    function = re.search(r"^readme_command\(\) \{\n.*?^\}$", script, re.M | re.S)
    assert function
    done = subprocess.run(
        ["bash", "-c", f"{function[0]}\nreadme_command test"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == readme_command("test")
    assert 'eval "$setup"' in script
    assert script.rstrip().endswith('eval "$tests"')


@pytest.mark.parametrize("name", ["serve", "test"])
def test_each_command_is_one_line_from_a_fresh_clone(name: str) -> None:
    command = readme_command(name)
    assert "\n" not in command
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install torch==")


def _fields(model: type[BaseModel], prefix: str = "") -> dict[str, object]:
    """Every field's path in a configuration file, with its default."""
    found: dict[str, object] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _fields(field.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = field.default
    return found


def test_every_configuration_field_is_in_the_table_with_its_default() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Configuration\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \|", section, re.M)
    table, fields = dict(rows), _fields(ServiceConfig)
    assert len(fields) > 15
    assert table.keys() == fields.keys()
    for name, default in fields.items():
        if isinstance(default, bool | int | float | str) and default != 1 << 30:
            spelt = f"{default:g}" if isinstance(default, float) else str(default)
            spelt = spelt.lower() if isinstance(default, bool) else spelt
            assert table[name].strip("`") == spelt


def test_every_file_that_the_documents_point_to_is_there() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    links = [
        (document, link)
        for document in documents
        for link in re.findall(r"\]\(([^)#\s]+)\)", document.read_text())
        if "://" not in link
    ]
    assert len(links) > 5
    assert [(document.name, link) for document, link in links if not (document.parent / link).exists()] == []


def test_every_test_that_the_architecture_names_is_there() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    files = re.findall(r"`(\w+/test_\w+\.py)", text)
    assert len(files) > 5
    missing = [name for name in files if not (ROOT / "tests" / name).is_file()]
    everything = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    missing += [name for name in re.findall(r"::(\w+)", text) if not re.search(rf"\b{name}\b", everything)]
    assert missing == []


def test_the_python_example_answers(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"^## Python\n\n```python\n(.*?)```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert example
    exec(example[1], {})
    assert capsys.readouterr().out.startswith("Paris. stop (")
