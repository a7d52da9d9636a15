"""`bench.bus` in small: its figures are there and mean something, and the table says what is beside what."""

from __future__ import annotations

import pytest
from rich.console import Console

from bench.bus import program
from bench.bus.decisions import decisions


def test_decisions_are_timed_over_all_routes() -> None:
    rates = decisions(routes=500, count=100, rounds=2)
    assert len(rates) == 2
    assert min(rates) > 0


def test_each_figure_stands_beside_its_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(program, "Console", lambda: Console(width=200))
    program.report(
        {
            "machine": "two cores",
            "decisions": {"10": [50_000.0], "100000": [45_000.0]},
            "ingest": {
                "bare": [30_000.0],
                "batches": [21_000.0],
                "saturation": 900.0,
                "latencies": [{"p50": 4.0, "p99": 12.0}, {"p50": 3.0, "p99": 8.0}, {"p50": 5.0, "p99": 300.0}],
                "bare_latencies": [{"p50": 1.0, "p99": 9.0}],
            },
            "limit": {"limit": 100, "commands": 150, "delivered": 97},
        }
    )
    lines = capsys.readouterr().out.splitlines()
    (batches,) = [line for line in lines if "100 a batch" in line]
    assert "0.70" in batches
    assert "0.60" in batches
    (over,) = [line for line in lines if ": over" in line]
    assert " 0 " in over
    assert any("0.970" in line for line in lines)
    assert any("p50 4.0, p99 12.0 (12.0, 8.0, 300.0)" in line for line in lines)
