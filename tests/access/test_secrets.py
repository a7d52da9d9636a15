"""Secrets of orgs: permission to set them, the tasks that receive them, and no output that shows a value."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import string
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID

import msgspec
import pytest

from interlock.apps.dispatcher import services as dispatcher_services
from interlock.client import Client
from interlock.errors import InterlockError
from interlock.processes.loop import forever
from interlock.settings import Settings
from interlock.wire.access import KeyRequest, Role
from interlock.wire.base import TaskStatus
from interlock.wire.jobs import Policy
from interlock.wire.tasks import TaskView
from interlock.workers import Worker
from interlock.workers.redaction import MASK
from tests.support.log_file import logging_to
from tests.support.system import System, until
from tests.support.third_party_servers import answer, stranger

LEAKING = "tests.support.leaking_operators"
LEAK, SEEN = f"{LEAKING}:leak", f"{LEAKING}:seen"
WAYS = ("message", "cut_message", "error_class", "cause", "result", "progress", "prints", "crash")
CONFIG = {"key": "${secret:KEY}"}
KEPT = Policy(backoff_seconds=0, jitter=0, max_attempts=2)


@asynccontextmanager
async def working(system: System, **more: Any) -> AsyncIterator[None]:
    loops = [asyncio.create_task(forever(service)) for service in dispatcher_services(system.kernel)]
    settings = Settings(
        internal_url=system.internal_url, worker_token=system.worker_token, outbound_allow=["127.0.0.1"]
    )
    worker = Worker(settings, concurrency=2, cancel_grace=5, operators=[LEAKING], **more)
    running = asyncio.create_task(worker.run())
    yield
    worker.request_drain()
    worker.request_drain()
    await running
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


@asynccontextmanager
async def admin(system: System, org: str | None = None) -> AsyncIterator[tuple[Client, UUID]]:
    """Yields a client of an admin and its org: the system's own org, or a new one."""
    await system.declare(LEAK, SEEN)
    org_id, key = system.org_id, system.admin_key
    if org is not None:
        org_id = (await system.kernel.access.principals.create_org(org)).org_id
        made = await system.kernel.access.principals.create_key(
            KeyRequest(user="ann", role=Role.ADMIN), org_id, granted_by=None
        )
        key = made.key
    async with Client(system.gateway_url, key) as client:
        yield client, org_id


async def ended(client: Client, run_id: UUID) -> list[TaskView]:
    async with asyncio.timeout(60):
        await client.wait(run_id, poll_seconds=0.05)
    return sorted([task async for task in client.tasks(run=run_id)], key=lambda task: task.index or 0)


async def submitted(client: Client, tasks: list[Any], operator: str = LEAK, **more: Any) -> UUID:
    given: dict[str, Any] = {"config": CONFIG, "policy": KEPT} | more
    accepted = await client.submit(tasks, operator=operator, **given)
    return accepted.run_id


def value_of(chance: random.Random) -> str:
    """Returns a random value with characters that URLs, JSON and Python escape."""
    signs = string.ascii_letters + string.digits + "/+=%&?\"'\\ <>{}~é漢"
    return "v" + "".join(chance.choices(signs, k=chance.randint(10, 60))) + "v"


def forms(value: str) -> set[str]:
    data = value.encode()
    text = {value, quote(value), quote(value, safe=""), repr(value)[1:-1], msgspec.json.encode(value).decode()[1:-1]}
    return text | {data.hex(), base64.b64encode(data).decode()}


async def everything_shown(system: System, client: Client, run_id: UUID) -> str:
    """Returns all replies about a run, and all rows of the state database."""
    paths = ["/v1/secrets", "/v1/jobs", "/v1/tasks", f"/v1/runs/{run_id}", "/v1/queues/platform/dead-letters"]
    for task in [task async for task in client.tasks(run=run_id)]:
        paths += [f"/v1/tasks/{task.task_id}{rest}" for rest in ("", "/attempts", "/explain")]
    replies = [(await system.user("GET", path)).text for path in paths]
    async with system.kernel.stores.database.connection() as connection:
        tables = await connection.fetch("select tablename from pg_tables where schemaname = 'interlock'")
        for table in tables:
            rows = await connection.fetch(f'select t::text as row from interlock."{table["tablename"]}" t')
            replies += [row["row"] for row in rows]
    return "\n".join(replies)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_secret_value_appears_nowhere_whatever_an_operator_does(
    system: System, seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    value, fifo = value_of(random.Random(seed)), tmp_path / "fifo"
    os.mkfifo(fifo)
    with logging_to(tmp_path / "log"):
        async with admin(system) as (client, _), working(system):
            await client.secrets.set("KEY", value)
            run_id = await submitted(client, [{"way": way} for way in WAYS], config=CONFIG | {"fifo": str(fifo)})
            text = await until(lambda: _progress_text(client, run_id))
            await asyncio.to_thread(fifo.write_bytes, b"")
            tasks = dict(zip(WAYS, await ended(client, run_id), strict=True))
            shown = await everything_shown(system, client, run_id)
    logged = "".join([*capfd.readouterr(), (tmp_path / "log").read_text()])
    for form in forms(value):
        assert form not in shown
        assert form not in logged
    assert value[: len(value) // 2] not in shown, "the message that was cut off"
    assert text == f"asking https://node/{MASK}"
    assert logged.count(f"past Python: {MASK}") >= 2
    assert {way: task.status for way, task in tasks.items()} == {
        way: TaskStatus.COMPLETED if way in ("result", "progress", "prints", "crash") else TaskStatus.FAILED
        for way in WAYS
    }
    assert tasks["error_class"].error_class == MASK
    assert msgspec.json.decode(tasks["crash"].result) == {"attempt": 2, "key": MASK}
    assert msgspec.json.decode(tasks["result"].result)["headers"] == {"x-key": MASK}


async def _progress_text(client: Client, run_id: UUID) -> str | None:
    texts = [task.progress_text async for task in client.tasks(run=run_id)]
    return next(filter(None, texts), None)


async def test_task_gets_only_secrets_of_its_own_org(system: System) -> None:
    guesses = {"guesses": ["value-of-ours", "value-of-theirs"]}
    async with admin(system) as (ours, _), admin(system, "theirs") as (theirs, _), working(system):
        await ours.secrets.set("KEY", "value-of-ours")
        with pytest.raises(InterlockError) as unknown:
            await submitted(theirs, [guesses], SEEN)
        assert unknown.value.code == "unknown_secret"
        assert (await theirs.secrets.page()).secrets == []
        await theirs.secrets.set("KEY", "value-of-theirs")
        runs = [await submitted(client, [guesses], SEEN) for client in (ours, theirs)]
        (mine,), (other,) = [await ended(client, run) for client, run in zip((ours, theirs), runs, strict=True)]
        assert msgspec.json.decode(mine.result)["is"] == [True, False]
        assert msgspec.json.decode(other.result)["is"] == [False, True]


async def test_secret_row_copied_to_another_org_cannot_be_decrypted(system: System) -> None:
    async with admin(system) as (ours, org_id), admin(system, "theirs") as (_, other):
        await ours.secrets.set("KEY", "value-of-ours")
        await system.value(
            "insert into interlock.org_secrets (org_id, name, sealed, hosts, set_by)"
            " select $2, name, sealed, hosts, set_by from interlock.org_secrets where org_id = $1",
            org_id,
            other,
        )
        (mine,) = await system.kernel.access.secrets.opened(org_id, ["KEY"])
        (copied,) = await system.kernel.access.secrets.opened(other, ["KEY"])
        assert mine.value == "value-of-ours"
        assert copied.value is None
        assert not copied.missing


async def test_new_secret_value_is_used_from_the_next_claim(system: System) -> None:
    guesses = {"guesses": ["the-old-value", "the-new-value"]}
    async with admin(system) as (client, _), working(system):
        for version, value in enumerate(("the-old-value", "the-new-value"), 1):
            assert (await client.secrets.set("KEY", value)).version == version
            (task,) = await ended(client, await submitted(client, [guesses], SEEN))
            assert msgspec.json.decode(task.result)["is"] == [version == 1, version == 2]


async def test_removed_secret_fails_its_tasks_permanently(system: System) -> None:
    async with admin(system) as (client, _):
        await client.secrets.set("KEY", "soon-to-be-gone")
        run_id = await submitted(client, [{"way": "result"}])
        assert (await client.secrets.remove("KEY")).name == "KEY"
        with pytest.raises(InterlockError, match="no secret 'KEY'"):
            await client.secrets.remove("KEY")
        async with working(system):
            (task,) = await ended(client, run_id)
        assert (task.status, task.error_class, task.attempt) == (TaskStatus.FAILED, "SecretMissing", 1)
        assert "interlock secret set KEY" in (task.error_message or "")


async def test_wrong_seal_fails_tasks_and_loses_none(system: System, tmp_path: Path) -> None:
    async with admin(system) as (client, _):
        await client.secrets.set("KEY", "sealed-with-another")
        run_id = await submitted(client, [{"way": "result"}])
        await system.value("update interlock.org_secrets set sealed = decode(repeat('00', 40), 'hex')")
        async with working(system):
            (task,) = await ended(client, run_id)
        assert (task.status, task.error_class, task.attempt) == (TaskStatus.FAILED, "SecretUnavailable", 2)


async def test_only_admins_of_the_org_see_or_change_secrets(system: System) -> None:
    writer = await system.kernel.access.principals.create_key(
        KeyRequest(user="wes", role=Role.WRITER), system.org_id, granted_by=None
    )
    for method, path in (("GET", ""), ("PUT", "/KEY"), ("DELETE", "/KEY")):
        body = {"json": {"value": "some-long-value"}} if method == "PUT" else {}
        reply = await system.user(method, f"/v1/secrets{path}", key=writer.key, **body)
        assert reply.status_code == 403, (method, reply.text)
    async with admin(system) as (ours, _), admin(system, "theirs") as (theirs, _):
        view = await ours.secrets.set("KEY", "some-long-value", hosts=["RPC.Example.com.", "[2001:DB8::1]:8545"])
        assert (view.hosts, view.set_by) == (["rpc.example.com", "[2001:db8::1]:8545"], "root")
        assert (await ours.secrets.page()).secrets == [view]
        with pytest.raises(InterlockError, match="no secret"):
            await theirs.secrets.remove("KEY")
        assert (await ours.secrets.page()).secrets == [view]


@pytest.mark.parametrize(
    ("name", "body", "code"),
    [
        ("1KEY", {"value": "some-long-value"}, "bad_secret_name"),
        ("KEY", {"value": "short"}, "invalid_request"),
        ("KEY", {"value": " some-long-value"}, "bad_secret_value"),
        ("KEY", {"value": "some-long-value", "hosts": ["https://x"]}, "bad_host"),
        ("KEY", {"value": "some-long-value", "hosts": ["*.test"]}, "bad_host"),
        ("KEY", {"value": ["some-long-value"]}, "invalid_request"),
    ],
)
async def test_invalid_secret_is_refused_without_showing_its_value(
    system: System, name: str, body: dict[str, Any], code: str
) -> None:
    reply = await system.user("PUT", f"/v1/secrets/{name}", json=body)
    assert (reply.status_code, reply.json()["code"]) == (400, code)
    assert "some-long-value" not in reply.text


@pytest.mark.parametrize(
    ("config", "runtime", "operator", "code"),
    [
        (CONFIG, "platform", "http_fetch", "unknown_secret"),
        ({"deep": [{"er": "a ${secret:NONE} b"}]}, "spark", "sql", "unknown_secret"),
        ({"key": "${secret:}"}, "platform", "echo", "bad_secret_reference"),
        ({"key": "${secret:a b}"}, "platform", "echo", "bad_secret_reference"),
        (CONFIG, "dispatcher", "noop", "secret_not_for_runtime"),
    ],
)
async def test_config_with_an_inaccessible_secret_is_refused(
    system: System, config: dict[str, Any], runtime: str, operator: str, code: str
) -> None:
    job = {"operator": operator, "runtime": runtime, "config": config, "tasks": [1]}
    reply = await system.user("POST", "/v1/jobs", json=job)
    assert (reply.status_code, reply.json()["code"]) == (400, code)


async def test_dag_with_an_unknown_secret_is_not_deployed(system: System) -> None:
    dag = """
name: secretive
jobs:
  - name: ask
    activation: source
    source: { kind: always_on }
    runtime: platform
    operator: block_follower
    outputs: [{ name: blocks, storage: postgres }]
    config: { rpc_url: "https://rpc.example/${secret:KEY}", outputs: [blocks] }
"""
    async with admin(system) as (client, _):
        with pytest.raises(InterlockError, match="no secret 'KEY'") as refused:
            await client.dags.deploy(dag)
        assert refused.value.code == "unknown_secret"
        await client.secrets.set("KEY", "some-long-value")
        await client.dags.deploy(dag)
    final = await system.value("select non_retryable from interlock.jobs where operator = 'block_follower'")
    assert {"SecretMissing", "AddressRefused", "HostNotBound"} <= set(final)


async def test_bound_secret_is_sent_only_to_its_host(system: System) -> None:
    async with admin(system) as (client, _), working(system), stranger() as there, stranger() as other:
        there.says("/", answer(b'{"ok": true}'))
        there.says("/echo", answer(b"you sent a-bound-secret-value"))
        there.says("/away", answer(status=307, location=other.url("/")))
        await client.secrets.set("KEY", "a-bound-secret-value", hosts=[f"127.0.0.1:{there.port}"])
        config = {"headers": {"x-key": "${secret:KEY}"}}
        urls = [there.url("/"), there.url("/echo"), there.url("/away"), other.url("/")]
        good, echoed, away, wrong = await ended(client, await submitted(client, urls, "http_fetch", config=config))
        assert good.status is TaskStatus.COMPLETED, good
        assert [one.headers["x-key"] for one in there.asked] == ["a-bound-secret-value"] * 3
        assert msgspec.json.decode(echoed.result)["body"] == f"you sent {MASK}"
        assert [task.error_class for task in (away, wrong)] == ["HostNotBound", "HostNotBound"]
        assert [task.attempt for task in (away, wrong)] == [1, 1]
        assert other.asked == []
        (task,) = await ended(client, await submitted(client, [{"way": "result"}]))
        assert (task.error_class, task.attempt) == ("SecretBound", 1)


async def test_variable_is_passed_only_to_tasks_of_its_org(system: System) -> None:
    guesses: dict[str, Any] = {"guesses": []}
    async with admin(system) as (ours, org_id), admin(system, "theirs") as (theirs, _), stranger() as there:
        there.says("/", answer(b"{}"))
        async with working(system, variables={org_id: {"OLD_KEY": "passed-on-value"}}):
            for client in (ours, theirs):
                await client.secrets.set("KEY", "any-long-value")
            runs = [await submitted(client, [guesses], SEEN) for client in (ours, theirs)]
            (mine,), (other,) = [await ended(client, run) for client, run in zip((ours, theirs), runs, strict=True)]
            assert msgspec.json.decode(mine.result)["env"] == {"OLD_KEY": None}
            assert msgspec.json.decode(other.result)["env"] == {}
            asked = {"config": {"headers": {"x-key": "${OLD_KEY}"}}}
            (task,) = await ended(theirs, await submitted(theirs, [there.url("/")], "http_fetch", **asked))
            assert task.error_class == "BadConfig"
            assert there.asked == []
            (task,) = await ended(ours, await submitted(ours, [there.url("/")], "http_fetch", **asked))
            assert task.status is TaskStatus.COMPLETED, task
            assert there.asked[0].headers["x-key"] == "passed-on-value"
