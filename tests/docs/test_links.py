"""Links resolve, and every path in the documentation exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documentation import PAGES, ROOT, anchors, links, spans, title

# Folders to which a path in the text may be relative.
_PLACES = [ROOT, ROOT / "src" / "interlock", *(ROOT / "src" / "interlock").glob("*/queries")]
_PATH = re.compile(r"[\w./-]+\.(?:py|sql)")
_IN_MANY_PLACES = {"my_operators.py", "build.py", "routes.py"}


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_link_to_a_file_or_a_heading_resolves(page: Path) -> None:
    broken = [link for link in links(page.read_text()) if not link.startswith("https://") and not _leads(page, link)]
    assert broken == []


def _leads(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in anchors(target.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_source_file_that_is_named_exists(page: Path) -> None:
    named = {span for span in spans(page.read_text()) if _PATH.fullmatch(span)} - _IN_MANY_PLACES
    assert [path for path in sorted(named) if not any((place / path).is_file() for place in _PLACES)] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    start = ROOT / "README.md"
    linked = {(ROOT / link).resolve() for link in links(start.read_text())}
    assert [title(page) for page in PAGES if page != start and page not in linked] == []
