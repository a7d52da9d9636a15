"""Ingest of a backfill: two processes, changes during the ingest, stops, losses; and a run with its own shard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import UUID

import pytest

from interlock.access.tokens import shard_of
from interlock.apps.ingest import ingest
from interlock.errors import Unavailable
from interlock.failpoints import arm, disarm
from interlock.jobs import backfills
from interlock.jobs.backfills import Scopes
from interlock.jobs.ingest_records import Overtaken, Records
from interlock.jobs.run_sources import Place, ScopesSource
from interlock.settings import INGEST_QUEUE
from tests.support.dataset_files import marked
from tests.support.deployed_dags import DeployedDags
from tests.support.staged_lists import Intake, intake

DAG = """
name: chain
jobs:
  - { name: feed, activation: source, source: { kind: manual }, operator: echo, outputs: [raw] }
  - { name: clean, operator: echo, inputs: [{ from: { job: feed, output: raw } }], outputs: [clean] }
  - { name: sum, operator: echo, inputs: [{ from: { job: clean, output: clean } }], outputs: [sums] }
  - name: pieces
    runtime: dispatcher
    operator: range_splitter
    inputs: [{ from: { job: feed, output: raw } }]
    outputs: [pieces]
    config: { size: 5 }
  - name: few
    operator: echo
    inputs: [{ from: { job: feed, output: raw } }]
    outputs: [few]
    scaling: { max_concurrency: 2 }
"""
SCOPES = 200
SECONDS = 120
"""Generous, for a loaded machine."""
POINTS = (
    "ingest.shard_created",
    "ingest.chunk_loaded",
    "ingest.loaded",
    "ingest.finished",
    "ingest.counted",
    "ingest.latched",
    "ingest.before_hand_out_commit",
)
UNDONE = "select count(*) from interlock.materialisations where job_id = $1 and done_commit < input_commit"


@pytest.fixture
async def site(state_url: str, tmp_path: Path) -> AsyncIterator[Intake]:
    """An intake with batches of fifty scopes."""
    async with intake(state_url, tmp_path, shard_threshold=50, reconcile_grace_seconds=0) as started:
        yield started
    for point in POINTS:
        disarm(point)


@pytest.fixture
async def flow(site: Intake) -> DeployedDags:
    """A flow whose jobs have nothing to do: their inputs exist as if they had read them long ago."""
    found = DeployedDags(site.system)
    await found.start(DAG)
    await found.report("chain", "feed", (10_000, 10_009))
    for job in ("clean", "sum", "few"):
        await found.finish_all("chain", job)
    await partitions(found, 0, 10 * SCOPES, 10)
    return found


async def partitions(flow: DeployedDags, first: int, end: int, step: int) -> None:
    """Inserts partitions of the feed without an event."""
    await flow.system.value(
        """insert into interlock.partitions (dataset_version, range_start, range_end, commit_id, input_commit, task_id,
                                             attempt)
           select $1, n, n + 9, 0, 0, gen_random_uuid(), 1 from generate_series($2::int, $3::int - 1, $4::int) n""",
        await flow.version("chain", "feed"),
        first,
        end,
        step,
    )


async def started(flow: DeployedDags, first: int = 0, last: int = 9_999, job: str = "clean", **more: Any) -> str:
    body = {"start": first, "end": last} | more
    reply = await flow.system.user("POST", f"/v1/dags/chain/jobs/{job}/backfills", json=body)
    assert reply.status_code == 200, reply.text
    run_id: str = reply.json()["backfill"]["run_id"]
    return run_id


async def shown(flow: DeployedDags, run_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await flow.system.user("GET", f"/v1/backfills/{run_id}")).json()
    return found


async def starts(site: Intake, run_id: str) -> list[int]:
    """Returns the start of each scope that has a task, ordered by index, and checks that no index is missing."""
    payloads = await site.payloads(run_id)
    assert sorted(payloads) == list(range(len(payloads)))
    return [payload["start"] for _, payload in sorted(payloads.items())]


async def tables(flow: DeployedDags) -> int:
    found: int = await flow.system.value(
        "select count(*) from pg_class where relname ~ '^tasks_[1-9][0-9]*$' and relkind = 'r'"
    )
    return found


async def test_backfill_has_its_own_shard_from_the_threshold_on(site: Intake, flow: DeployedDags) -> None:
    small, large = await started(flow, 0, 489), await started(flow, 0, 499)
    await site.drain()
    assert (await site.shard(small), await site.shard(large) > 0) == (0, True)
    for run_id, count in ((small, 49), (large, 50)):
        assert await starts(site, run_id) == [10 * n for n in range(count)]
        assert await site.indexes_of_messages(run_id) == list(range(count))
        found = await shown(flow, run_id)
        assert (found["state"], found["made"], found["total"], found["run_state"]) == ("Done", count, count, "Running")


async def test_run_of_a_backfill_behaves_like_any_other(site: Intake, flow: DeployedDags) -> None:
    run_id = await started(flow, 0, 599)
    await site.drain()
    job = await flow.job_id("chain", "clean")
    status = (await flow.system.user("GET", f"/v1/jobs/{job}")).json()
    assert (status["state"], status["run"]["counts"]["Queued"], status["run"]["total"]) == ("Running", 60, 60)
    assert len(await flow.finish_all("chain", "clean")) == 60
    await flow.system.settle()
    assert (await flow.system.run(run_id))["state"] == "Completed"
    receipt = (await flow.system.user("GET", f"/v1/jobs/{job}/receipt?run={run_id}")).json()
    assert (receipt["state"], receipt["run_id"], receipt["receipt"]["total"]) == ("Signed", run_id, 60)
    assert (await flow.partitions("chain", "clean"))[:60] == [(10 * n, 10 * n + 9) for n in range(60)]
    assert len(await flow.waiting("chain", "sum")) == 60


async def test_two_processes_with_different_scopes_make_each_task_once(site: Intake, flow: DeployedDags) -> None:
    """The second process starts when the first has loaded a batch, finds scopes in between, and finishes."""
    await partitions(flow, 100_000, 101_000, 20)
    run_id = await started(flow, 0, 200_000)
    async with ingest(site.system.kernel.settings, wait_seconds=0) as others:

        async def overtake() -> None:
            disarm("ingest.chunk_loaded")
            await partitions(flow, 100_010, 101_000, 20)
            await site.visible()
            assert await others[0].run_once() == 1

        arm("ingest.chunk_loaded", overtake)
        await site.drain()
    found = await starts(site, run_id)
    assert found == [*range(0, 2000, 10), 10_000, *range(100_000, 101_000, 10)]
    assert (await shown(flow, run_id))["total"] == len(found)
    chunks = "select sum(rows) from interlock.ingest_chunks where run_id = $1::text::uuid"
    assert await flow.system.value(chunks, run_id) == len(found)


async def test_two_processes_that_disagree_on_size_use_one_shard(site: Intake, flow: DeployedDags) -> None:
    """The first reads few enough scopes for the shared shard; the second finds more, so the run gets its own shard."""
    run_id = await started(flow, 1520, 30_000)
    records = Records(site.system.kernel.stores.database, site.system.kernel.settings)
    pending = await records.pending(UUID(run_id))
    assert pending is not None
    assert isinstance(pending.source, ScopesSource)
    scopes = Scopes(
        site.system.kernel.stores.database, pending.source, pending.run_id, pending.job_id, None, batch_rows=50
    )
    (few,) = [batch async for batch in scopes.batches(Place())]
    assert few.lines == 49
    await partitions(flow, 20_000, 20_200, 10)
    assert await records.shard(pending) is not None
    with pytest.raises(Overtaken):
        await records.small(pending, few.table, few.lines)
    await site.drain()
    assert await site.shard(run_id) > 0
    assert len(await starts(site, run_id)) == 69


@pytest.mark.parametrize("point", POINTS)
async def test_interrupted_ingest_continues_where_it_stopped(site: Intake, flow: DeployedDags, point: str) -> None:
    run_id = await started(flow)

    async def lost() -> None:
        disarm(point)
        raise Unavailable("away")

    arm(point, lost)
    await site.pass_of()
    await flow.system.value("delete from interlock.queue_messages where queue = $1", INGEST_QUEUE)
    await site.pass_of("ingest_reconciler")
    await site.drain()
    await site.pass_of("held_runs")
    assert await starts(site, run_id) == [10 * n for n in range(SCOPES)]
    assert await site.indexes_of_messages(run_id) == list(range(SCOPES))
    assert await flow.system.value("select count(*) from interlock.ingests where settled_at is null") == 0


@pytest.mark.parametrize("point", POINTS[1:5])
async def test_backfill_can_be_canceled_during_its_ingest(site: Intake, flow: DeployedDags, point: str) -> None:
    run_id = await started(flow)

    async def cancel() -> None:
        disarm(point)
        assert (await flow.system.user("POST", f"/v1/backfills/{run_id}/cancel")).status_code == 200

    arm(point, cancel)
    await site.drain()
    await site.pass_of("held_runs")
    await flow.system.settle()
    found = await shown(flow, run_id)
    assert (found["state"], found["run_state"], found["made"]) == ("Canceled", "Canceled", 0)
    assert found["counts"]["Canceled"] == found["total"]
    assert await flow.waiting("chain", "clean") == []


@pytest.mark.parametrize("point", POINTS[1:4])
async def test_backfill_deleted_during_its_ingest_leaves_nothing(site: Intake, flow: DeployedDags, point: str) -> None:
    run_id = await started(flow)

    async def delete() -> None:
        disarm(point)
        await flow.system.value(
            "update interlock.runs set delete_requested = true where run_id = $1::text::uuid", run_id
        )

    arm(point, delete)
    await site.drain()
    await flow.system.settle()
    for table in ("runs", "backfills", "ingests", "ingest_chunks"):
        gone = f"select count(*) from interlock.{table} where run_id = $1::text::uuid"
        assert await flow.system.value(gone, run_id) == 0
    assert await tables(flow) == 0


async def test_backfill_that_cannot_be_read_fails_with_a_reason(site: Intake, flow: DeployedDags) -> None:
    run_id = await started(flow)

    async def away() -> None:
        raise Unavailable("The disk is full.")

    arm("ingest.shard_created", away)
    for _ in range(site.system.kernel.settings.ingest_tries):
        await site.visible()
        assert await site.pass_of() == 1
    found = await shown(flow, run_id)
    assert (found["state"], found["run_state"]) == ("Failed", "Failed")
    assert found["run_reason"] == "Given up after 15 tries: The disk is full."
    dead = "select count(*) from interlock.queue_messages where queue = $1 and dead_at is not null"
    assert await flow.system.value(dead, INGEST_QUEUE) == 1
    assert (await flow.system.user("POST", f"/v1/backfills/{run_id}/pause")).json()["code"] == "backfill_ended"


async def test_held_tasks_are_neither_lost_nor_sent_and_are_explained(
    site: Intake, flow: DeployedDags, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfills, "_MAX_WAITING", 80)
    run_id = await started(flow)
    await site.drain()
    assert (await shown(flow, run_id))["made"] == 80
    await flow.run("reconciler", "run-wakes")
    assert await site.indexes_of_messages(run_id) == list(range(80))
    last = (await flow.system.user("GET", f"/v1/tasks?run={run_id}&limit=1000")).json()["tasks"][-1]["task_id"]
    explanation = (await flow.system.user("GET", f"/v1/tasks/{last}/explain")).json()
    assert (explanation["reason"], "has filled its job's queue" in explanation["detail"]) == ("held_back", True)
    await flow.system.user("POST", f"/v1/backfills/{run_id}/pause")
    explanation = (await flow.system.user("GET", f"/v1/tasks/{last}/explain")).json()
    assert f"interlock backfill resume {run_id}" in explanation["detail"]


@pytest.mark.parametrize("first", ["event", "backfill"])
async def test_event_during_recomputation_is_neither_lost_nor_done_twice(
    site: Intake, flow: DeployedDags, first: str
) -> None:
    """The output is that of the newer change, whichever task ends last."""
    run_id = await started(flow, 0, 599)
    await site.drain()
    forced = (await flow.waiting("chain", "clean"))[0]
    running = await flow.system.claim(forced)
    assert shard_of(UUID(running["lease_token"])) == await site.shard(run_id)
    await flow.report("chain", "feed", (0, 9))
    own = (await flow.waiting("chain", "clean"))[0]
    assert own != forced

    async def end_forced() -> None:
        (output,) = running["task"]["outputs"]
        scope = {name: output[name] for name in ("dataset_uuid", "dataset_version")} | {"start": 0, "end": 9}
        written = scope | {"output_index": 0} | marked(output["write_prefix"])
        reply = await flow.system.complete(running, outputs=[written], events=[scope])
        assert reply.status_code == 200, reply.text

    if first == "backfill":
        await end_forced()
    assert await flow.finish(own) == (0, 9)
    if first == "event":
        await end_forced()
    writer = "select task_id::text from interlock.partitions where dataset_version = $1 and range_start = 0"
    assert await flow.system.value(writer, await flow.version("chain", "clean")) == own
    assert await flow.system.value(UNDONE, await flow.job_id("chain", "clean")) == 0
    await flow.run("router")
    assert {*await flow.finish_all("chain", "sum")} == {(0, 9)}
    assert await flow.system.value(UNDONE, await flow.job_id("chain", "sum")) == 0


async def test_scope_taken_over_by_one_backfill_stays_with_it(site: Intake, flow: DeployedDags) -> None:
    """The scope is taken over only once its task, in its own shard, can never complete it."""
    await flow.report("chain", "feed", (0, 9))
    (own,) = [task for task in await flow.waiting("chain", "clean") if (await start_of(flow, task)) == 0]
    await flow.system.user("POST", f"/v1/tasks/{own}/cancel")
    job = await flow.job_id("chain", "clean")
    owner = "select task_id::text from interlock.materialisations where job_id = $1 and range_start = 0"
    runs, owners = [], []
    for _ in range(2):
        runs.append(await started(flow, 0, 599))
        await site.drain()
        owners.append(await flow.system.value(owner, job))
    ids = {run_id: await flow.system.task_ids(run_id) for run_id in runs}
    assert owners == [ids[runs[0]][0]] * 2
    await flow.system.user("POST", f"/v1/backfills/{runs[0]}/cancel")
    runs.append(await started(flow, 0, 599))
    await site.drain()
    assert await flow.system.value(owner, job) in await flow.system.task_ids(runs[2])


async def start_of(flow: DeployedDags, task_id: str) -> int:
    start: int = (await flow.system.task(task_id))["payload"]["start"]
    return start


async def test_backfill_respects_the_concurrency_limit_of_its_job(site: Intake, flow: DeployedDags) -> None:
    run_id = await started(flow, 0, 599, job="few")
    await site.drain()
    claims = (await flow.system.claim_many(run_id=run_id, start=0, end=59))["claims"]
    assert len(claims) == 2
    done = [await end(flow, claim) for claim in claims]
    for _ in range(58):
        woken = await flow.system.value(
            "select body ->> 'start' from interlock.queue_messages where body ->> 'start' = body ->> 'end' limit 1"
        )
        (claim,) = (await flow.system.claim_many(run_id=run_id, start=int(woken), end=int(woken)))["claims"]
        await flow.system.value("delete from interlock.queue_messages where dedupe_key = $1", claim["task_id"])
        done.append(await end(flow, claim))
    assert sorted(done) == [10 * n for n in range(60)]
    await flow.system.settle()
    assert (await flow.system.run(run_id))["state"] == "Completed"


async def end(flow: DeployedDags, claim: dict[str, Any]) -> int:
    assert (await flow.system.complete(claim)).status_code == 200
    start: int = claim["task"]["payload"]["start"]
    return start


async def test_runtime_without_a_queue_is_invoked_for_each_task(site: Intake, flow: DeployedDags) -> None:
    run_id = await started(flow, 0, 599, job="pieces")
    await site.drain()
    assert await site.shard(run_id) > 0
    async with asyncio.timeout(60):
        while (await flow.system.run(run_id))["state"] != "Completed":
            await flow.system.settle()
            await flow.system.kernel.tasks.inline.drain(10)
    halves = [(5 * n, 5 * n + 4) for n in range(120)]
    assert [scope for scope in await flow.partitions("chain", "pieces") if scope[0] < 600] == halves


async def test_shard_is_deleted_with_the_run_and_traces_of_its_tasks(site: Intake, flow: DeployedDags) -> None:
    run_id = await started(flow, 0, 599)
    await site.drain()
    await flow.finish_all("chain", "clean")
    await flow.system.settle()
    ids = await flow.system.task_ids(run_id)
    traces = "select count(*) from interlock.output_commits where task_id = any($1::text[]::uuid[])"
    assert (await tables(flow), await flow.system.value(traces, ids)) == (1, 60)
    await flow.system.value(
        "update interlock.runs set ended_at = now() - interval '30 days' where run_id = $1::text::uuid", run_id
    )
    while await flow.run("retention"):
        continue
    await flow.system.settle()
    assert (await tables(flow), await flow.system.value(traces, ids)) == (0, 0)
    assert (await flow.system.user("GET", f"/v1/backfills/{run_id}")).status_code == 404
    assert len(await flow.partitions("chain", "clean")) == 61


@pytest.mark.slow
async def test_hundred_thousand_partitions_take_seconds(site: Intake, flow: DeployedDags) -> None:
    await partitions(flow, 1_000_000, 2_000_000, 10)
    run_id = await started(flow, 1_000_000, 2_000_000)
    at = perf_counter()
    await site.drain()
    assert perf_counter() - at < SECONDS
    found = await shown(flow, run_id)
    assert (found["total"], found["counts"]["Queued"], found["state"]) == (100_000, 100_000, "Running")
    assert found["made"] == 5_000
    await site.pass_of("held_runs")
    assert (await shown(flow, run_id))["made"] == 10_000
    assert await site.pass_of("held_runs") == 0
    largest = await flow.system.value(
        "select max(task_index) = 99999 and count(distinct payload ->> 'start') = 100000"
        " from interlock.tasks where run_id = $1::text::uuid",
        run_id,
    )
    assert largest is True
