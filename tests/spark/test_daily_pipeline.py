"""The daily example on Spark, driven by commands: a schedule, a backfill of a week with a long day, and a month."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from interlock.apps.ingest import ingest
from interlock.dags.scheduler import Scheduler
from tests.cli.test_cli import Terminal
from tests.spark.spark_workers import LITTLE_JAVA, Bench, opened, working
from tests.support.staged_lists import Intake
from tests.support.system import System, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.xdist_group("spark-worker")]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
async def bench(system: System, tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened(system, tmp_path) as bench:
        await system.declare_all(EXAMPLES / "operators", spark=True)
        yield bench


@pytest.fixture
def terminal(system: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", system.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", system.admin_key)
    return Terminal(system, capsys)


async def test_daily_pipeline_runs_by_schedule_and_backfill(bench: Bench, terminal: Terminal, tmp_path: Path) -> None:
    system = bench.system
    assert (await terminal("dag", "deploy", str(EXAMPLES / "dags" / "daily.yaml"))).code == 0
    scheduler = Scheduler(system.kernel.stores.database, system.kernel.settings)
    await scheduler.run_once()
    await system.value(
        "update interlock.cron_state set next_at = now(), covered_to = covered_to - interval '1 day',"
        " last_at = last_at - interval '1 day'"
    )
    await scheduler.run_once()
    started = await terminal("backfill", "start", "sales", "enrich", "2025-10", "--yes")
    assert started.code == 0, started
    async with ingest(system.kernel.settings, wait_seconds=0) as services:
        await Intake(system, services).drain()
    async with working(bench.worker(operators=[str(EXAMPLES / "operators")], spark_conf=LITTLE_JAVA)):

        async def revenue() -> bool:
            reply = await system.user("GET", "/v1/datasets/revenue/partitions")
            return bool(reply.json()["partitions"])

        await until(revenue, seconds=300)
    sales = (await terminal.json("dataset", "partitions", "sales", "--within", "2025-10"))["partitions"]
    assert [one["start_date"] for one in sales] == [f"2025-10-{day:02}" for day in range(1, 32)]
    assert {one["start_date"]: one["row_count"] for one in sales if one["row_count"] != 480} == {"2025-10-26": 500}
    assert all(one["location"].endswith(f"/sales_{one['start_date']}_{one['end_date']}.parquet") for one in sales)
    months = (await terminal.json("dataset", "partitions", "revenue"))["partitions"]
    assert [(one["start_date"], one["row_count"]) for one in months] == [("2025-10", 7)]
    scheduled = await system.value("select count(*) from interlock.tasks where payload ->> 'scheduled_at' is not null")
    assert scheduled >= 1
