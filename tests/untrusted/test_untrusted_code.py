"""User code from end to end: a bundle is uploaded, one of its tasks is invoked, and the code reads, publishes and
reports through the task SDK, inside the sandbox of a real runner."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interlock.apps.dispatcher import services as dispatcher_services
from interlock.apps.process import serve
from interlock.apps.query import query, query_service
from interlock.archives import pack
from interlock.http.listener import bind, url_of
from interlock.processes.loop import forever
from interlock.schemas import Column, DatasetSchema
from interlock.settings import Settings
from tests.conftest import copied
from tests.support.buffered_datasets import Depot, depot
from tests.support.code_bundles import upload, zipped
from tests.support.dags import deploy
from tests.support.dataset_files import marked, path_of
from tests.support.datasets import claim_of
from tests.support.system import System, until

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKEN = "a-secret-of-dispatcher-and-runner"

CODE = """
import json, os
from decimal import Decimal

def plain(event, task):
    assert task.config["greeting"] == "hello"
    task.progress(0.5, "half")
    return {"n": event["payload"]["n"], "attempt": task.attempt, "cwd": os.getcwd()}

def broken(event, task):
    raise LookupError("there is no such thing")

def leaving(event, task):
    import sys
    sys.exit(7)

def by_itself(event, task):
    task.complete({"said": "by itself"})

def giving_up(event, task):
    task.fail("NotToday", "ask again tomorrow")

def publishing(event, task):
    first = task.publish([{"id": n, "amount": Decimal(10) ** 30 + n} for n in range(3)])
    again = task.publish({"id": n, "amount": Decimal(10) ** 30 + n} for n in range(3))
    with open("more.jsonl", "w") as file:
        file.write(json.dumps({"id": 9, "amount": 1}) + "\\n")
    other = task.publish("more.jsonl")
    return {"same": first == again, "other": other != first, "first": first}

def elsewhere(event, task):
    grant = dict(task.outputs[0], buffer_prefix=task.outputs[0]["buffer_prefix"].replace(task.task_id, "0" * 32))
    task.outputs[0] = grant
    task.publish([{"id": 1, "amount": 1}])

def writing(event, task):
    task.write_output(
        os.path.join(os.path.dirname(__file__), "blocks.parquet"),
        columns=[{"name": "block_number", "type": "bigint", "nullable": False}],
        row_count=2,
        range_column="block_number",
        bounds=(0, 9),
    )

def emitting(event, task):
    task.emit(cursor=41)
    task.emit_at_end(start=0, end=9)
"""


@dataclass
class RunnerSystem:
    system: System
    depot: Depot

    async def run(self, handler: str, *, output: bool = False, **policy: Any) -> dict[str, Any]:
        """Runs a task with the handler and returns it once it has ended."""
        config = {"bundle": "code", "entrypoint": f"handlers.{handler}", "greeting": "hello"}
        body: dict[str, Any] = {
            "operator": "udf",
            "runtime": "lambda",
            "config": config,
            "policy": {"max_attempts": 1} | policy,
        }
        if output:
            body["outputs"] = [{"dataset_uuid": DATASET, "dataset_version": VERSION}]
        accepted = await self.system.submit([{"n": 5}], **body)
        (task_id,) = await self.system.task_ids(accepted["run_id"])

        async def ended() -> dict[str, Any] | None:
            task = await self.system.task(task_id)
            return task if task["status"] not in ("Queued", "Running") else None

        found: dict[str, Any] = await until(ended, seconds=20)
        return found

    async def ended_of(self, job: str) -> dict[str, Any]:
        """Waits until a task of the DAG job has ended, and returns that task."""

        async def ended() -> dict[str, Any] | None:
            page = (await self.system.user("GET", f"/v1/tasks?job={job}")).json()
            return next((task for task in page["tasks"] if task["status"] in ("Completed", "Failed")), None)

        found: dict[str, Any] = await until(ended, seconds=40)
        return found


def parquet() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"block_number": [0, 9]}), buffer)
    return buffer.getvalue()


DATASET, VERSION = "5eed0000-0000-4000-8000-0000000000d1", "5eed0000-0000-4000-8000-0000000000d2"


@pytest.fixture(scope="module")
def runner_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A separate runner process, started as by `interlock serve runner`."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    folder = tmp_path_factory.mktemp("runner")
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    environment |= {"INTERLOCK_RUNNER_TOKEN": TOKEN, "INTERLOCK_DIR": str(folder)}
    command = [sys.executable, "-m", "interlock.cli", "runner", "--fd", str(listener.fileno())]
    with (folder / "runner.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, pass_fds=[listener.fileno()], stderr=log, stdout=log)
    listener.close()
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    assert process.wait(30) == 0, (folder / "runner.log").read_text()


@pytest.fixture(scope="module")
async def site(
    postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory, runner_url: str
) -> AsyncIterator[RunnerSystem]:
    """A system with a query service and a sink, whose loops run like those of the dispatcher."""
    listener = bind("127.0.0.1:0", setting="query")
    settings: dict[str, Any] = {
        "runner_url": runner_url,
        "runner_token": TOKEN,
        "relay_seconds": 0.05,
        "query_url": url_of(listener, Settings()),
    }
    async with (
        copied(postgres_url, template) as url,
        depot(postgres_url, url, tmp_path_factory.mktemp("site"), **settings) as both,
        query_service(both.system.kernel) as service,
    ):
        system, stop = both.system, asyncio.Event()
        app = query(system.kernel, service)
        serving = asyncio.create_task(serve(app, listener, system.kernel.settings, stop=stop, on_stop=lambda: None))
        services = [each for each in dispatcher_services(system.kernel) if each.name in ("relay", "router")]
        loops = [asyncio.create_task(forever(each)) for each in services]
        await upload(system, zipped({"handlers.py": CODE, "blocks.parquet": parquet()}), "code")
        yield RunnerSystem(system, both)
        for loop in loops:
            loop.cancel()
        stop.set()
        await serving


async def test_return_value_of_a_handler_is_the_result(site: RunnerSystem) -> None:
    task = await site.run("plain")
    assert task["status"] == "Completed", task["error_message"]
    assert task["result"] == {"n": 5, "attempt": 1, "cwd": "/tmp"}
    assert (task["progress"], task["progress_text"]) == (0.5, "half")


async def test_exception_of_a_handler_fails_the_attempt(site: RunnerSystem) -> None:
    task = await site.run("broken")
    assert (task["error_class"], task["error_message"]) == ("LookupError", "there is no such thing")


async def test_handler_that_exits_silently_fails_the_attempt(site: RunnerSystem) -> None:
    task = await site.run("leaving")
    assert task["error_class"] == "RunnerExited"
    assert "exit code 7" in task["error_message"]


async def test_handler_may_report_by_itself(site: RunnerSystem) -> None:
    assert (await site.run("by_itself"))["result"] == {"said": "by itself"}
    task = await site.run("giving_up")
    assert (task["error_class"], task["error_message"]) == ("NotToday", "ask again tomorrow")


async def test_published_rows_lie_under_the_attempts_own_prefix(site: RunnerSystem) -> None:
    task = await site.run("publishing", output=True)
    assert task["status"] == "Completed", task["error_message"]
    assert task["result"] == {"same": True, "other": True, "first": task["result"]["first"]}
    sql = "select batch_uri || ' ' || record_count from interlock.buffer_publishes where publish_id = $1::uuid"
    uri, count = str(await site.system.value(sql, task["result"]["first"])).split()
    assert count == "3"
    assert f"/buffers/{DATASET}/{task['task_id']}/1/" in uri
    batch = await site.system.kernel.access.objects.read(uri)
    assert batch is not None
    assert batch.decode().splitlines()[0] == '{"id":0,"amount":"1000000000000000000000000000000"}'


async def test_publishing_outside_the_prefix_is_refused(site: RunnerSystem) -> None:
    task = await site.run("elsewhere", output=True)
    assert (task["status"], task["error_class"]) == ("Failed", "TaskError")


async def test_events_count_now_or_with_the_completion(site: RunnerSystem) -> None:
    task = await site.run("emitting", output=True)
    assert task["status"] == "Completed", task["error_message"]
    sql = "select count(*) from interlock.dataset_events where task_id = $1::uuid"
    assert await site.system.value(sql, task["task_id"]) == 2


# The example

FEED = """
name: tokens
jobs:
  - { name: feed, activation: source, source: { kind: manual }, operator: echo, outputs: [transfers] }
publish:
  transfers: { from: { job: feed, output: transfers } }
"""
TRANSFERS = pa.schema(
    [
        pa.field("block_number", pa.int64(), nullable=False),
        ("block_hash", pa.string()),
        ("log_index", pa.int32()),
        ("token", pa.string()),
        ("from_address", pa.string()),
        ("to_address", pa.string()),
        ("value", pa.decimal128(38, 0)),
    ]
)
SCHEMA = DatasetSchema(
    [
        Column("block_number", "bigint", nullable=False),
        Column("block_hash", "string"),
        Column("log_index", "int"),
        Column("token", "string"),
        Column("from_address", "string"),
        Column("to_address", "string"),
        Column("value", "decimal(38,0)"),
    ],
    "block_number",
)


async def bring_transfers(system: System, start: int, end: int) -> None:
    """Reports a partition with one transfer per block. The value in block n is n times ten million; block 0 has a null
    value, which means more than a decimal can hold."""
    claim = await claim_of(system, "tokens", "feed")
    grant = claim["task"]["outputs"][0]
    name = f"transfers_{start}_{end}.parquet"
    said = marked(grant["write_prefix"], name, SCHEMA, rows=end - start + 1, min=start, max=end)
    rows = [
        {"block_number": n, "block_hash": f"0xb{n}", "log_index": 0, "token": "0xt"}
        | {"from_address": "0xa", "to_address": "0xb", "value": n * 10**7 or None}
        for n in range(start, end + 1)
    ]
    pq.write_table(pa.Table.from_pylist(rows, TRANSFERS), path_of(grant["write_prefix"] + name))
    ref = {each: grant[each] for each in ("dataset_uuid", "dataset_version")} | {"start": start, "end": end}
    reply = await system.complete(claim, outputs=[ref | said | {"min": start, "max": end}], events=[ref])
    assert reply.status_code == 200, reply.text


async def test_example_queries_its_range_and_its_alerts_become_rows(site: RunnerSystem, tmp_path: Path) -> None:
    pack(EXAMPLES / "bundles" / "alerts", tmp_path / "alerts.zip")
    await upload(site.system, (tmp_path / "alerts.zip").read_bytes(), "alerts")
    await deploy(site.system, FEED)
    yaml = (EXAMPLES / "dags" / "alerts.yaml").read_text()
    for large, small in (("4" + "_000" * 8, 1_150_000_000), ("6" + "_000" * 8, 1_180_000_000)):
        assert large in yaml
        yaml = yaml.replace(large, str(small))
    await deploy(site.system, yaml)
    await bring_transfers(site.system, 0, 119)

    task = await site.ended_of("alerts/large_transfers")
    assert task["status"] == "Completed", task["error_message"]
    assert task["result"] == {"alerts": 6}
    await site.depot.drain()
    version = await site.system.value(
        "select current_version from interlock.datasets where job_name = 'large_transfers'"
    )
    rows = await site.depot.data.fetch(
        f"select dedupe_key, value, severity, org_id from datasets.dataset_{version.hex} order by block_number"
    )
    assert [(row["dedupe_key"], row["value"]) for row in rows] == [
        ("0xb0:0", None),
        *((f"0xb{n}:0", n * 10**7) for n in range(115, 120)),
    ]
    assert [row["severity"] for row in rows] == ["critical", *["warning"] * 3, *["critical"] * 2]
    assert {row["org_id"] for row in rows} == {site.system.org_id}


WRITING = """
name: writing
jobs:
  - { name: feed, activation: source, source: { kind: manual }, operator: echo, outputs: [blocks] }
  - name: copy
    runtime: lambda
    operator: udf
    inputs: [{ from: { job: feed, output: blocks } }]
    outputs: [copies]
    config: { bundle: code, entrypoint: handlers.writing }
"""


async def test_file_of_a_handler_is_a_partition_after_its_completion(site: RunnerSystem) -> None:
    await deploy(site.system, WRITING)
    told = {"events": [{"start": 0, "end": 9}]}
    assert (await site.system.user("POST", "/v1/dags/writing/jobs/feed/events", json=told)).is_success
    task = await site.ended_of("writing/copy")
    assert task["status"] == "Completed", task["error_message"]
    location = await site.system.value(
        """select p.location from interlock.partitions p
           join interlock.datasets d on d.current_version = p.dataset_version where d.job_name = 'copy'"""
    )
    assert location.endswith(f"_attempts/{task['task_id']}/1/part_0_9.parquet")
    assert path_of(location).read_bytes() == parquet()
