"""`bench.access` in small: its figures are there and mean something, and the table says what is beside what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from rich.console import Console

from bench.access import program
from bench.access.deployment import Stopwatch, dag
from bench.access.tokens import tokens
from interlock.settings import Settings
from tests.support.dags import valid


async def test_tokens_are_issued_and_verified_beside_bare_signatures(state_url: str, tmp_path: Path) -> None:
    settings = Settings(dir=tmp_path, state_url=SecretStr(state_url))

    figures = await tokens(settings, 20, 2)

    assert figures["bytes"] > 500
    for measure in ("issued", "verified", "verified_again", "bare_sign", "bare_verify"):
        assert len(figures[measure]) == 2
        assert min(figures[measure]) > 0


class Clerk:
    def write(self, line: str) -> str:
        return line

    async def send(self, line: str) -> str:
        return self.write(line)


async def test_stopwatch_times_calls_only_while_active() -> None:
    watch = Stopwatch()
    with watch.around({"writing": [(Clerk, "write")], "sending": [(Clerk, "send")]}):
        assert await Clerk().send("one") == "one"
        assert Clerk().write("two") == "two"
    assert await Clerk().send("three") == "three"

    assert len(watch.seconds["writing"]) == 2
    assert len(watch.seconds["sending"]) == 1


def test_benchmark_deploys_a_valid_dag() -> None:
    checked = valid(dag(["one", "two"]))

    assert [job.name for job in checked.jobs] == ["probe", "feed", "ask", "one", "two"]


def test_each_side_stands_beside_its_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    steps = {"run": 100.0, "whole": 110.0}
    query: dict[str, Any] = {
        "files": 4,
        "rows": 1_000_000,
        "large": {"bare": [100.0], "service": [125.0]},
        "trivial": {"bare": [1.0], "service": [20.0]},
        "steps": {"large": steps, "trivial": steps},
    }
    monkeypatch.setattr(program, "Console", lambda: Console(width=200))

    program.report({"machine": "two cores", "query": query})

    (line,) = [line for line in capsys.readouterr().out.splitlines() if "1,000,000 rows in 4 files, HTTP" in line]
    assert "125.0" in line
    assert "1.25" in line
    assert "1.30" in line
