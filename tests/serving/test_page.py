"""The page's files over real HTTP: who gets them, and what a browser is told about them."""

import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from support.service import Service

from raysonar.serving import web

FOLDER = Path(web.__file__).parent / "page"
KEY = "sk-the-key"
NAME = "paged"
TEMPLATE = "{%- for message in messages %}{{ message.content }}{% endfor -%}"


@pytest.fixture(scope="module")
def service_url(start_scripted: Callable[..., Service], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a service that asks for a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    return start_scripted(NAME, TEMPLATE, service_options={"api_keys_file": str(keys)}).url


def references(text: str) -> set[str]:
    """What HTML and modules load."""
    return set(re.findall(r'(?:href|src)="([^"]+)"', text)) | set(re.findall(r'from "\./([^"]+)"', text))


def test_the_page_and_all_that_it_loads_come_without_a_key(service_url: str):
    index = httpx.get(f"{service_url}/")
    assert index.status_code == 200
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    wanted, seen = references(index.text), set()
    while wanted - seen:
        path = min(wanted - seen)
        seen.add(path)
        response = httpx.get(f"{service_url}/{path}")
        assert response.status_code == 200
        assert (
            response.headers["content-type"].partition(";")[0]
            == {
                "js": "text/javascript",
                "css": "text/css",
                "svg": "image/svg+xml",
            }[path.rpartition(".")[2]]
        )
        assert response.content == (FOLDER / path.removeprefix("page/")).read_bytes()
        wanted |= {f"page/{name}" for name in references(response.text) if path.endswith(".js")}
    assert seen == {f"page/{file.name}" for file in FOLDER.iterdir()} - {"page/index.html"}


def test_without_the_slash_at_its_end_the_address_leads_to_the_page(service_url: str):
    response = httpx.get(service_url, follow_redirects=True)
    assert response.status_code == 200
    assert response.url.path == f"/{NAME}/"
    assert "<title>raysonar</title>" in response.text


@pytest.mark.parametrize(
    "path", ["/page/", "/page/none.js", "/page/../web.py", "/page/%2e%2e/web.py", "/page/page.js/"]
)
def test_there_are_no_other_files(service_url: str, path: str):
    assert httpx.get(service_url + path).status_code == 401
    response = httpx.get(service_url + path, headers={"Authorization": f"Bearer {KEY}"})
    assert response.status_code in (307, 404)
    assert "raysonar.serving" not in response.text


@pytest.mark.parametrize("path", sorted(web.PAGE_PATHS))
def test_browsers_are_told_to_load_and_run_nothing_else(service_url: str, path: str):
    headers = httpx.get(service_url + path).headers
    policy = dict(each.strip().partition(" ")[::2] for each in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_the_files_hold_nothing_of_others_and_no_way_to_make_html_of_text(file: Path):
    text = file.read_text()
    assert set(re.findall(r"\w+://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "import("):
        assert way not in text
    if file.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)
        assert re.findall(r"<script[^>]*>", text) == ['<script type="module" src="page/page.js">']
