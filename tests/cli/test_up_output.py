"""The text that `interlock up` prints when it is ready."""

from __future__ import annotations

import os

import pytest

from interlock.apps.up.supervisor import Started
from interlock.cli import up
from interlock.processes import landlock

STARTED = Started(
    *(
        "http://gateway",
        "http://internal",
        "http://query",
        "/folder",
        "key",
        "token",
        "a",
        "b",
        "c",
        "http://gateway/ui/#sign-in=T",
    )
)


@pytest.mark.parametrize(("user", "kernel", "said"), [(0, 6, "as root"), (0, 0, "no Landlock"), (1000, 6, None)])
def test_start_says_what_operators_are_not_kept_from(
    user: int, kernel: int, said: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(landlock, "version", lambda: kernel)
    up._print_table(STARTED)
    printed = " ".join(capsys.readouterr().out.split())
    assert "Interlock is up." in printed
    assert "http://gateway/ui/#sign-in=T" in printed
    assert [text for text in ("as root", "no Landlock") if text in printed] == ([] if said is None else [said])
