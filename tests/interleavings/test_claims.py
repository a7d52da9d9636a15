"""Claims of a queued task against each other, and against operations that queue, end or release a task."""

from __future__ import annotations

import msgspec
import pytest

from interlock.tasks.shards import run_task_id
from tests.interleavings.operations import (
    End,
    cancel,
    cancel_run,
    claim,
    claim_range,
    complete,
    hold,
    one_pass,
    release,
)
from tests.interleavings.race_arena import PAST_THE_BACKOFF, Arena
from tests.interleavings.scheduler import OWN_GATE, Order, in_every_order, while_one_breaks

CLAIMED = ("Claimed", None)


def refused(reason: str) -> tuple[str, str]:
    return "NotClaimed", reason


# Claims against claims


@in_every_order(alike=("one", "other"), one="claim.before_commit", other="claim.before_commit")
async def test_two_claims_of_one_task_in_every_order_have_one_winner(arena: Arena, order: Order) -> None:
    accepted = await arena.submitted()
    task_id = run_task_id(accepted.run_id, 0)
    played = await arena.play(order, one=claim(task_id), other=claim(task_id))
    assert (played[order.first].status, played[order.first].reason) == CLAIMED
    assert (played[order.second].status, played[order.second].reason) == refused("AlreadyRunning")
    assert played.waits == order.meeting()
    row = await arena.task(task_id)
    assert (row["status"], row["attempt"], row["lease_token"]) == ("Running", 1, played[order.first].lease_token)


@in_every_order(low="claim.before_commit", high="claim.before_commit")
async def test_claims_of_overlapping_ranges_in_every_order_share_every_task_once(arena: Arena, order: Order) -> None:
    run_id = (await arena.submitted(9)).run_id
    played = await arena.play(order, low=claim_range(run_id, 0, 5), high=claim_range(run_id, 3, 8))
    first_low = order.first == "low"
    assert played["low"] == ([0, 1, 2, 3, 4, 5] if first_low else [0, 1, 2])
    assert played["high"] == ([6, 7, 8] if first_low else [3, 4, 5, 6, 7, 8])
    assert len(await arena.leases(run_id)) == 9


@in_every_order(alike=("one", "other"), one="claim.before_commit", other="claim.before_commit")
async def test_partial_claims_of_one_range_in_every_order_never_wait(arena: Arena, order: Order) -> None:
    run_id = (await arena.submitted(6)).run_id
    part = claim_range(run_id, 0, 5, limit=3)
    played = await arena.play(order, one=part, other=part)
    assert (played[order.first], played[order.second]) == ([0, 1, 2], [3, 4, 5])
    assert played.waits == set()


@pytest.mark.parametrize("limit", [2, 3])
@pytest.mark.parametrize("locked", [0, 1, 3])
@in_every_order(sweep=OWN_GATE, claim="claim.before_commit")
async def test_partial_claim_leaves_a_wake_up_for_locked_tasks(
    arena: Arena, order: Order, limit: int, locked: int
) -> None:
    run_id = (await arena.submitted(4)).run_id
    (message,) = await arena.messages()
    lock = hold("select 1 from interlock.tasks where task_id = $1 for no key update", run_task_id(run_id, locked))
    part = claim_range(run_id, 0, 3, limit=limit, message=message)
    played = await arena.play(order, sweep=lock, claim=part)
    assert (len(played["claim"]), ("claim", "sweep") in played.waits) == (limit, False)
    left = 4 - limit
    while left:
        arena.clock.advance(1)
        (message,) = await arena.messages()
        body = msgspec.json.decode(message.body)
        rest = claim_range(run_id, body["start"], body["end"], limit=limit, message=message)
        left -= len(await arena.do(rest))
    assert await arena.messages() == []


@in_every_order(listed="claim.before_commit", ranged="claim.before_commit")
async def test_list_and_a_range_of_the_same_tasks_in_every_order_the_first_gets_all(arena: Arena, order: Order) -> None:
    run_id = (await arena.submitted(4)).run_id
    ids = [run_task_id(run_id, index) for index in range(4)]
    played = await arena.play(order, listed=claim(*ids), ranged=claim_range(run_id, 0, 3))
    assert played["ranged"] == ([0, 1, 2, 3] if order.first == "ranged" else [])
    listed = {(reply.status, reply.reason) for reply in played["listed"].claims}
    assert listed == ({CLAIMED} if order.first == "listed" else {refused("AlreadyRunning")})


# Against operations that queue a task


@in_every_order(retry="retry.before_commit", claim="claim.before_commit")
async def test_retry_and_claim_in_every_order_only_a_queued_task_is_claimed(arena: Arena, order: Order) -> None:
    task_id = (await arena.failed()).task_id
    arena.clock.advance(PAST_THE_BACKOFF)
    played = await arena.play(order, retry=one_pass("retries"), claim=claim(task_id))
    assert (played["retry"], played.waits) == (1, set())
    if order.before("retry", "claim"):
        assert (played["claim"].status, played["claim"].attempt) == ("Claimed", 2)
        assert await arena.state(task_id) == ("Running", 2)
    else:
        assert (played["claim"].status, played["claim"].reason) == refused("NotDue")
        assert await arena.state(task_id) == ("Queued", 2)
    # Its wake-up came with it; a worker that receives it finds the task or nothing.
    assert len(await arena.messages()) == 1


@in_every_order(release="release.before_commit", claim="claim.before_commit")
async def test_release_and_claim_in_every_order_the_same_attempt_runs_once_at_a_time(
    arena: Arena, order: Order
) -> None:
    (lease,) = await arena.claimed()
    played = await arena.play(order, release=release(lease), claim=claim(lease.task_id))
    assert (played["release"], played.waits) == (1, set())
    if order.before("release", "claim"):
        assert (played["claim"].status, played["claim"].attempt) == ("Claimed", 1)
        assert played["claim"].lease_token != lease.lease_token
    else:
        assert (played["claim"].status, played["claim"].reason) == refused("AlreadyRunning")
        assert await arena.state(lease.task_id) == ("Queued", 1)


# Against operations that end a task


@pytest.mark.parametrize("reported", ["Completed", "Failed"])
@in_every_order(complete="complete.before_commit", claim="claim.before_commit")
async def test_late_report_and_next_claim_in_every_order_the_first_counts(
    arena: Arena, order: Order, reported: End
) -> None:
    late = await arena.requeued()
    played = await arena.play(order, complete=complete(late, reported), claim=claim(late.task_id))
    assert played.waits == order.meeting()
    if order.first == "complete":
        assert played["complete"].status == reported
        verdict = refused("Completed" if reported == "Completed" else "NotDue")
        assert (played["claim"].status, played["claim"].reason) == verdict
        assert await arena.state(late.task_id) == (reported, 1)
        assert await arena.history(late.task_id) == [(1, reported)]
    else:
        assert played.refusal("complete") == ("fenced", "attempt")
        assert await arena.state(late.task_id) == ("Running", 2)
        assert await arena.history(late.task_id) == [(1, "LeaseExpired"), (2, None)]


@in_every_order(complete="complete.before_commit", claim="claim.before_commit")
async def test_late_report_and_claim_of_its_range_in_every_order_the_first_counts(arena: Arena, order: Order) -> None:
    late = await arena.requeued()
    played = await arena.play(order, complete=complete(late), claim=claim_range(late.run_id, 0, 0))
    assert played.waits == order.meeting()
    if order.first == "complete":
        assert (played["complete"].status, played["claim"]) == ("Completed", [])
    else:
        assert (played.refusal("complete"), played["claim"]) == (("fenced", "attempt"), [0])


@in_every_order(cancel="cancel.before_commit", claim="claim.before_commit")
async def test_cancel_and_claim_in_every_order_the_task_ends_or_its_holder_is_asked(arena: Arena, order: Order) -> None:
    task_id = run_task_id((await arena.submitted()).run_id, 0)
    played = await arena.play(order, cancel=cancel(task_id), claim=claim(task_id))
    assert played.waits == order.meeting()
    row = await arena.task(task_id)
    assert row["cancel_requested"]
    if order.first == "cancel":
        assert (played["claim"].status, played["claim"].reason) == refused("Canceled")
        assert (row["status"], await arena.history(task_id)) == ("Canceled", [])
    else:
        assert (played["claim"].status, played["claim"].reason) == CLAIMED
        assert (row["status"], played["cancel"].status) == ("Running", "Running")


@in_every_order(cancel="cancel.before_commit", claim="claim.before_commit")
async def test_cancel_of_a_run_and_claim_of_its_range_in_every_order_reach_every_task(
    arena: Arena, order: Order
) -> None:
    run_id = (await arena.submitted(5)).run_id
    played = await arena.play(order, cancel=cancel_run(run_id), claim=claim_range(run_id, 0, 4))
    assert played.waits == order.meeting()
    assert (played["cancel"].matched, played["cancel"].remaining) == (5, False)
    rows = await arena.tasks(run_id)
    assert [row["cancel_requested"] for row in rows] == [True] * 5
    if order.first == "cancel":
        assert (played["claim"], {row["status"] for row in rows}) == ([], {"Canceled"})
        assert await arena.run_state(run_id) == "Canceled"
    else:
        assert (played["claim"], {row["status"] for row in rows}) == ([0, 1, 2, 3, 4], {"Running"})
        assert await arena.run_state(run_id) == "Running"


# Three operations


@in_every_order(complete="complete.before_commit", retry="retry.before_commit", claim="claim.before_commit")
async def test_late_report_retry_and_claim_in_every_order_run_or_end_the_task(arena: Arena, order: Order) -> None:
    late = await arena.reaped()
    arena.clock.advance(PAST_THE_BACKOFF)
    played = await arena.play(order, complete=complete(late), retry=one_pass("retries"), claim=claim(late.task_id))
    if played["claim"].status == "Claimed":
        assert played["retry"] == 1
        assert played.refusal("complete") == ("fenced", "attempt")
        assert await arena.state(late.task_id) == ("Running", 2)
    else:
        assert played["claim"].reason in ("NotDue", "Completed")
        assert (played["complete"].status, played["complete"].duplicate) == ("Completed", False)
        assert await arena.state(late.task_id) == ("Completed", 1)
        assert await arena.history(late.task_id) == [(1, "Completed")]
    # The claim got the task exactly if it came after the retry and before the report.
    began = [name for n, name in enumerate(order.moves) if name not in order.moves[:n]]
    assert (played["claim"].status == "Claimed") == (order.before("retry", "claim") and began[-1] == "complete")


@in_every_order(
    alike=("one", "other"), one="claim.before_commit", other="claim.before_commit", cancel="cancel.before_commit"
)
async def test_two_claims_and_a_cancel_in_every_order_have_at_most_one_holder(arena: Arena, order: Order) -> None:
    task_id = run_task_id((await arena.submitted()).run_id, 0)
    played = await arena.play(order, one=claim(task_id), other=claim(task_id), cancel=cancel(task_id))
    verdicts = sorted(played[name].reason or "Claimed" for name in ("one", "other"))
    if order.first == "cancel":
        assert (verdicts, (await arena.task(task_id))["status"]) == (["Canceled", "Canceled"], "Canceled")
    else:
        assert (verdicts, (await arena.task(task_id))["status"]) == (["AlreadyRunning", "Claimed"], "Running")
        assert played[order.first].status == "Claimed"


# One of two operations fails


@while_one_breaks(cancel="cancel.before_commit", claim="claim.before_commit")
async def test_when_cancel_or_claim_fails_the_other_acts_as_if_alone(arena: Arena, order: Order) -> None:
    task_id = run_task_id((await arena.submitted()).run_id, 0)
    played = await arena.play(order, cancel=cancel(task_id), claim=claim(task_id))
    survivor = "claim" if order.breaking == "cancel" else "cancel"
    assert played.waits == {(survivor, order.breaking)}
    row = await arena.task(task_id)
    expected = ("Running", False) if survivor == "claim" else ("Canceled", True)
    assert (row["status"], row["cancel_requested"]) == expected


@while_one_breaks(one="claim.before_commit", other="claim.before_commit")
async def test_when_a_claim_fails_the_waiting_one_gets_the_task(arena: Arena, order: Order) -> None:
    run_id = (await arena.submitted(3)).run_id
    claims = claim_range(run_id, 0, 2)
    played = await arena.play(order, one=claims, other=claims)
    survivor = "other" if order.breaking == "one" else "one"
    assert (played[survivor], played.waits) == ([0, 1, 2], {(survivor, order.breaking)})


@while_one_breaks(complete="complete.before_commit", claim="claim.before_commit")
async def test_when_late_report_or_next_claim_fails_the_other_wins(arena: Arena, order: Order) -> None:
    late = await arena.requeued()
    await arena.play(order, complete=complete(late), claim=claim(late.task_id))
    expected = ("Running", 2) if order.breaking == "complete" else ("Completed", 1)
    assert await arena.state(late.task_id) == expected
