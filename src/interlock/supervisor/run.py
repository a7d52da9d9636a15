"""Everything of one folder, started in order, kept alive, and put away in the opposite order.

    lock the folder ─► sockets ─► servers ─► schema ─► credentials ─► gateway, dispatcher ─► query, scheduler, workers
                                                                                                           │
    unlock ◄────────────────────── servers ◄────── gateway, dispatcher, query, scheduler ◄────── workers ◄ drain

The listening sockets belong to this process and are handed down: a gateway that dies costs its open requests, and the
next one answers those that came in meanwhile.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from interlock.errors import InterlockError
from interlock.settings import Settings
from interlock.supervisor.child import Child, ChildFailed, Handover
from interlock.supervisor.folder import Folder
from interlock.supervisor.interrupts import Interrupted, Interrupts

if TYPE_CHECKING:
    from interlock.supervisor.foundation import Foundation

log = structlog.get_logger()

WORKER_RUNTIMES: Final = ("platform", "spark")
"""Runtimes that this build has a worker for."""
_ON_DATA: Final = ("platform", "spark")
_ON_STATE: Final = "spark"
"""Loads staged lists that are too long for one process."""
"""Those of them whose own operators work on the data database."""

_DOORS: Final = {"gateway": "gateway", "dispatcher": "internal"}
"""The processes that listen, and the setting that says where."""
_LOOK_SECONDS: Final = 0.5
_TRIM_LOGS_EVERY: Final = 120
"""Looks between two trims of the servers' logs."""
_READY_SECONDS: Final = 60.0
_LISTENER_GRACE_SECONDS: Final = 15.0
_WORKER_GRACE_SECONDS: Final = 35.0
"""Beyond the drain: how long a child may need to answer open requests, or to tell its last reports."""

_NOT_FOR_ALL: Final = frozenset(
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
"""Each child gets those of these that it needs, and no other."""
_FOR_THE_RUNNER: Final = ("HOME", "LANG", "PATH", "PYTHONPATH", "TMPDIR", "TZ", "VIRTUAL_ENV")
_ITS_SETTINGS: Final = ("BODY_", "BUNDLE_", "CONFIG", "DIR", "DRAIN_", "FAILPOINTS", "LOG_", "RUNNER", "TLS_CA")
"""What it works with is users' code: of the environment it gets these alone."""


@dataclass(frozen=True)
class Started:
    """What `interlock up --json` prints."""

    gateway: str
    internal: str
    query: str
    dir: str
    admin_key: str
    worker_token: str
    state_url: str
    data_url: str
    valkey_url: str


@dataclass(frozen=True)
class Plan:
    """What to run beside the servers, the gateway, the dispatcher and the scheduler."""

    workers: Sequence[str] = WORKER_RUNTIMES
    operators: Sequence[str] = ()
    """Folders and modules whose declared operators the workers run."""
    modules: Sequence[str] = ()
    """Imported by workers at their start, and given to them as well."""
    children_stderr: int | None = None
    """Where children write beside their log files; None for our own stderr."""


@dataclass
class Supervisor:
    """The folder's lock is the caller's to hold."""

    settings: Settings
    folder: Folder
    plan: Plan
    doors: list[Child] = field(default_factory=list)
    schedulers: list[Child] = field(default_factory=list)
    queries: list[Child] = field(default_factory=list)
    runners: list[Child] = field(default_factory=list)
    workers: list[Child] = field(default_factory=list)
    _foundation: Foundation | None = None
    _laid: asyncio.Event = field(default_factory=asyncio.Event)
    _loops: list[asyncio.Task[None]] = field(default_factory=list)

    # Start

    async def start(self) -> Started:
        self.doors = [self._door(name) for name in _DOORS]
        self._keep_alive(self.doors)
        self._foundation = foundation = await asyncio.to_thread(self._load_foundation)
        await foundation.lay()
        self._laid.set()
        for door in self.doors:
            await self._wait_until_ready(door)
        await foundation.report_operators(self.plan.workers, [*self.plan.operators, *self.plan.modules])
        # Not sooner: on a small machine a worker's start would only slow down theirs, and it could not work yet.
        self.workers = [self._worker(runtime) for runtime in self.plan.workers]
        self.schedulers = [self._scheduler(), self._sink(), self._ingest(), self._bus()]
        self.queries = [self._query()]
        self._keep_alive(self.queries)
        self.runners = [self._runner()] if foundation.runner else []
        self._keep_alive(self.runners)
        self._keep_alive([*self.schedulers, *self.workers])
        started = self._started(foundation)
        self._write_endpoints(started)
        return started

    def _load_foundation(self) -> Foundation:
        from interlock.supervisor.foundation import Foundation

        return Foundation(self.settings, self.folder)

    def _keep_alive(self, children: Sequence[Child]) -> None:
        self._loops += [asyncio.create_task(child.run(), name=child.name) for child in children]

    async def _wait_until_ready(self, door: Child) -> None:
        answering = asyncio.create_task(self._laid_foundation.answers(_DOORS[door.name]))
        failing = asyncio.create_task(door.failed())
        try:
            done, _ = await asyncio.wait(
                {answering, failing}, timeout=_READY_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise ChildFailed(f"The {door.name} has not answered for {_READY_SECONDS:.0f} s: see its log.")
            for outcome in done:
                outcome.result()
        finally:
            answering.cancel()
            failing.cancel()

    @property
    def _laid_foundation(self) -> Foundation:
        if self._foundation is None:
            raise RuntimeError("start() comes first")
        return self._foundation

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
        if url := self._laid_foundation.runner.get("INTERLOCK_RUNNER_URL"):
            known["runner"] = url
        self.folder.write_endpoints(known)

    # Children

    def _door(self, name: str) -> Child:
        async def hand_over() -> Handover:
            await self._laid.wait()
            foundation = self._laid_foundation
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
                # Whether there is a mail server: it takes no channels for which there is none.
                settings |= self._mail()
            if name == "dispatcher":
                settings |= foundation.runner
            elif name == "gateway" and (runner := foundation.runner.get("INTERLOCK_RUNNER_URL")):
                # That there is one: it takes no jobs for a runtime that nobody runs.
                settings["INTERLOCK_RUNNER_URL"] = runner
            return Handover(settings, foundation.listeners[_DOORS[name]].fileno())

        return self._child(name, [name], hand_over, _LISTENER_GRACE_SECONDS)

    def _mail(self) -> dict[str, str]:
        url = self.settings.smtp_url
        return {} if url is None else {"INTERLOCK_SMTP_URL": url.get_secret_value()}

    def _objects_url(self, foundation: Foundation) -> str:
        """Where signed URLs of objects lead: only here is it known which port the gateway has got."""
        settings = self.settings
        return settings.objects_public_url or settings.gateway_url or foundation.url("gateway")

    def _runner(self) -> Child:
        async def hand_over() -> Handover:
            foundation = self._laid_foundation
            settings = {"INTERLOCK_RUNNER_TOKEN": foundation.runner_token}
            return Handover(settings, foundation.listeners["runner"].fileno())

        told = {name: value for name, value in self._environment().items() if _is_for_the_runner(name)}
        return self._child("runner", ["runner"], hand_over, _LISTENER_GRACE_SECONDS, told)

    def _query(self) -> Child:
        async def hand_over() -> Handover:
            foundation = self._laid_foundation
            urls = foundation.servers.urls
            settings = {
                "INTERLOCK_STATE_URL": urls.state,
                "INTERLOCK_VALKEY_URL": urls.valkey,
                "INTERLOCK_OBJECTS_PUBLIC_URL": self._objects_url(foundation),
                # Whose keys it lets attempts in by.
                "INTERLOCK_INTERNAL_URL": foundation.url("internal"),
            }
            if foundation.query_data_url is not None:
                settings["INTERLOCK_QUERY_DATA_URL"] = foundation.query_data_url
            return Handover(settings, foundation.listeners["query"].fileno())

        return self._child("query", ["query"], hand_over, _LISTENER_GRACE_SECONDS)

    def _scheduler(self) -> Child:
        async def hand_over() -> Handover:
            return Handover({"INTERLOCK_STATE_URL": self._laid_foundation.servers.urls.state})

        return self._child("scheduler", ["scheduler"], hand_over, _LISTENER_GRACE_SECONDS)

    def _sink(self) -> Child:
        async def hand_over() -> Handover:
            urls = self._laid_foundation.servers.urls
            return Handover({"INTERLOCK_STATE_URL": urls.state, "INTERLOCK_DATA_URL": urls.data})

        return self._child("sink", ["sink"], hand_over, _LISTENER_GRACE_SECONDS)

    def _bus(self) -> Child:
        async def hand_over() -> Handover:
            return Handover({"INTERLOCK_STATE_URL": self._laid_foundation.servers.urls.state} | self._mail())

        return self._child("bus", ["bus"], hand_over, _LISTENER_GRACE_SECONDS)

    def _ingest(self) -> Child:
        async def hand_over() -> Handover:
            return Handover({"INTERLOCK_STATE_URL": self._laid_foundation.servers.urls.state})

        return self._child("ingest", ["ingest"], hand_over, _LISTENER_GRACE_SECONDS)

    def _worker(self, runtime: str) -> Child:
        async def hand_over() -> Handover:
            foundation = self._laid_foundation
            settings = {
                "INTERLOCK_INTERNAL_URL": foundation.url("internal"),
                "INTERLOCK_WORKER_TOKEN": foundation.credentials.worker_token,
            }
            if runtime in _ON_DATA:
                settings["INTERLOCK_DATA_URL"] = foundation.servers.urls.data
            if runtime == _ON_STATE:
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
    ) -> Child:
        return Child(
            name,
            arguments,
            hand_over,
            environment=self._environment() if environment is None else environment,
            log_file=self.folder.log_of(name),
            drain_seconds=self.settings.drain_seconds + grace,
            stderr=self.plan.children_stderr,
        )

    def _environment(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if name.upper() not in _NOT_FOR_ALL}
        return kept | {"INTERLOCK_DIR": str(self.folder.path)}

    # While it runs

    async def watch(self) -> None:
        """Until cancelled: brings back what dies. Each child's own loop does so for that child."""
        servers = asyncio.create_task(self._watch_servers())
        try:
            ended, _ = await asyncio.wait({servers, *self._loops}, return_when=asyncio.FIRST_COMPLETED)
            for loop in ended:
                loop.result()
        finally:
            servers.cancel()

    async def _watch_servers(self) -> None:
        looks = 0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self._look_at_servers()
            looks += 1
            if looks % _TRIM_LOGS_EVERY == 0:
                await asyncio.to_thread(self._laid_foundation.servers.trim_logs)

    async def _look_at_servers(self) -> None:
        try:
            if await self._laid_foundation.servers.revive():
                log.warning("server.moved", effect="what uses it starts again with its new address")
                self._write_endpoints(self._started(self._laid_foundation))
                # The runner is on no server: its invocations go on.
                for child in (*self.doors, *self.queries, *self.schedulers, *self.workers):
                    child.restart()
        except InterlockError as error:
            log.warning("server.not_revived", reason=error.detail, effect="tried again")

    # End

    async def stop(self, hurry: asyncio.Event) -> None:
        """Workers give back what they hold while the dispatcher still listens; the stores go last."""
        await asyncio.gather(*(worker.stop(hurry) for worker in (*self.workers, *self.runners)))
        await asyncio.gather(*(child.stop(hurry) for child in (*self.doors, *self.queries, *self.schedulers)))
        for outcome in await asyncio.gather(*self._loops, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("child.loop_died", exc_info=outcome)
        if self._foundation is not None:
            await self._foundation.clear()
        self.folder.remove_endpoints()


def _is_for_the_runner(name: str) -> bool:
    setting = name.removeprefix("INTERLOCK_")
    return name in _FOR_THE_RUNNER or (setting != name and setting.startswith(_ITS_SETTINGS))


async def up(settings: Settings, folder: Folder, plan: Plan, on_ready: Callable[[Started], None]) -> None:
    """Runs until a signal asks for a drain. The caller holds the folder's lock."""
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
