"""The `invoke` runtimes: the dispatcher takes the lease and has a runner do the work. User code never runs here.

outbox ─► relay ─► a free place? ─► claim ─► runner ─► the attempt reports by itself: /v1/task/complete
                       │ no                    │ full, away: given back, no attempt is used up
                       ▼                       ▼ died, hung, lied: a failed attempt
              the row waits, and is      while it runs, the lease is kept from here;
              called in when one is      a cancel or a lost lease closes the connection
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
from interlock.adapters.notifications import Wakeups
from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Database, queries
from interlock.adapters.runner import Runner, RunnerAway, RunnerBusy, RunnerLost
from interlock.archives import Language
from interlock.errors import Fenced, InterlockError
from interlock.kernel.claims import Claims
from interlock.kernel.holding import completion, failure, fence_of, given, keep
from interlock.kernel.relay import Invoke, TaskRef
from interlock.kernel.tasks import Tasks
from interlock.kernel.udf import DIGEST, bundle_key
from interlock.settings import RuntimeKind, Settings
from interlock.telemetry import INVOCATIONS, INVOCATIONS_OPEN
from interlock.wire import (
    ClaimReply,
    Completion,
    Crash,
    Endpoints,
    Invocation,
    InvocationLimits,
    Release,
    RunnerReport,
    TaskPayload,
)

log = structlog.get_logger()
_sql = queries("effects")

_HEARTBEAT_SECONDS: Final = 5.0
"""How long a cancel takes to reach the process, at most."""
_TAKEN_SECONDS: Final = 1.0
"""A runner that has not refused by then has taken the invocation."""
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 15.0
_LEAST_SECONDS: Final = 1.0
_STDERR_SHOWN: Final = 2_000
_MEMORY_MB: Final = 1024


class _Udf(msgspec.Struct, frozen=True):
    """Of a job's configuration, what the platform reads."""

    bundle: str
    entrypoint: str
    language: Language


_udf = msgspec.json.Decoder(_Udf)


@dataclass
class _Gate:
    """Before a runner that was full or away: shut for a while, for longer each time. Then one may try; if the runner
    takes that one, all may."""

    is_shut: bool = False
    _trying: bool = False
    _refusals: int = 0

    def admit(self) -> bool:
        if self.is_shut or self._trying:
            return False
        self._trying = self._refusals > 0
        return True

    def shut(self, at_least: float = 0.0) -> float | None:
        """For how long; None when it was shut already."""
        if self.is_shut:
            return None
        pause = max(at_least, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**self._refusals))
        self.is_shut, self._trying, self._refusals = True, False, min(self._refusals + 1, 10)
        return pause

    def unlock(self) -> None:
        """For one, to try."""
        self.is_shut = self._trying = False

    def untried(self) -> None:
        """It came to nothing, and says nothing about the runner."""
        self._trying = False

    def open(self) -> bool:
        """Whether it was not, before."""
        was_open = not self.is_shut and not self._refusals
        self.is_shut, self._trying, self._refusals = False, False, 0
        return not was_open


@dataclass
class _Open:
    """An invocation that has not ended."""

    claim: ClaimReply
    taken: bool = False
    """The runner has not refused it."""


def by_kind(settings: Settings, inline: Invoke, invoked: Invoke) -> Invoke:
    """Tasks of runtimes without a queue, to whoever runs them."""
    names = {name for name in settings.runtime_names if settings.runtime(name).kind is RuntimeKind.INVOKE}

    async def invoke(runtime: str, ref: TaskRef) -> bool:
        return await (invoked if runtime in names else inline)(runtime, ref)

    return invoke


class Invoker:
    """Takes the lease like any worker, so a dispatcher that dies leaves the task to the reaper."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        claims: Claims,
        tasks: Tasks,
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

    @property
    def open_invocations(self) -> int:
        return len(self._open)

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
            # A wake-up for a task that is not claimable has done its work; one for a task that waits has not.
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
            # The runner has a place now, whatever it said before.
            self._gate.unlock()
        else:
            self._gate.untried()
        self._aside(self._call_in(self._settings.lambda_concurrency))

    async def drain(self, seconds: float) -> None:
        """What does not end in time is killed and given back: no attempt is used up."""
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
        """Whatever is still open is killed, and left to the reaper."""
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
            # The usual end: the attempt has reported by itself.
            log.debug("invoke.over", task_id=str(claim.task_id), stale=error.stale)
        except InterlockError as error:
            # The lease runs out and the task is tried again.
            log.warning("invoke.not_reported", task_id=str(claim.task_id), reason=error.detail)

    async def _run(self, runner: Runner, runtime: str, opened: _Open) -> Completion | None:
        """The report that ends the attempt, unless it has reported by itself; None when it was given back."""
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
            beat.result()  # raises when the lease is lost, or the attempt has ended by its own report
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
        """Nothing has run, so no attempt is used up. Shut first: the task is owed again the moment it is released."""
        self._shut(at_least)
        INVOCATIONS.labels(outcome=outcome).inc()
        log.warning("invoke.given_back", task_id=str(claim.task_id), reason=why)
        await self._tasks.release([Release(**fence_of(claim))])

    async def _invocation(self, claim: ClaimReply, runtime: str) -> Invocation:
        task: TaskPayload = given(claim.task)
        udf = _udf.decode(task.config)
        sha256 = udf.bundle.removeprefix(DIGEST)
        remaining = (given(task.timeout_at) - self._database.clock.now()).total_seconds()
        seconds = max(_LEAST_SECONDS, remaining)
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

    # Those that wait

    def _taken(self, opened: _Open) -> None:
        opened.taken = True
        if self._gate.open():
            self._aside(self._call_in(self._settings.lambda_concurrency))

    def _shut(self, at_least: float = 0.0) -> None:
        pause = self._gate.shut(at_least)
        if pause is not None:
            asyncio.get_running_loop().call_later(pause, lambda: self._aside(self._try_again()))

    async def _try_again(self) -> None:
        """A task is claimed for it only when somebody is there: each time that one is given back is written down."""
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

    async def _call_in(self, most: int) -> None:
        """Those that found no place come due again by themselves, too: this is what makes it quick."""
        room = min(most, self._room)
        if room <= 0 or self._gate.is_shut:
            return
        try:
            async with self._database.connection() as connection:
                rows = await _sql.call_in(connection, targets=self._runtimes, most=room)
        except InterlockError as error:
            log.warning("invoke.not_called_in", reason=error.detail)
            return
        if rows:
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
    "timeout": "The code ran longer than it may.",
    "oom": "The code was out of memory.",
    "refused": "The runner refused the invocation.",
    "bad_bundle": "The bundle could not be used.",
}


def _failed(claim: ClaimReply, report: RunnerReport) -> Completion:
    """However it ended: the attempt itself has the first word, and this is refused when it has spoken."""
    signal = str(report.signal) if report.signal is not None else None
    if report.outcome == "exited":
        sentence = f"The code ended with exit code {report.exit_code} and did not say what came of it."
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
