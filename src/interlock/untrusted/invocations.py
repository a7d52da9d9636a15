"""The `invoke` runtimes: the dispatcher takes the lease and has a runner do the work. User code never runs here.

outbox ─► relay ─► a free slot? ─► claim ─► runner ─► the attempt reports its own result: /v1/task/complete
                       │ no                    │ busy, unreachable: released, no attempt is used up
                       ▼                       ▼ died, hung, lied: a failed attempt
              the row waits, and        while it runs, the dispatcher renews the lease;
              is due when one is free   a cancel or a lost lease closes the connection
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog

from interlock.access.principals import WorkerIdentity
from interlock.archives import Language
from interlock.errors import Fenced, InterlockError
from interlock.settings import RuntimeKind, Settings
from interlock.stores.notifications import Wakeups
from interlock.stores.objects import Objects
from interlock.stores.postgres import Database
from interlock.tasks.claims import Claims
from interlock.tasks.completion import Attempts
from interlock.tasks.inline_runtime import completion, failure, fence_of, given, keep
from interlock.tasks.outbox_relay import Invoke, TaskRef, make_due
from interlock.telemetry import INVOCATIONS, INVOCATIONS_OPEN
from interlock.untrusted.bundles import DIGEST, bundle_key
from interlock.untrusted.runners import Runner, RunnerAway, RunnerBusy, RunnerLost
from interlock.wire.attempts import ClaimReply, Completion, Release, TaskPayload
from interlock.wire.bundles import Endpoints, Invocation, InvocationLimits, RunnerReport
from interlock.wire.tasks import Crash

log = structlog.get_logger()

_HEARTBEAT_SECONDS: Final = 5.0
"""Upper bound on the time until a cancel reaches the process."""
_TAKEN_SECONDS: Final = 1.0
"""A runner that has not refused an invocation by then has accepted it."""
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 15.0
_MIN_SECONDS: Final = 1.0
_STDERR_SHOWN: Final = 2_000
_MEMORY_MB: Final = 1024


class _Udf(msgspec.Struct, frozen=True):
    """The part of a job's configuration that the platform reads."""

    bundle: str
    entrypoint: str
    language: Language


_udf = msgspec.json.Decoder(_Udf)


@dataclass
class _Gate:
    """A gate in front of a runner that was busy or unreachable.

    A refusal shuts it for a pause, which grows with each refusal. Then one invocation may try; if the runner accepts
    it, the gate opens for all.
    """

    is_shut: bool = False
    _trying: bool = False
    _refusals: int = 0

    def admit(self) -> bool:
        if self.is_shut or self._trying:
            return False
        self._trying = self._refusals > 0
        return True

    def shut(self, at_least: float = 0.0) -> float | None:
        """Shuts the gate. Returns the pause, or None if it was already shut."""
        if self.is_shut:
            return None
        pause = max(at_least, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**self._refusals))
        self.is_shut, self._trying, self._refusals = True, False, min(self._refusals + 1, 10)
        return pause

    def unlock(self) -> None:
        """Admits one invocation as a trial."""
        self.is_shut = self._trying = False

    def untried(self) -> None:
        """Ends a trial that gave no information about the runner."""
        self._trying = False

    def open(self) -> bool:
        """Opens the gate. Returns True if it was not open before."""
        was_open = not self.is_shut and not self._refusals
        self.is_shut, self._trying, self._refusals = False, False, 0
        return not was_open


@dataclass
class _Open:
    """An invocation that has not ended."""

    claim: ClaimReply
    taken: bool = False
    """True once the runner has accepted the invocation."""


def by_kind(settings: Settings, inline: Invoke, invoked: Invoke) -> Invoke:
    """Routes tasks of runtimes without a queue to the runner of their kind."""
    names = {name for name in settings.runtime_names if settings.runtime(name).kind is RuntimeKind.INVOKE}

    async def invoke(runtime: str, ref: TaskRef) -> bool:
        return await (invoked if runtime in names else inline)(runtime, ref)

    return invoke


class Invoker:
    """Claims a lease like any worker, so the reaper recovers the tasks of a dispatcher that died."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        claims: Claims,
        tasks: Attempts,
        objects: Objects,
        runner: Runner | None,
        wakeups: Wakeups,
    ) -> None:
        self._database = database
        self._settings = settings
        self._claims = claims
        self._tasks = tasks
        self._objects = objects
        self._runner = runner
        self._wakeups = wakeups
        self._gate = _Gate()
        self._open: dict[asyncio.Task[None], _Open] = {}
        self._asides: set[asyncio.Task[None]] = set()
        self._drained = False
        self._worker_id = f"dispatcher:{socket.gethostname()}:{os.getpid()}"
        self._identity = WorkerIdentity("dispatcher", "dispatcher", None)
        self._runtimes = [n for n in settings.runtime_names if settings.runtime(n).kind is RuntimeKind.INVOKE]

    async def invoke(self, runtime: str, ref: TaskRef) -> bool:
        if self._runner is None or self._room <= 0 or not self._gate.admit():
            return False
        try:
            answer = await self._claims.claim(ref.claim(self._worker_id), self._identity)
        except InterlockError:
            self._gate.untried()
            raise
        claimed = [claim for claim in answer.claims if claim.status == "Claimed"]
        if claimed:
            self._begin(self._runner, runtime, _Open(claimed[0]))
        else:
            # A wake-up for a task that cannot be claimed is done. One for a task that waits for a limit is not.
            self._gate.untried()
        return not answer.remaining

    def _begin(self, runner: Runner, runtime: str, invocation: _Open) -> None:
        task = asyncio.create_task(self._attend(runner, runtime, invocation))
        self._open[task] = invocation
        INVOCATIONS_OPEN.set(len(self._open))
        task.add_done_callback(self._ended)

    @property
    def _room(self) -> int:
        return self._settings.lambda_concurrency - len(self._open)

    def _ended(self, task: asyncio.Task[None]) -> None:
        ended = self._open.pop(task)
        INVOCATIONS_OPEN.set(len(self._open))
        if ended.taken:
            # The runner has a free slot now, whatever it answered before.
            self._gate.unlock()
        else:
            self._gate.untried()
        self._aside(self._call_in(self._settings.lambda_concurrency))

    async def drain(self, seconds: float) -> None:
        """Waits for open invocations, then kills and releases the rest: this uses up no attempt."""
        self._drained = True
        if self._open:
            await asyncio.wait(self._open, timeout=seconds)
        interrupted = list(self._open)
        claims = [each.claim for each in self._open.values()]
        for task in interrupted:
            task.cancel()
        await asyncio.gather(*interrupted, *self._asides, return_exceptions=True)
        try:
            if claims:
                await self._tasks.release([Release(**fence_of(claim)) for claim in claims])
        except InterlockError as error:
            log.warning("invoke.not_given_back", tasks=len(claims), reason=error.detail)

    async def close(self) -> None:
        """Kills all open invocations and leaves their tasks to the reaper."""
        self._drained = True
        for task in (*self._open, *self._asides):
            task.cancel()
        await asyncio.gather(*self._open, *self._asides, return_exceptions=True)
        if self._runner is not None:
            await self._runner.close()

    # One invocation

    async def _attend(self, runner: Runner, runtime: str, opened: _Open) -> None:
        claim = opened.claim
        try:
            report = await self._run(runner, runtime, opened)
            if report is not None:
                await self._tasks.complete_one(report)
        except Fenced as error:
            # The usual end: the attempt has reported its own result.
            log.debug("invoke.over", task_id=str(claim.task_id), stale=error.stale)
        except InterlockError as error:
            # The lease expires and the task is retried.
            log.warning("invoke.not_reported", task_id=str(claim.task_id), reason=error.detail)

    async def _run(self, runner: Runner, runtime: str, opened: _Open) -> Completion | None:
        """Returns the report that ends the attempt, or None if the task was released.

        The report is refused if the attempt has reported its own result.
        """
        claim = opened.claim
        try:
            invocation = await self._invocation(claim, runtime)
        except msgspec.MsgspecError:
            return _told("unprepared", failure(claim, "NotInvoked", "The job's configuration names no bundle."))
        except InterlockError as error:
            await self._give_back(claim, "unprepared", error.detail)
            return None
        call = asyncio.ensure_future(runner.invoke(msgspec.json.encode(invocation), invocation.limits.timeout_seconds))
        beat = asyncio.ensure_future(keep(self._tasks, claim, at_least_every=_HEARTBEAT_SECONDS))
        try:
            await self._until_over(opened, call, beat)
            if call.done():
                return await self._outcome(opened, call)
            beat.result()  # raises if the lease is lost, or if the attempt has reported its own result
            return _told("canceled", completion(claim, "Canceled"))
        finally:
            call.cancel()
            beat.cancel()
            await asyncio.gather(call, beat, return_exceptions=True)

    async def _until_over(self, opened: _Open, *either: asyncio.Future[Any]) -> None:
        done, _ = await asyncio.wait(either, timeout=_TAKEN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            self._taken(opened)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def _outcome(self, opened: _Open, call: asyncio.Future[RunnerReport]) -> Completion | None:
        claim = opened.claim
        match call.exception():
            case None:
                self._taken(opened)
                report = call.result()
                return _told(report.outcome, _failed(claim, report))
            case RunnerBusy() as busy:
                await self._give_back(claim, "busy", str(busy), busy.retry_after)
            case RunnerAway() as away:
                await self._give_back(claim, "away", str(away))
            case RunnerLost() as lost:
                return _told("lost", failure(claim, "RunnerLost", f"The runner did not report: {lost}."))
            case error:
                log.error("invoke.broken", task_id=str(claim.task_id), exc_info=error)
                return _told("lost", failure(claim, "RunnerLost", f"The runner failed: {type(error).__name__}."))
        return None

    async def _give_back(self, claim: ClaimReply, outcome: str, why: str, at_least: float = 0.0) -> None:
        """Releases a task that has not run: this uses up no attempt.

        Shuts the gate first, because the outbox offers the task again as soon as it is released.
        """
        self._shut(at_least)
        INVOCATIONS.labels(outcome=outcome).inc()
        log.warning("invoke.given_back", task_id=str(claim.task_id), reason=why)
        await self._tasks.release([Release(**fence_of(claim))])

    async def _invocation(self, claim: ClaimReply, runtime: str) -> Invocation:
        task: TaskPayload = given(claim.task)
        udf = _udf.decode(task.config)
        sha256 = udf.bundle.removeprefix(DIGEST)
        remaining = (given(task.timeout_at) - self._database.clock.now()).total_seconds()
        seconds = max(_MIN_SECONDS, remaining)
        uri = f"{self._objects.root}/{bundle_key(task.org_id, sha256)}"
        return Invocation(
            **fence_of(claim),
            lease_expires_at=given(claim.lease_expires_at),
            capability_token=given(claim.capability_token),
            bundle_url=await self._objects.sign("GET", uri, seconds),
            bundle_sha256=sha256,
            entrypoint=udf.entrypoint,
            language=udf.language,
            endpoints=self._endpoints,
            job=task.job,
            operator=task.operator,
            config=task.config,
            inputs=task.inputs,
            outputs=task.outputs,
            payload=task.payload,
            limits=self._limits(runtime, seconds),
        )

    @property
    def _endpoints(self) -> Endpoints:
        settings = self._settings
        in_a_bucket = self._objects.root.startswith("s3://")
        return Endpoints(
            dispatcher_url=settings.dispatcher_base_url,
            query_url=settings.query_base_url,
            objects_url=settings.bucket_base_url if in_a_bucket else settings.objects_base_url,
            objects_in_bucket=in_a_bucket,
        )

    def _limits(self, runtime: str, seconds: float) -> InvocationLimits:
        settings = self._settings
        return InvocationLimits(
            memory_mb=settings.runtime(runtime).memory_mb or _MEMORY_MB,
            cpu_seconds=settings.lambda_cpu_seconds,
            timeout_seconds=seconds,
            processes=settings.lambda_processes,
            disk_mb=settings.lambda_disk_mb,
        )

    # Waiting tasks

    def _taken(self, opened: _Open) -> None:
        opened.taken = True
        if self._gate.open():
            self._aside(self._call_in(self._settings.lambda_concurrency))

    def _shut(self, at_least: float = 0.0) -> None:
        pause = self._gate.shut(at_least)
        if pause is not None:
            asyncio.get_running_loop().call_later(pause, lambda: self._aside(self._try_again()))

    async def _try_again(self) -> None:
        """Probes the runner, and makes a task due only if it answers: a claim that is released costs a write."""
        if self._runner is None or not self._gate.is_shut:
            return
        answers = await self._runner.answers()
        self._gate.unlock()
        if answers:
            await self._call_in(1)
        else:
            self._shut()

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        if self._drained:
            work.close()
            return
        aside = asyncio.create_task(work)
        self._asides.add(aside)
        aside.add_done_callback(self._asides.discard)

    async def _call_in(self, limit: int) -> None:
        """Makes waiting outbox rows due now. They would become due later anyway; this only saves time."""
        room = min(limit, self._room)
        if room <= 0 or self._gate.is_shut:
            return
        try:
            async with self._database.connection() as connection:
                made_due = await make_due(connection, self._runtimes, orgs=None, limit=room)
        except InterlockError as error:
            log.warning("invoke.not_called_in", reason=error.detail)
            return
        if made_due:
            self._wakeups.wake("outbox")


_CLASSES: Final = {
    "exited": "RunnerExited",
    "signaled": "RunnerSignaled",
    "timeout": "RunnerTimeout",
    "oom": "OutOfMemory",
    "refused": "RunnerRefused",
    "bad_bundle": "BadBundle",
}
_SENTENCES: Final = {
    "signaled": "The code was killed by {signal}.",
    "timeout": "The code exceeded its timeout.",
    "oom": "The code ran out of memory.",
    "refused": "The runner refused the invocation.",
    "bad_bundle": "The bundle could not be used.",
}


def _failed(claim: ClaimReply, report: RunnerReport) -> Completion:
    """Returns a failure for any end of the process. It is refused if the attempt has reported its own result."""
    signal = str(report.signal) if report.signal is not None else None
    if report.outcome == "exited":
        sentence = f"The code ended with exit code {report.exit_code} without reporting a result."
    else:
        sentence = _SENTENCES[report.outcome].format(signal=signal or "a signal")
    lines = [sentence, report.cause, report.detail, (report.stderr_tail or "")[-_STDERR_SHOWN:].strip()]
    died = report.exit_code is not None or signal is not None or report.outcome == "oom"
    crash = Crash(exit_code=report.exit_code, signal=signal, oom=report.outcome == "oom") if died else None
    message = "\n".join(line for line in lines if line)[:10_000]
    return failure(claim, _CLASSES[report.outcome], message, crash=crash)


def _told(outcome: str, report: Completion) -> Completion:
    INVOCATIONS.labels(outcome=outcome).inc()
    return report
