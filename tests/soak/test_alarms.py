"""Lease alarms are processed as fast as claims set them."""

from __future__ import annotations

from uuid import UUID

from interlock.apps.dispatcher import services as dispatcher_services
from interlock.clock import ManualClock
from interlock.wire.attempts import Completion
from tests.support.system import System


async def test_reaper_continues_while_alarms_are_due_without_expired_leases(still: System, clock: ManualClock) -> None:
    accepted = await still.submit(list(range(1000)))
    for start in range(0, 1000, 50):
        batch = await still.claim_many(run_id=accepted["run_id"], start=start, end=start + 49, tokens=False)
        ends = [
            Completion(
                task_id=UUID(claim["task_id"]),
                attempt=claim["attempt"],
                lease_token=UUID(claim["lease_token"]),
                status="Completed",
            )
            for claim in batch["claims"]
        ]
        assert (await still.kernel.tasks.attempts.complete(ends)).accepted == 50
    clock.advance(3600)
    reaper = next(service for service in dispatcher_services(still.kernel) if service.name == "reaper")
    while await reaper.run_once():
        continue
    assert await still.value("select count(*) from interlock.lease_alarms") == 0
