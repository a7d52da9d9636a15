"""One installation and one browser for all tests of a process; a fresh session of the browser for each test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from tests.browser.chromium import chromium
from tests.browser.site import Site, running, seed

PATIENCE_MS = 30_000
"""Allows for a machine with two busy cores."""
expect.set_options(timeout=PATIENCE_MS)


@dataclass
class Visit:
    """An open page, with everything that it complained about."""

    page: Page
    site: Site
    ids: dict[str, str]
    complaints: list[str] = field(default_factory=list)

    def sign_in(self, key: str | None = None, path: str = "/ui/") -> None:
        self.page.goto(self.site.url + path)
        self.page.get_by_label("API key").fill(key or self.site.key)
        self.page.get_by_role("button", name="Sign in", exact=True).click()
        expect(self.page.locator("#main h1")).to_be_visible()

    def open(self, path: str) -> None:
        self.page.goto(self.site.url + path.format(**self.ids))
        expect(self.page.locator("#main h1").first).to_be_visible()

    def heard(self, message: ConsoleMessage) -> None:
        # A request that is refused on purpose is reported by the browser as well.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    with running() as started:
        yield started


@pytest.fixture(scope="session")
def ids(site: Site) -> dict[str, str]:
    return seed(site)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Closed with its module: Playwright's loop runs as long as the browser, and asynchronous tests need their own."""
    with chromium() as started:
        yield started


@pytest.fixture
def visitor(browser: Browser, site: Site, ids: dict[str, str]) -> Iterator[Visit]:
    """A browser that is not signed in. The test fails if a page raises an error or breaks the policy of its content."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, locale="en-US", timezone_id="Europe/Berlin")
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    visit = Visit(page, site, ids)
    page.on("console", visit.heard)
    page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    yield visit
    context.close()
    assert visit.complaints == []


@pytest.fixture
def visit(visitor: Visit) -> Visit:
    visitor.sign_in()
    return visitor
