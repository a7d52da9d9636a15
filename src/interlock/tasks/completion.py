"""Operations of workers on the tasks they hold: heartbeat, complete, release. All are fenced and batched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.access.tokens import CapabilityTokens, Grant, write_grants
from interlock.errors import BadRequest, Conflict, Fenced, Forbidden, InterlockError, TooLarge
from interlock.failpoints import armed, failpoint
from interlock.schemas import Marker
from interlock.settings import Settings
from interlock.stores.postgres import CONTENT_ERRORS, Connection, Database, Row, isolated, queries
from interlock.tasks import dataset_changes
from interlock.tasks.dataset_changes import Admitted, Change, Found, Inputs, Markers
from interlock.tasks.effects import OperatorState, keep_state
from interlock.tasks.limits import RunSlots
from interlock.tasks.queue import enqueue, wake_parked
from interlock.tasks.result_packs import Packs, Place
from interlock.tasks.shards import by_shard, run_task_id
from interlock.telemetry import ATTEMPTS_ENDED
from interlock.wire.attempts import (
    Completion,
    CompletionBatchReply,
    CompletionGroup,
    CompletionReply,
    Heartbeat,
    HeartbeatBatchReply,
    HeartbeatReply,
    Refusal,
    Release,
    TaskInput,
)
from interlock.wire.base import TaskStatus
from interlock.wire.jobs import DatasetRef

_sql = queries(__name__, "tasks")


@dataclass
class _Outcome:
    """The result of a batch of completions."""

    rows: list[Row] = field(default_factory=list)
    """Tasks that this batch ended."""
    repeated: list[Row] = field(default_factory=list)
    """Tasks that had already ended with the same report."""
    refused: dict[UUID, InterlockError] = field(default_factory=dict)

    def add(self, other: _Outcome) -> None:
        self.rows += other.rows
        self.repeated += other.repeated
        self.refused |= other.refused


class Attempts:
    def __init__(
        self,
        database: Database,
        settings: Settings,
        tokens: CapabilityTokens,
        markers: Markers,
        inputs: Inputs,
        packs: Packs,
        turns: RunSlots,
    ) -> None:
        self._database = database
        self._packs = packs
        self._markers = markers
        self._inputs = inputs
        self._settings = settings
        self._tokens = tokens
        self._objects_root = settings.objects_root
        self._turns = turns

    # Heartbeat

    async def heartbeat(self, items: Sequence[Heartbeat]) -> HeartbeatBatchReply:
        items = _first_of_each(items)
        rows: dict[UUID, Row] = {}
        for shard, part in by_shard(items, _lease).items():
            extended, _ = await isolated("heartbeat", part, partial(self._extend, shard))
            for found in extended:
                rows |= found
        held = [i for i in items if i.task_id in rows]
        tokens = await self._new_tokens([i for i in held if i.token], rows)
        replies = [_beat(rows[i.task_id], tokens.get(i.task_id)) for i in held]
        missing = [i for i in items if i.task_id not in rows]
        states = await self._fence_states(missing)
        refused = [_refusal(i.task_id, _fenced(states.get(i.task_id), i)) for i in missing]
        return HeartbeatBatchReply(items=replies, refused=refused)

    async def _extend(self, shard: int, items: Sequence[Heartbeat]) -> dict[UUID, Row]:
        async def work(connection: Connection) -> list[Row]:
            rows: list[Row] = await _sql.heartbeat(
                connection,
                shard=shard,
                task_ids=[i.task_id for i in items],
                attempts=[i.attempt for i in items],
                leases=[i.lease_token for i in items],
                progresses=[_progress(i.progress) for i in items],
                texts=[clean(i.progress_text) for i in items],
            )
            await failpoint("heartbeat.before_commit")
            return rows

        rows = await self._database.run(work, transaction=armed("heartbeat.before_commit"))
        return {row["task_id"]: row for row in rows}

    async def heartbeat_one(self, item: Heartbeat) -> HeartbeatReply:
        reply = await self.heartbeat([item])
        if reply.refused:
            raise _raised(reply.refused[0])
        return reply.items[0]

    async def _new_tokens(self, items: Sequence[Heartbeat], rows: Mapping[UUID, Row]) -> dict[UUID, str]:
        if not items:
            return {}
        inputs = await self._inputs_of(items)
        grants = [
            Grant(
                rows[i.task_id]["org_id"],
                i.task_id,
                i.attempt,
                write_grants(self._objects_root, i.task_id, i.attempt, outputs_of(rows[i.task_id])),
                inputs.get(i.task_id, []),
            )
            for i in items
        ]
        issued = await self._tokens.issue(grants, await self.active_kid())
        return {grant.task_id: token for grant, token in zip(grants, issued, strict=True)}

    async def _inputs_of(self, items: Sequence[Heartbeat]) -> dict[UUID, list[TaskInput]]:
        found: dict[UUID, list[TaskInput]] = {}
        for shard, part in by_shard(items, _lease).items():
            async with self._database.connection() as connection:
                rows = await _sql.readers_among(connection, shard=shard, task_ids=[i.task_id for i in part])
                inputs = await self._inputs.of(connection, [row["job_id"] for row in rows])
            found |= {row["task_id"]: inputs.get(row["job_id"], []) for row in rows}
        return found

    async def active_kid(self) -> str:
        async with self._database.connection() as connection:
            kid: str = await connection.fetchval("select kid from interlock.signing_keys where retired_at is null")
        return kid

    # Complete

    async def complete(
        self, items: Sequence[Completion], groups: Sequence[CompletionGroup] = ()
    ) -> CompletionBatchReply:
        done, rest = await self._complete_groups(groups)
        if not items and not rest:
            return CompletionBatchReply(accepted=done)
        outcome = await self._complete([*items, *rest])
        refused = [_refusal(task_id, error) for task_id, error in outcome.refused.items()]
        return CompletionBatchReply(accepted=done + len(outcome.rows) + len(outcome.repeated), refused=refused)

    async def _complete_groups(self, groups: Sequence[CompletionGroup]) -> tuple[int, list[Completion]]:
        """Returns how many tasks were completed, and the completions to process singly because a group had failures."""
        done, rest = 0, list[Completion]()
        for shard, part in by_shard(groups, _lease).items():
            completed, left = await self._complete_groups_in(shard, part)
            done, rest = done + completed, rest + left
        return done, rest

    async def _complete_groups_in(self, shard: int, groups: Sequence[CompletionGroup]) -> tuple[int, list[Completion]]:
        arrays = self._group_arrays(groups)
        if arrays is None:
            return 0, _one_by_one(groups)
        arrays |= await self._packs.pack_groups(arrays)

        async def work(connection: Connection) -> int:
            count: int = await _sql.complete_by_index(connection, shard=shard, **arrays)
            await failpoint("complete.before_commit")
            return count

        try:
            done = await self._database.run(work, transaction=armed("complete.before_commit"))
        except CONTENT_ERRORS:
            return 0, _one_by_one(groups)
        await failpoint("complete.committed")
        if done:
            await self._turns.ended(_ended_of(groups, done))
            ATTEMPTS_ENDED.labels(outcome="Completed").inc(done)
        if done == len(arrays["indexes"]):
            return done, []
        # Tasks that were completed just now are recognised as repeats and counted there.
        return 0, _one_by_one(groups)

    def _group_arrays(self, groups: Sequence[CompletionGroup]) -> dict[str, Any] | None:
        """Returns None if a result cannot be stored. The tasks are then completed one by one."""
        indexes: list[int] = []
        results: list[str] = []
        ends: list[int] = []
        for group in groups:
            by_index = dict(zip(group.indexes, group.results, strict=True))
            indexes += sorted(by_index)
            try:
                results += [str(by_index[index], "utf-8") for index in sorted(by_index)]
            except UnicodeDecodeError:
                return None
            ends.append(len(indexes))
        if max(map(len, results)) * 4 > self._settings.result_limit_bytes and self._too_large(groups):
            return None
        return {
            "run_ids": [group.run_id for group in groups],
            "attempts": [group.attempt for group in groups],
            "leases": [group.lease_token for group in groups],
            "firsts": [start + 1 for start in [0, *ends[:-1]]],
            "lasts": ends,
            "indexes": indexes,
            "results": results,
        }

    def _too_large(self, groups: Sequence[CompletionGroup]) -> bool:
        limit = self._settings.result_limit_bytes
        return any(len(result) > limit for group in groups for result in group.results)

    async def complete_one(self, item: Completion, state: OperatorState | None = None) -> CompletionReply:
        """Completes a task. The state is stored in the same transaction as the attempt's end."""
        outcome = await self._complete([item], state)
        if outcome.refused:
            raise outcome.refused[item.task_id]
        if outcome.repeated:
            status = TaskStatus(outcome.repeated[0]["status"])
            return CompletionReply(task_id=item.task_id, status=status, duplicate=True)
        row = outcome.rows[0]
        return CompletionReply(task_id=item.task_id, status=TaskStatus(row["status"]), retry_at=row["retry_at"])

    async def _complete(self, items: Sequence[Completion], state: OperatorState | None = None) -> _Outcome:
        outcome = _Outcome()
        for shard, part in by_shard(_first_of_each(items), _lease).items():
            done, aside = await isolated("complete", part, partial(self._complete_in, shard, state=state))
            for each in done:
                outcome.add(each)
            for item, _ in aside:
                outcome.refused[item.task_id] = BadRequest("The report cannot be stored.", code="bad_result")
        return outcome

    async def _complete_in(self, shard: int, items: Sequence[Completion], state: OperatorState | None) -> _Outcome:
        outcome = _Outcome()
        acceptable = [item for item in items if self._acceptable(item, outcome)]
        with_effects = [item for item in acceptable if item.events or item.outputs]
        found = await self._markers.of(with_effects)
        packed = await self._packed(shard, acceptable)

        async def work(connection: Connection) -> list[Row]:
            reported: list[Change] = []
            admitted: Admitted | None = None
            if with_effects:
                reported, admitted = await self._admit(connection, shard, with_effects, found, outcome)
            allowed = [item for item in acceptable if item.task_id not in outcome.refused]
            rows = list[Row]()
            if allowed:
                rows = await _sql.complete(connection, shard=shard, **_completion_arrays(allowed, packed))
            ended = {row["task_id"] for row in rows} if reported else ()
            reported = [change for change in reported if change.task_id in ended]
            if reported and admitted:
                await dataset_changes.write(connection, reported, admitted, shard=shard)
            if state is not None and rows:
                await keep_state(connection, state)
            await failpoint("complete.before_commit")
            return rows

        # A single statement is its own transaction. Only side effects need an explicit one.
        explicit = bool(with_effects) or state is not None or armed("complete.before_commit")
        rows = await self._database.run(work, transaction=explicit)
        await failpoint("complete.committed")
        await self._wake_parked(rows)
        await self._turns.ended(Counter([row["run_id"] for row in rows if row["run_id"] and row["was"] == "Running"]))
        outcome.rows = rows
        for status, count in Counter([row["status"] for row in rows]).items():
            ATTEMPTS_ENDED.labels(outcome=status).inc(count)
        if len(rows) < len(acceptable):
            taken = {row["task_id"] for row in rows}
            await self._explain_refusals([item for item in acceptable if item.task_id not in taken], outcome)
        return outcome

    def _acceptable(self, item: Completion, outcome: _Outcome) -> bool:
        limit = self._settings.result_limit_bytes
        if isinstance(item.result, Raw) and len(item.result) > limit:
            outcome.refused[item.task_id] = TooLarge(
                f"The result has {len(item.result)} bytes, and result_limit_bytes is {limit}: return less, write the "
                "data to an output of the job, or raise the setting, for workers and dispatchers.",
                code="result_too_large",
            )
        elif isinstance(item.result, Raw) and not _is_utf8(item.result):
            outcome.refused[item.task_id] = BadRequest("The result is not JSON in UTF-8.", code="bad_result")
        return item.task_id not in outcome.refused

    async def _packed(self, shard: int, items: Sequence[Completion]) -> Mapping[UUID, Place]:
        """Writes long results to packs and returns their locations. Tasks without a run keep results in their rows."""
        long = [item for item in items if _length(item) > self._packs.inline_bytes]
        places: dict[UUID, Place] = {}
        if not long:
            return places
        bodies = {item.task_id: bytes(item.result) for item in long if isinstance(item.result, Raw)}
        async with self._database.connection() as connection:
            rows = await _sql.runs_of(connection, shard=shard, task_ids=list(bodies))
        for run_id in {row["run_id"] for row in rows}:
            ids = [row["task_id"] for row in rows if row["run_id"] == run_id]
            places |= zip(ids, await self._packs.write(run_id, [bodies[one] for one in ids]), strict=True)
        return places

    async def _admit(
        self,
        connection: Connection,
        shard: int,
        items: list[Completion],
        found: Mapping[UUID, Found],
        outcome: _Outcome,
    ) -> tuple[list[Change], Admitted]:
        """Returns the admitted dataset changes of successful attempts. Others are refused one by one."""
        ids = [item.task_id for item in items]
        rows = {row["task_id"]: row for row in await _sql.outputs_of(connection, shard=shard, task_ids=ids)}
        reported = []
        for item in items:
            row = rows.get(item.task_id)
            if row is None:
                continue
            try:
                dataset_changes.check(item.events, item.outputs, outputs_of(row))
                markers = self._markers_of(item, found)
            except (BadRequest, Forbidden, Conflict) as error:
                outcome.refused[item.task_id] = error
            else:
                if item.status == "Completed":
                    prefixes = [self._markers.prefix(item, output) for output in item.outputs]
                    reported.append(
                        Change(item.task_id, item.attempt, row["org_id"], item.events, item.outputs, prefixes, markers)
                    )
        admitted = await dataset_changes.admit(connection, reported)
        outcome.refused |= admitted.refused
        return [change for change in reported if change.task_id not in admitted.refused], admitted

    def _markers_of(self, item: Completion, found: Mapping[UUID, Found]) -> Mapping[int, Marker]:
        """Returns the markers of a successful attempt. Files of a failed one do not count."""
        markers = found.get(item.task_id)
        if markers is None or item.status != "Completed":
            return {}
        if markers.refused is not None:
            raise markers.refused
        return markers.by_output

    async def _wake_parked(self, rows: list[Row]) -> None:
        """Runs after the commit. If a crash loses this wake-up, the reconciler finds the parked tasks."""
        jobs = sorted(rows[0]["freed_jobs"] or []) if rows else []
        if jobs:
            keys = rows[0]["freed_keys"]
            await self._database.run(lambda c: wake_parked(c, jobs, keys, direct=self._settings.queue_direct))

    async def _explain_refusals(self, items: list[Completion], outcome: _Outcome) -> None:
        """Explains the completions that changed nothing.

        A repeated report is accepted even if it no longer passes the checks. A stale attempt learns only that it is
        stale.
        """
        states = await self._fence_states(items)
        for item in items:
            state = states.get(item.task_id)
            if state is not None and _is_repeated(state, item):
                outcome.refused.pop(item.task_id, None)
                outcome.repeated.append(state)
            elif item.task_id not in outcome.refused or (
                isinstance(outcome.refused[item.task_id], Conflict) and not _would_count(state, item)
            ):
                outcome.refused[item.task_id] = _fenced(state, item)

    # Release

    async def release(self, items: Sequence[Release]) -> int:
        parts = by_shard(_first_of_each(items), _lease)
        released = 0
        for shard, part in parts.items():
            done, _ = await isolated("release", part, partial(self._release_in, shard))
            released += sum(done)
        return released

    async def _release_in(self, shard: int, items: Sequence[Release]) -> int:
        async def work(connection: Connection) -> list[Row]:
            rows: list[Row] = await _sql.release(
                connection,
                shard=shard,
                task_ids=[i.task_id for i in items],
                attempts=[i.attempt for i in items],
                leases=[i.lease_token for i in items],
            )
            queued = [row["task_id"] for row in rows if row["status"] == "Queued"]
            if queued:
                await enqueue(connection, queued, shard=shard, direct=self._settings.queue_direct)
            await failpoint("release.before_commit")
            return rows

        rows = await self._database.run(work)
        await self._wake_parked(rows)
        await self._turns.ended(Counter([row["run_id"] for row in rows if row["run_id"]]))
        return len(rows)

    async def _fence_states(self, items: Sequence[Fence]) -> dict[UUID, Row]:
        rows: list[Row] = []
        for shard, part in by_shard(items, _lease).items():
            async with self._database.connection() as connection:
                rows += await _sql.fence_states(connection, shard=shard, task_ids=[item.task_id for item in part])
        return {row["task_id"]: row for row in rows}

    async def refusals(self, items: Sequence[Release]) -> list[Refusal]:
        """Returns refusals for attempts that no longer hold their tasks."""
        states = await self._fence_states(items)
        return [_refusal(item.task_id, _fenced(states.get(item.task_id), item)) for item in items]

    async def fenced(self, item: Release | Heartbeat) -> Fenced:
        """Returns the error for an attempt that no longer holds its task."""
        return _fenced((await self._fence_states([item])).get(item.task_id), item)


def outputs_of(job: Row) -> list[DatasetRef]:
    outputs: list[DatasetRef] = msgspec.json.decode(job["outputs"], type=list[DatasetRef])
    return outputs


Fence = Heartbeat | Completion | Release
F = TypeVar("F", Heartbeat, Completion, Release)


def _first_of_each(items: Sequence[F]) -> list[F]:
    """Keeps the first item of each task."""
    unique: dict[UUID, F] = {}
    for item in items:
        unique.setdefault(item.task_id, item)
    return list(unique.values())


def _lease(item: Fence | CompletionGroup) -> UUID:
    return item.lease_token


def _ended_of(groups: Sequence[CompletionGroup], done: int) -> Mapping[UUID, int]:
    """Returns ended attempts by run, or {} if a part of several runs' tasks ended: RunSlotRecount then recounts."""
    if len({group.run_id for group in groups}) == 1:
        return {groups[0].run_id: done}
    asked: Counter[UUID] = Counter()
    for group in groups:
        asked[group.run_id] += len(set(group.indexes))
    return asked if asked.total() == done else {}


def _one_by_one(groups: Sequence[CompletionGroup]) -> list[Completion]:
    return [
        Completion(
            task_id=run_task_id(group.run_id, index),
            attempt=group.attempt,
            lease_token=group.lease_token,
            status="Completed",
            result=result,
        )
        for group in groups
        for index, result in zip(group.indexes, group.results, strict=True)
    ]


def _completion_arrays(items: list[Completion], packed: Mapping[UUID, Place]) -> dict[str, Any]:
    places = [packed.get(item.task_id) for item in items] if packed else []
    return {
        "task_ids": [i.task_id for i in items],
        "attempts": [i.attempt for i in items],
        "leases": [i.lease_token for i in items],
        "statuses": [i.status for i in items],
        "error_classes": [clean(i.error_class) for i in items],
        "error_messages": [clean(i.error_message) for i in items],
        "results": [
            bytes(i.result).decode() if isinstance(i.result, Raw) and i.task_id not in packed else None for i in items
        ],
        "packs": [place and place.pack for place in places],
        "offsets": [place and place.offset for place in places],
        "lengths": [place and place.length for place in places],
        "crashes": [msgspec.json.encode(i.crash).decode() if i.crash else None for i in items],
    }


def _length(item: Completion) -> int:
    return len(item.result) if isinstance(item.result, Raw) else 0


def _is_repeated(state: Row | None, item: Completion) -> bool:
    """Returns True for a repeated report of the same attempt: a lost reply, or a message delivered twice."""
    if state is None or state["late_reply"]:
        return False
    # A failure after a cancel request was recorded as Canceled.
    reported = "Canceled" if item.status == "Failed" and state["cancel_requested"] else item.status
    return bool(
        state["lease_token"] == item.lease_token and state["attempt"] == item.attempt and state["status"] == reported
    )


def _would_count(state: Row | None, item: Completion) -> bool:
    """Applies the same conditions as the statement `complete`."""
    if state is None or state["lease_token"] != item.lease_token:
        return False
    if state["status"] == "Running":
        return bool(state["attempt"] == item.attempt)
    waiting = {"Failed": item.attempt, "Queued": item.attempt + 1}.get(state["status"])
    return bool(state["late_reply"] and state["attempt"] == waiting)


def _fenced(state: Row | None, item: Fence) -> Fenced:
    if state is None:
        return Fenced("The attempt no longer holds this task.", stale="task")
    if state["attempt"] > item.attempt:
        return Fenced(f"Attempt {item.attempt} has ended; the task is at attempt {state['attempt']}.", stale="attempt")
    if state["attempt"] < item.attempt:
        return Fenced(f"Attempt {item.attempt} has not started.", stale="attempt")
    if state["lease_token"] != item.lease_token:
        return Fenced("The lease belongs to another worker.", stale="lease_token")
    if state["status"] == "Running":
        return Fenced("The attempt has reached its hard timeout.", stale="timeout")
    return Fenced(f"The task is already {state['status']}.", stale="status")


def _beat(row: Row, token: str | None) -> HeartbeatReply:
    return HeartbeatReply(
        status="Running",
        task_id=row["task_id"],
        lease_expires_at=row["lease_expires_at"],
        cancel_requested=row["cancel_requested"],
        paused=row["paused"],
        capability_token=token,
    )


def _refusal(task_id: UUID, error: InterlockError) -> Refusal:
    return Refusal(task_id=task_id, code=error.code, detail=error.detail, stale=error.extra.get("stale"))


def _raised(refusal: Refusal) -> Fenced:
    return Fenced(refusal.detail, stale=refusal.stale or "task")


def _progress(fraction: float | None) -> float | None:
    # Postgres refuses a number that underflows to 0 in a float4.
    return 0.0 if fraction is not None and fraction < 1e-30 else fraction


def _is_utf8(raw: Raw) -> bool:
    try:
        bytes(raw).decode()
    except UnicodeDecodeError:
        return False
    return True


def clean(text: str | None) -> str | None:
    # Postgres text cannot contain NUL.
    return text.replace("\x00", "\ufffd") if text else text
