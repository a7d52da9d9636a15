"""The task SDK against a scripted server: requests, retries, accepted and rejected replies."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web

from interlock.client import task as sdk
from interlock.client.task import Fenced, Rows, Task, TaskError
from interlock.settings import Settings
from interlock.untrusted.runner.contract import Endpoints
from interlock.untrusted.runner.forwarder import Forwarder, open_routes
from tests.support.aws import Aws
from tests.support.polls import eventually
from tests.support.s3 import ROLE, S3

T = TypeVar("T")
TASK = "00000000-0000-4000-8000-000000000001"
GRANT: dict[str, Any] = {
    "output_index": 0,
    "dataset_uuid": "d1",
    "dataset_version": "v1",
    "write_prefix": f"file:///srv/objects/dataset/d1/version/v1/_attempts/{TASK}/2/",
    "buffer_prefix": f"file:///srv/objects/buffers/d1/{TASK}/2/",
}
INPUT = {
    "input_index": 0,
    "dataset_uuid": "d0",
    "dataset_version": "v0",
    "storage": "parquet",
    "read_prefix": "file:///srv/objects/dataset/d0/version/v0/",
    "start": 10,
    "end": 19,
}


@dataclass
class Platform:
    """Dispatcher, query service and gateway in one server."""

    url: str = ""
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    answers: dict[str, list[web.Response]] = field(default_factory=dict)
    """Answers by path that come before the usual one."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.path, dict(request.headers), await request.read()))
        queued = self.answers.get(request.path)
        if queued:
            return queued.pop(0)
        usual: dict[str, Any] = {
            "/v1/task/heartbeat": {"status": "Running", "cancel_requested": False},
            "/v1/task/buffer-publish": {"publish_id": "p1"},
            "/v1/task/credentials": {"scheme": "file", "expiration": _later(), "object_token": "ot"},
        }
        return web.json_response(usual.get(request.path, {}))

    def body(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(next(body for seen, _, body in reversed(self.seen) if seen == path))
        return found

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.seen]

    def event(self, **more: Any) -> dict[str, Any]:
        endpoints = {"dispatcher_url": self.url, "query_url": self.url, "objects_url": self.url}
        return {
            "task_id": TASK,
            "attempt": 2,
            "lease_token": "lease",
            "capability_token": "token-1",
            "endpoints": endpoints,
            "config": {"threshold": 3},
            "payload": {"n": 1},
            "inputs": [INPUT],
            "outputs": [GRANT],
        } | more

    def task(self, **more: Any) -> Task:
        return Task(self.event(**more), keep_alive=False)


def _later() -> str:
    return (datetime.now(UTC) + timedelta(hours=1)).isoformat().replace("+00:00", "Z")


@asynccontextmanager
async def platform_at(port: int = 0) -> AsyncIterator[Platform]:
    started = Platform()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", started.answer)
    serving = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await serving.setup()
    await web.TCPSite(serving, "127.0.0.1", port).start()
    started.url = f"http://127.0.0.1:{serving.addresses[0][1]}"
    yield started
    await serving.cleanup()


@pytest.fixture
async def platform(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Platform]:
    monkeypatch.setattr(sdk, "_FIRST_PAUSE_SECONDS", 0.01)
    async with platform_at() as started:
        yield started


async def aside(call: Callable[[], T]) -> T:
    """Runs a call in a thread: the SDK blocks, and the server runs on this event loop."""
    return await asyncio.to_thread(call)


def problem(status: int, code: str, **headers: str) -> web.Response:
    return web.json_response({"code": code, "detail": f"because of {code}"}, status=status, headers=headers)


async def test_every_call_carries_the_fence_and_the_token(platform: Platform) -> None:
    task = platform.task()
    await aside(lambda: task.progress(0.25, "a quarter"))
    await aside(lambda: task.emit(cursor=7))
    await aside(lambda: task.complete({"done": True}))
    fence = {"task_id": TASK, "attempt": 2, "lease_token": "lease"}
    for path, headers, body in platform.seen:
        assert headers["X-Trace-Task-Capability"] == "token-1", path
        assert json.loads(body).items() >= fence.items(), path
    assert platform.body("/v1/task/heartbeat") == fence | {"progress": 0.25, "progress_text": "a quarter"}
    event = {"dataset_uuid": "d1", "dataset_version": "v1", "cursor": 7}
    assert platform.body("/v1/task/events")["events"] == [event]
    assert platform.body("/v1/task/complete")["result"] == {"done": True}
    assert task.ended


async def test_renewed_token_replaces_the_old_one(platform: Platform) -> None:
    renewed = {"status": "Running", "cancel_requested": True, "capability_token": "token-2"}
    platform.answers["/v1/task/heartbeat"] = [web.json_response(renewed)]
    task = platform.task()
    assert await aside(task.heartbeat) is False
    await aside(task.canceled)
    assert platform.seen[-1][1]["X-Trace-Task-Capability"] == "token-2"
    assert platform.body("/v1/task/complete")["status"] == "Canceled"


async def test_each_heartbeat_says_whether_a_source_is_paused(platform: Platform) -> None:
    held = {"status": "Running", "cancel_requested": False, "paused": True}
    platform.answers["/v1/task/heartbeat"] = [web.json_response(held)]
    task = platform.task()
    assert (await aside(task.heartbeat), task.paused) == (True, True)
    assert (await aside(task.heartbeat), task.paused) == (True, False)


async def test_token_is_renewed_while_the_handler_runs(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk, "_BEAT_SECONDS", 0.01)
    task = Task(platform.event())
    await eventually(lambda: len(platform.seen) >= 2)
    assert platform.paths()[:2] == ["/v1/task/heartbeat"] * 2
    await aside(task.complete)


async def test_unreachable_or_busy_server_is_retried(platform: Platform) -> None:
    refusals = [problem(503, "unavailable"), problem(429, "too_many_requests"), problem(500, "internal")]
    platform.answers["/v1/task/complete"] = refusals
    await aside(platform.task().complete)
    assert platform.paths() == ["/v1/task/complete"] * 4


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (problem(409, "fenced"), Fenced),
        (problem(409, "conflict"), TaskError),
        (problem(403, "dataset_not_granted"), TaskError),
        (web.Response(status=400, text="<html>"), TaskError),
    ],
)
async def test_refusal_is_raised_immediately_with_its_code(
    platform: Platform, answer: web.Response, kind: type[TaskError]
) -> None:
    platform.answers["/v1/task/complete"] = [answer]
    with pytest.raises(TaskError) as refused:
        await aside(platform.task().complete)
    assert type(refused.value) is kind
    assert refused.value.status == answer.status
    assert platform.paths() == ["/v1/task/complete"]


async def test_redirect_is_not_followed_with_the_token(platform: Platform) -> None:
    async with platform_at() as elsewhere:
        moved = web.Response(status=307, headers={"Location": f"{elsewhere.url}/v1/task/complete"})
        platform.answers["/v1/task/complete"] = [moved]
        with pytest.raises(TaskError):
            await aside(platform.task().complete)
        assert elsewhere.seen == []


async def test_proxy_variables_are_ignored_and_environment_urls_win_over_the_event(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("TRACE_DISPATCHER_URL", platform.url)
    monkeypatch.setenv("TRACE_TASK_CAPABILITY_TOKEN", "token-of-the-environment")
    await aside(platform.task(endpoints={"dispatcher_url": "http://127.0.0.1:9"}).complete)
    assert platform.seen[0][1]["X-Trace-Task-Capability"] == "token-of-the-environment"


async def test_query_values_are_decoded_exactly(platform: Platform) -> None:
    columns = [
        {"name": "n", "type": "BIGINT"},
        {"name": "d", "type": "DECIMAL(38,0)"},
        {"name": "t", "type": "VARCHAR"},
        {"name": "b", "type": "BLOB"},
    ]
    rows = [["9007199254740993", "123456789012345678901234567890", "x", "AP8="], [1, None, None, None]]
    reply = {"columns": columns, "rows": rows, "truncated": True}
    platform.answers["/v1/task/query"] = [web.json_response(reply)]
    task = platform.task()
    found = await aside(lambda: task.query("select 1", limit=5))
    assert isinstance(found, Rows)
    assert found == [
        {"n": 9007199254740993, "d": Decimal("123456789012345678901234567890"), "t": "x", "b": b"\x00\xff"},
        {"n": 1, "d": None, "t": None, "b": None},
    ]
    assert (found.columns, found.truncated) == (["n", "d", "t", "b"], True)
    assert platform.body("/v1/task/query").items() >= {"sql": "select 1", "format": "json", "limit": 5}.items()
    platform.answers["/v1/task/query"] = [web.Response(body=b"ARROW1")]
    assert await aside(lambda: task.query_arrow("select 1")) == b"ARROW1"


async def test_batch_is_put_under_the_attempts_prefix_and_then_published(platform: Platform) -> None:
    task = platform.task()
    rows: list[dict[str, Any]] = [
        {"id": 1, "at": date(2026, 11, 16), "amount": Decimal("1e30"), "raw": b"\xff"},
        {"id": 2},
    ]
    assert await aside(lambda: task.publish(rows)) == "p1"
    credentials, put, publish = platform.seen
    assert (credentials[0], publish[0]) == ("/v1/task/credentials", "/v1/task/buffer-publish")
    assert put[0].startswith(f"/v1/objects/buffers/d1/{TASK}/2/batch-")
    assert put[1]["Authorization"] == "Bearer ot"
    first = json.loads(put[2].splitlines()[0])
    assert first == {"id": 1, "at": "2026-11-16", "amount": "1" + "0" * 30, "raw": "0xff"}
    body = platform.body("/v1/task/buffer-publish")
    assert (body["record_count"], body["dataset_uuid"]) == (2, "d1")
    assert body["batch_uri"] == f"file:///srv/objects{put[0].removeprefix('/v1/objects')}"
    await aside(lambda: task.publish(rows))
    assert platform.paths().count("/v1/task/credentials") == 1
    assert platform.body("/v1/task/buffer-publish")["batch_uri"] == body["batch_uri"], "the same rows, the same batch"


async def test_publishing_a_parquet_file_requires_its_row_count(platform: Platform, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    task = platform.task()
    with pytest.raises(ValueError, match="needs its number of rows"):
        task.publish(tmp_path / "rows.parquet")
    await aside(lambda: task.publish(tmp_path / "rows.parquet", count=12))
    assert platform.body("/v1/task/buffer-publish")["record_count"] == 12
    assert platform.body("/v1/task/buffer-publish")["batch_uri"].endswith(".parquet")


async def test_output_is_file_then_marker_then_part_of_the_completion(platform: Platform) -> None:
    task = platform.task()
    columns = [{"name": "n", "type": "bigint", "nullable": False}]

    def work() -> None:
        task.write_output(b"PAR1", columns=columns, row_count=3, range_column="n", bounds=(10, 12))
        task.emit_at_end(start=10, end=19)
        task.complete()

    await aside(work)
    puts = [path for path in platform.paths() if path.startswith("/v1/objects")]
    assert [path.rpartition("/")[2] for path in puts] == ["part_10_19.parquet", "_marker.json"]
    marker = json.loads(next(body for path, _, body in platform.seen if path.endswith("_marker.json")))
    assert marker["schema"] == {"columns": columns, "range_column": "n"}
    body = platform.body("/v1/task/complete")
    (output,) = body["outputs"]
    assert output["location"] == GRANT["write_prefix"] + "part_10_19.parquet"
    assert {name: output[name] for name in ("start", "end", "row_count", "bytes", "min", "max")} == {
        "start": 10,
        "end": 19,
        "row_count": 3,
        "bytes": 4,
        "min": 10,
        "max": 12,
    }
    assert body["events"][0]["partition_key"] == "10-19"


async def test_run_reports_what_a_handler_returns_or_raises(platform: Platform) -> None:
    assert await aside(lambda: sdk.run(lambda event, task: {"n": task.config["threshold"]}, platform.event())) == 0
    assert platform.body("/v1/task/complete")["result"] == {"n": 3}

    def broken(_event: Any, _task: Task) -> None:
        raise KeyError("absent")

    assert await aside(lambda: sdk.run(broken, platform.event())) == 1
    body = platform.body("/v1/task/complete")
    assert (body["status"], body["error_class"], body["error_message"]) == ("Failed", "KeyError", "'absent'")


async def test_run_reports_nothing_for_a_fenced_attempt(platform: Platform) -> None:
    platform.answers["/v1/task/complete"] = [problem(409, "fenced")]
    assert await aside(lambda: sdk.run(lambda event, task: None, platform.event())) == 1
    assert platform.paths() == ["/v1/task/complete"]


@pytest.fixture(params=["directly", "through a runner"])
async def bucket_url(request: pytest.FixtureRequest, s3: S3) -> AsyncIterator[str]:
    if request.param == "directly":
        yield s3.endpoint
        return
    endpoints = Endpoints(dispatcher_url="http://x", objects_url=s3.endpoint, objects_in_bucket=True)
    with open_routes(endpoints, own_network=False) as routes:
        forwarder = Forwarder(routes.listeners, routes.targets, ssl.create_default_context())
        forwarder.start()
        yield routes.urls["objects_url"]
        await forwarder.close()


async def test_bucket_objects_are_accessed_with_session_credentials(s3: S3, bucket_url: str) -> None:
    policy = {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": ["s3:GetObject", "s3:PutObject"],
                "Resource": f"arn:aws:s3:::{s3.bucket}/root/own/*",
            }
        ],
    }
    admin = Aws(s3.endpoint, s3.access_key, s3.secret_key, s3.region)
    async with admin.client("sts") as sts:
        reply = await sts.assume_role(RoleArn=ROLE, RoleSessionName="task", Policy=json.dumps(policy))
    made = reply["Credentials"]
    credentials = {
        "expiration": _later(),
        "region": s3.region,
        "endpoint": s3.endpoint,
        "access_key_id": made["AccessKeyId"],
        "secret_access_key": made["SecretAccessKey"],
        "session_token": made["SessionToken"],
    }
    store = sdk._S3(credentials, lambda _: bucket_url)
    own = f"{s3.root}/own/a b+c/ä.jsonl"
    assert store.request("GET", own, None).full_url.startswith(f"{bucket_url}/")
    await aside(lambda: store.put(own, b'{"id":1}\n'))
    assert await aside(lambda: store.get(own)) == b'{"id":1}\n'
    for refused in (lambda: store.put(f"{s3.root}/other", b""), lambda: store.get(f"{s3.root}/other")):
        with pytest.raises(TaskError) as error:
            await aside(refused)
        assert error.value.status == 403


def test_bucket_endpoint_is_set_on_aws_itself_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    settings = Settings(objects_url="s3://bucket/root")
    assert settings.bucket_base_url == "https://s3.us-east-1.amazonaws.com"
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert (settings.bucket_region, settings.bucket_base_url) == ("eu-north-1", "https://s3.eu-north-1.amazonaws.com")
    beside = Settings(objects_url="s3://bucket/root", objects_endpoint="http://127.0.0.1:9/", objects_region="here")
    assert (beside.bucket_region, beside.bucket_base_url) == ("here", "http://127.0.0.1:9")


def test_sdk_needs_only_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_bytes(Path(sdk.__file__).read_bytes())
    look = "import sys; sys.path.insert(0, sys.argv[1]); import task; print(task.Task.__name__)"
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-c", look, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr) == ("Task\n", "")
