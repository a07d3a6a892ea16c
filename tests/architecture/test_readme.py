"""README.md's commands are the ones that are run."""

import re
import subprocess
from pathlib import Path

import pytest

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
