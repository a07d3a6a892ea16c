"""What docs/security.md promises of the code itself."""

import ast
from pathlib import Path

import pytest

from raysonar.errors import InvalidRequestError
from raysonar.model.chat import ChatTemplate

ROOT = Path(__file__).parents[2]
SOURCES = sorted({path.resolve() for path in (ROOT / "raysonar").rglob("*.py")} | {*ROOT.glob("kernels/*.py")})
FORBIDDEN = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
DANGEROUS_CALLS = {"eval", "exec", "numpy.load", "np.load", "yaml.load"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_or_run(source: Path):
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.partition(".")[0] for alias in node.names} & FORBIDDEN
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in FORBIDDEN
        if isinstance(node, ast.Call):
            call, options = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert call not in DANGEROUS_CALLS
            if call == "torch.load":  # of a training run's own state
                assert "training" in source.parts
                assert options["weights_only"] == "True"
            assert not options.keys() & {"trust_remote_code", "allow_pickle"}


def test_the_sources_that_are_looked_at_are_all_of_them():
    assert len(SOURCES) > 80
    assert ROOT / "raysonar/model/weights.py" in SOURCES


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append({'role': 'system', 'content': 'x'}) %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_chat_template_cannot_leave_its_sandbox(template: str):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate(template, "test", {}).render(messages)
    assert messages == [{"role": "user", "content": "hi"}]
