"""`bench.bulk` in small: its figures are there and mean something, and the table says what is beside what."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench.bulk import program


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_small_run_measures_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.bulk", "--small"])
    monkeypatch.setattr(program, "Console", lambda: Console(width=240))
    program.main()
    figures = json.loads((tmp_path / "bench/results/bulk.json").read_text())
    assert set(program.PARTS) < set(figures)
    assert min(figures["accepted"]) > 0
    assert min(figures["ingest"]["ours"] + figures["ingest"]["bare"] + figures["running"]["drain"]) > 0
    out = capsys.readouterr().out
    assert all(bar in out for bar in ("p99 < 50", "0.60", "< 1.2", "> 20,000", "p99 < 20"))


def test_each_figure_stands_beside_its_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(program, "Console", lambda: Console(width=240))
    program.report(
        {
            "machine": "two cores",
            "size": {"lines": 1000, "factor": 10, "tasks": 500, "depth": 9000},
            "accepted": [10.0] * 99 + [60.0],
            "ingest": {"ours": [300.0], "bare": [400.0]},
            "memory": {"short": 100.0, "long": 110.0},
            "running": {"drain": [25_000.0], "limit": [50_000.0], "status_ms": [9.0], "pages_ms": (2.0, 2.2)},
        }
    )
    lines = capsys.readouterr().out.splitlines()
    for measure, ratio in (("claimable", "0.75"), ("10,000 lines", "1.10"), ("one worker", "0.50"), ("9,000", "1.10")):
        (line,) = [line for line in lines if measure in line]
        assert ratio in line
    assert any("p99 60.0" in line for line in lines)
