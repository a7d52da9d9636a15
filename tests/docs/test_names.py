"""Every file and module that a docstring, a comment or a page names exists."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.package_graph import modules
from tests.support.documentation import PAGES, ROOT, spans, title

_SOURCE = ROOT / "src" / "interlock"
_FOLDERS = ("src", "tests", "bench", "examples")
_FILE = re.compile(r"(?<![\w./<{*])[\w./]+\.py\b")
_MODULE = re.compile(r"\binterlock(?:\.[a-z_]\w*)+")
_MODULES = {f"interlock.{name}" for name in modules()} - {"interlock.__init__"}
_SCHEMA = set(_MODULE.findall((ROOT / "tests" / "stores" / "schema.sql").read_text()))
"""Tables and functions of the schema `interlock`."""
_NOT_MODULES = {
    "interlock.conf",
    "interlock.key",
    "interlock.queue.dead_letters",
    "interlock.receipt",
    "interlock.toml",
}
"""Files, a field of a token and an event."""


@pytest.mark.parametrize("folder", _FOLDERS)
def test_every_file_and_module_that_a_docstring_or_comment_names_exists(folder: str) -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for text in _texts(path.read_text())
        for name in [*_missing_files(path, text), *_missing_modules(text)]
    ]
    assert missing == []


# The changelog also names what earlier versions had.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=title)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    assert [name for span in spans(page.read_text()) for name in _missing_modules(span)] == []


def _texts(source: str) -> Iterator[str]:
    """Yields comments, and the strings that stand alone: docstrings of modules, functions and fields."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def _missing_files(path: Path, text: str) -> list[str]:
    """Returns files that are neither in a folder around `path` nor below src/interlock."""
    return [
        name
        for name in _FILE.findall(text)
        if not any((folder / name).is_file() for folder in [*path.parents, _SOURCE])
    ]


def _missing_modules(text: str) -> list[str]:
    return [name for name in _MODULE.findall(text) if name not in _SCHEMA | _NOT_MODULES and not _is_module(name)]


def _is_module(name: str) -> bool:
    """Returns True for a module, and for a name in one."""
    return name in _MODULES or name.rpartition(".")[0] in _MODULES
