"""The `dispatcher` runtime: the platform's own small operators, run in this process. User code never runs here."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import UUID
from weakref import WeakValueDictionary

import msgspec
import structlog

from interlock.access.principals import WorkerIdentity
from interlock.adapters.postgres import Database, queries
from interlock.errors import BadRequest, Conflict, Fenced, Forbidden, InterlockError, TooLarge
from interlock.kernel.claims import Claims
from interlock.kernel.effects import Effects
from interlock.kernel.holding import completion, failure, fence_of, given, keep
from interlock.kernel.operator_state import OperatorState, StateMoved, read_state
from interlock.kernel.relay import TaskRef
from interlock.kernel.tasks import Tasks
from interlock.wire import (
    ClaimReply,
    Completion,
    Event,
    EventBatch,
    Release,
    TaskPayload,
    WriteGrant,
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Call:
    """What an operator gets."""

    payload: Any
    config: dict[str, Any]
    outputs: Sequence[WriteGrant]
    state: Any
    """What the job's last task kept; None when there is nothing yet, or the operator keeps none."""
    place: Any
    """Where the last step of this attempt ended; None in the first."""


@dataclass(frozen=True, slots=True)
class Reaction:
    """What an operator gives back: one step of the task, or all of it."""

    result: Any
    events: Sequence[Event] = ()
    state: Any = None
    """Kept in the transaction that writes the events; None leaves it as it is."""
    place: Any = None
    """Unless None the task goes on from there: this step is written, and the operator called again."""


@dataclass(frozen=True, slots=True)
class InlineOperator:
    react: Callable[[Call], Awaitable[Reaction]]
    stateful: bool = False


@dataclass(frozen=True, slots=True)
class _Ended:
    """The last step, ready to be reported."""

    reaction: Reaction
    state: OperatorState | None


class OperatorFailed(Exception):
    """Raised by an inline operator; `error_class` decides about retries."""

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
"""Those that need nothing of DAGs; wiring adds the others. Their names are in jobs.py: INLINE_OPERATORS."""

_sql = queries("tasks")


@dataclass(frozen=True, slots=True)
class InlineLimits:
    """Places for tasks that run at once. An org has fewer than an operator, and that fewer than all: neither one org
    nor one operator that waits can keep the others out."""

    most: int = 128
    of_an_operator: int = 96
    of_an_org: int = 48


class InlineRunner:
    """Takes the lease like any worker, so a dispatcher that dies leaves the task to the reaper."""

    def __init__(
        self,
        database: Database,
        claims: Claims,
        tasks: Tasks,
        effects: Effects,
        operators: Mapping[str, InlineOperator] = OPERATORS,
        *,
        limits: InlineLimits | None = None,
    ) -> None:
        self._database = database
        self._claims = claims
        self._tasks = tasks
        self._effects = effects
        self._operators = operators
        self._limits = limits or InlineLimits()
        self._running: dict[asyncio.Task[None], ClaimReply] = {}
        self._places: dict[asyncio.Task[None], tuple[UUID | None, str | None]] = {}
        """By task, its org and operator."""
        self._turns: WeakValueDictionary[tuple[UUID, str], asyncio.Lock] = WeakValueDictionary()
        self._worker_id = f"dispatcher:{socket.gethostname()}:{os.getpid()}"
        self._identity = WorkerIdentity("dispatcher", "dispatcher", None)

    async def invoke(self, _runtime: str, ref: TaskRef) -> bool:
        """False while its org, its operator or all have no place left: the relay offers the task again later."""
        places = list(self._places.values())
        limits = self._limits
        if len(places) >= limits.most or sum(org == ref.org_id for org, _ in places) >= limits.of_an_org:
            return False
        operator = await self._operator_of(ref)
        if sum(held == operator for _, held in self._places.values()) >= limits.of_an_operator:
            return False
        request = ref.claim(self._worker_id, tokens=False)
        answer = await self._claims.claim(request, self._identity)
        for reply in answer.claims:
            if reply.status != "Claimed":
                continue
            task = asyncio.create_task(self._run(reply))
            self._running[task] = reply
            self._places[task] = (ref.org_id, operator)
            task.add_done_callback(self._running.pop)
            task.add_done_callback(self._places.pop)
        # A wake-up for a task that is not claimable has done its work; one for a task that waits for its turn has not.
        return not answer.remaining

    async def _operator_of(self, ref: TaskRef) -> str | None:
        async with self._database.connection() as connection:
            found: str | None = await _sql.operator_of(
                connection, org_id=ref.org_id, task_id=ref.task_id, run_id=ref.run_id
            )
        return found

    async def drain(self, seconds: float) -> None:
        """What does not end in time is given back: no attempt is used up."""
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        interrupted = dict(self._running)
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
            # The lease runs out and the task is tried again.
            log.warning("inline.not_reported", task_id=str(claim.task_id), reason=error.detail)

    def _turn(self, job_id: UUID, operator: str) -> asyncio.Lock:
        """Those who share a state go one after the other: at once, they would only undo each other's work."""
        return self._turns.setdefault((job_id, operator), asyncio.Lock())

    async def _run_in_turn(self, claim: ClaimReply, turn: asyncio.Lock) -> None:
        if not await self._wait_for(turn, claim):
            await self._report(claim, completion(claim, "Canceled"), None)
            return
        try:
            while not await self._reported_at_once(claim):
                # By another dispatcher: that costs no attempt.
                log.info("inline.state_moved", task_id=str(claim.task_id))
        finally:
            turn.release()

    async def _reported_at_once(self, claim: ClaimReply) -> bool:
        """False when the state was moved meanwhile, so that nothing was written."""
        try:
            await self._report(claim, *await self._execute(claim))
        except StateMoved:
            return False
        return True

    async def _wait_for(self, turn: asyncio.Lock, claim: ClaimReply) -> bool:
        """The lease is kept meanwhile. False when the task was canceled."""
        taken, beat = asyncio.ensure_future(turn.acquire()), asyncio.ensure_future(keep(self._tasks, claim))
        try:
            await asyncio.wait({taken, beat}, return_when=asyncio.FIRST_COMPLETED)
            if not taken.done():
                beat.result()  # raises when the lease is lost
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
            # What it said does not fit to what is there: a failed attempt, not one that nobody hears of.
            await self._tasks.complete_one(failure(claim, error.code, error.detail))

    async def _execute(self, claim: ClaimReply) -> tuple[Completion, OperatorState | None]:
        work = asyncio.ensure_future(self._call(claim))
        beat = asyncio.ensure_future(keep(self._tasks, claim))
        try:
            done, _ = await asyncio.wait({work, beat}, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                return _outcome(claim, work)
            beat.result()  # raises when the lease is lost
            return completion(claim, "Canceled"), None
        finally:
            beat.cancel()
            work.cancel()

    async def _call(self, claim: ClaimReply) -> _Ended:
        """Step by step; each but the last is written as soon as it is there."""
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
    """Whatever an operator raises is a failed attempt; only a lost lease is not for it to report."""
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
