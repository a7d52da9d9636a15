"""Alarms of leases are worked off as fast as claims set them."""

from __future__ import annotations

from uuid import UUID

from interlock.clock import ManualClock
from interlock.wire import Completion
from tests.system import System


async def test_the_reaper_goes_on_while_alarms_are_due_though_it_finds_nothing_to_reap(
    still: System, clock: ManualClock
) -> None:
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
        assert (await still.kernel.tasks.complete(ends)).accepted == 50
    clock.advance(3600)
    reaper = next(service for service in still.kernel.services() if service.name == "reaper")
    while await reaper.run_once():
        continue
    assert await still.value("select count(*) from interlock.lease_alarms") == 0
