"""Handing over slots: a job is never above its cap, and no task that waits for a slot is forgotten."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
import pytest

from interlock.tasks.queue import Received
from interlock.tasks.shards import run_task_id
from tests.interleavings.operations import (
    Lease,
    cancel,
    claim,
    claim_range,
    complete,
    complete_all,
    hold,
    one_pass,
    release,
)
from tests.interleavings.race_arena import PAST_THE_BACKOFF, PAST_THE_LEASE, Arena
from tests.interleavings.scheduler import OWN_GATE, Order, in_every_order, while_one_breaks

ONE_AT_A_TIME = {"max_concurrency": 1}
CAPS = [ONE_AT_A_TIME, {"key": "/host", "max_concurrency_per_key": 1}]
COMPLETING = ("complete.before_commit", "complete.committed", "wake.before_commit")
HANDING_OVER = ("complete.committed", "wake.before_commit")


async def one_runs_others_wait(arena: Arena, others: int, scaling: dict[str, Any]) -> tuple[Lease, list[UUID]]:
    """Returns the holder of the only slot, and the tasks parked behind it, oldest first."""
    leases = await arena.claimed(name="capped", scaling=scaling)
    waiting = [await one_more_waits(arena, scaling) for _ in range(others)]
    assert await arena.value("select count(*) from interlock.tasks where parked") == others
    return leases[0], waiting


async def one_more_waits(arena: Arena, scaling: dict[str, Any]) -> UUID:
    arena.clock.advance(1)
    accepted = await arena.submitted(name="capped", scaling=scaling)
    await claim_all(arena)
    return run_task_id(accepted.run_id, 0)


async def claim_all(arena: Arena) -> None:
    """Claims with all visible messages, as workers would."""
    for message in await arena.messages():
        await claim_by(arena, message)


async def claim_by(arena: Arena, message: Received) -> None:
    body = msgspec.json.decode(message.body)
    if "task_id" in body:
        await arena.do(claim(UUID(body["task_id"]), message=message))
    else:
        await arena.do(claim_range(UUID(body["run_id"]), body["start"], body["end"], message=message))


async def drained(arena: Arena) -> bool:
    """Returns True if wake-ups alone, without the reconciler, end every task without exceeding the cap."""
    arena.clock.advance(PAST_THE_BACKOFF)
    await arena.do(one_pass("retries"))
    running = "select task_id, attempt, lease_token, run_id from interlock.tasks where status = 'Running'"
    while True:
        await claim_all(arena)
        held = [Lease(*row) for row in await arena.rows(running)]
        await arena.check()
        if not held:
            break
        await arena.do(complete_all(held))
    unended = "select count(*) from interlock.tasks where status not in ('Completed', 'Canceled')"
    return bool(await arena.value(unended) == 0)


@pytest.mark.parametrize("scaling", CAPS, ids=["in all", "per key"])
@in_every_order(complete=COMPLETING, claim="claim.before_commit")
async def test_completion_and_claim_of_a_waiting_task_in_every_order_hand_the_slot_over(
    arena: Arena, order: Order, scaling: dict[str, Any]
) -> None:
    holder, (next_one, _) = await one_runs_others_wait(arena, 2, scaling)
    played = await arena.play(order, complete=complete(holder), claim=claim(next_one))
    assert played["complete"].status == "Completed"
    # The slot is free once the completion has committed: its second move.
    committed = [place for place, name in enumerate(order.moves) if name == "complete"][1]
    began = order.moves.index("claim")
    assert played["claim"].status == ("Claimed" if began > committed else "NotClaimed")
    assert played["claim"].reason == (None if began > committed else "LimitReached")
    assert await drained(arena)


@pytest.mark.parametrize("scaling", CAPS, ids=["in all", "per key"])
@in_every_order(reap="reap.before_commit", claim="claim.before_commit")
async def test_reaper_and_claim_of_a_waiting_task_in_every_order_hand_the_slot_over(
    arena: Arena, order: Order, scaling: dict[str, Any]
) -> None:
    _, (next_one, _) = await one_runs_others_wait(arena, 2, scaling)
    arena.clock.advance(PAST_THE_LEASE)
    played = await arena.play(order, reap=one_pass("reaper"), claim=claim(next_one))
    assert played["reap"] == 1
    assert await drained(arena)


@in_every_order(release="release.before_commit", claim="claim.before_commit")
async def test_release_and_claim_of_a_waiting_task_in_every_order_hand_the_slot_over(
    arena: Arena, order: Order
) -> None:
    holder, (next_one, _) = await one_runs_others_wait(arena, 2, ONE_AT_A_TIME)
    played = await arena.play(order, release=release(holder), claim=claim(next_one))
    assert played["release"] == 1
    assert (played["claim"].status == "Claimed") == order.before("release", "claim")
    assert await drained(arena)


@in_every_order(alike=("one", "other"), one=HANDING_OVER, other=HANDING_OVER)
async def test_two_completions_in_every_order_hand_over_both_slots(arena: Arena, order: Order) -> None:
    leases = await arena.claimed(5, scaling={"max_concurrency": 2})
    assert len(leases) == 2
    played = await arena.play(order, one=complete(leases[0]), other=complete(leases[1]))
    assert (played["one"].status, played["other"].status) == ("Completed", "Completed")
    awake = "select count(*) from interlock.tasks where status = 'Queued' and not parked"
    assert await arena.value(awake) >= 2
    assert await drained(arena)


@in_every_order(alike=("one", "other"), one="claim.before_commit", other="claim.before_commit")
async def test_two_claims_for_one_slot_in_every_order_park_the_loser(arena: Arena, order: Order) -> None:
    run_id = (await arena.submitted(2, scaling=ONE_AT_A_TIME)).run_id
    tasks = {"one": run_task_id(run_id, 0), "other": run_task_id(run_id, 1)}
    played = await arena.play(order, one=claim(tasks["one"]), other=claim(tasks["other"]))
    assert (played[order.first].status, played[order.second].reason) == ("Claimed", "LimitReached")
    assert played.waits == order.meeting()
    assert (await arena.task(tasks[order.second]))["parked"]
    assert await drained(arena)


@pytest.mark.parametrize("scaling", CAPS, ids=["in all", "per key"])
@in_every_order(router=OWN_GATE, claim="claim.before_commit")
async def test_claim_of_a_capped_task_waits_for_a_row_lock_and_loses_no_wake_up(
    arena: Arena, order: Order, scaling: dict[str, Any]
) -> None:
    """The router locks queued tasks that take in a newer change; so does the sweep of files."""
    task_id = run_task_id((await arena.submitted(scaling=scaling)).run_id, 0)
    (message,) = await arena.messages()
    lock = hold("select 1 from interlock.tasks where task_id = $1 for no key update", task_id)
    played = await arena.play(order, router=lock, claim=claim(task_id, message=message))
    assert played["claim"].status == "Claimed"
    assert played.waits == order.meeting()
    assert await drained(arena)


@in_every_order(alike=("one", "other"), one="claim.before_commit", other="claim.before_commit")
async def test_two_claims_of_one_task_of_a_capped_job_in_every_order_take_one_slot(arena: Arena, order: Order) -> None:
    task_id = run_task_id((await arena.submitted(scaling={"max_concurrency": 2})).run_id, 0)
    played = await arena.play(order, one=claim(task_id), other=claim(task_id))
    assert (played[order.first].status, played[order.second].status) == ("Claimed", "NotClaimed")
    assert await arena.value("select count(*) from interlock.slots") == 1


@in_every_order(complete=COMPLETING, cancel="cancel.before_commit")
async def test_completion_and_cancel_of_next_task_wake_the_one_after_it(arena: Arena, order: Order) -> None:
    holder, (next_one, _) = await one_runs_others_wait(arena, 2, ONE_AT_A_TIME)
    played = await arena.play(order, complete=complete(holder), cancel=cancel(next_one))
    assert (played["complete"].status, played["cancel"].status) == ("Completed", "Canceled")
    assert await drained(arena)


@in_every_order(reap="reap.before_commit", cancel="cancel.before_commit")
async def test_reaper_and_cancel_of_next_task_wake_the_one_after_it(arena: Arena, order: Order) -> None:
    _, (next_one, _) = await one_runs_others_wait(arena, 2, ONE_AT_A_TIME)
    arena.clock.advance(PAST_THE_LEASE)
    played = await arena.play(order, reap=one_pass("reaper"), cancel=cancel(next_one))
    assert (played["reap"], played["cancel"].status) == (1, "Canceled")
    assert await drained(arena)


@in_every_order(complete=COMPLETING, late="complete.before_commit")
async def test_completion_and_late_report_of_next_task_wake_the_one_after_it(arena: Arena, order: Order) -> None:
    late, (second,) = await one_runs_others_wait(arena, 1, ONE_AT_A_TIME)
    arena.clock.advance(PAST_THE_LEASE)
    await arena.do(one_pass("reaper"))
    holder = await arena.claim(second)
    # The reaped task is queued again and parked: it is next, although its last holder may still report.
    arena.clock.advance(PAST_THE_BACKOFF)
    await arena.do(one_pass("retries"))
    await claim_all(arena)
    await one_more_waits(arena, ONE_AT_A_TIME)
    played = await arena.play(order, complete=complete(holder), late=complete(late))
    assert (played["complete"].status, played["late"].status) == ("Completed", "Completed")
    assert await drained(arena)


@in_every_order(complete=HANDING_OVER, reconcile="reconcile.before_commit")
async def test_completion_and_reconciler_in_every_order_hand_the_slot_over(arena: Arena, order: Order) -> None:
    holder, _ = await one_runs_others_wait(arena, 2, ONE_AT_A_TIME)
    played = await arena.play(order, complete=complete(holder), reconcile=one_pass("reconciler"))
    assert played["complete"].status == "Completed"
    assert await drained(arena)


@while_one_breaks(complete="wake.before_commit", claim="claim.before_commit")
async def test_when_hand_over_or_claim_fails_the_other_takes_the_slot(arena: Arena, order: Order) -> None:
    holder, (next_one,) = await one_runs_others_wait(arena, 1, ONE_AT_A_TIME)
    played = await arena.play(order, complete=complete(holder), claim=claim(next_one))
    survivor = "claim" if order.breaking == "complete" else "complete"
    assert played.waits == {(survivor, order.breaking)}
    if survivor == "claim":
        assert played["claim"].status == "Claimed"
    assert await drained(arena)
