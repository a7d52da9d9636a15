"""The worker: the trusted process between the dispatcher and operator code.

    queue ─ receive ─► claim ─► pool ─► child processes, or the driver of a Spark session
                                 │  ▲
      dispatcher ◄─ heartbeat ───┘  └── reports ─► complete in batches ─► dispatcher

It holds the worker token; its children hold no credentials. The crash of a child costs an attempt of the task that ran
in it. The crash of the worker costs an attempt of each task it held. A drain costs no attempt.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from interlock.client import WorkerClient, dispatcher_access
from interlock.errors import ConfigurationError, InterlockError
from interlock.processes import linux
from interlock.settings import Runtime, RuntimeKind, Settings, config_file
from interlock.workers import catalogue, confinement
from interlock.workers.catalogue import LOOK_SECONDS, OperatorReports
from interlock.workers.claimed_tasks import NONE, Pace, Variables
from interlock.workers.confinement import NOT_CONFINED, OF_ROOT
from interlock.workers.driver_pool import DriverPool
from interlock.workers.driver_process import DriverLaunch
from interlock.workers.heartbeats import CANCEL_GRACE_SECONDS, Leases, Watch
from interlock.workers.operators import catalogue_of
from interlock.workers.pool import Pool
from interlock.workers.process import Launch
from interlock.workers.protocol import Outbound, SparkOptions
from interlock.workers.puller import PULLERS, Puller
from interlock.workers.reporter import Reporter
from interlock.workers.work_pool import WorkPool

log = structlog.get_logger()

LAST_REPORTS_SECONDS = 30.0
"""Time for which a worker that shuts down retries its last reports while the dispatcher is unavailable."""

OUTAGE_LINE_SECONDS = 10.0
RELOAD_LOOK_SECONDS = 0.5
"""Interval of the search for new operators while their files are being edited."""


class Worker:
    """Runs tasks of one runtime until it is drained.

    `operators` are the folders and modules whose declared operators it runs, in addition to those of the setting with
    that name. `modules` are imported in each child. `environment` names variables that its processes get in addition to
    the few that are always passed on. `variables` are passed only to tasks of their org.
    """

    def __init__(  # noqa: PLR0913 - the options of a worker, by name
        self,
        settings: Settings,
        runtime: str = "platform",
        worker_id: str | None = None,
        concurrency: int | None = None,
        *,
        operators: Sequence[str] = (),
        modules: Sequence[str] = (),
        environment: Sequence[str] = (),
        variables: Variables = NONE,
        cancel_grace: float = CANCEL_GRACE_SECONDS,
    ) -> None:
        self._settings = settings
        self._runtime = _queue_runtime(settings, runtime)
        self.worker_id = worker_id or _default_id()
        self._on_spark = self._runtime.spark
        cores = os.cpu_count() or 1
        self.concurrency = concurrency or (
            settings.spark_tasks or 2 * cores if self._on_spark else settings.worker_concurrency or cores
        )
        self._modules, self._environment, self._variables = tuple(modules), tuple(environment), variables
        self._sources = catalogue.sources([*settings.operators, *operators, *modules])
        self._cancel_grace = cancel_grace
        self._draining = asyncio.Event()
        self._hurry = asyncio.Event()
        self._renew: Callable[[], None] = lambda: None

    def reload(self) -> None:
        """Loads the operators' files again: new processes run the next tasks, running ones finish in theirs."""
        log.info("worker.reload", worker_id=self.worker_id)
        self._renew()

    def request_drain(self) -> None:
        """Starts a graceful shutdown: takes no new work, and finishes or releases the rest before `run` returns.

        A second call releases running tasks immediately.
        """
        if self._draining.is_set():
            self._hurry.set()
        self._draining.set()

    async def run(self) -> None:
        access = dispatcher_access(self._settings)
        async with WorkerClient(access.url, access.secret, verify=access.verify, on_retry=OutageLog()) as client:
            await self._run(client)

    async def _run(self, client: WorkerClient) -> None:
        pace = Pace(self._settings.range_size)
        reporter = Reporter(client, self._settings.body_limit_bytes // 2, self._settings.task_log_bytes)
        lease = self._runtime.lease_seconds
        pool, watch = self._spark_pool(client, pace, reporter) if self._on_spark else self._pool(pace, reporter)
        declared = catalogue_of(self._sources, spark=self._on_spark)
        self._renew = lambda: _renew(pool)
        look = RELOAD_LOOK_SECONDS if self._settings.reload else LOOK_SECONDS
        reports = OperatorReports(client, declared, self._runtime.queue, self.worker_id, self._renew, look)
        puller = Puller(client, pool, pace, reporter, self._runtime.queue, self.worker_id)
        if not confinement.is_possible():
            log.warning("worker.operators_not_confined", effect=NOT_CONFINED)
        elif os.geteuid() == 0:
            log.warning("worker.operators_run_as_root", effect=OF_ROOT)
        log.info("worker.started", worker_id=self.worker_id, queue=self._runtime.queue, concurrency=self.concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                loops = [
                    group.create_task(work)
                    for work in (
                        Leases(client, pool, lease).run(),
                        watch,
                        _raise_from(reporter.failure),
                        reports.run(),
                        reporter.logs.run(),
                    )
                ]
                pullers = [group.create_task(puller.run(self._draining)) for _ in range(PULLERS)]
                await self._drained(pool, reporter, pullers)
                for loop in loops:
                    loop.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        finally:
            await pool.abandon()
            reporter.abandon()
        log.info("worker.ended", worker_id=self.worker_id, reported=reporter.reported)

    def _pool(self, pace: Pace, reporter: Reporter) -> tuple[WorkPool, Coroutine[Any, Any, None]]:
        """Creates a pool with a child process for each running task."""
        settings = self._settings
        launch = Launch(
            memory_mb=self._runtime.memory_mb,
            result_limit=settings.result_limit_bytes,
            modules=self._modules,
            operators=tuple(source.text for source in self._sources),
            hidden=_hidden(settings),
            kept=_kept(settings),
            reload=bool(settings.reload),
            environment=self._environment,
            variables=self._variables,
            data_url=_data_url(settings, self._runtime),
            outbound=_outbound(settings, self._runtime),
        )
        pool = Pool(launch, pace, reporter, self._runtime.lease_seconds, always_on=settings.worker_always_on)
        pool.start(self.concurrency)
        return pool, Watch(pool, pace, self._cancel_grace).run()

    def _spark_pool(
        self, client: WorkerClient, pace: Pace, reporter: Reporter
    ) -> tuple[WorkPool, Coroutine[Any, Any, None]]:
        """Creates a pool of driver processes, each with one Spark session for its tasks."""
        settings = self._settings
        options = SparkOptions(
            master=settings.spark_master,
            remote=settings.spark_remote.get_secret_value() if settings.spark_remote else None,
            memory=settings.spark_memory,
            conf={name: value.get_secret_value() for name, value in settings.spark_conf.items()},
            tasks=self.concurrency,
            objects_root=settings.objects_root,
        )
        launch = DriverLaunch(
            options=options,
            result_limit=settings.result_limit_bytes,
            modules=self._modules,
            operators=tuple(source.text for source in self._sources),
            hidden=_hidden(settings),
            kept=_kept(settings),
            reload=bool(settings.reload),
            environment=self._environment,
            variables=self._variables,
            data_url=_data_url(settings, self._runtime),
            state_url=_state_url(settings, self._runtime),
            outbound=_outbound(settings, self._runtime),
        )
        pool = DriverPool(
            launch,
            pace,
            reporter,
            self._runtime.lease_seconds,
            client.task_data,
            per_org=settings.spark_driver_per_org,
            most_drivers=settings.spark_drivers,
        )
        return pool, pool.watch(self._cancel_grace)

    async def _drained(self, pool: WorkPool, reporter: Reporter, pullers: list[asyncio.Task[None]]) -> None:
        await self._draining.wait()
        log.info("worker.draining", worker_id=self.worker_id, tasks=len(pool.held))
        pool.drain()
        if not await self._finished_in_time(pool, pullers):
            pool.kill_all()
            await pool.ended()
        began = time.monotonic()
        # A claim in flight may still return tasks. The drained pool releases them immediately.
        await asyncio.wait(pullers, timeout=LAST_REPORTS_SECONDS)
        for puller in pullers:
            puller.cancel()
        await reporter.drain(max(LAST_REPORTS_SECONDS - (time.monotonic() - began), 0))

    async def _finished_in_time(self, pool: WorkPool, pullers: list[asyncio.Task[None]]) -> bool:
        finished = asyncio.ensure_future(asyncio.gather(pool.ended(), *pullers))
        hurried = asyncio.create_task(self._hurry.wait())
        waits: set[asyncio.Future[object]] = {finished, hurried}  # type: ignore[arg-type]
        await asyncio.wait(waits, timeout=self._settings.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        return finished.done()


class OutageLog:
    """Logs that the dispatcher is unavailable, at most once per OUTAGE_LINE_SECONDS."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    def __call__(self, error: InterlockError) -> None:
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + OUTAGE_LINE_SECONDS
            log.warning("worker.dispatcher_away", code=error.code, reason=error.detail)


def _queue_runtime(settings: Settings, name: str) -> Runtime:
    try:
        runtime = settings.runtime(name)
    except KeyError:
        known = ", ".join(settings.runtime_names)
        raise ConfigurationError(f"Runtime {name!r} does not exist: choose one of {known}.") from None
    if runtime.kind is not RuntimeKind.QUEUE:
        raise ConfigurationError(
            f"Runtime {name!r} is of kind {runtime.kind} and has no queue, so it needs no worker: start a worker only "
            "for a runtime with a queue."
        )
    return runtime


def _renew(pool: WorkPool) -> None:
    """Replaces processes that were confined before a file existed by new ones, which can open it."""
    if isinstance(pool, Pool):
        pool.renew()
    elif isinstance(pool, DriverPool):
        for driver in pool.drivers:
            driver.spend()


def _hidden(settings: Settings) -> tuple[str, ...]:
    """Returns the platform's files and folders that operators must not open."""
    own = [settings.dir, settings.signing_keys_dir, config_file(), *settings.secret_dirs]
    return tuple(str(path.absolute()) for path in (*own, settings.tls_key) if path is not None)


def _kept(settings: Settings) -> tuple[str, ...]:
    """Returns the local folder of objects, which tasks read and write directly."""
    root = settings.objects_root
    return (root.removeprefix("file://"),) if root.startswith("file://") else ()


def _data_url(settings: Settings, runtime: Runtime) -> str | None:
    """Returns the URL of the data database, which only the platform's own runtimes get."""
    if settings.data_url is None or not _is_trusted(settings, runtime):
        return None
    return settings.data_url.get_secret_value()


def _state_url(settings: Settings, runtime: Runtime) -> str | None:
    """Returns the URL of the state database. Without it, the ingest process loads staged lists."""
    if settings.state_url is None or not _is_trusted(settings, runtime):
        return None
    return settings.state_url.get_secret_value()


def _outbound(settings: Settings, runtime: Runtime) -> Outbound | None:
    """Returns the outbound settings. Other runtimes get no exceptions and no proxy."""
    if not _is_trusted(settings, runtime):
        return None
    proxy = settings.outbound_proxy.get_secret_value() if settings.outbound_proxy else None
    return Outbound(settings.outbound_allow, settings.outbound_ports, proxy, settings.result_limit_bytes)


def _is_trusted(settings: Settings, runtime: Runtime) -> bool:
    return runtime.spark or runtime.queue == settings.runtime("platform").queue


def _default_id() -> str:
    return f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(3)}"


async def _raise_from(failure: asyncio.Future[None]) -> None:
    await failure


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def hide_memory() -> None:
    """Prevents other processes of the same user from reading this process's memory and environment.

    Operator code runs as the same user, and this process was started with the worker token in its environment.
    """
    if sys.platform == "linux":
        linux.prctl(linux.PR_SET_DUMPABLE, 0)


async def main(
    settings: Settings,
    runtime: str = "platform",
    worker_id: str | None = None,
    concurrency: int | None = None,
    *,
    operators: Sequence[str] = (),
    modules: Sequence[str] = (),
    environment: Sequence[str] = (),
    variables: Variables = NONE,
) -> None:
    """Runs a worker as the main program. SIGTERM and SIGINT drain it; a second signal releases running tasks.

    SIGHUP makes it load the operators' files again.
    """
    hide_memory()
    worker = Worker(
        settings,
        runtime,
        worker_id,
        concurrency,
        operators=operators,
        modules=modules,
        environment=environment,
        variables=variables,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.request_drain)
    loop.add_signal_handler(signal.SIGHUP, worker.reload)
    await worker.run()
