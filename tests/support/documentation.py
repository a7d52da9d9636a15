"""The documentation, parsed for tests: pages, links, code spans, shell commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_ENDS_COMMAND = {"|", "&", "&&", ";", ">", "||"}


def read(name: str) -> str:
    return (ROOT / name).read_text()


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    return [body for found, body in _BLOCK.findall(text) if found == language]


def prose(text: str) -> str:
    return _BLOCK.sub("", text)


def spans(text: str) -> list[str]:
    """Returns the text in backticks, outside of code blocks."""
    return _SPAN.findall(prose(text))


def links(text: str) -> list[str]:
    return _LINK.findall(prose(text))


def anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub creates for headings."""
    return {_anchor(heading) for heading in _HEADING.findall(prose(text))}


def _anchor(heading: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return kept.replace(" ", "-")


def rows(text: str) -> list[list[str]]:
    """Returns the cells of every table row."""
    lines = [line for line in prose(text).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yields the words of every command in shell blocks, and after a `$` in console blocks."""
    console = [line[2:] for block in blocks(text, "console") for line in block.splitlines() if line.startswith("$ ")]
    for block in [*blocks(text, "sh"), *console]:
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.shlex(line, posix=True, punctuation_chars="|&;>")
            words.whitespace_split = True
            yield from _split(list(words))


def _split(words: list[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in words:
        if word in _ENDS_COMMAND:
            yield command
            command = []
        else:
            command.append(word)
    yield command
