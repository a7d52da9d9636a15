"""The lambda runtime: the dispatcher takes the lease and owns the retries, and a runner does the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from interlock.apps.dispatcher import services as dispatcher_services
from interlock.clock import ManualClock
from interlock.processes.loop import forever
from interlock.stores.embedded import EmbeddedValkey
from tests.conftest import copied
from tests.support.code_bundles import sha256, upload, zipped
from tests.support.scripted_runner import TOKEN, Invocation, ScriptedRunner, exited, scripted_runner
from tests.support.system import System, running, until

LOOPS = ("relay", "retries", "reaper")


@asynccontextmanager
async def looping(system: System) -> AsyncIterator[None]:
    """Runs the loops that send tasks to the runner, retry them and reap expired leases, as in a dispatcher."""
    loops = [asyncio.create_task(forever(each)) for each in dispatcher_services(system.kernel) if each.name in LOOPS]
    yield
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


@pytest.fixture(scope="module")
async def runner() -> AsyncIterator[ScriptedRunner]:
    async with scripted_runner() as started:
        yield started


@pytest.fixture(scope="module")
async def site(
    postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory, runner: ScriptedRunner
) -> AsyncIterator[System]:
    async with (
        copied(postgres_url, template) as url,
        running(
            url,
            tmp_path_factory.mktemp("invoke"),
            runner_url=runner.url,
            runner_token=TOKEN,
            lambda_concurrency=2,
            relay_seconds=0.05,
            reap_seconds=0.05,
            retry_seconds=0.05,
        ) as started,
        looping(started),
    ):
        await upload(started, zipped(), "main")
        yield started


async def submit(system: System, count: int = 1, **more: Any) -> list[str]:
    policy = {"backoff_seconds": 0, "max_attempts": 2} | more.pop("policy", {})
    config = {"bundle": "main", "entrypoint": "main.handler", "threshold": 3}
    accepted = await system.submit(
        [{"n": n} for n in range(count)], operator="udf", runtime="lambda", config=config, policy=policy, **more
    )
    return await system.task_ids(accepted["run_id"])


async def ended(system: System, task_id: str, *statuses: str) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        task = await system.task(task_id)
        over = task["status"] in (statuses or ("Completed", "Canceled")) or task["dead"]
        return task if over else None

    found: dict[str, Any] = await until(look)
    return found


async def attempts(system: System, task_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await system.user("GET", f"/v1/tasks/{task_id}/attempts")).json()["attempts"]
    return found


def completing(system: System) -> Any:
    """Returns the behaviour of correct user code, which reports its own completion."""

    async def behave(invocation: Invocation) -> dict[str, Any]:
        fence = {name: invocation[name] for name in ("task_id", "attempt", "lease_token")}
        result = {"seen": invocation["payload"]["n"]}
        reply = await system.attempt(
            "/v1/task/complete", invocation["capability_token"], fence | {"status": "Completed", "result": result}
        )
        assert reply.status_code == 200, reply.text
        return await exited(invocation)

    return behave


async def test_invocation_has_all_inputs_and_ends_by_its_own_report(site: System, runner: ScriptedRunner) -> None:
    runner.behaviour = completing(site)
    (task_id,) = await submit(site)
    task = await ended(site, task_id)
    assert (task["status"], task["result"], task["attempt"]) == ("Completed", {"seen": 0}, 1)
    told = runner.invocations[-1]
    assert told["task_id"] == task_id
    assert told["operator"] == "udf"
    assert told["config"]["threshold"] == 3
    assert told["payload"] == {"n": 0}
    assert (told["entrypoint"], told["language"]) == ("main.handler", "python")
    assert told["bundle_sha256"] == sha256(zipped())
    assert told["endpoints"]["dispatcher_url"] == site.internal_url
    assert told["endpoints"]["objects_url"] == site.gateway_url
    assert told["limits"]["memory_mb"] == 1024
    assert 890 < told["limits"]["timeout_seconds"] <= 900
    assert {"job", "inputs", "outputs", "lease_expires_at"} <= told.keys()


async def test_bundle_url_only_reads_its_object(site: System, runner: ScriptedRunner) -> None:
    runner.behaviour = completing(site)
    (task_id,) = await submit(site)
    await ended(site, task_id)
    url = runner.invocations[-1]["bundle_url"]
    assert (await site.http.get(url)).content == zipped()
    assert (await site.http.put(url, content=b"other")).status_code in (401, 403)
    other = await upload(site, zipped({"other.py": ""}))
    elsewhere = url.replace(sha256(zipped()), other["sha256"])
    assert (await site.http.get(elsewhere)).status_code in (401, 403)


@pytest.mark.parametrize(
    ("report", "error_class", "crash", "words"),
    [
        ({"outcome": "exited", "exit_code": 0}, "RunnerExited", {"exit_code": 0}, "without reporting"),
        (
            {"outcome": "exited", "exit_code": 3, "stderr_tail": "Traceback: oh no"},
            "RunnerExited",
            {"exit_code": 3},
            "oh no",
        ),
        ({"outcome": "signaled", "signal": "SIGSEGV"}, "RunnerSignaled", {"signal": "SIGSEGV"}, "SIGSEGV"),
        ({"outcome": "timeout", "cause": "timeout"}, "RunnerTimeout", {}, "exceeded its timeout"),
        ({"outcome": "oom", "signal": "SIGKILL"}, "OutOfMemory", {"signal": "SIGKILL", "oom": True}, "out of memory"),
        ({"outcome": "refused", "detail": "no walls here"}, "RunnerRefused", {}, "no walls here"),
        ({"outcome": "bad_bundle", "detail": "sha256 differs"}, "BadBundle", {}, "sha256 differs"),
    ],
)
async def test_code_that_does_not_report_is_a_failed_attempt_with_its_cause(
    site: System, runner: ScriptedRunner, report: dict[str, Any], error_class: str, crash: dict[str, Any], words: str
) -> None:
    async def behave(_: Invocation) -> dict[str, Any]:
        return report

    runner.behaviour = behave
    (task_id,) = await submit(site, policy={"max_attempts": 1})
    task = await ended(site, task_id)
    assert (task["status"], task["dead"], task["error_class"]) == ("Failed", True, error_class)
    assert words in task["error_message"]
    assert (await attempts(site, task_id))[-1]["crash"] == (crash or None)


async def _garbage(_: Invocation) -> web.StreamResponse:
    return web.Response(body=b"<html>")


async def _unknown(_: Invocation) -> web.StreamResponse:
    return web.json_response({"outcome": "splendid"})


async def _endless(_: Invocation) -> web.StreamResponse:
    return web.Response(body=b" " * (2 << 20))


async def _redirect(_: Invocation) -> web.StreamResponse:
    raise web.HTTPFound("http://127.0.0.1:9/")


async def _bad_request(_: Invocation) -> web.StreamResponse:
    return web.Response(status=400)


async def _broken(_: Invocation) -> web.StreamResponse:
    return web.Response(status=500)


@pytest.mark.parametrize(
    ("behaviour", "error_class"),
    [
        (_garbage, "RunnerLost"),
        (_unknown, "RunnerLost"),
        (_endless, "RunnerLost"),
        (_redirect, "RunnerRefused"),
        (_bad_request, "RunnerRefused"),
        (_broken, "RunnerLost"),
    ],
)
async def test_false_report_of_a_runner_is_a_failed_attempt(
    site: System, runner: ScriptedRunner, behaviour: Any, error_class: str
) -> None:
    runner.behaviour = behaviour
    (task_id,) = await submit(site, policy={"max_attempts": 1})
    task = await ended(site, task_id)
    assert (task["status"], task["error_class"]) == ("Failed", error_class)


async def test_killed_runner_uses_up_one_attempt(site: System, runner: ScriptedRunner) -> None:
    finish = completing(site)

    async def behave(invocation: Invocation) -> Any:
        if invocation["attempt"] == 1:
            raise ConnectionAbortedError
        return await finish(invocation)

    runner.behaviour = behave
    (task_id,) = await submit(site)
    task = await ended(site, task_id)
    assert (task["status"], task["attempt"]) == ("Completed", 2)
    assert (await attempts(site, task_id))[0]["error_class"] == "RunnerLost"


async def test_full_runner_uses_up_no_attempt_and_is_retried_soon(site: System, runner: ScriptedRunner) -> None:
    refusals = 2
    finish = completing(site)

    async def behave(invocation: Invocation) -> Any:
        nonlocal refusals
        if refusals:
            refusals -= 1
            return web.Response(status=429, headers={"Retry-After": "0.1"})
        return await finish(invocation)

    runner.behaviour = behave
    before = len(runner.invocations)
    (task_id,) = await submit(site, policy={"max_attempts": 1})
    task = await ended(site, task_id)
    assert (task["status"], task["attempt"]) == ("Completed", 1)
    assert len(runner.invocations) - before == 3, "no busy loop"
    assert [each["outcome"] for each in await attempts(site, task_id)][:2] == ["Released", "Released"]


async def test_open_invocations_never_exceed_the_slots(site: System, runner: ScriptedRunner) -> None:
    finish, gate = completing(site), asyncio.Semaphore(0)

    async def behave(invocation: Invocation) -> Any:
        await gate.acquire()
        return await finish(invocation)

    runner.behaviour, runner.most_open = behave, 0
    tasks = await submit(site, 5)
    await until(lambda: _is(runner.open == 2))
    # Each task without a slot waits with an outbox row that becomes due by itself. Here it is due after the test.
    await until(
        lambda: site.value("select count(*) = 3 from interlock.outbox where kind = 'invoke' and due_at > now()")
    )
    await site.value("update interlock.outbox set due_at = now() + interval '1 day' where kind = 'invoke' returning 1")
    for _ in tasks:
        gate.release()
    for task_id in tasks:
        assert (await ended(site, task_id))["attempt"] == 1
    assert runner.most_open == 2


async def test_cancel_reaches_the_runner(site: System, runner: ScriptedRunner) -> None:
    runner.behaviour, runner.killed = _forever, 0
    (task_id,) = await submit(site, policy={"lease_seconds": 3.0})
    await until(lambda: _is(runner.open == 1))
    await site.user("POST", f"/v1/tasks/{task_id}/cancel")
    assert (await ended(site, task_id))["status"] == "Canceled"
    await until(lambda: _is(runner.killed == 1))


async def test_lease_is_kept_while_the_invocation_is_open(site: System, runner: ScriptedRunner) -> None:
    finish, gate = completing(site), asyncio.Event()

    async def behave(invocation: Invocation) -> Any:
        await gate.wait()
        return await finish(invocation)

    runner.behaviour = behave
    (task_id,) = await submit(site, policy={"lease_seconds": 3.0})
    await until(lambda: _is(runner.open == 1))
    first = runner.invocations[-1]["lease_expires_at"]
    beyond = "select lease_expires_at > $2::timestamptz + interval '1 s' from interlock.tasks where task_id = $1::uuid"
    await until(lambda: site.value(beyond, task_id, datetime.fromisoformat(first)))
    gate.set()
    task = await ended(site, task_id)
    assert (task["status"], task["attempt"]) == ("Completed", 1)


async def test_hard_timeout_ends_the_attempt_and_kills_the_process(site: System, runner: ScriptedRunner) -> None:
    runner.behaviour, runner.killed = _forever, 0
    (task_id,) = await submit(site, policy={"timeout_seconds": 2.0, "max_attempts": 1})
    task = await ended(site, task_id)
    assert (task["status"], task["error_class"]) == ("Failed", "HardTimeout")
    await until(lambda: _is(runner.killed == 1))


async def test_code_that_lingers_after_its_report_is_killed(site: System, runner: ScriptedRunner) -> None:
    finish = completing(site)

    async def behave(invocation: Invocation) -> Any:
        await finish(invocation)
        return await _forever(invocation)

    runner.behaviour, runner.killed = behave, 0
    (task_id,) = await submit(site, policy={"lease_seconds": 3.0})
    assert (await ended(site, task_id))["status"] == "Completed"
    await until(lambda: _is(runner.killed == 1))


async def test_drain_kills_open_invocations_and_releases_their_tasks(
    state_url: str, tmp_path_factory: pytest.TempPathFactory, runner: ScriptedRunner
) -> None:
    folder = tmp_path_factory.mktemp("drained")
    async with running(state_url, folder, runner_url=runner.url, runner_token=TOKEN) as system:
        await upload(system, zipped(), "main")
        runner.behaviour, runner.killed = _forever, 0
        (task_id,) = await submit(system)
        await system.pass_of("relay")
        await until(lambda: _is(runner.open == 1))
        await system.kernel.untrusted.invoker.drain(0.01)
        await until(lambda: _is(runner.killed == 1))
        task = await system.task(task_id)
        assert (task["status"], task["attempt"]) == ("Queued", 1)


async def test_unreachable_runner_uses_up_no_attempt(state_url: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    async with scripted_runner() as first:
        url = first.url
    settings: dict[str, Any] = {"runner_url": url, "runner_token": TOKEN, "relay_seconds": 0.05}
    async with running(state_url, tmp_path_factory.mktemp("away"), **settings) as system, looping(system):
        await upload(system, zipped(), "main")
        (task_id,) = await submit(system)

        async def released() -> bool:
            return any(each["outcome"] == "Released" for each in await attempts(system, task_id))

        await until(released)
        async with scripted_runner(int(url.rpartition(":")[2])) as back:
            back.behaviour = completing(system)
            task = await ended(system, task_id)
        assert (task["status"], task["attempt"]) == ("Completed", 1)
        assert [each["outcome"] for each in await attempts(system, task_id)].count("Released") == 1, "asked, not tried"


async def test_runner_that_refuses_the_token_is_backed_off(
    state_url: str, tmp_path_factory: pytest.TempPathFactory, runner: ScriptedRunner
) -> None:
    folder = tmp_path_factory.mktemp("refused")
    async with running(state_url, folder, runner_url=runner.url, runner_token="another") as system:
        await upload(system, zipped(), "main")
        (task_id,) = await submit(system)
        await system.pass_of("relay")

        async def released() -> bool:
            return bool((await system.task(task_id))["status"] == "Queued")

        await until(released)
        await system.pass_of("relay")
        task = await system.task(task_id)
        assert (task["status"], task["attempt"]) == ("Queued", 1)
        assert len(await attempts(system, task_id)) == 1


async def test_rate_limited_task_keeps_its_wake_up(
    state_url: str, tmp_path: Path, clock: ManualClock, valkey: EmbeddedValkey, runner: ScriptedRunner
) -> None:
    at = {"runner_url": runner.url, "runner_token": TOKEN, "valkey_url": await valkey.start()}
    async with running(state_url, tmp_path, clock, **at) as system:
        await upload(system, zipped(), "main")
        runner.behaviour = completing(system)
        config = {"bundle": "main", "entrypoint": "main.handler"}
        rate = {"rate": {"key": "/h", "per_second": 1}}
        payloads = [{"h": 1, "n": n} for n in range(3)]
        run = await system.submit(payloads, operator="udf", runtime="lambda", config=config, limits=rate)
        for left in (2, 1, 0):
            assert await system.pass_of("relay") == 1
            assert await system.value("select count(*) from interlock.outbox where kind = 'invoke'") == left
            clock.advance(60)
        for task_id in await system.task_ids(run["run_id"]):
            assert (await ended(system, task_id))["status"] == "Completed"


async def test_without_a_runner_a_job_for_it_is_refused(system: System) -> None:
    reply = await system.user("POST", "/v1/jobs", json={"operator": "udf", "runtime": "lambda", "tasks": []})
    assert (reply.status_code, reply.json()["code"]) == (400, "runtime_without_runner")


async def _forever(_: Invocation) -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def _is(fact: bool) -> bool:
    return fact
