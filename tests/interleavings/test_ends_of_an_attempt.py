"""Operations that end a running attempt: its holder, the reaper, a user, a drain."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from interlock.access.tokens import write_prefix
from interlock.tasks import reaper
from interlock.wire.attempts import Event, Output
from tests.interleavings.operations import End, Lease, cancel, complete, emit, heartbeat, one_pass, release, retry
from tests.interleavings.race_arena import PAST_THE_LEASE, Arena
from tests.interleavings.scheduler import Order, in_every_order, while_one_breaks

STALE_STATUS = ("fenced", "status")


async def expired(arena: Arena, tasks: int = 1, **job: Any) -> list[Lease]:
    """Returns running attempts whose lease has expired unnoticed."""
    leases = await arena.claimed(tasks, **job)
    arena.clock.advance(PAST_THE_LEASE)
    return leases


# Against the reaper


@pytest.mark.parametrize("reported", ["Completed", "Failed"])
@in_every_order(reap="reap.before_commit", complete="complete.before_commit")
async def test_reaper_and_report_in_every_order_end_as_reported(arena: Arena, order: Order, reported: End) -> None:
    (lease,) = await expired(arena)
    played = await arena.play(order, reap=one_pass("reaper"), complete=complete(lease, reported))
    assert played["reap"] == (1 if order.first == "reap" else 0)
    assert (played["complete"].status, played["complete"].duplicate) == (reported, False)
    assert played.waits == order.meeting(after="reap")
    assert await arena.state(lease.task_id) == (reported, 1)
    assert await arena.history(lease.task_id) == [(1, reported)]
    assert await arena.run_state(lease.run_id) == ("Completed" if reported == "Completed" else "Running")


@pytest.mark.parametrize("reported", ["Completed", "Failed"])
@in_every_order(reap="reap.before_commit", complete="complete.before_commit")
async def test_reaper_and_report_of_the_last_attempt_in_every_order_end_as_reported(
    arena: Arena, order: Order, reported: End
) -> None:
    (lease,) = await expired(arena, policy={"max_attempts": 1})
    played = await arena.play(order, reap=one_pass("reaper"), complete=complete(lease, reported))
    assert played["reap"] == (1 if order.first == "reap" else 0)
    assert (played["complete"].status, played["complete"].duplicate) == (reported, False)
    assert played.waits == order.meeting(after="reap")
    assert (await arena.task(lease.task_id))["dead"] == (reported == "Failed")
    assert await arena.history(lease.task_id) == [(1, reported)]
    assert await arena.run_state(lease.run_id) == reported


@in_every_order(redrive="redrive.before_commit", complete="complete.before_commit")
async def test_redrive_and_late_report_of_a_dead_letter_in_every_order_the_first_counts(
    arena: Arena, order: Order
) -> None:
    lease = await arena.reaped(policy={"max_attempts": 1})
    await arena.fold()
    played = await arena.play(order, redrive=retry(lease.task_id), complete=complete(lease))
    if order.first == "redrive":
        assert played.refusal("complete") == ("fenced", "attempt")
        assert await arena.state(lease.task_id) == ("Queued", 2)
        assert await arena.run_state(lease.run_id) == "Running"
    else:
        assert played["complete"].status == "Completed"
        assert await arena.state(lease.task_id) == ("Completed", 1)
        assert await arena.run_state(lease.run_id) == "Completed"


@in_every_order(fold="fold.before_commit", complete="complete.before_commit")
async def test_run_end_and_late_report_of_dead_letter_in_every_order_complete_it(arena: Arena, order: Order) -> None:
    lease = await arena.reaped(policy={"max_attempts": 1})
    played = await arena.play(order, fold=one_pass("run-counters"), complete=complete(lease))
    assert (played["complete"].status, played.waits) == ("Completed", set())
    assert await arena.run_state(lease.run_id) == "Completed"


@in_every_order(one="complete.before_commit", other="complete.before_commit")
async def test_two_late_reports_of_a_dead_letter_in_every_order_the_first_counts(arena: Arena, order: Order) -> None:
    lease = await arena.reaped(policy={"max_attempts": 1})
    await arena.fold()
    played = await arena.play(order, one=complete(lease), other=complete(lease, "Failed"))
    assert played.refusal(order.second) == STALE_STATUS
    assert await arena.history(lease.task_id) == [(1, played[order.first].status)]
    assert await arena.run_state(lease.run_id) == played[order.first].status


@in_every_order(alike=("one", "other"), one="reap.before_commit", other="reap.before_commit")
async def test_two_reapers_in_every_order_end_an_attempt_once(arena: Arena, order: Order) -> None:
    (lease,) = await expired(arena)
    played = await arena.play(order, one=one_pass("reaper"), other=one_pass("reaper"))
    assert sorted([played["one"], played["other"]]) == [0, 1]
    assert played[order.first] == 1
    assert played.waits == set()
    assert await arena.state(lease.task_id) == ("Failed", 1)
    assert await arena.history(lease.task_id) == [(1, "LeaseExpired")]


@in_every_order(alike=("one", "other"), one="reap.before_commit", other="reap.before_commit")
async def test_two_reapers_in_every_order_share_the_work_without_waiting(
    arena: Arena, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "_BATCH", 1)
    leases = [*await arena.claimed(), *await expired(arena)]
    played = await arena.play(order, one=one_pass("reaper"), other=one_pass("reaper"))
    assert (played["one"], played["other"], played.waits) == (1, 1, set())
    assert [await arena.history(lease.task_id) for lease in leases] == [[(1, "LeaseExpired")]] * 2


@in_every_order(reap="reap.before_commit", beat="heartbeat.before_commit")
async def test_reaper_and_heartbeat_in_every_order_the_first_decides(arena: Arena, order: Order) -> None:
    (lease,) = await expired(arena)
    played = await arena.play(order, reap=one_pass("reaper"), beat=heartbeat(lease))
    assert played.waits == order.meeting(after="reap")
    if order.first == "reap":
        assert (played["reap"], played.refusal("beat")) == (1, STALE_STATUS)
        assert await arena.state(lease.task_id) == ("Failed", 1)
    else:
        assert played["reap"] == 0
        row = await arena.task(lease.task_id)
        assert (row["status"], row["lease_expires_at"]) == ("Running", played["beat"].lease_expires_at)
        assert row["lease_expires_at"] > arena.clock.now()


@in_every_order(reap="reap.before_commit", release="release.before_commit")
async def test_reaper_and_release_in_every_order_the_first_decides(arena: Arena, order: Order) -> None:
    (lease,) = await expired(arena)
    played = await arena.play(order, reap=one_pass("reaper"), release=release(lease))
    assert played.waits == order.meeting(after="reap")
    if order.first == "reap":
        assert (played["reap"], played["release"]) == (1, 0)
        assert await arena.state(lease.task_id) == ("Failed", 1)
        assert await arena.history(lease.task_id) == [(1, "LeaseExpired")]
    else:
        assert (played["reap"], played["release"]) == (0, 1)
        assert await arena.state(lease.task_id) == ("Queued", 1)
        assert await arena.history(lease.task_id) == [(1, "Released")]
        assert len(await arena.messages()) == 1


@in_every_order(reap="reap.before_commit", cancel="cancel.before_commit")
async def test_reaper_and_cancel_in_every_order_end_in_a_cancel(arena: Arena, order: Order) -> None:
    (lease,) = await expired(arena)
    played = await arena.play(order, reap=one_pass("reaper"), cancel=cancel(lease.task_id))
    assert played.waits == order.meeting(after="reap")
    # A reaper that found the row locked by the cancel left the attempt to its next pass.
    passed_by = order.first == "cancel" and order.overlap
    assert (played["reap"], await arena.do(one_pass("reaper"))) == ((0, 1) if passed_by else (1, 0))
    assert await arena.state(lease.task_id) == ("Canceled", 1)
    assert await arena.history(lease.task_id) == [(1, "LeaseExpired" if order.first == "reap" else "Canceled")]


@in_every_order(reap="reap.before_commit", emit="events.before_commit")
async def test_reaper_and_events_in_every_order_no_event_follows_the_end(arena: Arena, order: Order) -> None:
    output: dict[str, Any] = {"dataset_uuid": uuid4(), "dataset_version": uuid4()}
    (lease,) = await expired(arena, outputs=[output])
    played = await arena.play(order, reap=one_pass("reaper"), emit=emit(lease, Event(**output, cursor=7)))
    assert played.waits == order.meeting(after="reap")
    # A reaper that finds the row locked by the events skips the attempt.
    assert played["reap"] == (0 if order.first == "emit" and order.overlap else 1)
    assert (played["emit"] is None) == (order.first == "reap")
    assert await arena.value("select count(*) from interlock.dataset_events") == (order.first == "emit")


# Against the holder's own report


@pytest.mark.parametrize("reported", ["Completed", "Failed", "Canceled"])
@in_every_order(cancel="cancel.before_commit", complete="complete.before_commit")
async def test_cancel_and_report_in_every_order_agree_on_one_end(arena: Arena, order: Order, reported: End) -> None:
    (lease,) = await arena.claimed()
    played = await arena.play(order, cancel=cancel(lease.task_id), complete=complete(lease, reported))
    assert played.waits == order.meeting()
    ends = {"Completed": "Completed", "Failed": "Canceled", "Canceled": "Canceled"}
    assert await arena.state(lease.task_id) == (ends[reported], 1)
    canceled_first = order.first == "cancel"
    # A failure before the cancel is recorded; a failure after it counts as the cancel.
    assert played["complete"].status == (ends[reported] if canceled_first else reported)
    assert await arena.history(lease.task_id) == [(1, played["complete"].status)]
    asked = canceled_first or reported == "Failed"
    assert (await arena.task(lease.task_id))["cancel_requested"] == asked


@in_every_order(alike=("one", "other"), one="complete.before_commit", other="complete.before_commit")
async def test_same_report_twice_in_every_order_counts_once_with_its_outputs(arena: Arena, order: Order) -> None:
    output: dict[str, Any] = {"dataset_uuid": uuid4(), "dataset_version": uuid4()}
    (lease,) = await arena.claimed(outputs=[output])
    location = write_prefix(arena.objects_root, lease.task_id, lease.attempt, *output.values()) + "part"
    report = complete(lease, outputs=[Output(**output, location=location)], events=[Event(**output, cursor=7)])
    played = await arena.play(order, one=report, other=report)
    assert played.waits == order.meeting()
    assert [played[name].status for name in ("one", "other")] == ["Completed", "Completed"]
    assert (played[order.first].duplicate, played[order.second].duplicate) == (False, True)
    assert await arena.value("select count(*) from interlock.output_commits") == 1
    assert await arena.value("select count(*) from interlock.dataset_events") == 1


@in_every_order(good="complete.before_commit", bad="complete.before_commit")
async def test_different_reports_of_one_attempt_in_every_order_the_first_counts(arena: Arena, order: Order) -> None:
    (lease,) = await arena.claimed()
    played = await arena.play(order, good=complete(lease), bad=complete(lease, "Failed"))
    assert played.waits == order.meeting()
    end = "Completed" if order.first == "good" else "Failed"
    assert (played[order.first].status, played.refusal(order.second)) == (end, STALE_STATUS)
    assert await arena.history(lease.task_id) == [(1, end)]


@in_every_order(old="complete.before_commit", new="complete.before_commit")
async def test_reports_of_old_and_current_attempt_in_every_order_the_current_wins(arena: Arena, order: Order) -> None:
    old = await arena.requeued()
    new = await arena.claim(old.task_id)
    played = await arena.play(order, old=complete(old, "Failed"), new=complete(new))
    assert played.refusal("old") == ("fenced", "attempt")
    assert (played["new"].status, played["new"].duplicate) == ("Completed", False)
    # The stale lease token matches no row, so such a report blocks no other.
    assert played.waits == set()
    assert await arena.state(old.task_id) == ("Completed", 2)
    assert await arena.history(old.task_id) == [(1, "LeaseExpired"), (2, "Completed")]


@in_every_order(complete="complete.before_commit", release="release.before_commit")
async def test_report_and_release_in_every_order_the_first_counts(arena: Arena, order: Order) -> None:
    (lease,) = await arena.claimed()
    played = await arena.play(order, complete=complete(lease), release=release(lease))
    assert played.waits == order.meeting()
    if order.first == "complete":
        assert (played["complete"].status, played["release"]) == ("Completed", 0)
        assert await arena.state(lease.task_id) == ("Completed", 1)
    else:
        assert (played.refusal("complete"), played["release"]) == (STALE_STATUS, 1)
        assert await arena.state(lease.task_id) == ("Queued", 1)
        assert await arena.history(lease.task_id) == [(1, "Released")]


@in_every_order(complete="complete.before_commit", emit="events.before_commit")
async def test_report_and_events_in_every_order_no_event_comes_after_the_end(arena: Arena, order: Order) -> None:
    output: dict[str, Any] = {"dataset_uuid": uuid4(), "dataset_version": uuid4()}
    (lease,) = await arena.claimed(outputs=[output])
    played = await arena.play(order, complete=complete(lease), emit=emit(lease, Event(**output, cursor=7)))
    assert played.waits == order.meeting()
    assert played["complete"].status == "Completed"
    assert (played["emit"] is None) == (order.first == "complete")
    assert await arena.value("select count(*) from interlock.dataset_events") == (order.first == "emit")


# Cancel against heartbeat and release


@in_every_order(beat="heartbeat.before_commit", cancel="cancel.before_commit")
async def test_heartbeat_after_a_cancel_reports_it_in_every_order(arena: Arena, order: Order) -> None:
    (lease,) = await arena.claimed()
    played = await arena.play(order, beat=heartbeat(lease), cancel=cancel(lease.task_id))
    assert played.waits == order.meeting()
    assert played["beat"].cancel_requested == (order.first == "cancel")
    assert (await arena.do(heartbeat(lease))).cancel_requested
    assert await arena.state(lease.task_id) == ("Running", 1)


@in_every_order(release="release.before_commit", cancel="cancel.before_commit")
async def test_release_and_cancel_in_every_order_end_in_a_cancel(arena: Arena, order: Order) -> None:
    (lease,) = await arena.claimed()
    played = await arena.play(order, release=release(lease), cancel=cancel(lease.task_id))
    assert played.waits == order.meeting()
    assert played["release"] == 1
    assert await arena.state(lease.task_id) == ("Canceled", 1)
    assert await arena.history(lease.task_id) == [(1, "Canceled" if order.first == "cancel" else "Released")]
    assert await arena.run_state(lease.run_id) == "Canceled"


# Three operations


@in_every_order(reap="reap.before_commit", complete="complete.before_commit", cancel="cancel.before_commit")
async def test_reaper_report_and_cancel_in_every_order_have_one_outcome(arena: Arena, order: Order) -> None:
    (lease,) = await expired(arena)
    played = await arena.play(order, reap=one_pass("reaper"), complete=complete(lease), cancel=cancel(lease.task_id))
    status, attempt = await arena.state(lease.task_id)
    if status == "Completed":
        assert (played["complete"].status, played["complete"].duplicate) == ("Completed", False)
        assert await arena.history(lease.task_id) == [(1, "Completed")]
    else:
        # Both other operations came before the report: together they ended the task.
        assert (status, played["reap"], played.refusal("complete")) == ("Canceled", 1, STALE_STATUS)
        assert await arena.history(lease.task_id) in ([(1, "Canceled")], [(1, "LeaseExpired")])
        assert order.first != "complete"
    assert attempt == 1


# One of two operations fails


@while_one_breaks(reap="reap.before_commit", complete="complete.before_commit")
async def test_when_reaper_or_report_fails_the_other_acts_as_if_alone(arena: Arena, order: Order) -> None:
    (lease,) = await expired(arena)
    played = await arena.play(order, reap=one_pass("reaper"), complete=complete(lease))
    if order.breaking == "reap":
        assert (played["complete"].status, played.waits) == ("Completed", {("complete", "reap")})
        assert await arena.history(lease.task_id) == [(1, "Completed")]
    else:
        assert (played["reap"], played.waits) == (0, set())
        assert await arena.do(one_pass("reaper")) == 1
        assert await arena.history(lease.task_id) == [(1, "LeaseExpired")]


@while_one_breaks(cancel="cancel.before_commit", complete="complete.before_commit")
async def test_when_cancel_or_report_fails_the_other_acts_as_if_alone(arena: Arena, order: Order) -> None:
    (lease,) = await arena.claimed()
    played = await arena.play(order, cancel=cancel(lease.task_id), complete=complete(lease, "Failed"))
    assert played.waits == order.meeting()
    row = await arena.task(lease.task_id)
    expected = ("Failed", False) if order.breaking == "cancel" else ("Running", True)
    assert (row["status"], row["cancel_requested"]) == expected


@while_one_breaks(beat="heartbeat.before_commit", reap="reap.before_commit")
async def test_when_heartbeat_or_reaper_fails_the_other_acts_as_if_alone(arena: Arena, order: Order) -> None:
    (lease,) = await expired(arena)
    played = await arena.play(order, beat=heartbeat(lease), reap=one_pass("reaper"))
    assert await arena.state(lease.task_id) == ("Running", 1)
    lease_ends = (await arena.task(lease.task_id))["lease_expires_at"]
    if order.breaking == "reap":
        assert lease_ends == played["beat"].lease_expires_at > arena.clock.now()
    else:
        assert (lease_ends < arena.clock.now(), await arena.do(one_pass("reaper"))) == (True, 1)
