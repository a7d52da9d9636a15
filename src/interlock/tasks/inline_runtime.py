"""The `dispatcher` runtime: small built-in operators that run in this process. User code never runs here."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID
from weakref import WeakValueDictionary

import msgspec
import structlog

from interlock.access.principals import WorkerIdentity
from interlock.errors import BadRequest, Conflict, Fenced, Forbidden, InterlockError, TooLarge, Unavailable
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Database, queries
from interlock.tasks.claims import Claims
from interlock.tasks.completion import Attempts
from interlock.tasks.effects import Effects, OperatorState, StateMoved, read_state
from interlock.tasks.outbox_relay import TaskRef, make_due
from interlock.wire.attempts import (
    ClaimReply,
    Completion,
    Event,
    EventBatch,
    Heartbeat,
    Release,
    TaskPayload,
    WriteGrant,
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of an inline operator."""

    payload: Any
    config: dict[str, Any]
    outputs: Sequence[WriteGrant]
    state: Any
    """State kept by the job's last task; None if there is none yet or the operator is stateless."""
    place: Any
    """Checkpoint of this attempt's last step; None in the first step."""


@dataclass(frozen=True, slots=True)
class Reaction:
    """The result of one step of a task, or of the whole task."""

    result: Any
    events: Sequence[Event] = ()
    state: Any = None
    """Stored in the transaction that writes the events; None leaves it unchanged."""
    place: Any = None
    """If not None, the runner writes this step and calls the operator again from this checkpoint."""


@dataclass(frozen=True, slots=True)
class InlineOperator:
    react: Callable[[Call], Awaitable[Reaction]]
    stateful: bool = False


@dataclass(frozen=True, slots=True)
class _Ended:
    """The last step, ready to report."""

    reaction: Reaction
    state: OperatorState | None


class OperatorFailed(Exception):
    """Raised by an inline operator. `error_class` decides whether the task is retried."""

    def __init__(self, error_class: str, message: str) -> None:
        super().__init__(message)
        self.error_class = error_class


async def _echo(call: Call) -> Reaction:
    return Reaction(call.payload)


async def _fail(call: Call) -> Reaction:
    told = call.payload if isinstance(call.payload, dict) else {}
    raise OperatorFailed(str(told.get("error_class", "Failed")), str(told.get("message", "asked to fail")))


OPERATORS: Final[dict[str, InlineOperator]] = {
    "echo": InlineOperator(_echo),
    "fail": InlineOperator(_fail),
}
"""Operators that do not need DAGs; `INLINE_OPERATORS` in jobs/submission.py lists all names."""

_sql = queries(__name__, "tasks")


@dataclass(frozen=True, slots=True)
class InlineLimits:
    """Concurrency limits: in total, per operator and per org.

    An org may have fewer tasks than an operator, and an operator fewer than the total. So neither one org nor one slow
    operator can starve the others.
    """

    limit: int = 128
    of_an_operator: int = 96
    of_an_org: int = 48


class InlineRunner:
    """Claims a lease like any worker, so the reaper recovers the tasks of a dispatcher that died."""

    def __init__(
        self,
        database: Database,
        claims: Claims,
        tasks: Attempts,
        effects: Effects,
        wakeups: Wakeups,
        operators: Mapping[str, InlineOperator] = OPERATORS,
        *,
        limits: InlineLimits | None = None,
    ) -> None:
        self._database = database
        self._claims = claims
        self._tasks = tasks
        self._effects = effects
        self._wakeups = wakeups
        self._operators = operators
        self._limits = limits or InlineLimits()
        self._running: dict[asyncio.Task[None], ClaimReply] = {}
        self._places: dict[asyncio.Task[None], tuple[UUID | None, str | None]] = {}
        """By asyncio task: the org and the operator."""
        self._turned_away: set[tuple[str, UUID]] = set()
        """Runtimes and orgs of tasks that found no free slot."""
        self._place_was_freed = False
        self._calling: asyncio.Task[None] | None = None
        self._turns: WeakValueDictionary[tuple[UUID, str], asyncio.Lock] = WeakValueDictionary()
        self._worker_id = f"dispatcher:{socket.gethostname()}:{os.getpid()}"
        self._identity = WorkerIdentity("dispatcher", "dispatcher", None)

    async def invoke(self, runtime: str, ref: TaskRef) -> bool:
        """Starts a task. Returns False if a concurrency limit is reached.

        The relay then offers the task again when a slot becomes free, and after its backoff in any case.
        """
        operator = await self._operator_of(ref) if self._room_of(ref.org_id) > 0 else None
        held = sum(each == operator for _, each in self._places.values())
        if self._room_of(ref.org_id) <= 0 or held >= self._limits.of_an_operator:
            if ref.org_id is not None:
                self._turned_away.add((runtime, ref.org_id))
            return False
        request = ref.claim(self._worker_id, tokens=False)
        answer = await self._claims.claim(request, self._identity)
        for reply in answer.claims:
            if reply.status != "Claimed":
                continue
            task = asyncio.create_task(self._run(reply))
            self._running[task] = reply
            self._places[task] = (ref.org_id, operator)
            task.add_done_callback(self._ended)
        # A wake-up for a task that cannot be claimed is done. One for a task that waits for a limit is not.
        return not answer.remaining

    def _room_of(self, org_id: UUID | None) -> int:
        places = self._places.values()
        return min(self._limits.limit - len(places), self._limits.of_an_org - sum(org == org_id for org, _ in places))

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task], self._places[task]
        self._place_was_freed = True
        if self._turned_away and (self._calling is None or self._calling.done()):
            self._calling = asyncio.create_task(self._call_in(), name="inline-call-in")

    async def _call_in(self) -> None:
        """Makes tasks that found no free slot due now. Otherwise their backoff, which doubles, would delay them."""
        while self._place_was_freed:
            self._place_was_freed = False
            waiting = {each for each in self._turned_away if self._room_of(each[1]) > 0}
            room = self._limits.limit - len(self._places)
            try:
                async with self._database.connection() as connection:
                    made_due = await make_due(
                        connection,
                        list({runtime for runtime, _ in waiting}),
                        orgs=list({org_id for _, org_id in waiting}),
                        limit=room,
                    )
            except InterlockError as error:
                log.warning("inline.not_called_in", reason=error.detail)
                return
            if made_due < room:
                self._turned_away -= waiting
            if made_due:
                self._wakeups.wake("outbox")

    async def _operator_of(self, ref: TaskRef) -> str | None:
        async with self._database.connection() as connection:
            found: str | None = await _sql.operator_of(
                connection, org_id=ref.org_id, task_id=ref.task_id, run_id=ref.run_id
            )
        return found

    async def drain(self, seconds: float) -> None:
        """Waits for running tasks, then releases those that have not ended: this uses up no attempt."""
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        interrupted = dict(self._running)
        if self._calling is not None:
            self._calling.cancel()
        if not interrupted:
            return
        for task in interrupted:
            task.cancel()
        await asyncio.gather(*interrupted, return_exceptions=True)
        try:
            await self._tasks.release([Release(**fence_of(claim)) for claim in interrupted.values()])
        except InterlockError as error:
            log.warning("inline.not_given_back", tasks=len(interrupted), reason=error.detail)

    async def _run(self, claim: ClaimReply) -> None:
        task: TaskPayload = given(claim.task)
        operator = self._operators.get(task.operator)
        try:
            if operator is not None and operator.stateful:
                await self._run_in_turn(claim, self._turn(task.job_id, task.operator))
            else:
                await self._report(claim, *await self._execute(claim))
        except Fenced as error:
            log.warning("inline.fenced", task_id=str(claim.task_id), stale=error.stale)
        except InterlockError as error:
            # The lease expires and the task is retried.
            log.warning("inline.not_reported", task_id=str(claim.task_id), reason=error.detail)

    def _turn(self, job_id: UUID, operator: str) -> asyncio.Lock:
        """Returns the lock of a job's state. Tasks that share a state run one at a time: their updates conflict."""
        return self._turns.setdefault((job_id, operator), asyncio.Lock())

    async def _run_in_turn(self, claim: ClaimReply, turn: asyncio.Lock) -> None:
        if not await self._wait_for(turn, claim):
            await self._report(claim, completion(claim, "Canceled"), None)
            return
        try:
            while not await self._reported_at_once(claim):
                # Another dispatcher changed the state. A retry here uses up no attempt.
                log.info("inline.state_moved", task_id=str(claim.task_id))
        finally:
            turn.release()

    async def _reported_at_once(self, claim: ClaimReply) -> bool:
        """Returns False if the state changed concurrently, so that nothing was written."""
        try:
            await self._report(claim, *await self._execute(claim))
        except StateMoved:
            return False
        return True

    async def _wait_for(self, turn: asyncio.Lock, claim: ClaimReply) -> bool:
        """Waits for the lock while renewing the lease. Returns False if the task was canceled."""
        taken, beat = asyncio.ensure_future(turn.acquire()), asyncio.ensure_future(keep(self._tasks, claim))
        try:
            await asyncio.wait({taken, beat}, return_when=asyncio.FIRST_COMPLETED)
            if not taken.done():
                beat.result()  # raises if the lease is lost
            return taken.done()
        finally:
            beat.cancel()
            taken.cancel()

    async def _report(self, claim: ClaimReply, completion: Completion, state: OperatorState | None) -> None:
        try:
            await self._tasks.complete_one(completion, state)
        except (Fenced, StateMoved):
            raise
        except TooLarge as error:
            await self._tasks.complete_one(failure(claim, "ResultTooLarge", error.detail))
        except (BadRequest, Forbidden, Conflict) as error:
            # The report does not match the stored state: record a failed attempt instead of losing the report.
            await self._tasks.complete_one(failure(claim, error.code, error.detail))

    async def _execute(self, claim: ClaimReply) -> tuple[Completion, OperatorState | None]:
        work = asyncio.ensure_future(self._call(claim))
        beat = asyncio.ensure_future(keep(self._tasks, claim))
        try:
            done, _ = await asyncio.wait({work, beat}, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                return _outcome(claim, work)
            beat.result()  # raises if the lease is lost
            return completion(claim, "Canceled"), None
        finally:
            beat.cancel()
            work.cancel()

    async def _call(self, claim: ClaimReply) -> _Ended:
        """Runs the operator step by step. Each step but the last is written as soon as it ends."""
        task: TaskPayload = given(claim.task)
        operator = self._operators.get(task.operator)
        if operator is None:
            known = ", ".join(sorted(self._operators))
            raise OperatorFailed(
                "OperatorNotFound", f"The dispatcher runtime has no operator {task.operator!r}; it has: {known}."
            )
        state = OperatorState(task.job_id, task.operator, None, 0)
        if operator.stateful:
            state = await read_state(self._database, task.job_id, task.operator)
        payload, config = msgspec.json.decode(task.payload), msgspec.json.decode(task.config)
        place = None
        while True:
            reaction = await operator.react(Call(payload, config, task.outputs, state.value, place))
            kept = None if reaction.state is None else replace(state, value=reaction.state)
            if reaction.place is None:
                return _Ended(reaction, kept)
            await self._write_step(claim, reaction, kept)
            place = reaction.place
            if kept is not None:
                state = replace(kept, version=kept.version + 1)

    async def _write_step(self, claim: ClaimReply, step: Reaction, state: OperatorState | None) -> None:
        batch = EventBatch(events=list(step.events), **fence_of(claim))
        if await self._effects.emit(batch, state) is None:
            raise await self._tasks.fenced(Release(**fence_of(claim)))


def _outcome(claim: ClaimReply, work: asyncio.Future[_Ended]) -> tuple[Completion, OperatorState | None]:
    """Turns any exception of an operator into a failed attempt, except a lost lease, which cannot be reported."""
    error = work.exception()
    if isinstance(error, Fenced | StateMoved):
        raise error
    if error is not None:
        return failure(claim, _class_of(error), str(error)), None
    ended = work.result()
    try:
        result = msgspec.Raw(msgspec.json.encode(ended.reaction.result))
    except (TypeError, ValueError) as unwritable:
        return failure(claim, type(unwritable).__name__, str(unwritable)), None
    return completion(claim, "Completed", events=list(ended.reaction.events), result=result), ended.state


def _class_of(error: BaseException) -> str:
    if isinstance(error, OperatorFailed):
        return error.error_class
    return error.code if isinstance(error, InterlockError) else type(error).__name__


async def keep(tasks: Attempts, claim: ClaimReply, *, at_least_every: float = math.inf) -> None:
    """Renews the lease. Returns when a cancel is requested; raises when the lease is lost."""
    heartbeat = Heartbeat(**fence_of(claim))
    expires = given(claim.lease_expires_at)
    while True:
        third = max(0.1, (expires - datetime.now(UTC)).total_seconds() / 3)
        await asyncio.sleep(min(third, at_least_every))
        try:
            reply = await tasks.heartbeat_one(heartbeat)
        except Unavailable as error:
            log.warning("lease.heartbeat_missed", task_id=str(claim.task_id), reason=error.detail)
            continue
        if reply.cancel_requested:
            return
        expires = reply.lease_expires_at


def failure(claim: ClaimReply, error_class: str, message: str, **more: Any) -> Completion:
    return completion(claim, "Failed", error_class=error_class, error_message=message, **more)


def completion(claim: ClaimReply, status: Any, **more: Any) -> Completion:
    return Completion(status=status, **fence_of(claim), **more)


def fence_of(claim: ClaimReply) -> dict[str, Any]:
    return {
        "task_id": given(claim.task_id),
        "attempt": given(claim.attempt),
        "lease_token": given(claim.lease_token),
    }


def given(value: Any) -> Any:
    """Narrows an optional field. Claimed replies have every field; only NotClaimed replies omit some."""
    if value is None:
        raise ValueError("a claimed task without its lease")
    return value
