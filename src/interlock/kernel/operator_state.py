"""What an operator of the dispatcher keeps from task to task of its job. Written only with the events it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec

from interlock.adapters.postgres import Connection, Database, queries
from interlock.errors import Conflict

_sql = queries("operator_state")


class StateMoved(Conflict):
    """Somebody else has written it meanwhile: whoever made something of it begins anew."""


@dataclass(frozen=True, slots=True)
class OperatorState:
    job_id: UUID
    name: str
    value: Any
    """JSON; None when there is none yet."""
    version: int
    """As it was read; 0 when there was none."""


async def read_state(database: Database, job_id: UUID, name: str) -> OperatorState:
    async with database.connection() as connection:
        row = await _sql.read_state(connection, job_id=job_id, name=name)
    if row is None:
        return OperatorState(job_id, name, None, 0)
    return OperatorState(job_id, name, msgspec.json.decode(row["state"]), row["version"])


async def keep_state(connection: Connection, state: OperatorState) -> None:
    """Refuses what was made of a state that is no longer so: the caller's transaction must not go on."""
    version = await _sql.keep_state(
        connection,
        job_id=state.job_id,
        name=state.name,
        state=msgspec.json.encode(state.value).decode(),
        version=state.version,
    )
    if version is None:
        raise StateMoved(
            f"Another task has moved the state of {state.name} since this one read it; it is tried again.",
            code="state_moved",
        )
