"""Every test that the pages on guarantees and security name exists."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.documentation import ROOT, read, spans


def _tests() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
    return found


@pytest.mark.parametrize("page", ["docs/guarantees.md", "docs/security.md"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = {span for span in spans(read(page)) if re.fullmatch(r"(test_|Test)\w+", span)}
    assert len(named) > 20
    assert named - _tests() == set()


def test_every_guarantee_names_a_test() -> None:
    sections = re.split(r"^## \d", read("docs/guarantees.md"), flags=re.MULTILINE)[1:]
    assert sections
    assert [section.splitlines()[0] for section in sections if "`test_" not in section] == []
