"""The other queues of `make bench`, in small: their work is counted, and what cannot run says why.

graphile-worker is left to the bench itself: npm brings it from the network.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from bench.peers import graphile, pgqueuer
from bench.peers.measure import PEERS, add_peer_rows, measure_peers
from bench.peers.process import Peer


def shown(figures: dict[str, Any]) -> str:
    table = Table("measure", "figure", "vs limit", "bar")
    add_peer_rows(table, figures, limit=1000.0)
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("name", ["pgqueuer", "procrastinate"])
async def test_peer_works_all_its_tasks_and_gets_a_figure_for_each_measure(postgres_url: str, name: str) -> None:
    figures: dict[str, Any] = {}

    await measure_peers(postgres_url, 50, figures, [name], timed=5)

    assert "skipped" not in figures[name]
    assert figures[name]["tasks"] == 50
    for measure in ("create", "work", "whole"):
        [rate] = figures[name][measure]
        assert rate > 0
    [(p50, p99)] = figures[name]["latency_ms"]
    assert 0 < p50 <= p99
    assert figures[name]["name"] in shown(figures)


async def test_peer_with_tables_of_fewer_tasks_gets_no_figure(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forgetful() -> Peer:
        completed = "select count(*) - 1 from pgqueuer_log where status = 'successful'"
        return dataclasses.replace(await pgqueuer.peer(), workers=1, completed=completed)

    monkeypatch.setitem(PEERS, "forgetful", forgetful)
    figures: dict[str, Any] = {}

    await measure_peers(postgres_url, 50, figures, ["forgetful"])

    assert figures["forgetful"]["whole"] == []
    assert "49 completed tasks, but 50 were created" in shown(figures)


async def test_peer_whose_process_dies_is_skipped_with_a_sentence(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dying() -> Peer:
        return dataclasses.replace(await pgqueuer.peer(), command=[sys.executable, "-c", "raise SystemExit(3)"])

    monkeypatch.setitem(PEERS, "dying", dying)
    figures: dict[str, Any] = {}

    await measure_peers(postgres_url, 50, figures, ["dying"])

    assert "its process ended with 3" in shown(figures)


async def test_without_node_graphile_worker_is_skipped_with_a_sentence(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    figures: dict[str, Any] = {}

    await measure_peers(postgres_url, 50, figures, ["graphile-worker"])

    assert "skipped: Node.js with npm is not on PATH." in shown(figures)


def put_npm(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of npm, with an environment to install into that holds nothing yet."""
    shell = shutil.which("sh")
    for name in ("node", "npm"):
        (folder / name).write_text(f"#!{shell}\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "prefix", str(folder / "environment"))


async def test_graphile_worker_with_another_hash_than_the_known_one_is_not_run(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = json.dumps({"packages": {"node_modules/graphile-worker": {"integrity": "sha512-another"}}})
    put_npm(tmp_path, f"mkdir node_modules && echo '{record}' >node_modules/.package-lock.json", monkeypatch)
    figures: dict[str, Any] = {}

    await measure_peers(postgres_url, 50, figures, ["graphile-worker"])

    assert f"npm installed a graphile-worker {graphile.VERSION} with a different hash" in shown(figures)


async def test_failing_install_is_a_sentence_with_the_reason_npm_gave(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_npm(tmp_path, "echo 'npm error code ENOTFOUND' >&2; exit 1", monkeypatch)
    figures: dict[str, Any] = {}

    await measure_peers(postgres_url, 50, figures, ["graphile-worker"])

    assert "npm could not install it: npm error code ENOTFOUND" in shown(figures)
