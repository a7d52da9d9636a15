"""Queueing a failed task again: the retry loop and a user, against cancels, late reports and claims."""

from __future__ import annotations

from uuid import UUID

import pytest

from interlock.tasks import reaper
from tests.interleavings.operations import cancel, claim, complete, one_pass, retry
from tests.interleavings.race_arena import PAST_THE_BACKOFF, Arena
from tests.interleavings.scheduler import Order, in_every_order, while_one_breaks

NOT_FAILED = ("not_failed", None)


async def due(arena: Arena) -> UUID:
    """Returns a failed task whose backoff has elapsed."""
    lease = await arena.failed()
    arena.clock.advance(PAST_THE_BACKOFF)
    return lease.task_id


async def dead(arena: Arena) -> UUID:
    return (await arena.failed(policy={"max_attempts": 1})).task_id


@in_every_order(alike=("one", "other"), one="retry.before_commit", other="retry.before_commit")
async def test_two_retry_loops_in_every_order_queue_a_task_once(arena: Arena, order: Order) -> None:
    task_id = await due(arena)
    played = await arena.play(order, one=one_pass("retries"), other=one_pass("retries"))
    assert sorted([played["one"], played["other"]]) == [0, 1]
    assert played.waits == set()
    assert await arena.state(task_id) == ("Queued", 2)
    assert len(await arena.messages()) == 1


@in_every_order(alike=("one", "other"), one="retry.before_commit", other="retry.before_commit")
async def test_two_retry_loops_in_every_order_share_the_work_without_waiting(
    arena: Arena, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "_RETRY_BATCH", 1)
    tasks = [(await arena.failed()).task_id, (await arena.failed()).task_id]
    arena.clock.advance(PAST_THE_BACKOFF)
    played = await arena.play(order, one=one_pass("retries"), other=one_pass("retries"))
    assert (played["one"], played["other"], played.waits) == (1, 1, set())
    assert [await arena.state(task_id) for task_id in tasks] == [("Queued", 2)] * 2


@in_every_order(retry="retry.before_commit", cancel="cancel.before_commit")
async def test_retry_loop_and_cancel_in_every_order_end_in_a_cancel(arena: Arena, order: Order) -> None:
    task_id = await due(arena)
    played = await arena.play(order, retry=one_pass("retries"), cancel=cancel(task_id))
    assert played["cancel"].status == "Canceled"
    assert played["retry"] == (1 if order.first == "retry" else 0)
    waits = order.overlap and order.first == "retry"
    assert played.waits == ({("cancel", "retry")} if waits else set())
    assert (await arena.task(task_id))["status"] == "Canceled"
    assert await arena.history(task_id) == [(1, "Failed")]
    # A message that the retry left finds nothing to claim.
    assert (await arena.do(claim(task_id))).reason == "Canceled"


@in_every_order(retry="retry.before_commit", complete="complete.before_commit")
async def test_retry_loop_and_late_report_in_every_order_end_as_reported(arena: Arena, order: Order) -> None:
    late = await arena.reaped()
    arena.clock.advance(PAST_THE_BACKOFF)
    played = await arena.play(order, retry=one_pass("retries"), complete=complete(late))
    assert played["retry"] == (1 if order.first == "retry" else 0)
    waits = order.overlap and order.first == "retry"
    assert played.waits == ({("complete", "retry")} if waits else set())
    assert played["complete"].status == "Completed"
    assert await arena.state(late.task_id) == ("Completed", 1)
    assert await arena.history(late.task_id) == [(1, "Completed")]


@in_every_order(loop="retry.before_commit", user="redrive.before_commit")
async def test_retry_loop_and_retry_by_hand_in_every_order_use_up_one_attempt(arena: Arena, order: Order) -> None:
    task_id = await due(arena)
    played = await arena.play(order, loop=one_pass("retries"), user=retry(task_id))
    if order.first == "loop":
        assert (played["loop"], played.refusal("user")) == (1, NOT_FAILED)
        assert played.waits == ({("user", "loop")} if order.overlap else set())
    else:
        assert (played["loop"], played["user"].status, played.waits) == (0, "Queued", set())
    assert await arena.state(task_id) == ("Queued", 2)
    assert len(await arena.messages()) == 1


@in_every_order(alike=("one", "other"), one="redrive.before_commit", other="redrive.before_commit")
async def test_two_retries_by_hand_in_every_order_revive_a_dead_letter_once(arena: Arena, order: Order) -> None:
    task_id = await dead(arena)
    played = await arena.play(order, one=retry(task_id), other=retry(task_id))
    assert (played[order.first].attempt, played.refusal(order.second)) == (2, NOT_FAILED)
    assert played.waits == order.meeting()
    row = await arena.task(task_id)
    assert (row["status"], row["attempt"], row["max_attempts"], row["dead"]) == ("Queued", 2, 2, False)


@in_every_order(user="redrive.before_commit", complete="complete.before_commit")
async def test_retry_by_hand_and_late_report_in_every_order_the_first_decides(arena: Arena, order: Order) -> None:
    late = await arena.reaped()
    played = await arena.play(order, user=retry(late.task_id), complete=complete(late))
    assert played.waits == order.meeting()
    if order.first == "user":
        assert played.refusal("complete") == ("fenced", "attempt")
        assert await arena.state(late.task_id) == ("Queued", 2)
    else:
        assert (played["complete"].status, played.refusal("user")) == ("Completed", NOT_FAILED)
        assert await arena.state(late.task_id) == ("Completed", 1)


@in_every_order(user="redrive.before_commit", cancel="cancel.before_commit")
async def test_retry_by_hand_and_cancel_of_a_waiting_task_in_every_order_end_in_a_cancel(
    arena: Arena, order: Order
) -> None:
    lease = await arena.failed()
    played = await arena.play(order, user=retry(lease.task_id), cancel=cancel(lease.task_id))
    assert played.waits == order.meeting()
    if order.first == "user":
        assert played["user"].status in ("Queued", "Canceled")
    else:
        assert played.refusal("user") == NOT_FAILED
    assert (await arena.task(lease.task_id))["status"] == "Canceled"
    assert await arena.run_state(lease.run_id) == "Canceled"


@in_every_order(user="redrive.before_commit", claim="claim.before_commit")
async def test_retry_by_hand_and_claim_in_every_order_only_a_queued_task_is_claimed(arena: Arena, order: Order) -> None:
    task_id = await dead(arena)
    played = await arena.play(order, user=retry(task_id), claim=claim(task_id))
    assert played.waits == set()
    if order.before("user", "claim"):
        assert (played["claim"].status, played["claim"].attempt) == ("Claimed", 2)
    else:
        assert (played["claim"].status, played["claim"].reason) == ("NotClaimed", "Failed")
        assert await arena.state(task_id) == ("Queued", 2)


@while_one_breaks(retry="retry.before_commit", cancel="cancel.before_commit")
async def test_when_retry_loop_or_cancel_fails_the_other_gets_the_task(arena: Arena, order: Order) -> None:
    task_id = await due(arena)
    played = await arena.play(order, retry=one_pass("retries"), cancel=cancel(task_id))
    if order.breaking == "retry":
        assert (played.waits, await arena.state(task_id)) == ({("cancel", "retry")}, ("Canceled", 1))
        assert await arena.messages() == []
    else:
        assert (played.waits, played["retry"]) == (set(), 0)
        assert await arena.do(one_pass("retries")) == 1
        assert await arena.state(task_id) == ("Queued", 2)


@while_one_breaks(loop="retry.before_commit", user="redrive.before_commit")
async def test_when_retry_loop_or_manual_retry_fails_it_uses_up_no_attempt(arena: Arena, order: Order) -> None:
    task_id = await due(arena)
    await arena.play(order, loop=one_pass("retries"), user=retry(task_id))
    if order.breaking == "user":
        assert await arena.state(task_id) == ("Failed", 1)
        assert await arena.do(one_pass("retries")) == 1
    assert await arena.state(task_id) == ("Queued", 2)
    assert len(await arena.messages()) == 1
