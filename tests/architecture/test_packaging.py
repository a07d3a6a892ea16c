"""What an installation holds and pulls in."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GPU_PACKAGE = re.compile(r"nvidia|cuda|cupy|nccl|triton|flashinfer|rocm|deepspeed", re.IGNORECASE)


def _python_files(folder: Path) -> set[str]:
    return {
        f"raysonar/{room.name}/{path.relative_to(room)}" if room != folder else f"raysonar/{path.relative_to(room)}"
        for room in (folder, *(each for each in folder.iterdir() if each.is_symlink()))
        for path in room.rglob("*.py")
    }


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of the files in a wheel built from the tree, and in one built from the tree's sdist."""
    work = tmp_path_factory.mktemp("packaging")
    tree = work / "tree"
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("raysonar", "kernels", "moe"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)

    def build(*options: str) -> set[str]:
        out = work / "-".join(("out", *options))
        command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(out), str(tree)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        (wheel,) = out.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            assert not [each for each in archive.infolist() if (each.external_attr >> 28) == 0o12], "a link, not a file"
            return set(archive.namelist())

    return {"tree": build("--wheel"), "sdist": build()}


@pytest.mark.parametrize("source", ["tree", "sdist"])
def test_a_wheel_holds_every_module_the_demo_models_and_the_page(wheels: dict[str, set[str]], source: str) -> None:
    names = wheels[source]
    modules = _python_files(ROOT / "raysonar")
    assert any(name.startswith("raysonar/kernels/") for name in modules)
    assert any(name.startswith("raysonar/moe/") for name in modules)
    demo = {f"raysonar/{path.relative_to(ROOT / 'raysonar')}" for path in (ROOT / "raysonar/demo").rglob("*.*")}
    assert {name for name in demo if name.endswith(".safetensors")}
    page = {f"raysonar/serving/page/{path.name}" for path in (ROOT / "raysonar/serving/page").iterdir()}
    assert {
        "raysonar/serving/page/index.html",
        "raysonar/serving/page/page.js",
        "raysonar/serving/page/page.css",
    } <= page
    assert modules | demo | page | {"raysonar/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if not name.startswith(("raysonar/", f"raysonar-{PROJECT['version']}"))]


def test_a_cpu_user_pulls_no_gpu_package() -> None:
    base = [Requirement(each) for each in PROJECT["dependencies"]]
    assert len(base) > 5
    assert [each.name for each in base if GPU_PACKAGE.search(each.name) or "cu" in str(each.specifier)] == []


@pytest.mark.parametrize("extra", [None, "test", "train"])
def test_every_dependency_has_a_lower_bound(extra: str | None) -> None:
    chosen = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    unbounded = [each for each in chosen if ">=" not in str(Requirement(each).specifier)]
    assert unbounded == []
