"""The `dispatcher` runtime: the platform's own small operators, run in this process. User code never runs here."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import msgspec
import structlog

from interlock.access.principals import WorkerIdentity
from interlock.errors import Fenced, InterlockError, TooLarge, Unavailable
from interlock.kernel.claims import Claims
from interlock.kernel.tasks import Tasks
from interlock.wire import ClaimReply, ClaimRequest, Completion, Heartbeat, Release

log = structlog.get_logger()

InlineOperator = Callable[[Any, dict[str, Any]], Awaitable[Any]]
"""Payload and config in, result out."""


class OperatorFailed(Exception):
    """Raised by an inline operator; `error_class` decides about retries."""

    def __init__(self, error_class: str, message: str) -> None:
        super().__init__(message)
        self.error_class = error_class


async def _echo(payload: Any, _config: dict[str, Any]) -> Any:
    return payload


async def _sleep(payload: Any, _config: dict[str, Any]) -> Any:
    seconds = payload.get("seconds", 0) if isinstance(payload, dict) else 0
    await asyncio.sleep(min(float(seconds), 60.0))
    return {"slept": seconds}


async def _fail(payload: Any, _config: dict[str, Any]) -> Any:
    told = payload if isinstance(payload, dict) else {}
    raise OperatorFailed(str(told.get("error_class", "Failed")), str(told.get("message", "asked to fail")))


OPERATORS: Final[dict[str, InlineOperator]] = {"echo": _echo, "sleep": _sleep, "fail": _fail}


class InlineRunner:
    """Takes the lease like any worker, so a dispatcher that dies leaves the task to the reaper."""

    def __init__(self, claims: Claims, tasks: Tasks, *, most: int = 64) -> None:
        self._claims = claims
        self._tasks = tasks
        self._most = most
        self._running: dict[asyncio.Task[None], ClaimReply] = {}
        self._worker_id = f"dispatcher:{socket.gethostname()}:{os.getpid()}"
        self._identity = WorkerIdentity("dispatcher", "dispatcher", None)

    async def invoke(self, _runtime: str, task_id: UUID) -> bool:
        if len(self._running) >= self._most:
            return False
        request = ClaimRequest(worker_id=self._worker_id, task_id=task_id, tokens=False)
        reply = (await self._claims.claim(request, self._identity)).claims[0]
        if reply.status == "Claimed":
            task = asyncio.create_task(self._run(reply))
            self._running[task] = reply
            task.add_done_callback(self._running.pop)
        # A wake-up for a task that is not claimable has done its work.
        return True

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
            await self._tasks.release([Release(**_fence(claim)) for claim in interrupted.values()])
        except InterlockError as error:
            log.warning("inline.not_given_back", tasks=len(interrupted), reason=error.detail)

    async def _run(self, claim: ClaimReply) -> None:
        try:
            await self._report(claim, await self._execute(claim))
        except Fenced as error:
            log.warning("inline.fenced", task_id=str(claim.task_id), stale=error.stale)
        except InterlockError as error:
            # The lease runs out and the task is tried again.
            log.warning("inline.not_reported", task_id=str(claim.task_id), reason=error.detail)

    async def _report(self, claim: ClaimReply, completion: Completion) -> None:
        try:
            await self._tasks.complete_one(completion)
        except TooLarge as error:
            failure = _completion(claim, "Failed", error_class="ResultTooLarge", error_message=error.detail)
            await self._tasks.complete_one(failure)

    async def _execute(self, claim: ClaimReply) -> Completion:
        work = asyncio.ensure_future(_call(claim))
        beat = asyncio.ensure_future(self._beat(claim))
        try:
            done, _ = await asyncio.wait({work, beat}, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                return _outcome(claim, work)
            beat.result()  # raises when the lease is lost
            return _completion(claim, "Canceled")
        finally:
            beat.cancel()
            work.cancel()

    async def _beat(self, claim: ClaimReply) -> None:
        """Returns when the task was asked to cancel; raises when the lease is lost."""
        heartbeat = Heartbeat(**_fence(claim))
        expires = _given(claim.lease_expires_at)
        while True:
            await asyncio.sleep(max(0.1, (expires - datetime.now(UTC)).total_seconds() / 3))
            try:
                reply = await self._tasks.heartbeat_one(heartbeat)
            except Unavailable as error:
                log.warning("inline.heartbeat_missed", task_id=str(claim.task_id), reason=error.detail)
                continue
            if reply.cancel_requested:
                return
            expires = reply.lease_expires_at


async def _call(claim: ClaimReply) -> msgspec.Raw:
    task = _given(claim.task)
    operator = OPERATORS.get(task.operator)
    if operator is None:
        known = ", ".join(sorted(OPERATORS))
        raise OperatorFailed(
            "OperatorNotFound", f"The dispatcher runtime has no operator {task.operator!r}; it has: {known}."
        )
    result = await operator(msgspec.json.decode(task.payload), msgspec.json.decode(task.config))
    return msgspec.Raw(msgspec.json.encode(result))


def _outcome(claim: ClaimReply, work: asyncio.Future[msgspec.Raw]) -> Completion:
    """Whatever an operator raises is a failed attempt."""
    error = work.exception()
    if error is None:
        return _completion(claim, "Completed", result=work.result())
    error_class = error.error_class if isinstance(error, OperatorFailed) else type(error).__name__
    return _completion(claim, "Failed", error_class=error_class, error_message=str(error))


def _completion(claim: ClaimReply, status: Any, **more: Any) -> Completion:
    return Completion(status=status, **_fence(claim), **more)


def _fence(claim: ClaimReply) -> dict[str, Any]:
    return {
        "task_id": _given(claim.task_id),
        "attempt": _given(claim.attempt),
        "lease_token": _given(claim.lease_token),
    }


def _given(value: Any) -> Any:
    """Claimed replies carry everything; the optional fields are for NotClaimed."""
    if value is None:
        raise ValueError("a claimed task without its lease")
    return value
