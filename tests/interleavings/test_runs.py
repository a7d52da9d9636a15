"""A run's counters, end, cancel and deletion, against operations on its tasks."""

from __future__ import annotations

import pytest

from interlock.tasks import runs
from tests.interleavings.operations import cancel_run, complete, one_pass, retry
from tests.interleavings.race_arena import Arena
from tests.interleavings.scheduler import Order, in_every_order, while_one_breaks

ONE_ATTEMPT = {"policy": {"max_attempts": 1}}


# Counters


@in_every_order(fold="fold.before_commit", complete="complete.before_commit")
async def test_counters_and_completion_in_every_order_count_it_once(arena: Arena, order: Order) -> None:
    (lease,) = await arena.claimed()
    played = await arena.play(order, fold=one_pass("run-counters"), complete=complete(lease))
    assert played["complete"].status == "Completed"
    # The claim is there to be counted in any case.
    assert (played["fold"], played.waits) == (1, set())
    assert await arena.run_state(lease.run_id) == "Completed"


@in_every_order(alike=("one", "other"), one="fold.before_commit", other="fold.before_commit")
async def test_two_counter_loops_in_every_order_count_everything_once(
    arena: Arena, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_BATCH", 1)
    (lease,) = await arena.claimed()
    await arena.do(complete(lease))
    played = await arena.play(order, one=one_pass("run-counters"), other=one_pass("run-counters"))
    # There is work for both, and both would have to write to the same run.
    assert (played[order.first], played[order.second]) == ((1, 0) if order.overlap else (1, 1))
    assert played.waits == set()
    assert await arena.run_state(lease.run_id) == "Completed"


@while_one_breaks(one="fold.before_commit", other="fold.before_commit")
async def test_when_counting_fails_the_next_pass_counts_its_deltas(arena: Arena, order: Order) -> None:
    (lease,) = await arena.claimed()
    await arena.do(complete(lease))
    await arena.play(order, one=one_pass("run-counters"), other=one_pass("run-counters"))
    assert await arena.run_state(lease.run_id) == "Completed"


@in_every_order(fold="fold.before_commit", retry="redrive.before_commit")
async def test_run_end_and_retry_of_dead_letter_in_every_order_leave_it_open(arena: Arena, order: Order) -> None:
    dead = await arena.failed(**ONE_ATTEMPT)
    await arena.play(order, fold=one_pass("run-counters"), retry=retry(dead.task_id))
    assert await arena.state(dead.task_id) == ("Queued", 2)
    assert await arena.run_state(dead.run_id) == "Running"


@in_every_order(fold="fold.before_commit", cancel=())
async def test_run_end_and_cancel_in_every_order_keep_the_outcome_of_its_tasks(arena: Arena, order: Order) -> None:
    (lease,) = await arena.claimed()
    await arena.do(complete(lease))
    played = await arena.play(order, fold=one_pass("run-counters"), cancel=cancel_run(lease.run_id))
    assert played["cancel"].matched == 0
    assert played.waits == ({("cancel", "fold")} if order.first == "fold" and order.overlap else set())
    assert await arena.run_state(lease.run_id) == "Completed"


@in_every_order(cancel="cancel.before_commit", complete="complete.before_commit")
async def test_run_cancel_and_partial_completion_in_every_order_agree(arena: Arena, order: Order) -> None:
    leases = await arena.claimed(3)
    played = await arena.play(order, cancel=cancel_run(leases[0].run_id), complete=complete(leases[1]))
    assert played["complete"].status == "Completed"
    asked = [row["cancel_requested"] for row in await arena.tasks(leases[0].run_id)]
    assert asked == [True, order.first == "cancel", True]
    for lease in (leases[0], leases[2]):
        await arena.do(complete(lease, "Canceled"))
    await arena.fold()
    assert await arena.run_state(leases[0].run_id) == "Canceled"


@in_every_order(user="cancel.before_commit", loop="cancel.before_commit")
async def test_run_cancel_and_its_loop_in_every_order_cancel_each_task_once(arena: Arena, order: Order) -> None:
    run_id = (await arena.submitted(3)).run_id
    other_run = (await arena.submitted(2)).run_id
    played = await arena.play(order, user=cancel_run(run_id), loop=one_pass("run-cancels"))
    assert played["user"].matched == (0 if order.before("loop", "user") and played["loop"] else 3)
    assert {row["status"] for row in await arena.tasks(run_id)} == {"Canceled"}
    assert {row["status"] for row in await arena.tasks(other_run)} == {"Queued"}
    assert await arena.run_state(run_id) == "Canceled"


# Retention


def past_retention(arena: Arena) -> None:
    arena.clock.advance(arena.home.settings.retention_days * 86_400 + 1)


@in_every_order(retain="retention.before_commit", complete="complete.before_commit")
async def test_retention_and_very_late_report_in_every_order_change_nothing(arena: Arena, order: Order) -> None:
    (lease,) = await arena.claimed()
    await arena.do(complete(lease))
    await arena.fold()
    past_retention(arena)
    played = await arena.play(order, retain=one_pass("retention"), complete=complete(lease))
    assert played.waits == set()
    # The reply reads the row after the report found nothing to change.
    gone = order.before("retain", "complete") or order.moves[-1] == "complete"
    if gone:
        assert played.refusal("complete") == ("fenced", "task")
    else:
        assert played["complete"].duplicate
    assert [await arena.value(f"select count(*) from interlock.{table}") for table in ("runs", "tasks", "jobs")] == [
        0
    ] * 3


@in_every_order(retain="retention.before_commit", complete="complete.before_commit")
async def test_retention_and_a_late_report_of_a_dead_letter_in_every_order_leave_no_rows(
    arena: Arena, order: Order
) -> None:
    lease = await arena.reaped(**ONE_ATTEMPT)
    await arena.fold()
    past_retention(arena)
    played = await arena.play(order, retain=one_pass("retention"), complete=complete(lease))
    if order.first == "retain":
        assert played.refusal("complete") == ("fenced", "task")
    else:
        assert played["complete"].status == "Completed"
    tables = ("runs", "tasks", "attempts", "run_deltas")
    assert [await arena.value(f"select count(*) from interlock.{table}") for table in tables] == [0] * 4


@in_every_order(retain="retention.before_commit", retry="redrive.before_commit")
async def test_retention_and_retry_of_old_dead_letter_in_every_order_keep_all_or_none(
    arena: Arena, order: Order
) -> None:
    dead = await arena.failed(**ONE_ATTEMPT)
    await arena.fold()
    past_retention(arena)
    played = await arena.play(order, retain=one_pass("retention"), retry=retry(dead.task_id))
    if order.first == "retain":
        assert played.waits == ({("retry", "retain")} if order.overlap else set())
        assert played.refusal("retry") == ("not_found", None)
        assert await arena.value("select count(*) from interlock.runs") == 0
    else:
        assert (played["retry"].status, played.waits) == ("Queued", set())
        assert await arena.run_state(dead.run_id) == "Running"
        assert await arena.history(dead.task_id) == [(1, "Failed")]


@in_every_order(alike=("one", "other"), one="retention.before_commit", other="retention.before_commit")
async def test_two_retentions_in_every_order_delete_a_run_each_without_waiting(arena: Arena, order: Order) -> None:
    for _ in range(2):
        (lease,) = await arena.claimed()
        await arena.do(complete(lease))
    await arena.fold()
    past_retention(arena)
    played = await arena.play(order, one=one_pass("retention"), other=one_pass("retention"))
    assert (played["one"] >= 2, played["other"] >= 2, played.waits) == (True, True, set())
    assert await arena.value("select count(*) from interlock.tasks") == 0


@in_every_order(
    alike=("one", "other"),
    fold="fold.before_commit",
    one="complete.before_commit",
    other="complete.before_commit",
)
async def test_counters_and_two_completions_in_every_order_end_the_run(
    arena: Arena, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_BATCH", 1)
    leases = await arena.claimed(2)
    played = await arena.play(
        order, fold=one_pass("run-counters"), one=complete(leases[0]), other=complete(leases[1], "Canceled")
    )
    assert (played["one"].status, played["other"].status, played.waits) == ("Completed", "Canceled", set())
    assert await arena.run_state(leases[0].run_id) == "CompletedWithFailures"
