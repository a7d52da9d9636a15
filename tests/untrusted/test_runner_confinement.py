"""Permissions of user code in a runner, for every kind of sandbox that this machine supports."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from interlock.untrusted.runner.cgroups import Parents
from interlock.untrusted.runner.confinement import Walls
from tests.support.polls import eventually
from tests.support.sandboxes import (
    CANARY,
    CONFINEMENTS,
    ORDINARY,
    Runner,
    heard,
    packed,
    processes_of,
    running,
    with_word,
    zipped,
)
from tests.support.system import System
from tests.support.third_party_servers import answer, identity, stranger, terminating
from tests.untrusted.test_runner_forward import SMUGGLED

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's"),
    pytest.mark.xdist_group("runner"),
]

HOSTILE, LIMITED = zipped("hostile"), zipped("limits")
INSIDE = {"HOME", "LANG", "PATH", "TMPDIR", "TRACE_DISPATCHER_URL", "TRACE_QUERY_URL", "TRACE_OBJECTS_URL"}


@pytest.fixture(scope="module", params=CONFINEMENTS)
async def runner(request: pytest.FixtureRequest, shared: System) -> AsyncIterator[Runner]:
    async with running(request.param, shared.internal_url, shared.gateway_url) as started:
        yield started


def test_this_machine_supports_a_sandbox() -> None:
    """Without a sandbox, the tests below would not run at all."""
    assert CONFINEMENTS


async def attempt(shared: System, **more: Any) -> dict[str, Any]:
    """Returns the part of an invocation that describes the task."""
    claim = await shared.claim(await shared.one(**more))
    names = ("task_id", "attempt", "lease_token", "lease_expires_at", "capability_token")
    return {name: claim[name] for name in names}


# Permitted


async def test_handler_gets_its_event_and_reports_its_result(runner: Runner, shared: System) -> None:
    code = """
import json, os, sys
from pathlib import Path

def handler(event, task):
    assert task.event is event and event["config"] == {"depth": 3}
    assert json.loads(Path("event.json").read_text())["payload"] == event["payload"]
    assert "bundle_url" not in event
    found = {}
    for name in ("msgspec", "interlock.settings", "other", "sqlite3"):
        try:
            __import__(name)
        except ImportError:
            continue
        found[name] = True
    Path("scratch").write_text("there is room for files")
    return {"found": sorted(found), "environment": sorted(os.environ), "home": os.environ["HOME"] == os.getcwd()}
"""
    claim = await attempt(shared)
    bundle = packed({"main.py": code, "other.py": ""})
    report = await runner.invoke(bundle, "main.handler", config={"depth": 3}, payload={"n": 5}, **claim)
    assert (report["outcome"], report["exit_code"], report["cause"]) == ("exited", 0, "exit_code"), report
    task = await shared.task(claim["task_id"])
    assert task["status"] == "Completed"
    assert task["result"]["found"] == ["other", "sqlite3"]
    assert task["result"]["environment"] == sorted(INSIDE | {"TRACE_TASK_CAPABILITY_TOKEN"})
    assert task["result"]["home"]


async def test_exception_of_a_handler_fails_its_attempt(runner: Runner, shared: System) -> None:
    claim = await attempt(shared)
    report = await runner.invoke(LIMITED, "main.raises", **claim)
    task = await shared.task(claim["task_id"])
    assert (task["status"], task["error_class"]) == ("Failed", "KeyError"), report
    assert "of the handler's own" in report["stderr_tail"]
    assert "in_sandbox/entry.py" not in report["stderr_tail"]


async def test_node_and_executables_use_the_same_contract(runner: Runner, shared: System) -> None:
    script = "exports.handler = async (event) => ({ twice: 2 * event.payload.n });"
    throwing = "export function handler() { throw new RangeError('too far'); }"
    program = "#!/bin/sh\ncmp -s - event.json && echo '{\"same\": true}' > result.json\n"
    claims = [await attempt(shared) for _ in range(3)]
    bundles = [({"main.js": script}, "node"), ({"main.mjs": throwing}, "node"), ({"bootstrap": program}, "bootstrap")]
    reports = await asyncio.gather(
        *(
            runner.invoke(packed(files), "main.handler", language=language, payload={"n": 4}, **claim)
            for (files, language), claim in zip(bundles, claims, strict=True)
        )
    )
    tasks = [await shared.task(claim["task_id"]) for claim in claims]
    assert [task["status"] for task in tasks] == ["Completed", "Failed", "Completed"], reports
    assert tasks[0]["result"] == {"twice": 8}
    assert (tasks[1]["error_class"], tasks[1]["error_message"]) == ("RangeError", "too far")
    assert tasks[2]["result"] == {"same": True}


# Forbidden


@contextmanager
def secrets() -> Iterator[dict[str, str]]:
    """Files that every user can read: only the sandbox protects them from user code."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="interlock-test-", dir="/var/tmp")))
        folder.chmod(0o755)
        (folder / "secret").write_text(CANARY)
        (folder / "secret").chmod(0o644)
        yield {"a file of another task": str(folder / "secret"), "the host's name": "/etc/hostname"}


@contextmanager
def listeners() -> Iterator[tuple[dict[str, int], dict[str, str], list[socket.socket]]]:
    """Listeners to which the code must not connect; the test checks them after the code has ended."""
    with ExitStack() as stack:
        tcp = [stack.enter_context(socket.create_server((host, 0))) for host in ("127.0.0.1", "")]
        path, abstract = f"/var/tmp/{uuid4()}", f"\0{uuid4()}"
        unix = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2)]
        for listening, address in zip(unix, (path, abstract), strict=True):
            listening.bind(address)
            listening.listen()
        Path(path).chmod(0o777)
        stack.callback(Path(path).unlink)
        ports = {f"listener {number}": listening.getsockname()[1] for number, listening in enumerate(tcp)}
        yield ports, {"in the file system": path, "without a file": f"@{abstract[1:]}"}, [*tcp, *unix]


@contextmanager
def shared_memory() -> Iterator[int]:
    """A segment that every user of the machine can attach."""
    libc = ctypes.CDLL(None)
    key = int(uuid4()) % 2**30
    segment = libc.shmget(key, 4096, 0o1666)
    yield key
    libc.shmctl(segment, 0, None)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def connections(listening: list[socket.socket]) -> list[str]:
    found = []
    for one in listening:
        one.setblocking(False)
        try:
            one.accept()
        except BlockingIOError:
            continue
        found.append(str(one.getsockname()))
    return found


async def test_hostile_code_is_confined(runner: Runner, shared: System) -> None:
    failing = {"max_attempts": 2, "backoff_seconds": 0, "jitter": 0}
    task_id = await shared.one(policy=failing)
    first = await shared.claim(task_id)
    await shared.complete(first, "Failed")
    await shared.pass_of("retries")
    claim = await shared.claim(task_id)
    victim = await shared.claim(await shared.one())
    with secrets() as files, listeners() as (ports, sockets, listening), shared_memory() as key:
        other = runner.files.add(packed({"secret.py": f"# {CANARY}"}))
        folders = {"the runner's folder": str(runner.folder), "the folders of bundles": str(runner.folder / "runner")}
        database = await shared.value("select inet_server_port()")
        servers = {"runner": runner.url, "dispatcher": shared.internal_url, "gateway": shared.gateway_url}
        payload = {
            "canary": CANARY,
            "secrets": files | {"the runner's log": str(runner.errors)},
            "folders": folders | {"the folder of another task": str(Path(files["a file of another task"]).parent)},
            "pids": {"runner": runner.process.pid, "dispatcher": os.getpid()},
            "ports": ports | {"database": database} | {name: port_of(url) for name, url in servers.items()},
            "sockets": sockets,
            "shm_key": key,
            "other": {name: victim[name] for name in ("task_id", "attempt", "lease_token")},
            "old_token": first["capability_token"],
        }
        names = ("task_id", "attempt", "lease_token", "capability_token")
        report = await runner.invoke(HOSTILE, "main.handler", payload=payload, **{name: claim[name] for name in names})
        assert connections(listening) == []
        assert not list(runner.folder.rglob("mine"))
    task = await shared.task(task_id)
    assert task["status"] == "Completed", report
    found = task["result"]
    assert len(found["outcomes"]) > 90
    assert {name: outcome for name, outcome in found["outcomes"].items() if not outcome.startswith("no: ")} == {}
    assert found["canaries"] == []
    assert found["descriptors"] == [0, 1, 2]
    assert set(found["environment"]) == INSIDE | {"TRACE_TASK_CAPABILITY_TOKEN"}
    assert found["user"] != 0
    assert found["alive"]
    assert (await shared.task(victim["task_id"]))["status"] == "Running"
    assert runner.process.returncode is None
    assert other


async def test_code_cannot_kill_other_processes(runner: Runner, shared: System) -> None:
    bystander = await asyncio.create_subprocess_exec("sleep", "1000")
    claim = await attempt(shared)
    await runner.invoke(HOSTILE, "main.kill_everything", **claim)
    assert (await shared.task(claim["task_id"]))["result"] == "still here"
    assert runner.process.returncode is None
    assert psutil.Process(bystander.pid).is_running()
    bystander.kill()
    await bystander.wait()


async def test_daemons_end_with_the_code_that_started_them(runner: Runner, shared: System) -> None:
    nonce = str(uuid4().int % 10**9)
    claim = await attempt(shared)
    report = await runner.invoke(HOSTILE, "main.leave_daemons", payload={"nonce": nonce}, **claim)
    assert (await shared.task(claim["task_id"]))["result"] == "left", report
    assert with_word(nonce) == []


async def test_closed_connection_kills_the_code_and_its_children(runner: Runner) -> None:
    nonce = str(uuid4().int % 10**9)
    payload = {"nonce": nonce}
    call = asyncio.create_task(runner.invoke(HOSTILE, "main.hang_with_children", payload=payload))
    await heard(runner, nonce)
    await eventually(lambda: len(with_word(nonce)) == 3)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await eventually(lambda: not with_word(nonce))


# An https platform

ASKING = """
import os, socket, urllib.error, urllib.request
from urllib.parse import urlsplit

def handler(event, task):
    endpoints, wanted = event["endpoints"], event["payload"]
    names = ("dispatcher_url", "query_url", "objects_url")
    written = task.write_output(b"some rows", columns=[], row_count=1, start=0, end=9)
    return {
        "same": all(endpoints[name] == os.environ[f"TRACE_{name.upper()}"] for name in names),
        "answers": {name + path: answer(endpoints[name] + path) for name in names for path in wanted["paths"]},
        "raw": {form: raw(endpoints["dispatcher_url"], data.encode("latin-1")) for form, data in wanted["raw"].items()},
        "connected": [port for port in wanted["ports"] if connected(port)],
        "read": task.read(written).decode(),
    }

def answer(url):
    try:
        return urllib.request.urlopen(url, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code

def raw(url, data):
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode("latin-1")

def connected(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True
"""
PATHS = ["/metrics", "/healthz", "/openapi.json", "/internal/jwks/task", "/v1/tasks", "/", "/v1/task/%2e%2e/tasks"]


@pytest.fixture(scope="module")
def localhost() -> Iterator[Path]:
    """A certificate that a runner of any user can read."""
    with tempfile.TemporaryDirectory(prefix="interlock-test-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        yield identity(Path(folder) / "localhost.pem", "localhost")


@pytest.fixture(scope="module", params=[*CONFINEMENTS, str(Walls.NONE)])
async def encrypted(request: pytest.FixtureRequest, shared: System, localhost: Path) -> AsyncIterator[Runner]:
    """A runner of a platform whose URLs are https."""
    async with (
        terminating(shared.internal_url, localhost) as dispatcher,
        terminating(shared.gateway_url, localhost) as gateway,
        running(request.param, dispatcher, gateway, tls_ca=str(localhost)) as started,
    ):
        yield started


async def test_code_reaches_only_task_paths_and_objects_of_an_https_platform(encrypted: Runner, shared: System) -> None:
    output = {"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())}
    claim = await shared.claim(await shared.one(outputs=[output]))
    names = ("task_id", "attempt", "lease_token", "capability_token")
    dispatcher, gateway = encrypted.dispatcher_url, encrypted.objects_url or ""
    payload = {
        "paths": PATHS,
        "raw": {form: data.decode("latin-1") for form, data in SMUGGLED.items()},
        "ports": [port_of(url) for url in (dispatcher, gateway, shared.internal_url, shared.gateway_url)],
    }
    told = {name: claim[name] for name in names} | {"outputs": claim["task"]["outputs"]}
    told["endpoints"] = {"dispatcher_url": dispatcher, "query_url": dispatcher, "objects_url": gateway}
    report = await encrypted.invoke(packed({"main.py": ASKING}), "main.handler", payload=payload, **told)
    task = await shared.task(claim["task_id"])
    assert task["status"] == "Completed", (report, task)
    found = task["result"]
    assert found["same"]
    assert set(found["answers"].values()) == {404}, found["answers"]
    assert [form for form, got in found["raw"].items() if '"checks"' in got or "HTTP/1.1 200" in got] == []
    assert found["connected"] == [] or encrypted.walls is Walls.NONE
    assert found["read"] == "some rows"


async def test_code_reaches_a_bucket_at_the_url_that_it_is_given(
    encrypted: Runner, shared: System, localhost: Path
) -> None:
    code = """
import os, urllib.request

def handler(event, task):
    return urllib.request.urlopen(os.environ["TRACE_OBJECTS_URL"] + "/bucket/key").read().decode()
"""
    claim = await attempt(shared)
    async with stranger(localhost) as bucket:
        bucket.says("/bucket/key", answer(b"an object"))
        urls = {"dispatcher_url": encrypted.dispatcher_url, "objects_url": bucket.url("", "localhost")}
        endpoints = urls | {"objects_in_bucket": True}
        report = await encrypted.invoke(packed({"main.py": code}), "main.handler", endpoints=endpoints, **claim)
    assert (await shared.task(claim["task_id"]))["result"] == "an object", report
    assert [asked.headers["host"] for asked in bucket.asked] == [f"localhost:{bucket.port}"]


# Its limits


async def test_exceeded_limit_is_named_in_the_report(runner: Runner) -> None:
    expected = {
        "memory": "out_of_memory",
        "disk": "disk_full",
        "disk_unseen": "disk_full",
        "one_large_file": "disk_full",
        "forks": "fork_limit",
        "threads": "fork_limit",
        "leaves": "exit_code",
        "breaks": "signal",
    }
    # Processes of an ordinary user are counted together, so tests that start many must run alone.
    many = ("forks", "threads")

    async def report_of(name: str) -> dict[str, Any]:
        return await runner.invoke(LIMITED, f"main.{name}", memory_mb=200 if name == "memory" else 8_000)

    few = [name for name in expected if name not in many]
    reports = dict(zip(few, await asyncio.gather(*(report_of(name) for name in few)), strict=True))
    reports |= {name: await report_of(name) for name in many}
    assert {name: reports[name]["cause"] for name in expected} == expected, reports
    assert [reports[name]["outcome"] for name in ("memory", "leaves", "breaks")] == ["oom", "exited", "signaled"]
    assert [reports[name].get("exit_code") for name in ("leaves", "breaks")] == [7, None]
    assert reports["breaks"]["signal"] == "SIGSEGV"
    assert "200 MiB" in reports["memory"]["detail"]


async def test_memory_limit_counts_all_processes_with_cgroups(runner: Runner) -> None:
    if Parents.find() is None or runner.confinement.endswith(ORDINARY):
        pytest.skip("no control groups for this runner")
    report = await runner.invoke(LIMITED, "main.memory_of_many", memory_mb=150, timeout_seconds=20)
    assert (report["outcome"], report["cause"]) == ("oom", "out_of_memory"), report


async def test_code_over_its_time_limit_is_killed(runner: Runner) -> None:
    slow, busy = await asyncio.gather(
        runner.invoke(LIMITED, "main.time", timeout_seconds=0.5),
        runner.invoke(LIMITED, "main.processor", cpu_seconds=1),
    )
    assert (slow["outcome"], slow["cause"]) == ("timeout", "timeout")
    assert (busy["outcome"], busy["cause"], busy["signal"]) == ("signaled", "cpu_limit", "SIGXCPU")


async def test_fork_bomb_ends_at_the_timeout_without_leftovers(runner: Runner) -> None:
    report = await runner.invoke(LIMITED, "main.fork_bomb", timeout_seconds=0.7)
    assert report["outcome"] == "timeout"
    # Only one process stays, prepared for the next invocation.
    await eventually(lambda: len(processes_of(runner)) <= 1)


async def test_only_the_end_of_the_output_is_kept(runner: Runner, shared: System) -> None:
    claim = await attempt(shared)
    report = await runner.invoke(LIMITED, "main.writes", **claim)
    assert (await shared.task(claim["task_id"]))["result"] == "written"
    assert report["stderr_tail"].endswith("the end\n")
    assert len(report["stderr_tail"]) <= 4_096


async def test_missing_entrypoint_is_a_bad_bundle(runner: Runner) -> None:
    reports = await asyncio.gather(
        *(
            runner.invoke(LIMITED, entrypoint)
            for entrypoint in ("main.nothing", "nowhere.handler", "handler", "main.Path.cwd")
        )
    )
    assert [report["outcome"] for report in reports] == ["bad_bundle"] * 4
    assert "'nothing'" in reports[0]["stderr_tail"]
