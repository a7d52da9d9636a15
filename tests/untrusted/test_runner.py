"""The HTTP API of the runner: authentication, refusals, concurrency and shutdown."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from interlock.errors import ConfigurationError
from interlock.http.connection import ConnectionLimits
from interlock.http.listener import require_loopback
from interlock.untrusted.runner.confinement import Interpreter
from interlock.untrusted.runner.invocation import find_machine
from interlock.untrusted.runner.server import Application, Rules, require_token
from tests.support.polls import eventually
from tests.support.sandboxes import LIMITS, TOKEN, Runner, heard, packed, running, with_word, zipped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's")

HOSTILE, LIMITED = zipped("hostile"), zipped("limits")
NOWHERE = "http://127.0.0.1:9"
"""An address without a listener, for code that does not end and sends no reports."""


@pytest.fixture(scope="module")
async def runner() -> AsyncIterator[Runner]:
    async with running("auto", NOWHERE, runner_concurrency="2", bundle_limit_bytes="100000") as started:
        yield started


def hanging(runner: Runner, nonce: str) -> dict[str, Any]:
    payload = {"nonce": nonce}
    return runner.invocation(HOSTILE, "main.hang_with_children", payload=payload)


def new_nonce() -> str:
    return str(uuid4().int % 10**9)


# Authentication


async def test_invocation_requires_the_runner_token(runner: Runner) -> None:
    body = runner.invocation(LIMITED, "main.leaves")
    for token in ("guess", "the-runner's-ow", "the-runner's-own2"):
        reply = await runner.post(body, token)
        assert (reply.status_code, reply.json()["code"]) == (401, "unauthenticated")
    assert (await runner.http.post(f"{runner.url}/invoke", json=body)).status_code == 401


async def test_invalid_invocation_is_refused_with_a_reason(runner: Runner) -> None:
    good = runner.invocation(LIMITED, "main.leaves")
    for change, word in (
        ({"language": "perl"}, "language"),
        ({"bundle_sha256": "../../etc"}, "bundle_sha256"),
        ({"bundle_url": "file:///etc/passwd"}, "bundle_url"),
        ({"capability_token": "a\nb"}, "capability_token"),
        ({"limits": {"memory_mb": 0}}, "memory_mb"),
        ({"endpoints": {}}, "dispatcher_url"),
    ):
        reply = await runner.post(good | change)
        assert (reply.status_code, reply.json()["code"]) == (400, "bad_request"), change
        assert word in reply.json()["detail"]


async def test_runner_serves_only_invoke_health_and_metrics(runner: Runner) -> None:
    assert (await runner.http.get(f"{runner.url}/invoke")).status_code == 405
    assert (await runner.http.get(f"{runner.url}/v1/tasks")).status_code == 404
    health = (await runner.http.get(f"{runner.url}/healthz")).json()
    assert health["status"] == "ok"
    assert (await runner.http.get(f"{runner.url}/metrics")).status_code == 401
    told = await runner.http.get(f"{runner.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert "interlock_runner_invocations_open" in told.text


def test_unsafe_runner_does_not_start() -> None:
    with pytest.raises(ConfigurationError, match="INTERLOCK_RUNNER_TOKEN"):
        require_token(None)
    with pytest.raises(ConfigurationError, match="not a loopback address"):
        require_loopback("0.0.0.0:0", setting="runner")
    with pytest.raises(ConfigurationError, match="could not be started as Python"):
        Interpreter.find("/bin/false")


async def test_missing_sandbox_prevents_the_runner_start(tmp_path: Path) -> None:
    """A Python that cannot load the sandbox code simulates a sandbox that does not work."""
    broken = Interpreter(sys.executable, "/nowhere")
    with pytest.raises(ConfigurationError, match="cannot confine"):
        await find_machine(tmp_path, "namespaces", broken, None, user=0)
    assert left_behind(tmp_path) == []


def left_behind(folder: Path) -> list[Path]:
    return list(folder.glob("programs-*"))


async def test_runner_without_a_sandbox_refuses_all_invocations(tmp_path: Path) -> None:
    rules = Rules(TOKEN, tmp_path, 1, "auto", None, None, 61_000, 1000, 1000, 1000, 0, ConnectionLimits())
    app = Application(ConfigurationError("This machine cannot confine user code."), rules)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://runner") as client:
        assert (await client.get("/healthz")).json()["status"] == "degraded"
        body = {"task_id": "t", "attempt": 1, "capability_token": "c", "bundle_url": "http://h/b", "entrypoint": "a.b"}
        more = {"bundle_sha256": "0" * 64, "language": "python", "endpoints": {"dispatcher_url": "http://h"}}
        headers = {"Authorization": f"Bearer {TOKEN}"}
        report = (await client.post("/invoke", headers=headers, json=body | more | {"limits": LIMITS})).json()
    assert (report["outcome"], report["cause"]) == ("refused", "no_confinement")
    assert "cannot confine" in report["detail"]


# Bundles


async def test_invalid_bundle_is_not_run(runner: Runner) -> None:
    large = packed({"main.py": "#" * 200_000})
    linked = packed({"../main.py": "def handler(event, task): pass"})
    other = {"bundle_url": f"{runner.files.url}/{runner.files.add(zipped('limits'))}", "bundle_sha256": "0" * 64}
    bodies = {
        "expected 0000": runner.invocation(LIMITED, "main.leaves") | other,
        "not a zip": runner.invocation(b"no zip at all", "main.handler"),
        "exceeds the limit of 100000 bytes": runner.invocation(large, "main.handler"),
        "is absolute, or has an empty": runner.invocation(linked, "main.handler"),
        "too long": runner.invocation(packed({"main.py": "", "a" * 256: ""}), "main.handler"),
        "answered 404": runner.invocation(LIMITED, "main.leaves")
        | {"bundle_url": f"{runner.files.url}/gone", "bundle_sha256": "1" * 64},
    }
    for words, body in bodies.items():
        report = (await runner.post(body)).json()
        assert (report["outcome"], report["cause"]) == ("bad_bundle", "bad_bundle"), report
        assert words in report["detail"]


async def test_unreachable_bundle_returns_503(runner: Runner) -> None:
    body = runner.invocation(LIMITED, "main.leaves") | {"bundle_url": f"{NOWHERE}/bundle", "bundle_sha256": "2" * 64}
    reply = await runner.post(body)
    assert (reply.status_code, reply.json()["code"]) == (503, "unavailable")


async def test_bundle_is_downloaded_once(runner: Runner) -> None:
    bundle = packed({"main.py": f"def handler(event, task):\n    raise SystemExit(4)  # {uuid4()}"})
    both = await asyncio.gather(runner.invoke(bundle, "main.handler"), runner.invoke(bundle, "main.handler"))
    reports = [*both, await runner.invoke(bundle, "main.handler")]
    assert [report["exit_code"] for report in reports] == [4, 4, 4]
    assert runner.files.asked.count(f"/{runner.files.add(bundle)}") == 1


# Concurrency and shutdown


async def test_busy_runner_returns_429_with_retry_after(runner: Runner) -> None:
    nonces = [new_nonce(), new_nonce()]
    calls = [asyncio.create_task(runner.post(hanging(runner, nonce))) for nonce in nonces]
    for nonce in nonces:
        await heard(runner, nonce)
    reply = await runner.post(runner.invocation(LIMITED, "main.leaves"))
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)

    async def free() -> bool:
        return (await runner.post(runner.invocation(LIMITED, "main.leaves"))).status_code == 200

    await eventually(lambda: not any(with_word(nonce) for nonce in nonces))
    async with asyncio.timeout(30):
        while not await free():
            continue


async def test_drain_lets_code_finish_and_accepts_no_more() -> None:
    async with running("auto", NOWHERE) as runner:
        nonce = new_nonce()
        code = """
import os, sys, time, urllib.request
def handler(event, task):
    tell = os.environ["TRACE_QUERY_URL"] + "/v1/task/tell/"
    urllib.request.urlopen(tell + event["payload"]["nonce"]).close()
    while urllib.request.urlopen(tell + "ask").read() != b"go":
        time.sleep(0.01)
    sys.exit(5)
"""
        body = runner.invocation(packed({"main.py": code}), "main.handler", payload={"nonce": nonce})
        call = asyncio.create_task(runner.post(body))
        await heard(runner, nonce)
        runner.process.send_signal(signal.SIGTERM)
        await _refusing(runner)
        runner.files.bundles["/v1/task/tell/ask"] = b"go"
        assert (await call).json()["exit_code"] == 5
        assert await runner.ended() == 0


async def _refusing(runner: Runner) -> None:
    async with asyncio.timeout(30):
        while (await runner.post(runner.invocation(LIMITED, "main.leaves"))).status_code != 429:
            continue


async def test_expired_drain_kills_the_code_and_returns_503() -> None:
    async with running("auto", NOWHERE, drain_seconds="0") as runner:
        nonce = new_nonce()
        call = asyncio.create_task(runner.post(hanging(runner, nonce)))
        await heard(runner, nonce)
        runner.process.send_signal(signal.SIGTERM)
        assert (await call).status_code == 503
        assert await runner.ended() == 0
        assert with_word(nonce) == []
