"""A headless browser, and what a page may not do in it."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str | None:
    """A Chromium of this machine."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def headless() -> Iterator[Browser]:
    """While it runs, this thread counts as running an event loop: what refuses that (Serve's handles) comes before."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable())
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched(browser: Browser, origin: str) -> Iterator[Page]:
    """A new page. It must raise nothing, break no policy of its own, and ask for nothing outside of `origin`."""
    faults: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 1000}, accept_downloads=True)
    try:
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(f"raised {error}"))
        page.on("dialog", lambda dialog: faults.append(f"asked {dialog.message}"))
        page.on("console", lambda message: faults.append(message.text) if "Policy" in message.text else None)
        page.on("request", lambda request: None if _own(request.url, origin) else faults.append(request.url))
        yield page
        assert faults == []
    finally:
        context.close()


def _own(url: str, origin: str) -> bool:
    return url.removeprefix("blob:").startswith(origin)


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours, each as `rgb(R, G, B)`."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    """https://www.w3.org/TR/WCAG22/#dfn-relative-luminance"""
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
