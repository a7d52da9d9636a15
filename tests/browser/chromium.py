"""The Chromium that `make test` unpacks into `.venv/browser`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.support.documentation import ROOT

FOLDER = ROOT / ".venv" / "browser"
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts the browser with its own libraries and font, since a machine may have neither."""
    assert (FOLDER / "chromium").exists(), "Run `make test`, or `make .venv/browser/chromium` once"
    environment: dict[str, str | float | bool] = {
        **os.environ,
        "LD_LIBRARY_PATH": str(FOLDER / "lib"),
        "FONTCONFIG_PATH": str(FOLDER),
        "LANG": "en_US.UTF-8",
    }
    options = ["--no-sandbox", "--no-zygote", "--disable-gpu", "--headless=new", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=Path(FOLDER, "chromium"), args=options, env=environment)
        yield browser
        browser.close()
