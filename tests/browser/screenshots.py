"""Writes the screenshots of docs/dashboard.md: `make screenshots`, or `SCREENSHOT_ARGS="--all FOLDER"` for every page.

With `--all`, each page is written in both widths and both colour schemes.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.browser.chromium import chromium
from tests.browser.site import Site, running, seed
from tests.support.documentation import ROOT

DOCS = ROOT / "docs" / "images"
SHOWN = {
    "overview": "/ui/",
    "runs": "/ui/runs",
    "run": "/ui/run/{failures}",
    "tasks": "/ui/tasks?status=Failed",
    "task": "/ui/task/{task}",
    "dag": "/ui/dag/shop",
    "sql": "/ui/sql",
    "queues": "/ui/queues",
    "bus": "/ui/bus",
}
MORE = {
    "job": "/ui/job/{job}",
    "operations": "/ui/operations",
    "dags": "/ui/dags",
    "backfills": "/ui/backfills",
    "datasets": "/ui/datasets",
    "dataset": "/ui/dataset/shop:orders:orders",
    "alerts": "/ui/alerts",
    "access": "/ui/access",
    "changelog": "/ui/bus?tab=changes",
    "hostile": "/ui/task/{hostile_task}",
}
LOAD_MS = 30_000
IN_DOCS = ("overview", "run", "task", "bus")
SIZES = {"wide": (1440, 900), "narrow": (390, 844)}


def _signed_in(browser: Browser, site: Site, size: tuple[int, int], scheme: str) -> Page:
    width, height = size
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        locale="en-US",
    )
    page.goto(site.url + "/ui/")
    page.get_by_label("API key").fill(site.key)
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.locator("#main").wait_for()
    return page


def _shoot(page: Page, url: str, file: Path) -> None:
    page.goto(url)
    page.locator("#main h1").first.wait_for()
    expect(page.locator(".skeleton")).to_have_count(0, timeout=LOAD_MS)
    page.evaluate("document.fonts.ready.then(() => true)")
    page.screenshot(path=file, full_page=True)


def _write(browser: Browser, site: Site, ids: dict[str, str], folder: Path, everything: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pages = SHOWN | MORE if everything else {name: SHOWN[name] for name in IN_DOCS}
    for width, size in SIZES.items() if everything else [("wide", SIZES["wide"])]:
        for scheme in ("light", "dark") if everything else ("light",):
            page = _signed_in(browser, site, size, scheme)
            for name, path in pages.items():
                suffix = f"-{width}-{scheme}" if everything else ""
                _shoot(page, site.url + path.format(**ids), folder / f"dashboard-{name}{suffix}.png")
            page.context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes screenshots of the dashboard.")
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="write every page to this folder instead")
    folder: Path | None = parser.parse_args().all
    with ExitStack() as stack:
        site = stack.enter_context(running())
        ids = seed(site)
        browser = stack.enter_context(chromium())
        _write(browser, site, ids, folder or DOCS, everything=folder is not None)


if __name__ == "__main__":
    main()
