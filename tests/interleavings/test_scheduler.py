"""The scheduler itself: it enumerates orders, distinguishes callers, sees lock waits, and detects deadlocks."""

from __future__ import annotations

from math import comb
from uuid import UUID

import pytest

from interlock import failpoints
from interlock.apps.app import App
from interlock.errors import NotFound
from tests.interleavings import invariants
from tests.interleavings.operations import ORG, Operation, cancel, claim_range, complete, hold, one_pass
from tests.interleavings.race_arena import Arena
from tests.interleavings.scheduler import OWN_GATE, Order, orders, stand_at

PAIR = {"one": (OWN_GATE,), "other": (OWN_GATE,)}
LOCK = "select pg_advisory_xact_lock($1)"
ADVISORY_LOCKS = """
    select count(*) from pg_locks join pg_database d on d.oid = database
    where locktype = 'advisory' and datname = current_database()
"""


def test_two_operations_with_a_gate_each_have_six_orders() -> None:
    assert [str(order) for order in orders(one="a", other="b")] == [
        "one begins, one ends, other begins, other ends",
        "one begins, other begins, one ends, other ends",
        "one begins, other begins, other ends, one ends",
        "other begins, one begins, one ends, other ends",
        "other begins, one begins, other ends, one ends",
        "other begins, other ends, one begins, one ends",
    ]


def test_orders_are_all_there_and_none_is_twice() -> None:
    assert len({order.moves for order in orders(one=("a", "b", "c"), other="d")}) == comb(6, 2)
    assert len({order.moves for order in orders(one="a", two="b", three="c")}) == 90
    assert len({order.moves for order in orders(alike=("one", "two"), one="a", two="b", three="c")}) == 45
    assert str(orders(one="a", other=())[0]) == "one begins, one ends, other runs"


def test_order_knows_which_operation_ended_first() -> None:
    apart, met = Order(PAIR, ("one", "one", "other", "other")), Order(PAIR, ("other", "one", "one", "other"))
    assert (apart.before("one", "other"), apart.before("other", "one"), apart.overlap) == (True, False, False)
    assert (met.before("one", "other"), met.before("other", "one"), met.overlap) == (False, False, True)
    assert (met.first, met.second, met.meeting(), met.meeting(after="one")) == (
        "other",
        "one",
        {("one", "other")},
        set(),
    )


async def test_same_failpoint_holds_one_caller_and_lets_another_pass(arena: Arena) -> None:
    one, other = await arena.claimed(2)
    order = Order({"held": ("complete.before_commit",), "free": ()}, ("held", "free", "held"))
    seen: list[str] = []

    async def free(kernel: App) -> None:
        await complete(other)(kernel)
        seen.append((await kernel.tasks.reads.task(one.task_id, ORG)).status)

    await arena.play(order, held=complete(one), free=free)
    assert seen == ["Running"]
    assert (await arena.task(one.task_id))["status"] == "Completed"


async def test_failpoints_are_disarmed_when_a_race_is_over(arena: Arena) -> None:
    order = Order({"reap": ("reap.before_commit",)}, ("reap", "reap"))
    await arena.play(order, reap=one_pass("reaper"))
    assert not failpoints.armed("reap.before_commit")


async def test_waiting_operation_continues_only_when_the_lock_is_released(arena: Arena) -> None:
    done: list[str] = []

    def locking(name: str) -> Operation:
        async def work(kernel: App) -> None:
            async with kernel.stores.database.transaction() as connection:
                await connection.execute(LOCK, 1)
                done.append(name)
                await stand_at(OWN_GATE)

        return work

    order = Order(PAIR, ("one", "other", "other", "one"))
    played = await arena.play(order, one=locking("one"), other=locking("other"))
    assert (done, played.waits) == (["one", "other"], {("other", "one")})


def both_locks(first: int, then: int) -> Operation:
    async def work(kernel: App) -> None:
        async with kernel.stores.database.transaction() as connection:
            await connection.execute(LOCK, first)
            await stand_at(OWN_GATE)
            await connection.execute(LOCK, then)

    return work


async def test_deadlocked_operations_fail_and_leave_nothing_behind(arena: Arena) -> None:
    order = Order(PAIR, ("one", "other", "one", "other"))
    with pytest.raises(AssertionError, match=r"deadlock: .* waits for .* waits for"):
        await arena.play(order, one=both_locks(1, 2), other=both_locks(2, 1))
    # pg_locks lists the locks of all databases; other systems of this test process share the server.
    assert await arena.value(ADVISORY_LOCKS) == 0


async def test_operation_that_never_ends_is_a_failure(arena: Arena) -> None:
    order = Order(PAIR, ("one", "other"))
    with pytest.raises(AssertionError, match="never ended"):
        await arena.play(order, one=hold(LOCK, 1), other=hold(LOCK, 1))


async def test_refusal_is_a_result_and_any_other_error_is_raised(arena: Arena) -> None:
    alone = Order({"one": ()}, ("one",))
    played = await arena.play(alone, one=cancel(UUID(int=7)))
    assert isinstance(played["one"], NotFound)
    assert played.refusal("one") == ("not_found", None)

    async def broken(_: App) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await arena.play(alone, one=broken)


async def test_failing_operation_is_rolled_back_at_its_gate(arena: Arena) -> None:
    (lease,) = await arena.claimed()
    order = Order({"complete": ("complete.before_commit",)}, ("complete", "complete"), breaking="complete")
    played = await arena.play(order, complete=complete(lease))
    assert isinstance(played["complete"], failpoints.FailpointError)
    assert (await arena.task(lease.task_id))["status"] == "Running"


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        ("update interlock.tasks set lease_expires_at = null", "has a lease exactly while it runs"),
        ("update interlock.tasks set attempt = 2", "without gaps"),
        ("delete from interlock.slots", "has a slot"),
        ("update interlock.jobs set max_concurrency = 0", "above its cap"),
        ("update interlock.runs set running = 0", "counters of a run"),
        ("update interlock.runs set ended_at = now()", "ended exactly if all its tasks"),
        ("insert into interlock.run_deltas (run_id) select run_id from interlock.runs", "folded in"),
        ("update interlock.tasks set status = 'Queued', lease_expires_at = null", "history|slot|wake-up|counters"),
    ],
)
async def test_every_violated_invariant_is_reported(arena: Arena, damage: str, rule: str) -> None:
    run_id = (await arena.submitted(1, scaling={"max_concurrency": 1})).run_id
    await arena.do(claim_range(run_id, 0, 0))
    await arena.check()
    await arena.watcher.execute(damage)
    with pytest.raises(AssertionError, match=rule):
        await invariants.require(arena.watcher, arena.clock.now())
