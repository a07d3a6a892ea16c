"""The page as its users meet it: real services, a real browser."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect
from support.browser import contrast, executable, headless, watched
from support.prometheus import Scrape
from support.scripted import say
from support.service import Service

from raysonar.observe.chrome import RankTimeline, trace_of
from raysonar.observe.timeline import Lane, Span

pytestmark = pytest.mark.skipif(executable() is None, reason="needs Chromium (`apt-get install chromium`)")

KEY = "sk-the-key"
TEMPLATE = """\
{#- Short, but with all that the ingress looks for: <｜tool▁calls▁begin｜>, </think>. -#}
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor -%}
{%- for message in messages %}{{ message.content }}{% endfor -%}
"""
CALLS = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
EVIL = '<img src=x onerror="window.stolen = 1"><script>window.stolen = 1</script><b>bold</b>'
ORIGINS = ("accepted", "recovered", "bonus", "plain")
QUESTION = "Describe the climate of Norway."
WAIT_MS = 60_000
expect.set_options(timeout=20_000)


@pytest.fixture(scope="module")
def guarded(start_scripted: Callable[..., Service], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a service that asks for a key and says what it is told to."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    return start_scripted("guarded-page", TEMPLATE, service_options={"api_keys_file": str(keys)}).url


@pytest.fixture(scope="module")
def scripted(start_scripted: Callable[..., Service]) -> str:
    """The address of one that does not."""
    return start_scripted("page", TEMPLATE).url


@pytest.fixture(scope="module")
def browser(guarded: str, scripted: str, pair: Service) -> Iterator[Browser]:
    with headless() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, pair: Service) -> Iterator[Page]:
    origin = pair.url.removesuffix("/pair")
    with watched(browser, origin) as page:
        yield page


def open_page(page: Page, url: str) -> None:
    page.goto(f"{url}/")
    expect(page.locator("#model")).not_to_have_text("…")


def ask(page: Page, words: str) -> None:
    """And wait for the answer's end."""
    page.fill("#message", words)
    page.press("#message", "Enter")
    expect(page.locator("#send")).to_be_enabled(timeout=WAIT_MS)


def settings(page: Page, **fields: str) -> None:
    if page.locator("#settings").get_attribute("open") is None:
        page.click("#settings summary")
    for name, value in fields.items():
        field = f"#{name.replace('_', '-')}"
        page.fill(field, value)
        page.dispatch_event(field, "change")


def counts(page: Page) -> dict[str, int]:
    """Of the last answer's tokens, by their origin, as the page has counted them."""
    article = page.locator("article[data-role=assistant]").last
    return {origin: int(article.get_attribute(f"data-{origin}") or "0") for origin in ORIGINS}


@contextmanager
def others_ask(url: str) -> Iterator[None]:
    """Again and again: a step is run as two halves when there are rows for both."""
    body = {"model": "pair", "n": 3, "max_tokens": 40, "messages": [{"role": "user", "content": QUESTION}]}
    stop = Event()

    def work() -> None:
        while not stop.is_set():
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(work) for _ in range(2)]
        try:
            while scrape(url).value("raysonar_num_requests_running") < 2:
                pass
            yield
        finally:
            stop.set()
        for each in working:
            each.result()


def scrape(url: str) -> Scrape:
    return Scrape(httpx.get(f"{url}/metrics", timeout=30).text)


def test_an_answer_is_streamed_and_its_tokens_coloured_and_counted(page: Page, pair: Service):
    open_page(page, pair.url)
    expect(page.locator("#model")).to_have_text("pair")
    page.uncheck("#trace-answers")
    page.evaluate("""() => {
      window.seen = [];
      const look = () => seen.push([performance.now(), document.querySelectorAll("#log .token").length]);
      new MutationObserver(look).observe(document.querySelector("#log"), { childList: true, subtree: true });
    }""")
    before = scrape(pair.url)
    ask(page, QUESTION)
    after = scrape(pair.url)
    expect(page.locator("#error")).to_be_hidden()

    answer = page.locator("article[data-role=assistant]")
    text = answer.locator(".content").inner_text()
    body = {"model": "pair", "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
    whole = httpx.post(f"{pair.url}/v1/chat/completions", json=body, timeout=60).json()
    assert text == whole["choices"][0]["message"]["content"]

    seen: list[tuple[float, int]] = page.evaluate("() => seen")
    assert len({tokens for _, tokens in seen}) > 5
    assert len({round(moment) for moment, _ in seen}) > 5, "all came at once"

    def grown(name: str) -> int:
        return round(after.value(name) - before.value(name))

    told = counts(page)
    assert sum(told.values()) == grown("raysonar_generation_tokens_total") == whole["usage"]["completion_tokens"]
    for origin in ORIGINS:
        spans = answer.locator(f".token[data-origin={origin}]").count()
        assert spans <= told[origin]  # the last token ends the answer and has no text
        if spans:
            first = answer.locator(f".token[data-origin={origin}]").first
            assert first.evaluate("token => getComputedStyle(token).backgroundColor") != "rgba(0, 0, 0, 0)"
    assert answer.locator(".token").count() >= sum(told.values()) - 1
    assert told["accepted"] > 0
    assert told["recovered"] > 0

    drafted = grown("raysonar_spec_decode_num_draft_tokens_total")
    accepted = grown("raysonar_spec_decode_num_accepted_tokens_total")
    figures = answer.locator(".figures").inner_text()
    assert f"{100 * accepted / drafted:.1f}% of {drafted} drafts accepted" in figures
    assert re.search(r"\d+\.\d tokens/s", figures)


def test_the_engines_figures_are_the_servers(page: Page, pair: Service):
    """Of the steps that the page has asked for, whose latest it shows."""
    open_page(page, pair.url)
    page.uncheck("#trace-answers")
    before = int(page.locator("#steps tbody th").first.inner_text())
    ask(page, "Where is Chad?")
    expect(page.locator("#steps tbody th").first).not_to_have_text(str(before))
    shown: dict[str, str] = page.evaluate("""() => Object.fromEntries([
      ["latest", document.querySelector("#steps tbody th").textContent],
      ...[...document.querySelectorAll("#figures div")].map(({ children: [name, value] }) =>
        [name.textContent, value.textContent]),
    ])""")
    assert int(shown["latest"]) > before
    [replica] = httpx.get(f"{pair.url}/v1/steps?last=1024").json()["data"]
    steps = [step for step in replica["steps"] if step["number"] <= int(shown["latest"])][-64:]
    accepted, drafted = sum(step["accepted"] for step in steps), sum(step["drafted"] for step in steps)
    assert shown["Acceptance"] == f"{100 * accepted / drafted:.1f}%"
    split = sum(step["halves"] == 2 for step in steps)
    assert shown["Steps in two halves"] == f"{100 * split / len(steps):.1f}%"
    assert float(shown["Tokens/s at work"]) > 0
    assert 0 < page.locator("#steps tbody tr").count() <= 10


def test_the_timeline_shows_both_halves_of_both_ranks_and_their_communication(
    page: Page, pair: Service, tmp_path: Path
):
    open_page(page, pair.url)
    with others_ask(pair.url):
        ask(page, QUESTION)
        expect(page.locator("#trace")).to_be_enabled(timeout=WAIT_MS)
    drawing = page.locator("#drawing svg")
    expect(drawing).to_be_visible(timeout=WAIT_MS)
    ranks = drawing.locator(".rank").all_text_contents()
    assert [name.partition(" (")[0] for name in ranks] == ["rank 0", "rank 1"]
    for half in (0, 1):
        lanes = drawing.locator(f'g[data-lane="half {half}"]')
        transfers = drawing.locator(f'g[data-lane="transfers {half}"]')
        assert (lanes.count(), transfers.count()) == (2, 2)
        for rank in (0, 1):
            assert lanes.nth(rank).locator("rect[data-kind=work]").count() > 3
            assert transfers.nth(rank).locator("rect[data-kind=transfer]").count() > 1
    title = drawing.locator('g[data-lane="transfers 1"] rect title').first.text_content()
    assert re.fullmatch(r"(dispatch|combine), layer \d+, step \d+: \d+\.\d{3} ms", title or "")

    everything = drawing.locator("rect").count()
    page.select_option("#shown", index=1)
    assert 0 < drawing.locator("rect").count() <= everything
    sums = page.locator("#sums tbody tr")
    assert sums.count() == 2
    for cell in sums.nth(0).locator("td").all_inner_texts():
        assert float(cell) >= 0
    assert float(sums.nth(1).locator("td").nth(2).inner_text()) > 0

    with page.expect_download() as saved:
        page.click("#save")
    file = tmp_path / "saved.json"
    saved.value.save_as(file)
    assert {event["cat"] for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"} >= {
        "work",
        "transfer",
    }
    page.locator("#drawing").scroll_into_view_if_needed()
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_an_answers_first_steps_are_traced_when_that_is_asked_for(page: Page, pair: Service):
    open_page(page, pair.url)
    ask(page, QUESTION)
    expect(page.locator("#trace")).to_be_enabled(timeout=WAIT_MS)
    expect(page.locator("#timeline-note")).not_to_have_text("No steps have been traced yet.")
    assert page.locator("#drawing svg").count() or "ask for something" in page.locator("#timeline-note").inner_text()


def span(name: str, kind: Any, start: int, end: int, lane: Lane) -> Span:
    """Times in microseconds."""
    return Span(name, kind, start * 1000, end * 1000, lane, 7, 3)


def test_a_recorded_trace_is_drawn_and_summed_up_and_its_names_are_text(page: Page, scripted: str, tmp_path: Path):
    spans = [
        span("experts", "work", 0, 2000, Lane.HALF_0),
        span("dispatch", "transfer", 1000, 4000, Lane.TRANSFERS_0),
        span(EVIL, "work", 2000, 3500, Lane.HALF_1),
        span("wait for dispatch", "wait", 3500, 4000, Lane.HALF_0),
        span("wait for plan", "wait", 4000, 9000, Lane.STEP),
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(trace_of([RankTimeline(host=EVIL, process=1, spans=spans)])))
    open_page(page, scripted)
    page.set_input_files("#load", file)
    expect(page.locator("#timeline-note")).to_have_text("Steps 7 to 7, on one clock.")
    assert page.locator("#sums td").all_inner_texts() == ["2.00", "1.50", "3.00", "2.50", "0.50"]
    titles = page.locator("#drawing rect title").all_text_contents()
    assert f"{EVIL}, layer 3, step 7: 1.500 ms" in titles
    assert page.locator("#drawing img, #sums img, #drawing b").count() == 0
    assert page.evaluate("() => window.stolen") is None

    file.write_text('{"traceEvents": 3}')
    page.set_input_files("#load", file)
    expect(page.locator("#timeline-note")).to_have_text("trace.json: this is not a trace in Chrome's format")


def test_what_model_and_user_say_is_text(page: Page, scripted: str):
    open_page(page, scripted)
    ask(page, f"{EVIL} {say(EVIL)}")
    assert page.locator("article[data-role=assistant] .content").inner_text() == EVIL
    assert page.locator("article[data-role=user] .text").inner_text().startswith(EVIL)
    assert page.locator("#log img, #log script, #log b").count() == 0
    assert page.evaluate("() => window.stolen") is None


@pytest.mark.parametrize(
    "way",
    [
        "document.body.innerHTML = '<b>x</b>'",
        "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
        "const made = document.createElement('script'); made.text = 'window.ran = 1'; document.body.append(made)",
        "setTimeout('window.ran = 1')",
    ],
)
def test_the_browser_keeps_the_pages_policy(browser: Browser, scripted: str, way: str):
    page = browser.new_page()
    page.goto(f"{scripted}/")
    outcome = page.evaluate(f"() => {{ try {{ {way}; return 'done'; }} catch (error) {{ return error.name; }} }}")
    assert outcome in ("TypeError", "EvalError")
    assert page.evaluate("() => window.ran") is None
    page.close()


def test_reasoning_and_function_calls_are_shown(page: Page, scripted: str):
    open_page(page, scripted)
    settings(page, tools='[{"type": "function", "function": {"name": "f"}}]')
    ask(page, say(f"<think>hm, hm</think>So:{CALLS}"))
    answer = page.locator("article[data-role=assistant]")
    assert answer.locator(".reasoning").inner_text() == "hm, hm"
    assert answer.locator(".content").inner_text() == "So:"
    assert answer.locator(".call").inner_text() == 'f {"a": 1}'
    assert answer.locator("summary").all_inner_texts() == ["Reasoning", "Function call 1"]
    settings(page, tools="[")
    ask(page, "more")
    expect(page.locator("#error")).to_contain_text("Functions: ")
    assert page.input_value("#message") == "more"


def test_settings_and_the_conversation_are_sent_and_a_new_chat_forgets(page: Page, scripted: str):
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if "/chat/" in request.url else None)
    open_page(page, scripted)
    settings(page, system="Be brief.", temperature="0.5", max_tokens="9", stop="END\n\nSTOP")
    ask(page, say("one END two"))
    assert page.locator("article[data-role=assistant] .content").inner_text().rstrip() == "one"
    ask(page, say("two"))
    page.click("#new")
    assert page.locator("#log article").count() == 0
    settings(page, system="", temperature="", max_tokens="", stop="")
    ask(page, say("three"))
    first, second, third = sent
    options = {"temperature": 0.5, "max_tokens": 9, "stop": ["END", "STOP"]}
    assert options.items() <= first.items()
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": say("one END two")}
    assert first["messages"] == [system, user]
    said = {"role": "assistant", "content": "one "}
    assert second["messages"] == [system, user, said, {"role": "user", "content": say("two")}]
    assert third["messages"] == [{"role": "user", "content": say("three")}]
    assert not third.keys() & {"temperature", "max_tokens", "stop", "tools"}
    settings(page, temperature="9")
    ask(page, "more")
    expect(page.locator("#error")).to_contain_text("Temperature: ")


def test_an_answer_can_be_stopped_and_frees_what_it_holds(page: Page, scripted: str):
    open_page(page, scripted)
    page.evaluate("""() => {
      const stop = () => document.querySelector("#log .token") && document.querySelector("#cancel").click();
      new MutationObserver(stop).observe(document.querySelector("#log"), { childList: true, subtree: true });
    }""")
    long = "long " * 100
    ask(page, say(long))
    expect(page.locator("article[data-role=assistant] .figures")).to_contain_text("stopped")
    assert len(page.locator("article[data-role=assistant] .content").inner_text()) < len(long) - 1
    expect(page.locator("#error")).to_be_hidden()
    while scrape(scripted).value("raysonar_num_requests_running"):
        pass


def test_a_key_is_asked_for_and_a_wrong_one_is_said_to_be(page: Page, guarded: str):
    open_page(page, guarded)
    expect(page.locator("#model")).to_contain_text("An API key is needed")
    settings(page, key="sk-wrong")
    expect(page.locator("#model")).to_contain_text("The API key is not valid. The field for the key is under Settings.")
    ask(page, say("hello"))
    expect(page.locator("#error")).to_contain_text("The API key is not valid")
    assert page.input_value("#message") == say("hello")
    assert page.locator("#log article").count() == 0
    settings(page, key=KEY)
    expect(page.locator("#model")).to_have_text("guarded-page")
    ask(page, say("hello"))
    assert page.locator("article[data-role=assistant] .content").inner_text() == "hello"
    expect(page.locator("#error")).to_be_hidden()


def test_a_service_that_cannot_be_reached_is_said_to_be(page: Page, scripted: str):
    open_page(page, scripted)
    page.context.set_offline(True)
    ask(page, say("hello"))
    expect(page.locator("#error")).to_have_text("The service cannot be reached. Is it running?")
    expect(page.locator("#engine-note")).to_have_text("The service cannot be reached. Is it running?")
    page.context.set_offline(False)
    ask(page, page.input_value("#message"))
    assert page.locator("article[data-role=assistant] .content").inner_text() == "hello"
    expect(page.locator("#error")).to_be_hidden()


def chunk(text: str) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "token_origins": ["plain"]}
    return f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\n"


PROBLEM = {"message": "The engine is starting, or starting again", "type": "server_error", "param": None, "code": "x"}
FAILED = f"data: {json.dumps({'error': PROBLEM})}\n\n"


@pytest.mark.parametrize(
    ("status", "body", "error", "kept"),
    [
        (503, json.dumps({"error": PROBLEM}), f"{PROBLEM['message']}. Try again in 1 s.", ""),
        (502, "<html>Bad gateway</html>", "The service answered 502 Bad Gateway.", ""),
        (200, chunk("Half an ans") + FAILED, PROBLEM["message"], "Half an ans"),
        (200, chunk("Half an ans"), "The connection ended before the answer was complete.", "Half an ans"),
    ],
)
def test_an_engine_that_is_down_is_said_to_be(page: Page, scripted: str, status: int, body: str, error: str, kept: str):
    def answer(route: Route) -> None:
        kind = "text/event-stream" if status == 200 else "application/json"
        route.fulfill(
            status=status,
            body=body,
            headers={"Content-Type": kind, "Retry-After": "1"} if status == 503 else {"Content-Type": kind},
        )

    open_page(page, scripted)
    page.route("**/v1/chat/completions", answer)
    ask(page, say("hello"))
    expect(page.locator("#error")).to_have_text(error)
    if kept:
        assert page.locator("article[data-role=assistant] .content").inner_text() == kept
        expect(page.locator("article[data-role=assistant] .figures")).to_contain_text("broken off")
    else:
        assert page.input_value("#message") == say("hello")
        assert page.locator("#log article").count() == 0


def test_every_control_has_a_name_and_is_reached_by_the_keyboard(page: Page, scripted: str):
    open_page(page, scripted)
    settings(page)
    unnamed = page.evaluate("""() => [...document.querySelectorAll("input, textarea, select, button")]
      .filter((control) => !(control.labels?.length || control.textContent.trim()))
      .map((control) => control.id)""")
    assert unnamed == []
    wanted = set(
        page.evaluate("""() => [...document.querySelectorAll("input, textarea, select, button")]
      .filter((control) => !control.disabled).map((control) => control.id)""")
    )
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => document.activeElement.id"))
    assert wanted <= reached
    assert page.locator("html").get_attribute("lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(page: Page, scripted: str, scheme: Any):
    page.emulate_media(color_scheme=scheme)
    open_page(page, scripted)
    settings(page, key="")
    ask(page, say("hello, hello, hello"))
    pairs = page.evaluate("""() => {
      const behind = (node) => {
        const colour = getComputedStyle(node).backgroundColor;
        return colour === "rgba(0, 0, 0, 0)" && node.parentElement ? behind(node.parentElement) : colour;
      };
      const texts = "h1, h2, h3, label, .token, .figures, #model, #legend li, dt, dd, th, td, caption, summary, "
        + "button:enabled, #timeline-note, textarea";
      return [...document.querySelectorAll(texts)].map((node) => [getComputedStyle(node).color, behind(node)]);
    }""")
    assert len({tuple(pair) for pair in pairs}) > 5
    assert min(contrast(*pair) for pair in pairs) >= 4.5


def test_it_fits_a_small_screen(page: Page, scripted: str):
    page.set_viewport_size({"width": 360, "height": 640})
    open_page(page, scripted)
    settings(page)
    ask(page, say("hello " * 30))
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
