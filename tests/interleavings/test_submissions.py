"""Concurrent duplicate submissions: by Idempotency-Key, by dedupe key, by the name of a job."""

from __future__ import annotations

from typing import Any

from tests.interleavings.operations import submit
from tests.interleavings.race_arena import Arena
from tests.interleavings.scheduler import Order, in_every_order, while_one_breaks

DEDUPED = {"name": "deduped", "dedupe_by": "/id"}


def items(*ids: str) -> list[dict[str, Any]]:
    return [{"id": item} for item in ids]


async def count(arena: Arena, table: str) -> int:
    return int(await arena.value(f"select count(*) from interlock.{table}"))


OPERATORS = {"one": "echo", "other": "fail"}


@in_every_order(alike=("one", "other"), one="submit.before_commit", other="submit.before_commit")
async def test_two_submissions_with_one_key_in_every_order_make_one_run(arena: Arena, order: Order) -> None:
    same = submit([1, 2], key="k")
    played = await arena.play(order, one=same, other=same)
    assert played.waits == order.meeting()
    assert played[order.second] == played[order.first]
    assert [await count(arena, table) for table in ("runs", "tasks", "jobs", "queue_messages")] == [1, 2, 1, 1]


@in_every_order(alike=("one", "other"), one="submit.before_commit", other="submit.before_commit")
async def test_two_bodies_with_one_key_in_every_order_the_first_is_accepted(arena: Arena, order: Order) -> None:
    played = await arena.play(order, one=submit([1], key="k"), other=submit([2, 3], key="k"))
    assert played.waits == order.meeting()
    assert played[order.first].total == (1 if order.first == "one" else 2)
    assert played.refusal(order.second) == ("idempotency_key_reused", None)
    assert await count(arena, "runs") == 1


@while_one_breaks(one="submit.before_commit", other="submit.before_commit")
async def test_when_a_submission_fails_its_idempotency_key_stays_free(arena: Arena, order: Order) -> None:
    same = submit([1, 2], key="k")
    played = await arena.play(order, one=same, other=same)
    assert played.waits == order.meeting()
    assert await arena.value("select run_id from interlock.runs") == played[order.second].run_id
    assert [await count(arena, table) for table in ("runs", "tasks", "idempotency_keys")] == [1, 2, 1]


@in_every_order(one="submit.before_commit", other="submit.before_commit")
async def test_two_submissions_with_one_dedupe_key_in_every_order_make_its_task_once(
    arena: Arena, order: Order
) -> None:
    await arena.do(submit(items("known"), **DEDUPED))
    played = await arena.play(
        order, one=submit(items("c", "b", "known"), **DEDUPED), other=submit(items("a", "b", "c"), **DEDUPED)
    )
    assert played.waits == order.meeting()
    new = {name: (played[name].total, played[name].deduplicated) for name in ("one", "other")}
    if order.first == "one":
        assert new == {"one": (2, 1), "other": (1, 2)}
    else:
        assert new == {"one": (0, 3), "other": (3, 0)}
        assert played["one"].state == "Completed"
    keys = await arena.rows("select dedupe_key from interlock.tasks order by 1")
    assert [row["dedupe_key"] for row in keys] == ["a", "b", "c", "known"]


@while_one_breaks(one="submit.before_commit", other="submit.before_commit")
async def test_when_a_submission_fails_its_dedupe_keys_stay_free(arena: Arena, order: Order) -> None:
    await arena.do(submit(items("known"), **DEDUPED))
    same = submit(items("a", "b"), **DEDUPED)
    played = await arena.play(order, one=same, other=same)
    assert played.waits == order.meeting()
    assert played[order.second].total == 2
    assert await count(arena, "tasks") == 3


@in_every_order(alike=("one", "other"), one="submit.before_commit", other="submit.before_commit")
async def test_two_first_submissions_to_a_name_in_every_order_make_one_job(arena: Arena, order: Order) -> None:
    played = await arena.play(order, one=submit([1], name="n"), other=submit([2, 3], name="n"))
    assert played.waits == order.meeting()
    assert played["one"].job_id == played["other"].job_id
    assert [await count(arena, table) for table in ("jobs", "runs", "tasks")] == [1, 2, 3]


@in_every_order(alike=("one", "other"), one="submit.before_commit", other="submit.before_commit")
async def test_two_definitions_for_a_new_name_in_every_order_the_first_wins(arena: Arena, order: Order) -> None:
    played = await arena.play(
        order,
        one=submit([1], name="n", operator=OPERATORS["one"]),
        other=submit([1], name="n", operator=OPERATORS["other"]),
    )
    assert played.waits == order.meeting()
    assert played.refusal(order.second) == ("job_differs", None)
    assert await arena.value("select operator from interlock.jobs") == OPERATORS[order.first]
    assert await count(arena, "runs") == 1


@in_every_order(alike=("one", "other"), one="submit.before_commit", other="submit.before_commit")
async def test_two_updates_of_a_job_in_every_order_the_last_wins_and_both_run(arena: Arena, order: Order) -> None:
    await arena.do(submit([0], name="n", operator="sleep"))
    played = await arena.play(
        order,
        one=submit([1], name="n", operator=OPERATORS["one"], update=True),
        other=submit([1], name="n", operator=OPERATORS["other"], update=True),
    )
    assert played.waits == order.meeting()
    assert await arena.value("select operator from interlock.jobs") == OPERATORS[order.second]
    assert await count(arena, "runs") == 3
