"""`interlock backfill`, and the backpressure in `interlock queue status`, against a real gateway."""

from __future__ import annotations

import pytest

from interlock.apps.ingest import ingest
from tests.cli.test_cli import Terminal
from tests.support.deployed_dags import DeployedDags
from tests.support.staged_lists import Intake
from tests.support.system import System

DAG = """
name: chain
jobs:
  - { name: feed, activation: source, source: { kind: manual }, operator: echo, outputs: [raw] }
  - { name: clean, operator: echo, inputs: [{ from: { job: feed, output: raw } }], outputs: [clean] }
  - { name: sum, operator: echo, inputs: [{ from: { job: clean, output: clean } }], max_queue_depth: 2 }
"""


@pytest.fixture
def terminal(system: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", system.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", system.admin_key)
    return Terminal(system, capsys)


@pytest.fixture
async def flow(system: System) -> DeployedDags:
    found = DeployedDags(system)
    await found.start(DAG)
    await found.report("chain", "feed", *((10 * n, 10 * n + 9) for n in range(3)))
    await found.finish_all("chain", "clean")
    return found


async def ingested(flow: DeployedDags) -> None:
    async with ingest(flow.system.kernel.settings, wait_seconds=0) as services:
        await Intake(flow.system, services).drain()


async def test_backfill_from_dry_run_to_its_last_task(terminal: Terminal, flow: DeployedDags) -> None:
    counted = await terminal("backfill", "start", "chain", "clean", "0", "19", "--dry-run")
    assert "0-9, 10-19" in counted.out
    answer = await terminal.json("backfill", "start", "chain", "clean", "0", "19", "--yes", "--reason", "a test")
    run_id = answer["backfill"]["run_id"]
    assert (await terminal("backfill", "pause", run_id)).out.count("Paused")
    assert (await terminal.json("backfill", "resume", run_id))["state"] == "Running"
    await ingested(flow)
    await flow.finish_all("chain", "clean")
    await flow.run("run-counters")
    watched = await terminal("backfill", "show", run_id, "--watch")
    assert (watched.code, "Done, 2 tasks created, 2 done" in watched.out) == (0, True)
    assert run_id in (await terminal("backfill", "list")).out
    refused = await terminal("backfill", "pause", run_id)
    assert (refused.code, "Done" in refused.err) == (1, True)


async def test_watching_a_canceled_backfill_fails(terminal: Terminal, flow: DeployedDags) -> None:
    answer = await terminal.json("backfill", "start", "chain", "clean", "0", "29", "--yes")
    run_id = answer["backfill"]["run_id"]
    await ingested(flow)
    assert "Canceled" in (await terminal("backfill", "cancel", run_id, "--yes")).out
    await flow.run("run-counters")
    watched = await terminal("backfill", "show", run_id, "--watch", "--output", "json")
    assert (watched.code, '"run_state": "Canceled"' in watched.out) == (1, True)


async def test_queue_status_draws_paused_jobs_and_their_cause(terminal: Terminal, flow: DeployedDags) -> None:
    assert "paused job" not in (await terminal("queue", "status")).out
    await flow.run("pressure")
    printed = (await terminal("queue", "status")).out
    assert "paused job" in printed
    assert "chain/feed → chain/clean → chain/sum" in printed
    assert "sum has 3 tasks waiting; its max_queue_depth is 2" in printed
    status = await terminal.json("queue", "status")
    assert {pause["level"] for pause in status["pauses"]} == {"all"}
    assert "platform" in {queue["queue"] for queue in status["queues"]}
