"""Events that are sent by hand to a source: scopes of its outputs, and payloads for its tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID, uuid4

import msgspec
from msgspec import Raw, Struct

from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.dags import triggers
from interlock.dags.definition import SourceKind
from interlock.dags.triggers import Trigger, check_payload
from interlock.errors import BadRequest, Conflict, NotFound
from interlock.kernel import changes, idempotency
from interlock.kernel.changes import Change
from interlock.settings import Settings
from interlock.wire import DatasetRef, Event, SourceEvent, SourceEvents, SourceEventsAccepted

_sql = queries("sources")

_INSTEAD: Final = {
    SourceKind.ALWAYS_ON: "it runs by itself: see `interlock source list`",
    SourceKind.CRON: "its schedule starts it",
    SourceKind.WEBHOOK: "send a call to its hook",
    SourceKind.COMMAND: "send it a command",
}


class _Named(Struct, frozen=True):
    """An output of a generation."""

    name: str | None
    dataset_uuid: UUID
    dataset_version: UUID

    @property
    def granted(self) -> DatasetRef:
        return DatasetRef(dataset_uuid=self.dataset_uuid, dataset_version=self.dataset_version)


_outputs = msgspec.json.Decoder(list[_Named])


@dataclass(frozen=True)
class _Request:
    """One call, wherever it is repeated."""

    dag: str
    job: str
    org_id: UUID
    key: str
    events: Sequence[SourceEvent]

    @property
    def sequence(self) -> int:
        """Tells calls apart: correcting a range for the second time is another change of it."""
        return int.from_bytes(hashlib.sha256(self.key.encode()).digest()[:7])


class ManualEvents:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    async def take(
        self, dag: str, job: str, org_id: UUID, sent: SourceEvents, *, idempotency_key: str | None, body: bytes
    ) -> SourceEventsAccepted:
        """All or none of them. `body` is the request as it came: an Idempotency-Key is bound to its bytes."""
        endpoint = f"POST /v1/dags/{dag}/jobs/{job}/events"
        request = _Request(dag, job, org_id, idempotency_key or str(uuid4()), sent.events)
        self._check(request)

        async def work(connection: Connection) -> bytes:
            if idempotency_key is not None:
                known = await idempotency.answered_before(
                    connection, self._settings, org_id, endpoint, idempotency_key, body
                )
                if known is not None:
                    return known
            accepted = msgspec.json.encode(await self._write(connection, request))
            if idempotency_key is not None:
                await idempotency.remember(connection, org_id, endpoint, idempotency_key, 200, accepted)
            return accepted

        return msgspec.json.decode(await self._database.run(work), type=SourceEventsAccepted)

    def _check(self, request: _Request) -> None:
        for event in request.events:
            scoped = event.cursor is not None or event.start is not None or event.end is not None
            if scoped == isinstance(event.payload, Raw):
                raise BadRequest(
                    "An event is either `payload`, or an `output` with `cursor`, or with `start` and `end`.",
                    code="bad_event_scope",
                )
            if isinstance(event.payload, Raw):
                check_payload(bytes(event.payload), self._settings)

    async def _write(self, connection: Connection, request: _Request) -> SourceEventsAccepted:
        rows = await _sql.source_generations(connection, org_id=request.org_id, dag_name=request.dag, name=request.job)
        _require_manual(request, rows)
        rows = [row for row in rows if row["kind"] == SourceKind.MANUAL]
        scopes = [event for event in request.events if not isinstance(event.payload, Raw)]
        payloads = [event.payload for event in request.events if isinstance(event.payload, Raw)]
        if scopes:
            await self._write_scopes(connection, [_change(request, row, scopes) for row in rows])
        if payloads:
            told = [Trigger(f"manual:{request.key}:{n}", bytes(payload)) for n, payload in enumerate(payloads)]
            await triggers.accept(connection, [row["job_id"] for row in rows], told)
        return SourceEventsAccepted(events=len(scopes), triggers=len(payloads))

    async def _write_scopes(self, connection: Connection, said: list[Change]) -> None:
        admitted = await changes.admit(connection, said)
        for error in admitted.refused.values():
            raise error
        await changes.write(connection, said, admitted)


def _require_manual(request: _Request, rows: Sequence[Row]) -> None:
    if not rows:
        raise NotFound(f"There is no job {request.job!r} of DAG {request.dag!r} in this org.")
    kind = rows[0]["kind"]
    if kind != SourceKind.MANUAL:
        instead = _INSTEAD[SourceKind(kind)] if kind else "it runs when one of its inputs has changed"
        raise Conflict(
            f"Job {request.job!r} takes no events by hand: {instead}. A source that does has `kind: manual`.",
            code="not_manual",
        )


def _change(request: _Request, row: Row, scopes: Sequence[SourceEvent]) -> Change:
    named: list[_Named] = _outputs.decode(row["outputs"])
    events = [_event(scope, named, request.sequence) for scope in scopes]
    changes.check(events, [], [one.granted for one in named])
    return Change(row["producer"], 1, request.org_id, events)


def _event(scope: SourceEvent, outputs: Sequence[_Named], sequence: int) -> Event:
    found = [one for one in outputs if scope.output in (None, one.name)]
    if len(found) != 1:
        names = ", ".join(str(one.name) for one in outputs) or "none"
        raise BadRequest(f"Say which `output` the event is about; the job's are: {names}.", code="unknown_output")
    return Event(
        dataset_uuid=found[0].dataset_uuid,
        dataset_version=found[0].dataset_version,
        cursor=scope.cursor,
        start=scope.start,
        end=scope.end,
        sequence=sequence if scope.cursor is None else None,
    )
