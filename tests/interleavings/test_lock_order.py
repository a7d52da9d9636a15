"""Operations on many rows lock them in one order, so that two overlapping ones never deadlock.

A third transaction holds one row in the middle. Two operations start, lock the rows before it, and wait. When it is
released, they continue: if their orders differ, each now needs a row that the other holds. The scheduler detects the
cycle, long before PostgreSQL breaks it by aborting one of them.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from interlock.tasks.queue import Outgoing
from interlock.tasks.shards import run_task_id
from tests.interleavings.operations import (
    QUEUE,
    Operation,
    ack,
    cancel_run,
    claim,
    claim_range,
    complete_all,
    complete_group,
    extend,
    heartbeat,
    hold,
    one_pass,
    receive,
    redrive_run,
    submit,
)
from tests.interleavings.race_arena import PAST_THE_BACKOFF, PAST_THE_LEASE, Arena
from tests.interleavings.scheduler import OWN_GATE, Order

TASKS = 6
HOLD_TASK = "select 1 from interlock.tasks where task_id = $1 for update"
HOLD_JOB = "select 1 from interlock.jobs where job_id = $1 for update"
HOLD_MESSAGE = "select 1 from interlock.queue_messages where dedupe_key = $1 for update"


def around_a_held_row(*names: str, held_at: str = OWN_GATE) -> pytest.MarkDecorator:
    """Parametrizes a test: a row is held, the two operations start in either order and wait, the row is released."""
    gates = {"holder": (held_at,)} | dict.fromkeys(names, ())
    both = [Order(gates, ("holder", *began, "holder")) for began in (names, names[::-1])]
    return pytest.mark.parametrize("order", both, ids=str)


async def crosswise_run(arena: Arena, **job: Any) -> tuple[UUID, list[UUID]]:
    """Returns a run whose first two tasks have ids in the opposite order of their indexes.

    Statements that lock by index and by id therefore meet its rows in opposite orders.
    """
    while True:
        run_id = (await arena.submitted(TASKS, **job)).run_id
        ids = [run_task_id(run_id, index) for index in range(TASKS)]
        if min(ids) not in ids[:2]:
            return run_id, ids
        await arena.empty()


async def emptied_and_vacuumed(arena: Arena) -> None:
    """Leaves pages without rows, for which a scan of any index costs as much as a key. Runs the loop against that."""
    await arena.submitted(TASKS)
    await arena.empty()
    await arena.watcher.execute("vacuum (truncate off, analyze) interlock.tasks_0")
    counted = "select reltuples from pg_class where oid = 'interlock.tasks_0'::regclass"
    assert await arena.value(counted) == 0
    await arena.do(one_pass("statistics"))
    assert await arena.value(counted) == -1


async def statuses(arena: Arena, run_id: UUID) -> set[str]:
    return {row["status"] for row in await arena.tasks(run_id)}


@around_a_held_row("claim", "cancel")
async def test_range_claim_and_run_cancel_never_deadlock(arena: Arena, order: Order) -> None:
    run_id, ids = await crosswise_run(arena)
    played = await arena.play(
        order, holder=hold(HOLD_TASK, ids[1]), claim=claim_range(run_id, 0, TASKS - 1), cancel=cancel_run(run_id)
    )
    assert played["cancel"].matched == TASKS
    assert all(row["cancel_requested"] for row in await arena.tasks(run_id))


@around_a_held_row("claim", "cancel")
async def test_lock_order_survives_a_vacuum_of_empty_tables(arena: Arena, order: Order) -> None:
    await emptied_and_vacuumed(arena)
    run_id, ids = await crosswise_run(arena)
    played = await arena.play(
        order, holder=hold(HOLD_TASK, ids[1]), claim=claim_range(run_id, 0, TASKS - 1), cancel=cancel_run(run_id)
    )
    assert played["cancel"].matched == TASKS


@around_a_held_row("complete", "beat")
async def test_lock_order_of_reports_survives_a_vacuum_of_empty_tables(arena: Arena, order: Order) -> None:
    await emptied_and_vacuumed(arena)
    run_id, ids = await crosswise_run(arena)
    (message,) = await arena.messages()
    await arena.do(claim_range(run_id, 0, TASKS - 1, message=message))
    leases = await arena.leases(run_id)
    played = await arena.play(
        order, holder=hold(HOLD_TASK, ids[1]), complete=complete_group(leases), beat=heartbeat(*leases)
    )
    assert played["complete"].accepted == TASKS


@around_a_held_row("ranged", "listed")
async def test_range_claim_and_list_claim_never_deadlock(arena: Arena, order: Order) -> None:
    run_id, ids = await crosswise_run(arena)
    await arena.play(
        order, holder=hold(HOLD_TASK, ids[1]), ranged=claim_range(run_id, 0, TASKS - 1), listed=claim(*reversed(ids))
    )
    # A task that a claim skipped because it was locked still has its message, or a holder.
    assert await statuses(arena, run_id) <= {"Running", "Queued"}


@around_a_held_row("ranged", "late")
async def test_range_claim_and_late_reports_never_deadlock(arena: Arena, order: Order) -> None:
    run_id, ids = await crosswise_run(arena)
    (message,) = await arena.messages()
    await arena.do(claim_range(run_id, 0, TASKS - 1, message=message))
    leases = await arena.leases(run_id)
    arena.clock.advance(PAST_THE_LEASE)
    await arena.do(one_pass("reaper"))
    arena.clock.advance(PAST_THE_BACKOFF)
    assert await arena.do(one_pass("retries")) == TASKS
    played = await arena.play(
        order,
        holder=hold(HOLD_TASK, ids[1]),
        ranged=claim_range(run_id, 0, TASKS - 1),
        late=complete_all(leases),
    )
    assert len(played["ranged"]) + played["late"].accepted <= TASKS
    assert await statuses(arena, run_id) <= {"Running", "Completed", "Queued"}


@around_a_held_row("complete", "cancel")
async def test_completions_and_run_cancel_never_deadlock(arena: Arena, order: Order) -> None:
    leases = await arena.claimed(TASKS)
    middle = sorted(lease.task_id for lease in leases)[TASKS // 2]
    played = await arena.play(
        order,
        holder=hold(HOLD_TASK, middle),
        complete=complete_all(leases),
        cancel=cancel_run(leases[0].run_id),
    )
    assert played["complete"].accepted == TASKS
    assert await statuses(arena, leases[0].run_id) == {"Completed"}


@around_a_held_row("complete", "beat")
async def test_completions_and_heartbeats_in_opposite_order_never_deadlock(arena: Arena, order: Order) -> None:
    leases = await arena.claimed(TASKS)
    middle = sorted(lease.task_id for lease in leases)[TASKS // 2]
    played = await arena.play(
        order,
        holder=hold(HOLD_TASK, middle),
        complete=complete_all(leases),
        beat=heartbeat(*reversed(leases)),
    )
    assert played["complete"].accepted == TASKS
    assert len(played["beat"].items) + len(played["beat"].refused) == TASKS


@around_a_held_row("complete", "other")
@pytest.mark.parametrize("other", ["heartbeats", "cancel", "reports"])
async def test_completions_of_a_range_never_deadlock_with_other_operations(
    arena: Arena, order: Order, other: str
) -> None:
    run_id, ids = await crosswise_run(arena)
    (message,) = await arena.messages()
    await arena.do(claim_range(run_id, 0, TASKS - 1, message=message))
    leases = await arena.leases(run_id)
    rivals = {"heartbeats": heartbeat(*leases), "cancel": cancel_run(run_id), "reports": complete_all(leases)}
    played = await arena.play(
        order, holder=hold(HOLD_TASK, ids[1]), complete=complete_group(leases), other=rivals[other]
    )
    assert played["complete"].accepted == TASKS
    assert await statuses(arena, run_id) == {"Completed"}


@around_a_held_row("one", "other", held_at="submit.before_commit")
async def test_submissions_with_dedupe_keys_in_opposite_order_never_deadlock(arena: Arena, order: Order) -> None:
    job = {"name": "deduped", "dedupe_by": "/id"}
    await arena.do(submit([{"id": "known"}], **job))
    middle, up, down = ([{"id": key} for key in keys] for keys in ("m", "amz", "zma"))
    played = await arena.play(order, holder=submit(middle, **job), one=submit(up, **job), other=submit(down, **job))
    assert sorted(played[name].total for name in ("holder", "one", "other")) == [0, 1, 2]


@around_a_held_row("reap", "cancel")
async def test_reaper_that_frees_slots_and_run_cancel_never_deadlock(arena: Arena, order: Order) -> None:
    run_id, ids = await crosswise_run(arena, scaling={"max_concurrency": 2})
    (message,) = await arena.messages()
    await arena.do(claim_range(run_id, 0, TASKS - 1, message=message))
    arena.clock.advance(PAST_THE_LEASE)
    job_id = (await arena.task(ids[0]))["job_id"]
    played = await arena.play(order, holder=hold(HOLD_JOB, job_id), reap=one_pass("reaper"), cancel=cancel_run(run_id))
    assert (played["reap"], played["cancel"].matched) == (2, TASKS)
    assert await statuses(arena, run_id) == {"Canceled"}


@around_a_held_row("retain", "retry")
async def test_retention_and_retry_of_old_dead_letters_never_deadlock(arena: Arena, order: Order) -> None:
    leases = await arena.claimed(TASKS, policy={"max_attempts": 1})
    run_id = leases[0].run_id
    arena.clock.advance(PAST_THE_LEASE)
    assert await arena.do(one_pass("reaper")) == TASKS
    await arena.fold()
    arena.clock.advance(arena.home.settings.retention_days * 86_400 + 1)
    middle = sorted(lease.task_id for lease in leases)[TASKS // 2]
    await arena.play(order, holder=hold(HOLD_TASK, middle), retain=one_pass("retention"), retry=redrive_run(run_id))
    left = await statuses(arena, run_id)
    assert left in (set(), {"Queued"})


@around_a_held_row("complete", "cancel")
async def test_slots_handed_over_and_cancel_of_the_waiting_never_deadlock(arena: Arena, order: Order) -> None:
    run_id, _ = await crosswise_run(arena, scaling={"max_concurrency": 3})
    (message,) = await arena.messages()
    await arena.do(claim_range(run_id, 0, TASKS - 1, message=message))
    leases = await arena.leases(run_id)
    parked = sorted(row["task_id"] for row in await arena.tasks(run_id) if row["parked"])
    played = await arena.play(
        order, holder=hold(HOLD_TASK, parked[1]), complete=complete_all(leases), cancel=cancel_run(run_id)
    )
    assert played["complete"].accepted == 3
    assert await statuses(arena, run_id) == {"Completed", "Canceled"}


def send(*keys: str) -> Operation:
    return lambda kernel: kernel.tasks.queue.send(QUEUE, [Outgoing("{}", dedupe_key=key) for key in keys])


@around_a_held_row("one", "other")
async def test_senders_of_the_same_messages_in_opposite_order_never_deadlock(arena: Arena, order: Order) -> None:
    await arena.do(send("a", "m", "z"))
    await arena.play(order, holder=hold(HOLD_MESSAGE, "m"), one=send("a", "m", "z"), other=send("z", "m", "a"))
    assert len(await arena.messages()) == 3


@around_a_held_row("send", "settle")
@pytest.mark.parametrize("settle", [ack, extend], ids=["ack", "extend"])
async def test_sender_and_receiver_of_the_same_messages_never_deadlock(
    arena: Arena, order: Order, settle: object
) -> None:
    for key in ("z", "m", "a"):
        await arena.do(send(key))
    messages = await arena.do(receive(3))
    settling = ack(*messages) if settle is ack else extend(*messages)
    await arena.play(order, holder=hold(HOLD_MESSAGE, "m"), send=send("a", "m", "z"), settle=settling)
    assert len(await arena.messages()) == 3
