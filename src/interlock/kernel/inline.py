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
from interlock.errors import Fenced, InterlockError
from interlock.kernel.tasks import Tasks
from interlock.wire import ClaimReply, ClaimRequest, Completion, Heartbeat

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

    def __init__(self, tasks: Tasks, *, most: int = 64) -> None:
        self._tasks = tasks
        self._most = most
        self._running: set[asyncio.Task[None]] = set()
        self._worker_id = f"dispatcher:{socket.gethostname()}:{os.getpid()}"
        self._identity = WorkerIdentity("dispatcher", "dispatcher", None)

    async def invoke(self, _runtime: str, task_id: UUID) -> bool:
        if len(self._running) >= self._most:
            return False
        request = ClaimRequest(worker_id=self._worker_id, task_id=task_id, tokens=False)
        reply = (await self._tasks.claim(request, self._identity)).claims[0]
        if reply.status == "Claimed":
            task = asyncio.create_task(self._run(reply))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        # A wake-up for a task that is not claimable has done its work.
        return True

    async def drain(self, seconds: float) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        for task in self._running:
            task.cancel()

    async def _run(self, claim: ClaimReply) -> None:
        try:
            completion = await self._execute(claim)
            await self._tasks.complete_one(completion)
        except Fenced as error:
            log.warning("inline.fenced", task_id=str(claim.task_id), stale=error.stale)
        except InterlockError as error:
            # The lease runs out and the task is tried again.
            log.warning("inline.not_reported", task_id=str(claim.task_id), reason=error.detail)

    async def _execute(self, claim: ClaimReply) -> Completion:
        work = asyncio.ensure_future(_call(claim))
        beat = asyncio.ensure_future(self._beat(claim))
        try:
            done, _ = await asyncio.wait({work, beat}, return_when=asyncio.FIRST_COMPLETED)
            if work not in done:
                return _completion(claim, "Canceled")
            return _completion(claim, "Completed", result=msgspec.Raw(msgspec.json.encode(work.result())))
        except OperatorFailed as error:
            return _completion(claim, "Failed", error_class=error.error_class, error_message=str(error))
        except (TypeError, ValueError) as error:
            return _completion(claim, "Failed", error_class=type(error).__name__, error_message=str(error))
        finally:
            beat.cancel()
            work.cancel()

    async def _beat(self, claim: ClaimReply) -> None:
        """Returns when the task was asked to cancel; raises when the lease is lost."""
        fence = Heartbeat(
            task_id=_given(claim.task_id),
            attempt=_given(claim.attempt),
            lease_token=_given(claim.lease_token),
        )
        expires = _given(claim.lease_expires_at)
        while True:
            await asyncio.sleep(max(0.1, (expires - datetime.now(UTC)).total_seconds() / 3))
            reply = await self._tasks.heartbeat_one(fence)
            if reply.cancel_requested:
                return
            expires = reply.lease_expires_at


async def _call(claim: ClaimReply) -> Any:
    task = _given(claim.task)
    operator = OPERATORS.get(task.operator)
    if operator is None:
        known = ", ".join(sorted(OPERATORS))
        raise OperatorFailed(
            "OperatorNotFound", f"The dispatcher runtime has no operator {task.operator!r}; it has: {known}."
        )
    return await operator(msgspec.json.decode(task.payload), msgspec.json.decode(task.config))


def _completion(claim: ClaimReply, status: Any, **more: Any) -> Completion:
    return Completion(
        task_id=_given(claim.task_id),
        attempt=_given(claim.attempt),
        lease_token=_given(claim.lease_token),
        status=status,
        **more,
    )


def _given(value: Any) -> Any:
    """Claimed replies carry everything; the optional fields are for NotClaimed."""
    if value is None:
        raise ValueError("a claimed task without its lease")
    return value
