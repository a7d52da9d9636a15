"""Reports of many tasks by index, as workers report success, against operations on one of the tasks."""

from __future__ import annotations

from uuid import UUID

from tests.interleavings.operations import cancel, complete, complete_group, heartbeat, one_pass, release
from tests.interleavings.race_arena import PAST_THE_LEASE, Arena
from tests.interleavings.scheduler import Order, in_every_order, while_one_breaks

TASKS = 3


async def ends(arena: Arena, run_id: UUID) -> list[str]:
    return [row["status"] for row in await arena.tasks(run_id)]


@in_every_order(reap="reap.before_commit", report="complete.before_commit")
async def test_reaper_and_grouped_report_in_every_order_end_as_reported(arena: Arena, order: Order) -> None:
    leases = await arena.claimed(TASKS)
    arena.clock.advance(PAST_THE_LEASE)
    played = await arena.play(order, reap=one_pass("reaper"), report=complete_group(leases))
    assert played.waits == order.meeting(after="reap")
    assert played["reap"] == (TASKS if order.first == "reap" else 0)
    assert (played["report"].accepted, played["report"].refused) == (TASKS, [])
    assert await ends(arena, leases[0].run_id) == ["Completed"] * TASKS
    assert [await arena.history(lease.task_id) for lease in leases] == [[(1, "Completed")]] * TASKS


@in_every_order(alike=("one", "other"), one="complete.before_commit", other="complete.before_commit")
async def test_grouped_report_twice_in_every_order_counts_once(arena: Arena, order: Order) -> None:
    leases = await arena.claimed(TASKS)
    report = complete_group(leases)
    played = await arena.play(order, one=report, other=report)
    assert played.waits == order.meeting()
    assert (played["one"].accepted, played["other"].accepted) == (TASKS, TASKS)
    assert await ends(arena, leases[0].run_id) == ["Completed"] * TASKS


@in_every_order(group="complete.before_commit", failure="complete.before_commit")
async def test_grouped_report_and_failure_of_one_task_in_every_order_the_first_wins(arena: Arena, order: Order) -> None:
    leases = await arena.claimed(TASKS)
    played = await arena.play(order, group=complete_group(leases), failure=complete(leases[1], "Failed"))
    assert played.waits == order.meeting()
    if order.first == "group":
        assert (played["group"].accepted, played.refusal("failure")) == (TASKS, ("fenced", "status"))
        assert await ends(arena, leases[0].run_id) == ["Completed"] * TASKS
    else:
        assert (played["group"].accepted, played["failure"].status) == (TASKS - 1, "Failed")
        assert [(refused.task_id, refused.stale) for refused in played["group"].refused] == [
            (leases[1].task_id, "status")
        ]
        assert await ends(arena, leases[0].run_id) == ["Completed", "Failed", "Completed"]


@in_every_order(group="complete.before_commit", cancel="cancel.before_commit")
async def test_grouped_report_and_cancel_of_one_task_in_every_order_complete_it(arena: Arena, order: Order) -> None:
    leases = await arena.claimed(TASKS)
    played = await arena.play(order, group=complete_group(leases), cancel=cancel(leases[1].task_id))
    assert played.waits == order.meeting()
    assert played["group"].accepted == TASKS
    assert await ends(arena, leases[0].run_id) == ["Completed"] * TASKS
    assert (await arena.task(leases[1].task_id))["cancel_requested"] == (order.first == "cancel")


@in_every_order(group="complete.before_commit", release="release.before_commit")
async def test_grouped_report_and_release_of_one_task_in_every_order_the_first_wins(arena: Arena, order: Order) -> None:
    leases = await arena.claimed(TASKS)
    played = await arena.play(order, group=complete_group(leases), release=release(leases[1]))
    assert played.waits == order.meeting()
    given_back = order.first == "release"
    assert (played["release"], played["group"].accepted) == ((1, TASKS - 1) if given_back else (0, TASKS))
    middle = "Queued" if given_back else "Completed"
    assert await ends(arena, leases[0].run_id) == ["Completed", middle, "Completed"]


@in_every_order(group="complete.before_commit", beat="heartbeat.before_commit")
async def test_grouped_report_and_heartbeats_in_every_order_complete_every_task(arena: Arena, order: Order) -> None:
    leases = await arena.claimed(TASKS)
    played = await arena.play(order, group=complete_group(leases), beat=heartbeat(*leases))
    assert played.waits == order.meeting()
    assert played["group"].accepted == TASKS
    assert len(played["beat"].refused) == (TASKS if order.first == "group" else 0)
    assert await ends(arena, leases[0].run_id) == ["Completed"] * TASKS


@while_one_breaks(group="complete.before_commit", reap="reap.before_commit")
async def test_when_grouped_report_or_reaper_fails_the_other_acts_as_if_alone(arena: Arena, order: Order) -> None:
    leases = await arena.claimed(TASKS)
    arena.clock.advance(PAST_THE_LEASE)
    played = await arena.play(order, group=complete_group(leases), reap=one_pass("reaper"))
    if order.breaking == "reap":
        assert played["group"].accepted == TASKS
    else:
        # Skipped, because the report had locked them; their alarm is still set.
        assert (played["reap"], await arena.do(one_pass("reaper"))) == (0, TASKS)
    expected = "Completed" if order.breaking == "reap" else "Failed"
    assert await ends(arena, leases[0].run_id) == [expected] * TASKS


@in_every_order(reap="reap.before_commit", beat="heartbeat.before_commit")
async def test_reaper_and_partial_heartbeat_in_every_order_keep_an_alarm(arena: Arena, order: Order) -> None:
    leases = await arena.claimed(TASKS)
    arena.clock.advance(PAST_THE_LEASE)
    played = await arena.play(order, reap=one_pass("reaper"), beat=heartbeat(leases[0], leases[2]))
    kept = order.first == "beat"
    assert played["reap"] == (1 if kept else TASKS)
    assert await ends(arena, leases[0].run_id) == (["Running", "Failed", "Running"] if kept else ["Failed"] * TASKS)
    # A worker that stops sending heartbeats is found in time.
    arena.clock.advance(PAST_THE_LEASE)
    while await arena.do(one_pass("reaper")):
        continue
    assert "Running" not in await ends(arena, leases[0].run_id)
