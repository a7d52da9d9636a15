"""Wake-ups: redelivered while they are settled, sent again while they are processed."""

from __future__ import annotations

from uuid import UUID

from interlock.apps.app import App
from interlock.tasks.queue import Received
from interlock.tasks.shards import run_task_id
from tests.interleavings.operations import (
    VISIBILITY_SECONDS,
    Operation,
    ack,
    claim,
    claim_range,
    complete,
    extend,
    lease_of,
    nack,
    one_pass,
    receive,
    submit,
)
from tests.interleavings.race_arena import PAST_THE_BACKOFF, Arena
from tests.interleavings.scheduler import Order, in_every_order, while_one_breaks
from tests.support.system import until


async def overdue(arena: Arena, tasks: int = 1) -> tuple[UUID, Received]:
    """Returns a run, and its message at a worker that has kept it past its visibility timeout."""
    run_id = (await arena.submitted(tasks)).run_id
    (message,) = await arena.messages()
    arena.clock.advance(VISIBILITY_SECONDS + 1)
    return run_id, message


def passing(arena: Arena, seconds: float) -> Operation:
    """Advances the clock, as one of the racing operations."""

    async def advance(_: App) -> None:
        arena.clock.advance(seconds)

    return advance


# A message against its redelivery


@in_every_order(alike=("one", "other"), one="receive.before_commit", other="receive.before_commit")
async def test_two_receivers_in_every_order_get_a_message_once(arena: Arena, order: Order) -> None:
    await arena.submitted()
    played = await arena.play(order, one=receive(), other=receive())
    assert (len(played[order.first]), played[order.second], played.waits) == (1, [], set())


@in_every_order(redeliver="receive.before_commit", ack="settle.before_commit")
async def test_redelivery_and_ack_in_every_order_delete_or_deliver_the_message(arena: Arena, order: Order) -> None:
    run_id, message = await overdue(arena)
    await arena.do(claim_range(run_id, 0, 0))
    played = await arena.play(order, redeliver=receive(), ack=ack(message))
    if order.first == "ack":
        assert (played["ack"], played["redeliver"], played.waits) == (1, [], set())
        assert await arena.value("select count(*) from interlock.queue_messages") == 0
    else:
        (again,) = played["redeliver"]
        assert (played["ack"], again.receives, played.waits) == (0, 2, set())
        assert await arena.do(ack(again)) == 1


@in_every_order(redeliver="receive.before_commit", extend="settle.before_commit")
async def test_redelivery_and_extension_in_every_order_leave_one_holder(arena: Arena, order: Order) -> None:
    _, message = await overdue(arena)
    played = await arena.play(order, redeliver=receive(), extend=extend(message))
    kept = order.first == "extend"
    assert (played["extend"], len(played["redeliver"]), played.waits) == ((1, 0, set()) if kept else (0, 1, set()))
    assert await arena.messages() == []
    assert await arena.do(ack(message)) == (1 if kept else 0)


@in_every_order(redeliver="receive.before_commit", nack="settle.before_commit")
async def test_redelivery_and_nack_in_every_order_leave_one_holder(arena: Arena, order: Order) -> None:
    _, message = await overdue(arena)
    played = await arena.play(order, redeliver=receive(), nack=nack(message))
    assert played["nack"] == (1 if order.first == "nack" else 0)
    passed_by = order.first == "nack" and order.overlap
    assert len(played["redeliver"]) == (0 if passed_by else 1)
    assert len(await arena.messages()) == (1 if passed_by else 0)


@in_every_order(claim=("claim.before_commit", "claim.committed"), redeliver="receive.before_commit")
async def test_redelivery_and_claim_of_its_message_in_every_order_run_tasks_once(arena: Arena, order: Order) -> None:
    run_id, message = await overdue(arena, tasks=3)
    played = await arena.play(order, claim=claim_range(run_id, 0, 2, message=message), redeliver=receive())
    assert (played["claim"], played.waits) == ([0, 1, 2], set())
    for again in played["redeliver"]:
        assert await arena.do(claim_range(run_id, 0, 2, message=again)) == []
    assert await arena.value("select count(*) from interlock.queue_messages") == 0


@in_every_order(first=("claim.before_commit", "claim.committed"), again=("claim.before_commit", "claim.committed"))
async def test_claims_with_two_deliveries_of_one_message_run_every_task_once(arena: Arena, order: Order) -> None:
    run_id, message = await overdue(arena, tasks=3)
    (again,) = await arena.messages()
    played = await arena.play(
        order,
        first=claim_range(run_id, 0, 2, message=message),
        again=claim_range(run_id, 0, 2, message=again),
    )
    assert played[order.first] == [0, 1, 2]
    assert sorted([*played["first"], *played["again"]]) == [0, 1, 2]
    # The receipt of the older delivery is invalid; the newer one acks the message, with or without tasks.
    assert await arena.value("select count(*) from interlock.queue_messages") == 0


@in_every_order(
    first=("claim.before_commit", "claim.committed"),
    again="claim.before_commit",
)
async def test_parts_claimed_by_two_deliveries_of_one_message_in_every_order_lose_no_task(
    arena: Arena, order: Order
) -> None:
    run_id, message = await overdue(arena, tasks=6)
    (again,) = await arena.messages()
    played = await arena.play(
        order,
        first=claim_range(run_id, 0, 5, limit=2, message=message),
        again=claim_range(run_id, 0, 5, limit=2, message=again),
    )
    assert sorted([*played["first"], *played["again"]]) == [0, 1, 2, 3]
    (rest,) = await arena.messages()
    assert await arena.do(claim_range(run_id, 0, 5, message=rest)) == [4, 5]


@in_every_order(submit="submit.before_commit", time=(), receive="receive.before_commit")
async def test_message_that_commits_late_is_received_in_every_order(arena: Arena, order: Order) -> None:
    played = await arena.play(order, submit=submit([1]), time=passing(arena, 10), receive=receive())
    assert len(played["receive"]) == (1 if order.before("submit", "receive") else 0)
    receiver = arena.kernels[2]  # the receiver of the race: it remembers its scan position

    async def found() -> list[Received]:
        received: list[Received] = await receive()(receiver)
        return received

    assert len(played["receive"] or await until(found)) == 1


# A message against a resend


async def due_again(arena: Arena) -> Received:
    """Returns the message of an attempt that has failed since; its worker has not acked it yet."""
    lease = await arena.failed()
    arena.clock.advance(PAST_THE_BACKOFF)
    await arena.do(one_pass("retries"))
    (message,) = await arena.messages()
    again = lease_of(await arena.do(claim(lease.task_id)))
    await arena.do(complete(again, "Failed"))
    arena.clock.advance(2 * PAST_THE_BACKOFF)
    return message


@in_every_order(retry="retry.before_commit", ack="settle.before_commit")
async def test_retry_and_ack_of_last_message_in_every_order_leave_one_wake_up(arena: Arena, order: Order) -> None:
    message = await due_again(arena)
    played = await arena.play(order, retry=one_pass("retries"), ack=ack(message))
    assert played.waits == ({("retry", "ack")} if order.overlap and order.first == "ack" else set())
    assert (played["retry"], played["ack"]) == (1, 1 if order.first == "ack" else 0)
    (new,) = await arena.messages()
    assert new.receives == 1


@while_one_breaks(retry="retry.before_commit", ack="settle.before_commit")
async def test_when_retry_or_ack_fails_the_other_acts_as_if_alone(arena: Arena, order: Order) -> None:
    message = await due_again(arena)
    played = await arena.play(order, retry=one_pass("retries"), ack=ack(message))
    if order.breaking == "retry":
        # The ack skipped the message, locked by the retry. It becomes visible again and wakes a worker for the retry or
        # for nothing.
        assert played["ack"] == 0
        assert await arena.do(one_pass("retries")) == 1
    assert len(await arena.messages()) == 1


# The outbox


@in_every_order(alike=("one", "other"), one=("relay.taken", "relay.sent"), other=("relay.taken", "relay.sent"))
async def test_two_relays_in_every_order_send_a_message_once(arena: Arena, order: Order) -> None:
    await arena.submitted(kernel=arena.indirect)
    played = await arena.play(order, one=one_pass("relay"), other=one_pass("relay"))
    assert sorted([played["one"], played["other"]]) == [0, 1]
    assert played.waits == set()
    assert await arena.value("select count(*) from interlock.outbox") == 0
    assert len(await arena.messages()) == 1


@in_every_order(slow="relay.sent", time=(), other="relay.sent")
async def test_slow_relay_and_its_successor_in_every_order_leave_one_message(arena: Arena, order: Order) -> None:
    await arena.submitted(kernel=arena.indirect)
    played = await arena.play(order, slow=one_pass("relay"), time=passing(arena, 6), other=one_pass("relay"))
    first, then = sorted(("slow", "other"), key=order.moves.index)
    began = [order.moves.index(name) for name in (first, "time", then)]
    overtaken = began == sorted(began) and not order.before(first, then)
    assert played["slow"] + played["other"] == (2 if overtaken else 1)
    assert await arena.value("select count(*) from interlock.outbox") == 0
    (message,) = await arena.messages()
    run_id = await arena.value("select run_id from interlock.runs")
    assert (await arena.do(claim(run_task_id(run_id, 0), message=message))).status == "Claimed"
    assert await arena.value("select count(*) from interlock.queue_messages") == 0
