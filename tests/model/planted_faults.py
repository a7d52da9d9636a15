"""Kernels with a planted fault, to verify that the state machine finds it.

Most faults are in the database, where a trigger suppresses or changes a part of what a statement writes: they remain
the same faults however the statements are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from interlock.tasks.completion import Attempts
from interlock.wire.attempts import Completion
from tests.model.dispatchers import World

Plant = Callable[[World, pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    plant: Plant
    shows: str
    """Expected in the message of the state machine."""


def _bent(event: str, table: str, condition: str, body: str = "return null;") -> Plant:
    """Plants a trigger. By default it suppresses the row."""

    def plant(world: World, _patch: pytest.MonkeyPatch) -> None:
        world.execute(
            f"create function public.bent() returns trigger language plpgsql as $$ begin {body} end $$;"
            f" create trigger bent before {event} on interlock.{table} for each row when ({condition})"
            " execute function public.bent()"
        )

    return plant


def _without_index(world: World, _patch: pytest.MonkeyPatch) -> None:
    world.execute("drop index interlock.tasks_0_dedupe")


def _without_fence(world: World, patch: pytest.MonkeyPatch) -> None:
    """Treats every report as one of the current holder."""
    complete, complete_one = Attempts.complete, Attempts.complete_one

    async def forged(items: Sequence[Completion]) -> list[Completion]:
        rows = await world.select_async(
            "select task_id, attempt, lease_token from interlock.tasks where lease_token is not null"
        )
        current = {row["task_id"]: {"attempt": row["attempt"], "lease_token": row["lease_token"]} for row in rows}
        return [msgspec.structs.replace(item, **current.get(item.task_id, {})) for item in items]

    async def several(tasks: Attempts, items: Sequence[Completion], *groups: Any) -> Any:
        return await complete(tasks, await forged(items), *groups)

    async def one(tasks: Attempts, item: Completion, *state: Any) -> Any:
        return await complete_one(tasks, (await forged([item]))[0], *state)

    patch.setattr(Attempts, "complete", several)
    patch.setattr(Attempts, "complete_one", one)


_KEPT = "if exists (select 1 from interlock.tasks where task_id = old.task_id) then return null; end if; return old;"

FAULTS = {
    "a report that passes no fence": Fault(_without_fence, "refused"),
    "a claim that takes no slot": Fault(_bent("insert", "slots", "true"), "slot is False, not True"),
    "an end that keeps its slot": Fault(_bent("delete", "slots", "true", _KEPT), "every slot is of a running task"),
    "a freed slot that wakes nobody": Fault(
        _bent("update", "tasks_0", "old.parked and not new.parked and new.status = 'Queued'"), "it owed a slot"
    ),
    "a reaper that leaves no history": Fault(
        _bent("insert", "attempts", "new.outcome in ('LeaseExpired', 'TimedOut')"), "attempts never skip"
    ),
    "a retry that skips an attempt": Fault(
        _bent(
            "update",
            "tasks_0",
            "old.status = 'Failed' and new.status = 'Queued'",
            "new.attempt := new.attempt + 1; return new;",
        ),
        "attempts never skip",
    ),
    "a retry without a message": Fault(
        _bent("insert", "queue_messages", "new.body ->> 'task_id' is not null"), "every queued task has a wake-up"
    ),
    "a cancel that counts for nothing": Fault(
        _bent("insert", "run_deltas", "new.canceled > 0"), "counters and deltas add up to the rows"
    ),
    "a lease beyond the hard timeout": Fault(
        _bent(
            "update",
            "tasks_0",
            "new.status = 'Running'",
            "new.lease_expires_at := new.timeout_at + interval '1 second'; return new;",
        ),
        "lease",
    ),
    "an end that is not final": Fault(
        _bent(
            "update",
            "tasks_0",
            "new.status = 'Canceled' and old.status = 'Running'",
            "new.late_reply := true; return new;",
        ),
        "late_reply is True, not False",
    ),
    "a dedupe key that does not hold": Fault(_without_index, "tasks made and deduplicated"),
}
