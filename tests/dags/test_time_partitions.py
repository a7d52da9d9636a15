"""Time partitions from the DAG file to the command line: declared, inherited, merged, backfilled and shown as dates."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.apps.ingest import ingest
from interlock.calendars import Calendar, Every
from interlock.clock import ManualClock
from interlock.dags import range_operators
from interlock.dags.definition import CatchUp, canonical, dag_of
from interlock.dags.partitioning import AGGREGATOR, SPLITTER, Partitions
from interlock.dags.scheduler import Scheduler
from tests.cli.test_cli import Terminal
from tests.dags.test_range_operators import Task
from tests.support.dags import problems_of, valid
from tests.support.deployed_dags import DeployedDags
from tests.support.staged_lists import Intake
from tests.support.system import System

BERLIN = Calendar(Every.DAILY, "Europe/Berlin")
DAG = """
name: sales
jobs:
  - name: enrich
    activation: source
    source: { kind: cron, schedule: "0 6 * * *", timezone: Europe/Berlin }
    partition: daily
    operator: echo
    outputs: [sales]
  - { name: products, operator: echo, inputs: [{ from: { job: enrich, output: sales } }], outputs: [products] }
  - name: months
    runtime: dispatcher
    operator: range_aggregator
    partition: monthly
    inputs: [{ from: { job: enrich, output: sales } }]
    outputs: [months]
  - { name: feed, activation: source, source: { kind: manual }, partition: daily, operator: echo, outputs: [days] }
  - { name: plain, activation: source, source: { kind: manual }, operator: echo, outputs: [raw] }
publish:
  sales: { from: { job: enrich, output: sales } }
"""
HEAD = "name: d\njobs:\n  - { name: s, activation: source, source: { kind: manual }, operator: echo, outputs: [o] }\n"
DAYS = HEAD.replace("operator: echo", "operator: echo, partition: daily")


# The file


def test_jobs_inherit_the_partition_of_their_inputs() -> None:
    partitions = Partitions(valid(DAG))
    found = {name: partitions.calendar(name) for name in ("enrich", "products", "months", "plain")}
    assert {name: calendar and str(calendar) for name, calendar in found.items()} == {
        "enrich": "daily Europe/Berlin",
        "products": "daily Europe/Berlin",
        "months": "monthly Europe/Berlin",
        "plain": None,
    }


def test_partition_survives_the_canonical_form_and_makes_up_for_all_starts() -> None:
    dag = valid(DAG)
    assert dag_of(canonical(dag)) == msgspec.structs.replace(
        dag, jobs=tuple(sorted(dag.jobs, key=lambda job: job.name))
    )
    enrich = dag.job("enrich")
    assert enrich is not None
    assert enrich.source is not None
    assert enrich.source.catch_up is CatchUp.ALL


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEAD.replace("operator", "partition: weekly, operator"), "partition cannot be weekly"),
        (HEAD.replace("operator", "partition: { every: daily, timezone: Mars }, operator"), "is not a known time zone"),
        (HEAD.replace("operator", "partition: { timezone: UTC }, operator"), "every"),
        (HEAD + "  - { name: r, partition: daily, operator: echo, inputs: [{ from: { job: s, output: o } }] }",
         "job 'r' has a partition, but the ranges of its inputs are integers"),
        (DAYS + "  - { name: r, partition: hourly, operator: echo, inputs: [{ from: { job: s, output: o } }] }",
         "job 'r' has partition hourly, but its inputs are daily UTC"),
        (DAYS + "  - { name: r, partition: hourly, runtime: dispatcher, operator: range_aggregator, outputs: [o],"
         " inputs: [{ from: { job: s, output: o } }] }", "partitions that are daily UTC cannot merge into hourly UTC"),
        (DAYS + "  - { name: r, partition: monthly, runtime: dispatcher, operator: range_aggregator, outputs: [o],"
         " config: { size: 3 }, inputs: [{ from: { job: s, output: o } }] }",
         "has a size, but its job has a partition"),
        (DAYS + "  - { name: t, activation: source, source: { kind: manual }, partition: monthly, operator: echo,"
         " outputs: [o] }\n  - { name: r, operator: echo, inputs: [{ from: { job: s, output: o } },"
         " { from: { job: t, output: o } }] }", "the inputs of job 'r' are daily UTC and monthly UTC"),
    ],
)  # fmt: skip
def test_invalid_partition_is_reported(text: str, problem: str) -> None:
    assert any(problem in one.what for one in problems_of(text)), problems_of(text)


# Merging and splitting


@given(st.sampled_from(["Europe/Berlin", "America/St_Johns", "Pacific/Apia"]), st.data())
async def test_month_is_emitted_once_all_its_days_are_there(zone: str, data: st.DataObject) -> None:
    daily, monthly = Calendar(Every.DAILY, zone), Calendar(Every.MONTHLY, zone)
    month = monthly.range_of(data.draw(st.sampled_from(["2011-12", "2026-03", "2026-10", "2028-02"])))
    days = data.draw(st.permutations(list(daily.partitions(*month))))
    task = Task({"partition": str(monthly)})
    emitted = [await task.run(AGGREGATOR, start=start, end=end) for start, end in days]
    assert emitted[:-1] == [[]] * (len(days) - 1)
    assert emitted[-1] == [month]


async def test_day_is_split_into_its_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_operators, "STEP", 4)
    start, end = BERLIN.range_of("2026-10-25")
    hourly = Calendar(Every.HOURLY, "Europe/Berlin")
    emitted = await Task({"partition": str(hourly)}).run(SPLITTER, start=start, end=end)
    assert emitted == list(hourly.partitions(start, end))
    assert len(emitted) == 25


# On a system


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(datetime(2026, 11, 18, 20, tzinfo=UTC))


@pytest.fixture
def terminal(still: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", still.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", still.admin_key)
    monkeypatch.setenv("COLUMNS", "200")
    return Terminal(still, capsys)


@pytest.fixture
async def flow(still: System) -> DeployedDags:
    found = DeployedDags(still)
    await found.start(DAG)
    return found


async def backfilled(flow: DeployedDags) -> list[Any]:
    """Returns the payloads of the tasks that the backfills created."""
    stores = flow.system.kernel.stores
    async with ingest(flow.system.kernel.settings, clock=stores.database.clock, wait_seconds=0) as services:
        await Intake(flow.system, services).drain()
    query = "select array_agg(payload::text order by task_index) from interlock.tasks where run_id is not null"
    return [msgspec.json.decode(payload) for payload in await flow.system.value(query) or []]


async def test_backfill_of_a_cron_source_makes_a_task_for_each_day(terminal: Terminal, flow: DeployedDags) -> None:
    counted = await terminal("backfill", "start", "sales", "enrich", "2026-11-01", "2026-11-18", "--dry-run")
    assert "18" in counted.out
    assert "2026-11-01, 2026-11-02, " in counted.out
    answer = await terminal.json("backfill", "start", "sales", "enrich", "2026-11-01", "2026-11-18", "--yes")
    shown = answer["backfill"]
    assert (shown["start_date"], shown["end_date"], shown["total"]) == ("2026-11-01", "2026-11-18", 18)
    payloads = await backfilled(flow)
    assert [str(BERLIN.dates(one["start"], one["end"])) for one in payloads] == [
        f"2026-11-{day:02}" for day in range(1, 19)
    ]
    assert payloads[0]["interval_start"] == "2026-11-01T00:00:00+01:00"
    assert "2026-11-01..2026-11-18" in (await terminal("backfill", "list")).out
    assert "2026-11-01..2026-11-18" in (await terminal("backfill", "show", shown["run_id"])).out
    assert "2026-11-01" in (await terminal("task", "show", await _first_task(flow))).out


async def _first_task(flow: DeployedDags) -> str:
    return str(await flow.system.value("select task_id from interlock.tasks where task_index = 0"))


async def test_backfill_without_input_data_names_the_source_to_backfill(terminal: Terminal, flow: DeployedDags) -> None:
    counted = await terminal("backfill", "start", "sales", "products", "2026-11-01", "--dry-run")
    assert "interlock backfill start sales enrich" in counted.out


@pytest.mark.parametrize(
    ("job", "dates", "says"),
    [
        ("enrich", ["2026-11-31"], "'2026-11-31' is not a date that exists"),
        ("enrich", ["2026-11-18", "2026-11-17"], "write the earlier date first"),
        ("enrich", ["2026-11-18T06"], "the partitions are daily: write 2026-11-18"),
        ("enrich", ["2026-11-01", "2026-12-01"], "has not begun: end it with 2026-11-18 or earlier"),
        ("enrich", ["5", "9"], "does not begin and end with a day of Europe/Berlin: write 1970-01-01"),
        ("enrich", ["tomorrow"], "or dates such as 2026-11-01..2026-11-18"),
        ("enrich", ["2026-11-01", "now"], "write an integer, or a date such as 2026-11-18"),
        ("plain", ["2026-11-18"], "is a source without inputs to recompute"),
    ],
)
async def test_backfill_of_a_wrong_date_says_what_to_write(
    terminal: Terminal, flow: DeployedDags, job: str, dates: list[str], says: str
) -> None:
    refused = await terminal("backfill", "start", "sales", job, *dates, "--yes")
    assert refused.code != 0
    assert says in " ".join(refused.err.replace("│", " ").split())


async def test_dates_are_accepted_and_shown_wherever_a_range_is(terminal: Terminal, flow: DeployedDags) -> None:
    sent = await terminal("source", "trigger", "sales", "feed", "--range", "2026-11-01..2026-11-03")
    assert sent.code == 0, sent
    partitions = (await terminal.json("dataset", "partitions", "sales/feed/days"))["partitions"]
    assert [(one["start_date"], one["end_date"]) for one in partitions] == [("2026-11-01", "2026-11-03")]
    events = (await flow.system.user("GET", "/v1/datasets/sales:feed:days/events")).json()["events"]
    assert [(one["start_date"], one["end_date"]) for one in events] == [("2026-11-01", "2026-11-03")]
    for within, found in (("2026-11-03", 1), ("2026-11-04", 0), ("2026-10..2026-11", 1)):
        page = await terminal.json("dataset", "partitions", "sales/feed/days", "--within", within)
        assert len(page["partitions"]) == found
    shown = (await terminal("dataset", "show", "sales/feed/days")).out
    assert "2026-11-01..2026-11-03" in shown
    assert "daily UTC" in shown
    assert "2026-11-01..2026-11-03" in (await terminal("source", "list", "sales")).out
    redone = await terminal(
        "dataset", "invalidate", "sales/feed/days", "2026-11-02", "--reason", "late rows", "--dry-run"
    )
    assert "1 scopes" in redone.out


async def test_misaligned_events_are_refused(flow: DeployedDags) -> None:
    for body, code in (
        ({"start": "2026-11-01T06"}, "misaligned_partition"),
        ({"start": 0, "end": 5}, "misaligned_partition"),
        ({"start": "1 May"}, "bad_date"),
        ({"end": "2026-11-01"}, "bad_event_scope"),
    ):
        reply = await flow.system.user("POST", "/v1/dags/sales/jobs/feed/events", json={"events": [body]})
        assert (reply.status_code, reply.json()["code"]) == (400, code), reply.text
    reply = await flow.system.user(
        "POST", "/v1/dags/sales/jobs/plain/events", json={"events": [{"start": "2026-11-01"}]}
    )
    assert (reply.status_code, reply.json()["code"]) == (400, "not_time_partitioned")


async def test_scope_is_explained_by_date(terminal: Terminal, flow: DeployedDags) -> None:
    explained = await terminal("dataset", "explain", "sales/products", "2026-11-02")
    assert "2026-11-02 is not in sales yet" in explained.out


async def test_plan_and_dag_show_the_partitions(terminal: Terminal, flow: DeployedDags, tmp_path: Any) -> None:
    file = tmp_path / "dag.yaml"
    file.write_text(DAG.replace("name: plain", "name: other"))
    planned = {job["name"]: job["partition"] for job in (await terminal.json("dag", "plan", str(file)))["plan"]}
    assert planned["months"] == "monthly Europe/Berlin"
    assert "daily Europe/Berlin" in (await terminal("dag", "show", "sales")).out
    await Scheduler(flow.system.kernel.stores.database, flow.system.kernel.settings).run_once()
    assert "for 2026-11-18" in (await terminal("source", "list", "sales")).out
