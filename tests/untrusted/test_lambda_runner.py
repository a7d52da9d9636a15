"""The runner as an AWS Lambda function, invoked by the dispatcher on a server that runs it for real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from interlock.apps.dispatcher import services as dispatcher_services
from interlock.processes.loop import forever
from interlock.untrusted.runner.confinement import HANDLER, write
from interlock.untrusted.runners import LambdaRunner, RunnerAway
from tests.conftest import copied
from tests.support.aws import Aws
from tests.support.code_bundles import upload, zipped
from tests.support.sandboxes import served
from tests.support.system import System, running, until

FUNCTION = "interlock-runner"

CODE = """
import os, sys, time

def plain(event, task):
    return {"n": event["payload"]["n"], "environment": sorted(os.environ)}

def broken(event, task):
    raise LookupError("there is no such thing")

def leaving(event, task):
    print("about to leave", file=sys.stderr)
    os._exit(9)

def greedy(event, task):
    return len("x" * (4 << 30))

def lingering(event, task):
    told, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(tell, str(os.getpid()).encode())
            os.close(1), os.close(2)
            time.sleep(600)
        os._exit(0)
    return int(os.read(told, 20))
"""


@pytest.fixture(scope="module")
async def function(aws: Aws, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    code = tmp_path_factory.mktemp("function") / "runner.zip"
    write(code)
    async with aws.client("lambda") as client:
        await client.create_function(
            FunctionName=FUNCTION,
            Runtime="python3.11",
            Role="arn:aws:iam::000000000000:role/nothing",
            Handler=HANDLER,
            Code={"ZipFile": code.read_bytes()},
            Timeout=60,
        )
        yield FUNCTION
        await client.delete_function(FunctionName=FUNCTION)


@pytest.fixture(scope="module")
async def site(
    postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory, aws: Aws, function: str
) -> AsyncIterator[System]:
    settings: dict[str, Any] = {"runner_lambda": function, "runner_lambda_endpoint": aws.endpoint}
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in aws.environment.items():
            patch.setenv(name, value)
        async with copied(postgres_url, template) as url, running(url, folder, **settings) as system:
            relay = next(service for service in dispatcher_services(system.kernel) if service.name == "relay")
            loop = asyncio.create_task(forever(relay))
            await upload(system, zipped({"handlers.py": CODE}), "handlers")
            yield system
            loop.cancel()


async def run(system: System, handler: str) -> dict[str, Any]:
    config = {"bundle": "handlers", "entrypoint": f"handlers.{handler}"}
    policy = {"max_attempts": 1}
    accepted = await system.submit([{"n": 5}], operator="udf", runtime="lambda", config=config, policy=policy)
    (task_id,) = await system.task_ids(accepted["run_id"])

    async def ended() -> dict[str, Any] | None:
        task = await system.task(task_id)
        return task if task["status"] not in ("Queued", "Running") else None

    found: dict[str, Any] = await until(ended, seconds=30)
    return found


async def test_code_runs_in_the_function_and_reports_by_itself(site: System) -> None:
    task = await run(site, "plain")
    assert task["status"] == "Completed", task["error_message"]
    assert task["result"]["n"] == 5
    ours = {name for name in task["result"]["environment"] if not name.startswith("TRACE_")}
    assert ours <= {"HOME", "PATH", "TMPDIR", "LC_CTYPE"}, "nothing of the function's own"


@pytest.mark.parametrize(
    ("handler", "error_class", "words"),
    [
        ("broken", "LookupError", "there is no such thing"),
        ("leaving", "RunnerExited", "about to leave"),
        ("greedy", "OutOfMemory", "out of memory"),
    ],
)
async def test_code_that_fails_in_the_function_is_a_failed_attempt_with_its_cause(
    site: System, handler: str, error_class: str, words: str
) -> None:
    task = await run(site, handler)
    assert (task["status"], task["error_class"]) == ("Failed", error_class)
    assert words in task["error_message"]


async def test_detached_process_is_gone_before_the_next_invocation(site: System) -> None:
    task = await run(site, "lingering")
    assert task["status"] == "Completed", task["error_message"]
    await run(site, "plain")
    assert not psutil.pid_exists(task["result"])


async def test_bundle_with_a_wrong_digest_is_not_run(site: System) -> None:
    view = (await site.user("GET", "/v1/bundles/handlers")).json()
    root = Path(site.kernel.access.objects.root.removeprefix("file://"))
    stored = root / "bundles" / str(site.org_id) / f"{view['sha256']}.zip"
    kept = stored.read_bytes()
    stored.write_bytes(zipped({"handlers.py": "def plain(event, task): return 'evil'"}))
    try:
        task = await run(site, "plain")
    finally:
        stored.write_bytes(kept)
    assert (task["status"], task["error_class"]) == ("Failed", "BadBundle")
    assert "does not match the SHA-256" in task["error_message"]


async def test_missing_function_counts_as_an_unreachable_runner(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    for endpoint in (aws.endpoint, "http://127.0.0.1:9"):
        runner = LambdaRunner("nowhere", endpoint=endpoint)
        with pytest.raises(RunnerAway):
            await runner.invoke(b"{}", 5)
        await runner.close()


async def test_code_whose_objects_are_in_a_bucket_runs_in_the_function(
    aws: Aws, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    runner = LambdaRunner(function, endpoint=aws.endpoint)
    with served() as files:
        digest = files.add(zipped({"handlers.py": CODE}))
        urls = {"dispatcher_url": files.url, "query_url": None, "objects_url": "https://s3.test"}
        invocation = {
            "task_id": "a-task",
            "attempt": 1,
            "lease_token": "a-lease",
            "capability_token": "a-token",
            "bundle_url": f"{files.url}/{digest}",
            "bundle_sha256": digest,
            "entrypoint": "handlers.leaving",
            "language": "python",
            "endpoints": urls | {"objects_in_bucket": True},
            "limits": {"memory_mb": 512, "cpu_seconds": 10, "timeout_seconds": 30, "processes": 8, "disk_mb": 8},
        }
        report = await runner.invoke(json.dumps(invocation).encode(), 30)
    await runner.close()
    assert (report.outcome, report.exit_code) == ("exited", 9), report


def test_function_code_is_reproducible(tmp_path: Path) -> None:
    write(tmp_path / "1.zip")
    write(tmp_path / "2.zip")
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "2.zip").read_bytes()
