"""Runs everything in one folder: starts it in order, keeps it running, and stops it in reverse order.

    lock the folder ─► sockets ─► servers ─► schema ─► credentials ─► gateway, dispatcher ─► query, scheduler, workers
                                                                                                           │
    unlock ◄────────────────────── servers ◄────── gateway, dispatcher, query, scheduler ◄────── workers ◄ drain

The listening sockets belong to this process, which passes them to its children. If a gateway dies, only its open
requests fail; the next gateway serves the connections that arrived in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import structlog

from interlock.apps.up.folder import Folder
from interlock.errors import InterlockError
from interlock.processes.supervision import ChildFailed, Handover, Interrupted, Interrupts, SupervisedChild
from interlock.settings import Settings

if TYPE_CHECKING:
    from interlock.apps.up.foundation import Foundation

log = structlog.get_logger()

WORKER_RUNTIMES: Final = ("platform", "spark")
"""Runtimes for which this build has a worker."""
_USES_DATA_DATABASE: Final = ("platform", "spark")
"""Runtimes whose built-in operators use the data database."""
_USES_STATE_DATABASE: Final = "spark"
"""The runtime that uses the state database, to load staged lists that are too long for one process."""

_LISTENERS: Final = {"gateway": "gateway", "dispatcher": "internal"}
"""Child processes that listen, with the name of the setting for their address."""
_CHECK_SECONDS: Final = 0.5
_TRIM_LOGS_EVERY: Final = 120
"""Number of server checks between two trims of the server logs."""
_FAILURES_SECONDS: Final = 5.0
_READY_SECONDS: Final = 60.0
_LISTENER_GRACE_SECONDS: Final = 15.0
_WORKER_GRACE_SECONDS: Final = 35.0
"""Time that a child gets beyond the drain to finish open requests, or to send its last reports."""

_CREDENTIALS: Final = frozenset(
    {
        "INTERLOCK_STATE_URL",
        "INTERLOCK_DATA_URL",
        "INTERLOCK_QUERY_DATA_URL",
        "INTERLOCK_VALKEY_URL",
        "INTERLOCK_API_KEY",
        "INTERLOCK_WORKER_TOKEN",
        "INTERLOCK_RUNNER_TOKEN",
        "INTERLOCK_SMTP_URL",
    }
)
"""Variables with credentials. Each child gets only the ones that it needs."""
_RUNNER_VARIABLES: Final = ("HOME", "LANG", "PATH", "PYTHONPATH", "TMPDIR", "TZ", "VIRTUAL_ENV")
"""The only environment variables that the runner gets, because it executes user code."""
_RUNNER_SETTINGS: Final = ("BODY_", "BUNDLE_", "CONFIG", "DIR", "DRAIN_", "FAILPOINTS", "LOG_", "RUNNER", "TLS_CA")
"""Prefixes of the only settings that the runner gets."""


@dataclass(frozen=True)
class Started:
    """The output of `interlock up --json`."""

    gateway: str
    internal: str
    query: str
    dir: str
    admin_key: str
    worker_token: str
    state_url: str
    data_url: str
    valkey_url: str
    sign_in_url: str = ""
    """A link to the dashboard that signs in once; empty after the start."""


@dataclass(frozen=True)
class Plan:
    """The processes to run in addition to the servers, the gateway, the dispatcher and the scheduler."""

    workers: Sequence[str] = WORKER_RUNTIMES
    operators: Sequence[str] = ()
    """Folders and modules with the operators that the workers run."""
    modules: Sequence[str] = ()
    """Modules that workers import at start, and search for operators."""
    children_stderr: int | None = None
    """File descriptor for the output of children in addition to their log files; None for our own stderr."""


@dataclass
class Supervisor:
    """Starts, watches and stops all processes. The caller must hold the lock of the folder."""

    settings: Settings
    folder: Folder
    plan: Plan
    listeners: list[SupervisedChild] = field(default_factory=list)
    schedulers: list[SupervisedChild] = field(default_factory=list)
    queries: list[SupervisedChild] = field(default_factory=list)
    runners: list[SupervisedChild] = field(default_factory=list)
    workers: list[SupervisedChild] = field(default_factory=list)
    _foundation: Foundation | None = None
    _prepared: asyncio.Event = field(default_factory=asyncio.Event)
    _loops: list[asyncio.Task[None]] = field(default_factory=list)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    # Start

    async def start(self) -> Started:
        self.listeners = [self._listener(name) for name in _LISTENERS]
        self._keep_alive(self.listeners)
        self._foundation = foundation = await asyncio.to_thread(self._load_foundation)
        await foundation.prepare()
        self._prepared.set()
        for child in self.listeners:
            await self._wait_until_ready(child)
        await foundation.report_operators(self.plan.workers, [*self.plan.operators, *self.plan.modules])
        # Workers start later: on a small machine they would slow down the start of the others, and could not work yet.
        self.workers = [self._worker(runtime) for runtime in self.plan.workers]
        self.schedulers = [self._scheduler(), self._sink(), self._ingest(), self._bus()]
        self.queries = [self._query()]
        self._keep_alive(self.queries)
        self.runners = [self._runner()] if foundation.runner else []
        self._keep_alive(self.runners)
        self._keep_alive([*self.schedulers, *self.workers])
        for child in self.queries:
            await self._wait_until_ready(child)
        started = self._started(foundation)
        self._write_endpoints(started)
        self._loops.append(asyncio.create_task(self._show_failures(started), name="failures"))
        return replace(started, sign_in_url=await foundation.sign_in_url())

    def _load_foundation(self) -> Foundation:
        from interlock.apps.up.foundation import Foundation

        return Foundation(self.settings, self.folder)

    def _keep_alive(self, children: Sequence[SupervisedChild]) -> None:
        self._loops += [asyncio.create_task(child.run(), name=child.name) for child in children]

    async def _wait_until_ready(self, child: SupervisedChild) -> None:
        answering = asyncio.create_task(
            self._prepared_foundation.wait_until_healthy(_LISTENERS.get(child.name, child.name))
        )
        failing = asyncio.create_task(child.failed())
        try:
            done, _ = await asyncio.wait(
                {answering, failing}, timeout=_READY_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise ChildFailed(f"The {child.name} did not respond within {_READY_SECONDS:.0f} s; see its log.")
            for outcome in done:
                outcome.result()
        finally:
            answering.cancel()
            failing.cancel()

    @property
    def _prepared_foundation(self) -> Foundation:
        if self._foundation is None:
            raise RuntimeError("call start() first")
        return self._foundation

    async def _show_failures(self, started: Started) -> None:
        """Logs a line when a job of a DAG begins to fail, and when it no longer does."""
        from interlock.client import Client

        known: set[str] = set()
        async with Client(started.gateway, started.admin_key, verify=False, patience=1.0) as client:
            while not self._stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _FAILURES_SECONDS)
                try:
                    found = {f"{one.dag}/{one.job}": one for one in (await client.dags.failures()).failures}
                except InterlockError:
                    continue  # the gateway restarts
                for name in found.keys() - known:
                    one = found[name]
                    more = f"interlock task logs {one.task_id}"
                    log.warning("job.failing", job=name, error=one.error_class, message=one.error_message, more=more)
                for name in known - found.keys():
                    log.info("job.no_longer_failing", job=name)
                known = set(found)

    def _started(self, foundation: Foundation) -> Started:
        urls, credentials = foundation.servers.urls, foundation.credentials
        return Started(
            gateway=foundation.url("gateway"),
            internal=foundation.url("internal"),
            query=foundation.url("query"),
            dir=str(self.folder.path),
            admin_key=credentials.admin_key,
            worker_token=credentials.worker_token,
            state_url=urls.state,
            data_url=urls.data,
            valkey_url=urls.valkey,
        )

    def _write_endpoints(self, started: Started) -> None:
        names = ("gateway", "internal", "query", "state_url", "data_url", "valkey_url")
        known = {name: str(getattr(started, name)) for name in names} | {"pid": str(os.getpid())}
        if url := self._prepared_foundation.runner.get("INTERLOCK_RUNNER_URL"):
            known["runner"] = url
        self.folder.write_endpoints(known)

    # Children

    def _listener(self, name: str) -> SupervisedChild:
        async def hand_over() -> Handover:
            await self._prepared.wait()
            foundation = self._prepared_foundation
            urls = foundation.servers.urls
            settings = {
                "INTERLOCK_STATE_URL": urls.state,
                "INTERLOCK_DATA_URL": urls.data,
                "INTERLOCK_VALKEY_URL": urls.valkey,
                "INTERLOCK_OBJECTS_PUBLIC_URL": self._objects_url(foundation),
                "INTERLOCK_QUERY_URL": foundation.url("query"),
                "INTERLOCK_INTERNAL_URL": foundation.url("internal"),
            }
            if name == "gateway":
                # The gateway needs to know whether a mail server exists: it rejects e-mail channels without one.
                settings |= self._mail()
            if name == "dispatcher":
                settings |= foundation.runner
            elif name == "gateway" and (runner := foundation.runner.get("INTERLOCK_RUNNER_URL")):
                # The gateway needs to know whether a runner exists: it rejects jobs for a runtime that cannot run.
                settings["INTERLOCK_RUNNER_URL"] = runner
            return Handover(settings, foundation.listeners[_LISTENERS[name]].fileno())

        return self._child(name, [name], hand_over, _LISTENER_GRACE_SECONDS)

    def _mail(self) -> dict[str, str]:
        url = self.settings.smtp_url
        return {} if url is None else {"INTERLOCK_SMTP_URL": url.get_secret_value()}

    def _objects_url(self, foundation: Foundation) -> str:
        """Returns the base of signed object URLs. Only the supervisor knows the port that the gateway got."""
        settings = self.settings
        return settings.objects_public_url or settings.gateway_url or foundation.url("gateway")

    def _runner(self) -> SupervisedChild:
        async def hand_over() -> Handover:
            foundation = self._prepared_foundation
            settings = {"INTERLOCK_RUNNER_TOKEN": foundation.runner_token}
            return Handover(settings, foundation.listeners["runner"].fileno())

        environment = {name: value for name, value in self._environment().items() if _is_runner_variable(name)}
        return self._child("runner", ["runner"], hand_over, _LISTENER_GRACE_SECONDS, environment)

    def _query(self) -> SupervisedChild:
        async def hand_over() -> Handover:
            foundation = self._prepared_foundation
            urls = foundation.servers.urls
            settings = {
                "INTERLOCK_STATE_URL": urls.state,
                "INTERLOCK_VALKEY_URL": urls.valkey,
                "INTERLOCK_OBJECTS_PUBLIC_URL": self._objects_url(foundation),
                # Its keys verify the capability tokens of attempts.
                "INTERLOCK_INTERNAL_URL": foundation.url("internal"),
            }
            if foundation.query_data_url is not None:
                settings["INTERLOCK_QUERY_DATA_URL"] = foundation.query_data_url
            return Handover(settings, foundation.listeners["query"].fileno())

        return self._child("query", ["query"], hand_over, _LISTENER_GRACE_SECONDS)

    def _scheduler(self) -> SupervisedChild:
        async def hand_over() -> Handover:
            return Handover({"INTERLOCK_STATE_URL": self._prepared_foundation.servers.urls.state})

        return self._child("scheduler", ["scheduler"], hand_over, _LISTENER_GRACE_SECONDS)

    def _sink(self) -> SupervisedChild:
        async def hand_over() -> Handover:
            urls = self._prepared_foundation.servers.urls
            return Handover({"INTERLOCK_STATE_URL": urls.state, "INTERLOCK_DATA_URL": urls.data})

        return self._child("sink", ["sink"], hand_over, _LISTENER_GRACE_SECONDS)

    def _bus(self) -> SupervisedChild:
        async def hand_over() -> Handover:
            return Handover({"INTERLOCK_STATE_URL": self._prepared_foundation.servers.urls.state} | self._mail())

        return self._child("bus", ["bus"], hand_over, _LISTENER_GRACE_SECONDS)

    def _ingest(self) -> SupervisedChild:
        async def hand_over() -> Handover:
            return Handover({"INTERLOCK_STATE_URL": self._prepared_foundation.servers.urls.state})

        return self._child("ingest", ["ingest"], hand_over, _LISTENER_GRACE_SECONDS)

    def _worker(self, runtime: str) -> SupervisedChild:
        async def hand_over() -> Handover:
            foundation = self._prepared_foundation
            settings = {
                "INTERLOCK_INTERNAL_URL": foundation.url("internal"),
                "INTERLOCK_WORKER_TOKEN": foundation.credentials.worker_token,
                "INTERLOCK_RELOAD": str(self.settings.reload is not False).lower(),
            }
            if runtime in _USES_DATA_DATABASE:
                settings["INTERLOCK_DATA_URL"] = foundation.servers.urls.data
            if runtime == _USES_STATE_DATABASE:
                settings["INTERLOCK_STATE_URL"] = foundation.servers.urls.state
            return Handover(settings)

        given = [part for one in self.plan.operators for part in ("--operators", one)]
        given += [part for module in self.plan.modules for part in ("--import", module)]
        arguments = ["worker", "--runtime", runtime, *given]
        return self._child(f"worker-{runtime}", arguments, hand_over, _WORKER_GRACE_SECONDS)

    def _child(
        self,
        name: str,
        arguments: list[str],
        hand_over: Callable[[], Awaitable[Handover]],
        grace: float,
        environment: Mapping[str, str] | None = None,
    ) -> SupervisedChild:
        return SupervisedChild(
            name,
            ["serve", *arguments],
            hand_over,
            environment=self._environment() if environment is None else environment,
            log_file=self.folder.log_of(name),
            drain_seconds=self.settings.drain_seconds + grace,
            stderr=self.plan.children_stderr,
        )

    def _environment(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if name.upper() not in _CREDENTIALS}
        return kept | {"INTERLOCK_DIR": str(self.folder.path)}

    # Watch

    async def watch(self) -> None:
        """Restarts servers that die, until cancelled. Each child has its own loop that restarts it."""
        servers = asyncio.create_task(self._watch_servers())
        try:
            ended, _ = await asyncio.wait({servers, *self._loops}, return_when=asyncio.FIRST_COMPLETED)
            for loop in ended:
                loop.result()
        finally:
            servers.cancel()

    async def _watch_servers(self) -> None:
        checks = 0
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            await self._check_servers()
            checks += 1
            if checks % _TRIM_LOGS_EVERY == 0:
                await asyncio.to_thread(self._prepared_foundation.servers.trim_logs)

    async def _check_servers(self) -> None:
        try:
            if await self._prepared_foundation.servers.revive():
                log.warning("server.moved", effect="its clients restart with the new address")
                self._write_endpoints(self._started(self._prepared_foundation))
                # The runner uses no server, so its invocations continue.
                for child in (*self.listeners, *self.queries, *self.schedulers, *self.workers):
                    child.restart()
        except InterlockError as error:
            log.warning("server.not_revived", reason=error.detail, effect="will be retried")

    # Stop

    async def stop(self, hurry: asyncio.Event) -> None:
        """Stops workers first, so that they can release tasks while the dispatcher listens, and the stores last."""
        self._stopping.set()
        await asyncio.gather(*(worker.stop(hurry) for worker in (*self.workers, *self.runners)))
        await asyncio.gather(*(child.stop(hurry) for child in (*self.listeners, *self.queries, *self.schedulers)))
        for outcome in await asyncio.gather(*self._loops, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("child.loop_died", exc_info=outcome)
        if self._foundation is not None:
            await self._foundation.close()
        self.folder.remove_endpoints()


def _is_runner_variable(name: str) -> bool:
    setting = name.removeprefix("INTERLOCK_")
    return name in _RUNNER_VARIABLES or (setting != name and setting.startswith(_RUNNER_SETTINGS))


async def up(settings: Settings, folder: Folder, plan: Plan, on_ready: Callable[[Started], None]) -> None:
    """Runs until a signal requests a drain. The caller must hold the lock of the folder."""
    interrupts = Interrupts()
    interrupts.listen()
    supervisor = Supervisor(settings, folder, plan)
    try:
        on_ready(await interrupts.unless_asked(supervisor.start()))
        await interrupts.unless_asked(supervisor.watch())
    except Interrupted:
        log.info("stopping")
    finally:
        await supervisor.stop(interrupts.hurry)
    log.info("stopped")
