"""Routing of single changes: which jobs receive a scope, and which do not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from interlock.dags.routing import Scopes
from interlock.errors import Conflict
from interlock.wire.attempts import Completion, Event, EventBatch, Output
from tests.dags.routing_pipeline import Node, Pipeline, fence
from tests.support.system import until

SOURCE = Node("source")
STREAM = Node("stream", stream=True)
READER = Node("reader", ("source",))


async def scopes(pipe: Pipeline, name: str, status: str = "Queued") -> list[str]:
    rows = await pipe.rows.fetch(
        "select payload ->> 'partition_key' as key from interlock.tasks"
        " where job_id = $1 and status = $2::text::interlock.task_status order by task_id",
        pipe.jobs[name],
        status,
    )
    return [row["key"] for row in rows]


async def test_change_gives_its_scope_to_all_readers(pipe: Pipeline) -> None:
    await pipe.lay([SOURCE, Node("other"), READER, Node("second", ("source",)), Node("far", ("reader",))])
    await pipe.report("source", 0, 9)
    assert await pipe.run("router") == 1
    assert [await scopes(pipe, name) for name in ("reader", "second", "far")] == [["0-9"], ["0-9"], []]
    await pipe.start(0)
    await pipe.start(0)
    await pipe.finish(0)
    await pipe.finish(0)
    await pipe.run("router")
    assert await scopes(pipe, "far") == ["0-9"]


async def test_repeated_event_creates_no_task(pipe: Pipeline) -> None:
    await pipe.lay([SOURCE, READER])
    for _ in range(3):
        await pipe.report("source", 0, 9, again=1)
        await pipe.run("router")
        await pipe.run("scopes")
    assert await scopes(pipe, "reader") == ["0-9"]


async def test_one_statement_gives_a_change_to_a_thousand_dependents(pipe: Pipeline) -> None:
    await pipe.lay([SOURCE, *(Node(f"reader{n}", ("source",)) for n in range(1000))])
    await pipe.report("source", 0, 9)
    assert await pipe.run("router") == 1
    counted = (
        "select count(*), count(distinct xmin::text), count(distinct job_id) from interlock.tasks"
        " where status = 'Queued'"
    )
    assert [tuple(row) for row in await pipe.rows.fetch(counted)] == [(1000, 1, 1000)]
    assert await pipe.rows.fetchval("select count(*) from interlock.queue_messages") == 1000


async def test_retired_generation_receives_nothing_and_its_events_are_kept(pipe: Pipeline) -> None:
    await pipe.lay([SOURCE, READER])
    await pipe.rows.execute("update interlock.edges set active = false")
    await pipe.report("source", 0, 9)
    await pipe.run("router")
    await pipe.run("scopes")
    assert await scopes(pipe, "reader") == []
    assert await pipe.rows.fetchval("select count(*) from interlock.dataset_events") == 1


async def test_waiting_task_includes_a_newer_change(pipe: Pipeline) -> None:
    await pipe.lay([SOURCE, READER])
    for _ in range(2):
        await pipe.report("source", 0, 9)
        await pipe.run("router")
    assert await scopes(pipe, "reader") == ["0-9"]
    await pipe.start(0)
    await pipe.finish(0)
    undone = "select count(*) from interlock.materialisations where done_commit is distinct from input_commit"
    assert await pipe.rows.fetchval(undone) == 0


async def test_running_task_does_not_include_a_newer_change(pipe: Pipeline) -> None:
    await pipe.lay([SOURCE, READER])
    await pipe.report("source", 0, 9)
    await pipe.run("router")
    await pipe.start(0)
    await pipe.report("source", 0, 9)
    await pipe.run("router")
    assert await scopes(pipe, "reader") == ["0-9"]
    await pipe.settle()
    assert pipe.data["reader"] == {cell: ("reader", pipe.data["source"][cell]) for cell in range(10)}


async def test_per_update_creates_a_task_for_every_change(pipe: Pipeline) -> None:
    await pipe.lay([SOURCE, Node("reader", ("source",), per_update=True)])
    for _ in range(3):
        await pipe.report("source", 0, 9)
        await pipe.run("router")
    assert await scopes(pipe, "reader") == ["0-9"] * 3


async def test_output_of_older_inputs_does_not_replace_a_newer_one(pipe: Pipeline) -> None:
    await pipe.lay([SOURCE, READER])
    for _ in range(2):
        await pipe.report("source", 0, 9)
        await pipe.run("router")
        await pipe.start(0)
    await pipe.finish(1)
    newer = dict(pipe.data["reader"])
    await pipe.finish(0)
    assert pipe.data["reader"] == newer
    writer = await pipe.rows.fetchval(
        "select input_commit from interlock.partitions where dataset_version = $1", pipe.versions["reader"][1]
    )
    assert writer == await pipe.rows.fetchval("select max(input_commit) from interlock.materialisations")


@pytest.mark.parametrize("first", ["left", "right"])
async def test_job_waits_until_all_of_its_inputs_have_the_scope(pipe: Pipeline, first: str) -> None:
    await pipe.lay([Node("left"), Node("right"), Node("join", ("left", "right"))])
    await pipe.report(first, 0, 9)
    await pipe.run("router")
    assert await scopes(pipe, "join") == []
    for name in {"left", "right"} - {first}:
        await pipe.report(name, 0, 9)
    await pipe.run("router")
    await pipe.run("scopes")
    assert await scopes(pipe, "join") == ["0-9"]


async def test_wait_for_any_gives_each_change(pipe: Pipeline) -> None:
    await pipe.lay([Node("left"), Node("right"), Node("either", ("left", "right"), wait_for_all=False)])
    for name, start in (("left", 0), ("right", 0), ("right", 10)):
        await pipe.report(name, start, start + 9)
    await pipe.run("router")
    await pipe.run("scopes")
    assert sorted(await scopes(pipe, "either")) == ["0-9", "0-9", "10-19"]


async def test_stream_next_to_partitions_counts_once_it_reaches_their_end(pipe: Pipeline) -> None:
    await pipe.lay([SOURCE, STREAM, Node("join", ("source", "stream"))])
    await pipe.report("source", 0, 9)
    await pipe.advance("stream", 8)
    await pipe.run("router")
    assert await scopes(pipe, "join") == []
    await pipe.advance("stream", 9)
    await pipe.run("router")
    assert await scopes(pipe, "join") == ["0-9"]


async def test_stream_is_read_by_one_task_at_a_time_from_its_cursor(pipe: Pipeline) -> None:
    await pipe.lay([STREAM, Node("reader", ("stream",))])
    for cursor in (3, 5, 4):
        await pipe.advance("stream", cursor)
        await pipe.run("router")
    assert await scopes(pipe, "reader") == ["0-3"]
    await pipe.start(0)
    await pipe.finish(0)
    await pipe.run("router")
    assert await scopes(pipe, "reader") == ["4-5"]


@pytest.mark.parametrize("known", [False, True], ids=["first task", "later task"])
async def test_concurrent_passes_start_one_task_of_a_stream(pipe: Pipeline, *, known: bool) -> None:
    await pipe.lay([STREAM, Node("reader", ("stream",))])
    if known:
        await pipe.advance("stream", 1)
        await pipe.run("router")
        await pipe.start(0)
        await pipe.finish(0)
    await pipe.advance("stream", 3)
    database, passes, reader = pipe.kernel.stores.database, Scopes(pipe.kernel.settings), [pipe.jobs["reader"]]
    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"

    async def second_pass() -> int:
        async with database.transaction() as connection:
            return await passes.follow(connection, reader)

    async with database.transaction() as connection:
        assert await passes.follow(connection, reader) == 1
        await pipe.advance("stream", 5)
        second = asyncio.create_task(second_pass())
        await until(lambda: pipe.rows.fetchval(waiting))
    assert await second == 0
    assert await scopes(pipe, "reader") == ["2-3" if known else "0-3"]
    await pipe.start(0)
    await pipe.finish(0)
    await pipe.run("router")
    assert await scopes(pipe, "reader") == ["4-5"]


async def test_cursor_moves_only_with_a_fenced_completion(pipe: Pipeline) -> None:
    await pipe.lay([STREAM, Node("reader", ("stream",))])
    await pipe.advance("stream", 3)
    await pipe.run("router")
    await pipe.start(0)
    held = pipe.held[0]
    stale = Completion(**fence(held.claim) | {"attempt": 2}, status="Completed")
    assert (await pipe.kernel.tasks.attempts.complete([stale])).accepted == 0
    committed = "select committed from interlock.job_cursors"
    assert await pipe.rows.fetchval(committed) == -1
    await pipe.finish(0)
    assert await pipe.rows.fetchval(committed) == 3


async def test_canceled_reader_of_a_stream_is_replaced(pipe: Pipeline) -> None:
    await pipe.lay([STREAM, Node("reader", ("stream",))])
    await pipe.advance("stream", 3)
    await pipe.run("router")
    (task,) = await pipe.rows.fetch("select task_id from interlock.tasks where status = 'Queued'")
    await pipe.kernel.tasks.actions.cancel(task["task_id"], pipe.org_id)
    await pipe.run("scopes")
    assert await scopes(pipe, "reader") == ["0-3"]


async def test_rewritten_stream_range_gives_the_scopes_made_of_it(pipe: Pipeline) -> None:
    await pipe.lay([STREAM, Node("reader", ("stream",)), Node("far", ("reader",))])
    for cursor in (3, 7, 11):
        await pipe.advance("stream", cursor)
        await pipe.settle()
    await pipe.report("stream", 2, 5)
    await pipe.run("router")
    assert await scopes(pipe, "reader") == ["0-3", "4-7"]
    changed = (
        "select (payload ->> 'changed_start')::int, (payload ->> 'changed_end')::int from interlock.tasks"
        " where status = 'Queued'"
    )
    assert sorted(map(tuple, await pipe.rows.fetch(changed))) == [(2, 3), (4, 5)]
    await pipe.settle()
    assert await scopes(pipe, "far", "Completed") == ["0-3", "4-7", "8-11", "0-3", "4-7"]


async def test_reconciler_makes_up_for_a_lost_event(pipe: Pipeline) -> None:
    await pipe.lay([SOURCE, READER, STREAM, Node("follower", ("stream",))])
    await pipe.report("source", 0, 9)
    await pipe.advance("stream", 3)
    await pipe.lose_events()
    assert await pipe.run("router") == 0
    assert await pipe.run("scopes")
    assert [await scopes(pipe, name) for name in ("reader", "follower")] == [["0-9"], ["0-3"]]
    assert await pipe.run("scopes") == 0


async def test_rewritten_range_is_given_even_to_a_paused_job(pipe: Pipeline) -> None:
    """No registry row records the rewritten range, so the reconciler could not find it later."""
    await pipe.lay([STREAM, Node("reader", ("stream",))])
    await pipe.advance("stream", 3)
    await pipe.settle()
    await pipe.rows.execute(
        "insert into interlock.pauses (job_id, cause_id, bulk, path, reason) values ($1, $1, false, '{}', 'full')",
        pipe.jobs["reader"],
    )
    await pipe.report("stream", 1, 2)
    await pipe.run("router")
    assert await scopes(pipe, "reader") == ["0-3"]


@pytest.mark.parametrize("bulk", [False, True])
async def test_paused_job_receives_missed_changes_later(pipe: Pipeline, bulk: bool) -> None:
    await pipe.lay([SOURCE, READER])
    await pipe.rows.execute("update interlock.jobs set priority = $1", int(bulk))
    await pipe.rows.execute(
        "insert into interlock.pauses (job_id, cause_id, bulk, path, reason) values ($1, $1, $2, '{}', 'full')",
        pipe.jobs["reader"],
        bulk,
    )
    for start in (0, 10, 0):
        await pipe.report("source", start, start + 9)
        await pipe.run("router")
        assert await pipe.run("scopes") == 0
    assert await scopes(pipe, "reader") == []
    await pipe.rows.execute("delete from interlock.pauses")
    assert await pipe.run("scopes")
    assert sorted(await scopes(pipe, "reader")) == ["0-9", "10-19"]


async def test_bulk_pause_does_not_affect_normal_work(pipe: Pipeline) -> None:
    await pipe.lay([SOURCE, READER])
    await pipe.rows.execute(
        "insert into interlock.pauses (job_id, cause_id, bulk, path, reason) values ($1, $1, true, '{}', 'full')",
        pipe.jobs["reader"],
    )
    await pipe.report("source", 0, 9)
    await pipe.run("router")
    assert await scopes(pipe, "reader") == ["0-9"]


def event(pipe: Pipeline, name: str, **scope: Any) -> Event:
    dataset, version = pipe.versions[name]
    return Event(dataset_uuid=dataset, dataset_version=version, **scope)


async def registry(pipe: Pipeline) -> list[Any]:
    return [
        await pipe.rows.fetch(f"select * from interlock.{table} order by 1, 2")
        for table in ("dataset_versions", "partitions", "dataset_events", "outbox")
    ]


@pytest.mark.parametrize(
    ("first", "then", "code"),
    [
        ({"start": 0, "end": 9}, {"start": 5, "end": 14}, "partition_overlap"),
        ({"start": 0, "end": 9}, {"start": 0, "end": 4}, "partition_overlap"),
        ({"start": 0, "end": 9}, {"start": 0, "end": 19}, "partition_overlap"),
        ({"start": 0, "end": 9}, {"start": 2, "end": 3}, "partition_overlap"),
        ({"start": 0, "end": 9}, {"cursor": 5}, "scope_kind"),
        ({"cursor": 5}, {"start": 4, "end": 6}, "scope_kind"),
    ],
)
async def test_scope_that_does_not_fit_is_refused_and_changes_nothing(
    pipe: Pipeline, first: dict[str, int], then: dict[str, int], code: str
) -> None:
    await pipe.lay([SOURCE, READER])
    who = fence(pipe.producers["source"])
    await pipe.kernel.tasks.effects.emit(EventBatch(**who, events=[event(pipe, "source", **first)]))
    before = await registry(pipe)
    with pytest.raises(Conflict) as refused:
        await pipe.kernel.tasks.effects.emit(EventBatch(**who, events=[event(pipe, "source", **then)]))
    assert refused.value.code == code
    assert await registry(pipe) == before


async def test_overlapping_partitions_of_one_request_are_all_refused(pipe: Pipeline) -> None:
    await pipe.lay([SOURCE, READER])
    events = [event(pipe, "source", start=0, end=9), event(pipe, "source", start=9, end=12)]
    with pytest.raises(Conflict):
        await pipe.kernel.tasks.effects.emit(EventBatch(**fence(pipe.producers["source"]), events=events))
    assert await pipe.rows.fetchval("select count(*) from interlock.dataset_events") == 0


async def test_completion_does_not_move_a_stream_back(pipe: Pipeline) -> None:
    await pipe.lay([SOURCE])
    await pipe.kernel.tasks.effects.emit(
        EventBatch(**fence(pipe.producers["source"]), events=[event(pipe, "source", cursor=9)])
    )
    dataset, version = pipe.versions["source"]
    task = pipe.producers["source"].task
    assert task is not None
    prefix = task.outputs[0].write_prefix
    output = Output(dataset_uuid=dataset, dataset_version=version, location=f"{prefix}part", cursor=8)
    reply = await pipe.kernel.tasks.attempts.complete(
        [Completion(**fence(pipe.producers["source"]), status="Completed", outputs=[output])]
    )
    assert [refusal.code for refusal in reply.refused] == ["cursor_backwards"]
    assert await pipe.rows.fetchval("select cursor from interlock.dataset_versions") == 9
    assert await pipe.rows.fetchval("select status from interlock.tasks") == "Running"
