"""Operators on a running installation try to read its secrets, and those of another org."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from interlock.client import Client
from interlock.errors import BadRequest, Conflict, Forbidden
from interlock.processes import landlock
from interlock.wire.access import KeyRequest, Role
from interlock.wire.base import TaskStatus
from interlock.wire.jobs import Policy
from tests.apps.test_up import Up, installation
from tests.support.code_bundles import zipped
from tests.support.system import until
from tests.untrusted.thief import clue

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("spark-worker")]
needs_landlock = pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")

THIEF = Path(__file__).parents[1] / "untrusted" / "thief.py"
SECRET = f"of-strangers-{secrets.token_hex(16)}"
OPERATORS = """
from interlock.workers import operator
import thief

kept = []

@operator
def keeps(payload, ctx):
    kept.append(ctx.secret("TOKEN"))

@operator
def on_platform(payload, ctx):
    return thief.loot(**payload)

@operator
def writes(payload, ctx):
    refused = []
    for path in payload:
        try:
            open(path, "ab").close()
        except OSError:
            refused.append(path)
    return refused

@operator
def connects(payload, ctx):
    import socket
    told = []
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        try:
            with socket.socket(socket.AF_UNIX, kind) as line:
                line.connect(payload)
            told.append("connected")
        except PermissionError:
            told.append("refused")
        except OSError as error:
            told.append(type(error).__name__)
    try:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        told.append("paired")
    except PermissionError:
        told.append("refused")
    one, other = socket.socketpair()
    one.sendall(b"through")
    return [*told, other.recv(7).decode()]
"""
ON_SPARK = """
import json
from interlock.spark import operator
import thief

kept = []

@operator(inputs={})
def keeps(ctx):
    kept.append(ctx.secret("TOKEN"))

def in_a_python_worker(batches, asked):
    import pyarrow
    for batch in batches:
        yield pyarrow.RecordBatch.from_pydict({"found": thief.loot(**asked) or ["nothing"]})

def readable(spark, path):
    try:
        return [path] if spark.read.text("file://" + path).count() else []
    except Exception:
        return []

@operator(inputs={})
def on_spark(ctx):
    asked = ctx.payload
    found = thief.loot(**asked)
    rows = ctx.spark.range(1).mapInArrow(lambda batches: in_a_python_worker(batches, asked), "found string").collect()
    found += [row["found"] for row in rows if row["found"] != "nothing"]
    for name in ("credentials.json", "endpoints.json"):
        found += readable(ctx.spark, f"{asked['folder']}/{name}")
    return found
"""


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with installation() as made:
        project = made.folder.parent
        (project / "thief.py").write_text(THIEF.read_text())
        (project / "thieves.py").write_text(OPERATORS)
        (project / "spark_thieves.py").write_text(ON_SPARK)
        # With a single child, the thief gets the process that ran the task before, unless that is replaced.
        settings = {"spark_memory": "1g", "spark_master": "local[1]", "worker_concurrency": "1"}
        made.start("--operators", str(project), **settings)
        yield made


@pytest.fixture
async def client(up: Up) -> AsyncIterator[Client]:
    async with up.client() as client:
        yield client


@pytest.fixture
async def strangers(client: Client, up: Up) -> AsyncIterator[Client]:
    """A client of another org, which has a secret."""
    with contextlib.suppress(Conflict):
        await client.create_org("strangers")
    key = (await client.create_key(KeyRequest(user="eve", role=Role.ADMIN, org="strangers"))).key
    async with Client(up.ready["gateway"], key) as eve:
        await eve.secrets.set("TOKEN", SECRET)
        yield eve


@pytest.fixture
def asked(up: Up, strangers: Client) -> dict[str, Any]:
    """Input for the thief, with more information than it could find by itself."""
    ready = up.ready
    urls = {name: urlsplit(ready[f"{name}_url"]) for name in ("state", "data", "valkey")}
    seal = (up.folder / "keys" / "bus-seal.key").read_bytes()
    found = {
        "admin key": ready["admin_key"].encode(),
        "worker token": ready["worker_token"].encode(),
        "seal key": seal,
        "secret of another org": SECRET.encode(),
    }
    found |= {f"password of {name}": url.password.encode() for name, url in urls.items() if url.password}
    # The first 80 characters are the same in all files with a key of this type.
    found |= {f"key {path.name}": path.read_bytes()[80:] for path in (up.folder / "keys").glob("*.pem")}
    assert len(found) >= 8
    ports = {name: url.port or 0 for name, url in urls.items()}
    return {"folder": str(up.folder), "secrets": [clue(*one) for one in found.items()], "ports": ports}


async def stolen(client: Client, payload: Any, **job: Any) -> Any:
    accepted = await client.submit([payload], policy=Policy(max_attempts=1), **job)
    async with asyncio.timeout(200):
        await client.wait(accepted.run_id, poll_seconds=0.1)
    (task,) = [task async for task in client.tasks(run=accepted.run_id)]
    assert task.status is TaskStatus.COMPLETED, task.error_message
    return msgspec.json.decode(task.result)


def looted(asked: dict[str, Any], copy: str) -> list[str]:
    """Runs the thief in a process that is not confined and has a copy of a secret."""
    code = (
        "import json, os, thief\nkept = [os.environ['COPY']]\n"
        f"print(json.dumps(thief.loot(**json.loads({json.dumps(asked)!r}))))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(THIEF.parent), "COPY": copy},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(told.stdout)
    return found


async def test_unconfined_thief_finds_the_secrets(asked: dict[str, Any], strangers: Client, up: Up) -> None:
    """Control test: without a sandbox, the thief finds the secrets that the tests below must not find."""
    await stolen(strangers, None, operator="thieves:keeps", config={"token": "${secret:TOKEN}"})
    dispatcher = up.children()["dispatcher"].pid
    found = await asyncio.to_thread(looted, asked | {"pids": [dispatcher]}, SECRET)
    assert {place.rpartition(": ")[2] for place in found} == {clue["name"] for clue in asked["secrets"]}
    for place in ("own environment", "own objects", "memory of self"):
        assert f"{place}: secret of another org" in found
    assert f"{asked['folder']}/credentials.json: admin key" in found
    assert f"{asked['folder']}/endpoints.json: password of state" in found
    assert not [place for place in found if "without a password" in place]
    if os.geteuid() == 0:
        assert f"memory of {dispatcher}: password of state" in found


@needs_landlock
async def test_platform_operator_finds_no_secret(client: Client, strangers: Client, asked: dict[str, Any]) -> None:
    await stolen(strangers, None, operator="thieves:keeps", config={"token": "${secret:TOKEN}"})
    assert await stolen(client, asked, operator="thieves:on_platform") == []


@needs_landlock
async def test_spark_operator_finds_no_secret(client: Client, strangers: Client, asked: dict[str, Any]) -> None:
    """Tries the driver, a Python worker of Spark, and the JVM."""
    config = {"token": "${secret:TOKEN}"}
    await stolen(strangers, None, operator="spark_thieves:keeps", runtime="spark", config=config)
    assert await stolen(client, asked, operator="spark_thieves:on_spark", runtime="spark") == []


async def test_bundle_finds_no_secret(client: Client, strangers: Client, asked: dict[str, Any]) -> None:
    code = "import thief\n\ndef handler(event, task):\n    return thief.loot(**event['payload'])\n"
    content = zipped({"main.py": code, "thief.py": THIEF.read_text()})
    await client.bundles.upload(content, name="thief")
    await stolen(strangers, None, operator="thieves:keeps", config={"token": "${secret:TOKEN}"})
    config = {"bundle": "thief", "entrypoint": "main.handler"}
    assert await stolen(client, asked, operator="udf", runtime="lambda", config=config) == []


@needs_landlock
async def test_operator_cannot_change_code_or_state_of_the_platform(client: Client, up: Up) -> None:
    paths = [f"{up.folder}/credentials.json", f"{up.folder}/planted", f"{up.folder}/keys/planted"]
    paths += [f"{sys.prefix}/planted", str(Path(landlock.__file__)), "/etc/planted", "/proc/sys/kernel/core_pattern"]
    assert await stolen(client, paths, operator="thieves:writes") == paths
    assert await stolen(client, [f"/var/tmp/interlock-test-{os.getpid()}"], operator="thieves:writes") == []
    await asyncio.to_thread(Path(f"/var/tmp/interlock-test-{os.getpid()}").unlink)


@needs_landlock
@pytest.mark.skipif(os.geteuid() != 0, reason="operators of an ordinary user may use its Unix sockets")
async def test_operator_of_root_reaches_no_unix_socket(client: Client, up: Up) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as service:
        service.bind(f"{folder}/trusts-root")
        service.listen()
        told = await stolen(client, f"{folder}/trusts-root", operator="thieves:connects")
    assert told == ["refused"] * 4 + ["through"]
    table = "/var/spool/interlock-test"
    assert await stolen(client, [table], operator="thieves:writes") == [table]


async def test_job_cannot_name_a_function_of_the_interpreter(client: Client, up: Up) -> None:
    await client.create_org("limited")
    key = (await client.create_key(KeyRequest(user="eve", role=Role.WRITER, org="limited"))).key
    statement = "open('/var/tmp/owned', 'w').close()"
    async with Client(up.ready["gateway"], key) as eve:
        for operator, config, payload in (
            ("cProfile:run", {}, statement),
            ("python", {"function": "subprocess:getoutput"}, "touch /var/tmp/owned"),
            ("linecache:getlines", {}, f"{up.folder}/credentials.json"),
            ("thieves:os.system", {}, "touch /var/tmp/owned"),
        ):
            with pytest.raises(BadRequest) as refused:
                await eve.submit([payload], operator=operator, config=config)
            assert refused.value.code == "unknown_operator"
        await client.limit_org_operators("limited", ["echo"])
        with pytest.raises(Forbidden, match="org-operators"):
            await eve.submit([{}], operator="thieves:on_platform")
    assert not await asyncio.to_thread(Path("/var/tmp/owned").exists)


async def test_new_file_is_run_by_workers_that_started_before(client: Client, up: Up) -> None:
    """The sandbox opens the folder with the platform's own files entry by entry, so new processes must take over."""
    (up.folder.parent / "later.py").write_text(
        "from interlock.workers import operator\n\n@operator\ndef fresh(payload, ctx):\n    return payload\n"
    )

    async def known() -> bool:
        try:
            await client.submit([], operator="later:fresh")
        except BadRequest:
            return False
        return True

    await until(known, seconds=60)
    assert await stolen(client, 5, operator="later:fresh") == 5
