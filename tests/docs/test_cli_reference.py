"""The command line reference is up to date, and every command in the documentation is valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from interlock.cli.app import app
from tests.docs.generate import COMMAND, cli_commands, cli_page
from tests.support.documentation import PAGES, ROOT, read, shell_commands, spans, title

_ROOT_COMMAND: Any = typer.main.get_command(app)
_TARGET = re.compile(r"make ([a-z]+)")


def test_cli_reference_is_up_to_date() -> None:
    assert read("docs/cli.md") == cli_page(), f"run {COMMAND}"


@pytest.mark.parametrize(
    "command", [pytest.param(found, id=path) for path, found in cli_commands(_ROOT_COMMAND, "interlock")]
)
def test_every_command_has_a_description_and_an_example(command: Any) -> None:
    assert command.help
    assert hasattr(command, "commands") or "Example:" in (command.epilog or "")


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_command_in_a_shell_block_is_valid(page: Path) -> None:
    for words in shell_commands(page.read_text()):
        name = next((number for number, word in enumerate(words) if Path(word).name == "interlock"), None)
        if name is not None:
            _check(words[name + 1 :])


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_command_in_the_text_is_valid(page: Path) -> None:
    for span in spans(page.read_text()):
        if span.startswith("interlock ") and "…" not in span:
            _check(span.split()[1:])


def _check(words: list[str]) -> None:
    """Follows the words to a command and checks every option among them."""
    command = _ROOT_COMMAND
    rest = list(words)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"there is no command: interlock {' '.join(words)}"
        command = command.commands[rest.pop(0)]
    known = {"--help", "--verbose"} | {option for parameter in command.params for option in parameter.opts}
    unknown = [word for word in rest if word.startswith("-") and word != "-" and word.partition("=")[0] not in known]
    assert unknown == [], f"interlock {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    typed = [" ".join(words) for words in shell_commands(text)]
    named = {found[1] for words in [*spans(text), *typed] if (found := _TARGET.match(words))}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named - targets == set()
