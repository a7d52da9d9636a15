"""The query service: read access, replies, history, and misbehaving queries."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interlock.access import jwks
from interlock.access.jwks import FRESH_SECONDS, STALE_SECONDS
from interlock.apps.app import with_published_keys
from interlock.apps.up.foundation import as_role, make_query_role
from interlock.client import Fence, TaskClient
from interlock.clock import ManualClock
from interlock.failpoints import arm, disarm
from interlock.query.records import Asker, QueryRetention
from interlock.wire.access import KeyRequest, Role
from interlock.wire.queries import QueryMode
from tests.cli.test_cli import Terminal
from tests.conftest import copied
from tests.support.block_followers import data_database
from tests.support.dataset_files import path_of
from tests.support.datasets import deploy, stranger
from tests.support.identity_provider import Publisher, publishing
from tests.support.polls import eventually
from tests.support.query_service import (
    DAG,
    QuerySystem,
    bring,
    fill_hot_table,
    listening,
    querying,
    reader_of,
    version_of,
)
from tests.support.system import System, fence, running, until

KEYS = "/internal/jwks/task"

LIMITS: dict[str, Any] = {
    "query_memory_mb": 128,
    "query_temp_mb": 64,
    "query_threads": 1,
    "query_concurrency": 2,
    "query_queue": 1,
    "query_queue_seconds": 0.3,
    "query_max_rows": 50,
    "query_max_bytes": 4096,
}


@pytest.fixture(scope="module")
async def site(
    postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[QuerySystem]:
    """Blocks 0-29 in three files, and ten rows of a hot table."""
    async with copied(postgres_url, template) as url, data_database(postgres_url) as data_url:
        readable = as_role(data_url, await make_query_role(data_url))
        async with (
            running(url, tmp_path_factory.mktemp("queries"), query_data_url=readable, **LIMITS) as system,
            querying(system, data_url) as site,
        ):
            await deploy(system, DAG)
            for start in (0, 10, 20):
                await bring(system, start, start + 9)
            await fill_hot_table(system, data_url, 10)
            yield site


@pytest.fixture(scope="module")
async def hurried(site: QuerySystem) -> AsyncIterator[QuerySystem]:
    """A second service, with a query timeout of one second."""
    async with querying(site.system, site.data_url, query_timeout_seconds=1.0) as hurried:
        yield hurried


async def test_published_name_is_a_relation_with_typed_columns(site: QuerySystem) -> None:
    reply = await site.ask("select block_number, reward from blocks where block_number between 8 and 11 order by 1")
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["columns"] == [
        {"name": "block_number", "type": "BIGINT"},
        {"name": "reward", "type": "DECIMAL(38,0)"},
    ]
    assert answer["rows"] == [[number, str(10**20 + number)] for number in (8, 9, 10, 11)]
    assert (answer["row_count"], answer["truncated"], answer["outcome"]) == (4, False, "Completed")
    assert answer["duration_ms"] > 0
    assert reply.headers["interlock-query-id"] == answer["query_id"]


@pytest.mark.parametrize("relation", ['"chain:feed:blocks"', '"chain/feed/blocks"', "Blocks", "{uuid}"])
async def test_dataset_has_several_names(site: QuerySystem, relation: str) -> None:
    uuid = await site.system.value("select dataset_uuid from interlock.datasets where job_name = 'feed'")
    assert await site.rows(f"select count(*) from {relation}".replace("{uuid}", f'"{uuid}"')) == [[30]]


async def test_only_listed_datasets_are_visible_under_short_names(site: QuerySystem) -> None:
    listed = ["chain:feed:blocks"]
    assert await site.rows("select max(block_number) from blocks", datasets=listed) == [[29]]
    refused = await site.ask("select * from hot_logs", datasets=listed)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_query")
    unknown = await site.ask("select 1", datasets=["nothing"])
    assert unknown.status_code == 404
    assert "dag:job:output" in unknown.json()["detail"]


async def test_files_and_tables_are_joined_in_one_statement(site: QuerySystem) -> None:
    sql = "select b.miner, count(*), max(l.topic) from blocks b join hot_logs l using (block_number) group by 1"
    assert await site.rows(f"{sql} order by 1") == [
        ["miner 0", 3, "topic 1"],
        ["miner 1", 4, "topic 1"],
        ["miner 2", 3, "topic 1"],
    ]
    exact = await site.rows(f"select value from hot_logs where value > {6 * 10**30} order by value limit 1")
    assert exact == [[str(7 * 10**30)]]


async def test_uncommitted_rows_are_not_visible(site: QuerySystem) -> None:
    await bring(site.system, 900, 909, commit=False)
    assert await site.rows("select count(*), max(block_number) from blocks") == [[30, 29]]


async def test_csv_stream_has_a_header_and_all_rows(site: QuerySystem) -> None:
    sql = "select a.block_number, null as nothing, a.miner from blocks a, blocks b order by 1"
    reply = await site.ask(sql, format="csv")
    assert reply.headers["content-type"] == "text/csv; charset=utf-8"
    header, *rows = csv.reader(io.StringIO(reply.text))
    assert header == ["block_number", "nothing", "miner"]
    assert len(rows) == 900
    record = await site.record(reply.headers["interlock-query-id"])
    assert (record["outcome"], record["row_count"], record["truncated"]) == ("Completed", 900, False)


async def test_arrow_stream_is_readable_by_pyarrow(site: QuerySystem) -> None:
    reply = await site.ask("select block_number, reward from blocks order by 1", format="arrow")
    assert reply.headers["content-type"] == "application/vnd.apache.arrow.stream"
    table = pa.ipc.open_stream(reply.content).read_all()
    assert table["block_number"].to_pylist() == list(range(30))
    limited = await site.ask("select block_number from blocks order by 1", format="arrow", limit=3)
    assert pa.ipc.open_stream(limited.content).read_all().num_rows == 3


async def test_result_over_row_or_byte_limit_is_marked_truncated(site: QuerySystem) -> None:
    many = (await site.ask("select 1 from blocks a, blocks b")).json()
    assert (many["row_count"], len(many["rows"]), many["truncated"]) == (50, 50, True)
    long = (await site.ask("select repeat(miner, 100) from blocks")).json()
    assert 0 < long["row_count"] < 30
    assert long["truncated"]
    asked = (await site.ask("select * from blocks", limit=5)).json()
    assert (asked["row_count"], asked["truncated"]) == (5, True)


# Read access


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_parquet('/etc/passwd')",
        "select * from 'x.parquet'",
        "copy blocks to '/tmp/x'",
        "select 1; select 2",
        "attach 'x'",
        "select getenv('HOME')",
        "select * from information_schema.tables",
        "this is no SQL",
    ],
)
async def test_refusal_is_recorded_and_shows_its_statement_to_the_author_alone(site: QuerySystem, sql: str) -> None:
    reply = await site.ask(sql)
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_query")
    record = await recorded(site, sql)
    assert (record["outcome"], record["code"], record["user"]) == ("Refused", "invalid_query", "root")
    assert record["sql"] == sql
    reader = await reader_of(site.system)
    theirs = (await site.system.user("GET", f"/v1/queries/{record['query_id']}", key=reader)).json()
    listed = (await site.system.user("GET", "/v1/queries", key=reader)).json()["queries"]
    assert (theirs["sql"], {each["sql"] for each in listed}) == (None, {None})
    assert theirs["sql_sha256"] == record["sql_sha256"]


async def test_statement_that_cannot_be_stored_is_recorded_without_its_text(site: QuerySystem) -> None:
    assert (await site.ask("select 'a\0b'")).status_code == 400
    record = await recorded(site, "select 'a\0b'")
    assert (record["outcome"], record["sql"]) == ("Refused", None)


async def recorded(site: QuerySystem, sql: str) -> dict[str, Any]:
    """Returns the record of a statement, which is written while its refusal is already on its way."""
    digest = hashlib.sha256(sql.encode()).hexdigest()

    async def found() -> dict[str, Any] | None:
        page = (await site.system.user("GET", "/v1/queries")).json()
        return next((each for each in page["queries"] if each["sql_sha256"] == digest), None)

    one: dict[str, Any] = await until(found)
    return await site.record(one["query_id"])


@pytest.fixture(scope="module")
async def outsider(site: QuerySystem) -> str:
    """A key of another org."""
    return await stranger(site.system)


# What there is


@pytest.mark.parametrize("sql", ["show tables", " SHOW  Tables ; ", "show all tables"])
async def test_show_tables_lists_what_the_caller_may_query(site: QuerySystem, outsider: str, sql: str) -> None:
    rows = await site.rows(sql)
    assert [row[:2] for row in rows] == [
        ["blocks", "chain:feed:blocks"],
        ["hot_logs", "chain:hot:logs"],
        ["secrets", "chain:derive:facts"],
    ]
    assert rows[0][2] == "block_number, miner, reward"
    reader = await reader_of(site.system)
    assert [row[0] for row in await site.rows(sql, key=reader)] == ["blocks", "hot_logs"]
    assert await site.rows(sql, key=outsider) == []
    cut = (await site.ask(sql, limit=1)).json()
    assert (cut["row_count"], cut["truncated"]) == (1, True)
    assert (await site.ask(sql, format="csv")).json()["code"] == "not_exportable"


@pytest.mark.parametrize("name", ["blocks", '"chain:feed:blocks"', "chain/feed/blocks", "table blocks;"])
async def test_describe_shows_the_columns_of_a_dataset(site: QuerySystem, name: str) -> None:
    assert await site.rows(f"describe {name}") == [
        ["block_number", "bigint", False],
        ["miner", "string", True],
        ["reward", "decimal(38,0)", True],
    ]
    reader = await reader_of(site.system)
    assert (await site.ask("describe secrets", key=reader)).json()["code"] == "dataset_not_readable"


@pytest.mark.parametrize("sql", ["select * from block", "describe block", "select 1 from blocks join block on true"])
async def test_unknown_relation_names_the_nearest_and_what_there_is(site: QuerySystem, outsider: str, sql: str) -> None:
    reply = await site.ask(sql)
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_query")
    detail = reply.json()["detail"]
    assert "'block' is no dataset that you can query. Did you mean blocks?" in detail
    assert "There are: blocks, hot_logs, secrets." in detail
    reader = await reader_of(site.system)
    assert "secrets" not in (await site.ask(sql, key=reader)).json()["detail"]
    nothing = await site.ask(sql, key=outsider)
    assert "interlock dag deploy" in nothing.json()["detail"]


async def test_relations_are_paged_with_their_columns(site: QuerySystem, outsider: str) -> None:
    first = (await site.system.user("GET", "/v1/relations", params={"limit": 2})).json()
    rest = (await site.system.user("GET", "/v1/relations", params={"cursor": first["next_cursor"]})).json()
    found = {each["name"]: each for each in first["relations"] + rest["relations"]}
    assert sorted(found) == ["blocks", "hot_logs", "secrets"]
    assert found["blocks"]["columns"][0] == {"name": "block_number", "type": "bigint", "nullable": False}
    assert (found["blocks"]["sql_name"], found["blocks"]["dataset"]) == ("blocks", "chain:feed:blocks")
    assert rest["next_cursor"] is None
    assert (await site.system.user("GET", "/v1/relations", key=outsider)).json()["relations"] == []


async def test_datasets_of_another_org_are_not_found(site: QuerySystem, outsider: str) -> None:
    key = outsider
    for relation in ("blocks", '"chain:feed:blocks"', f'"{await version_of(site.system, "feed")}"'):
        reply = await site.ask(f"select * from {relation}", key=key)
        assert (reply.status_code, reply.json()["code"]) == (400, "invalid_query")
    assert (await site.ask("select 1", key=key, datasets=["blocks"])).status_code == 404
    mine = (await site.ask("select 1")).json()["query_id"]
    assert (await site.system.user("GET", f"/v1/queries/{mine}", key=key)).status_code == 404
    theirs = (await site.system.user("GET", "/v1/queries", key=key)).json()["queries"]
    assert mine not in {query["query_id"] for query in theirs}


async def test_dataset_with_other_read_roles_is_not_a_relation(site: QuerySystem) -> None:
    reader = await reader_of(site.system)
    assert await site.rows("select count(*) from blocks", key=reader) == [[30]]
    assert (await site.ask("select * from secrets", key=reader)).status_code == 400
    assert (await site.ask("select 1", key=reader, datasets=["secrets"])).json()["code"] == "dataset_not_readable"


async def test_key_without_the_scope_and_no_key_are_refused(site: QuerySystem) -> None:
    body = {"user": "robot", "role": "reader", "scopes": ["jobs:read"]}
    key = (await site.system.user("POST", "/v1/keys", json=body)).json()["key"]
    assert (await site.ask("select 1", key=key)).status_code == 403
    assert (await site.ask("select 1", key="nonsense")).status_code == 401


async def test_database_role_reads_only_dataset_tables(site: QuerySystem) -> None:
    url = site.system.kernel.settings.query_data_url
    assert url is not None
    connection = await asyncpg.connect(url.get_secret_value())
    table = f"datasets.dataset_{(await version_of(site.system, 'hot')).hex}"
    assert await connection.fetchval(f"select count(*) from {table}") == 10
    for statement in (
        f"insert into {table} values (1)",
        f"set transaction_read_only = off; delete from {table}",
        "select * from datasets.followers",
        "select * from datasets.sink_commits",
        "create table datasets.mine (a int)",
    ):
        with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.ReadOnlySQLTransactionError)):
            await connection.execute(statement)
    await connection.close()


# Attempts of tasks


@pytest.fixture
async def claim(site: QuerySystem) -> dict[str, Any]:
    """A running attempt of a job that reads blocks."""
    return await attempt_of(site.system)


async def test_attempt_queries_only_its_inputs_by_name(site: QuerySystem, claim: dict[str, Any]) -> None:
    reply = await site.ask_as(claim, "select count(*) from blocks")
    assert reply.json()["rows"] == [[30]]
    record = await site.record(reply.json()["query_id"])
    assert (record["task_id"], record["attempt"], record["user"]) == (claim["task_id"], 1, None)
    assert record["dataset_versions"] == [str(await version_of(site.system, "feed"))]
    for sql in ("select * from hot_logs", "select * from secrets", "select * from logs"):
        assert (await site.ask_as(claim, sql)).json()["code"] == "invalid_query"


async def test_body_and_token_must_name_the_same_attempt(site: QuerySystem, claim: dict[str, Any]) -> None:
    for other in ({"attempt": 2}, {"task_id": str(uuid4())}):
        reply = await site.ask_as(claim | other, "select 1")
        assert (reply.status_code, reply.json()["code"]) == (403, "token_mismatch")
    assert (await site.newest())["outcome"] == "Refused"
    stale = await site.ask_as(claim | {"lease_token": str(uuid4())}, "select 1")
    assert (stale.status_code, stale.json()["stale"]) == (409, "lease_token")


async def test_attempt_without_its_lease_reads_nothing(site: QuerySystem, claim: dict[str, Any]) -> None:
    await site.system.value(
        "update interlock.tasks set lease_expires_at = now() - interval '1 second' where task_id = $1",
        UUID(claim["task_id"]),
    )
    assert (await site.ask_as(claim, "select 1 from blocks")).status_code == 409
    await site.system.pass_of("reaper")
    reaped = await site.ask_as(claim, "select 1 from blocks")
    assert (reaped.status_code, reaped.json()["code"]) == (409, "fenced")


async def attempt_of(system: System) -> dict[str, Any]:
    task_id = await system.value(
        "insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, payload)"
        """ select uuidv7(), org_id, job_id, 5, 0, '{"start": 0, "end": 9}' from interlock.jobs"""
        " where dag_name = 'chain' and name = 'derive' and current returning task_id"
    )
    return await system.claim(str(task_id))


@dataclass
class Apart:
    """The site's service behind a listener whose keys come from a publisher that relays the dispatcher's keys."""

    site: QuerySystem
    publisher: Publisher
    clock: ManualClock

    async def publish(self) -> None:
        reply = await self.site.system.http.get(f"{self.site.system.internal_url}{KEYS}")
        self.publisher.says(KEYS, reply.content)

    async def rotate(self) -> None:
        assert (await self.site.system.user("POST", "/v1/signing-keys/rotate")).status_code == 201

    async def status(self, claim: dict[str, Any]) -> tuple[int, str]:
        reply = await self.site.ask_as(claim, "select count(*) from blocks")
        return reply.status_code, reply.json().get("code", "")


@pytest.fixture
async def apart(site: QuerySystem, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Apart]:
    monkeypatch.setattr(jwks, "PAUSE_SECONDS", 0.05)
    clock = ManualClock()
    async with publishing() as publisher:
        settings = site.system.kernel.settings.model_copy(update={"internal_url": publisher.url})
        parts = with_published_keys(replace(site.system.kernel, settings=settings), clock)
        async with listening(parts, site.service) as url:
            apart = Apart(replace(site, url=url), publisher, clock)
            await apart.publish()
            yield apart


async def test_key_rotation_during_a_task_causes_one_jwks_fetch(apart: Apart, claim: dict[str, Any]) -> None:
    assert await apart.status(claim) == (200, "")
    await apart.rotate()
    await apart.publish()
    newer = await attempt_of(apart.site.system)
    assert await apart.status(newer) == (200, "")
    assert await apart.status(claim) == (200, "")
    assert apart.publisher.asked == [KEYS, KEYS]
    forged = claim["capability_token"][:-4] + "AAAA"
    assert (await apart.status(claim | {"capability_token": forged}))[0] == 401


async def test_known_keys_outlive_a_jwks_outage_without_false_refusals(apart: Apart, claim: dict[str, Any]) -> None:
    assert await apart.status(claim) == (200, "")
    apart.publisher.away = True
    await apart.rotate()
    newer = await attempt_of(apart.site.system)
    assert await apart.status(newer) == (503, "no_keys")
    apart.clock.advance(FRESH_SECONDS + 1)
    assert await apart.status(claim) == (200, "")
    apart.clock.advance(STALE_SECONDS)
    assert await apart.status(claim) == (503, "no_keys")
    apart.publisher.away = False
    await apart.publish()
    # The keys are known again, but the token has expired by now.
    assert await apart.status(claim) == (401, "token_expired")


async def test_task_may_not_start_batch_queries(site: QuerySystem, claim: dict[str, Any]) -> None:
    for mode in ("batch", "auto"):
        reply = await site.ask_as(claim, "select 1", mode=mode)
        assert (reply.status_code, reply.json()["code"]) == (403, "batch_of_a_task")


async def test_attempt_exports_under_its_own_prefix(site: QuerySystem, claim: dict[str, Any]) -> None:
    reply = (await site.ask_as(claim, "select * from blocks order by block_number", export=True)).json()
    prefix = claim["task"]["outputs"][0]["write_prefix"]
    (file,) = reply["export"]["files"]
    assert file["uri"] == f"{prefix}exports/{reply['query_id']}/result.parquet"
    assert pq.read_table(path_of(file["uri"])).num_rows == 30


# Exports and batch queries of users


async def test_export_is_downloaded_by_signed_url_and_expires(site: QuerySystem) -> None:
    reply = (await site.ask("select * from blocks", export=True)).json()
    assert (reply["row_count"], reply["rows"]) == (30, [])
    root = site.system.kernel.access.objects.root
    assert reply["export"]["prefix"] == f"{root}/exports/{site.system.org_id}/{reply['query_id']}/"
    shown = await site.record(reply["query_id"])
    (file,) = shown["export"]["files"]
    fetched = await site.system.http.get(file["url"])
    assert pq.read_table(io.BytesIO(fetched.content)).num_rows == 30
    await site.system.value(
        "update interlock.file_sweeps set due_at = now(), final_at = now() - interval '1 day' where place = $1",
        reply["export"]["prefix"],
    )
    await site.system.pass_of("sweep")
    assert not path_of(file["uri"]).exists()
    refused = await site.ask("select * from blocks", export=True, limit=3)
    assert refused.json()["code"] == "export_limit"


async def test_batch_query_is_a_task_with_pinned_inputs_and_a_result(
    site: QuerySystem,
) -> None:
    system = site.system
    reply = await site.ask("select * from blocks join hot_logs using (block_number)", mode="batch")
    assert reply.status_code == 202, reply.text
    query_id, task_id = reply.json()["query_id"], reply.json()["task_id"]
    claim = await system.claim(task_id)
    assert (claim["task"]["operator"], claim["task"]["payload"]["relations"]) == ("batch_query", ["blocks", "hot_logs"])
    data = (await system.worker("POST", "/internal/task-data", json={"items": [fence(claim)]})).json()["items"][0]
    assert [len(one.get("files", [])) for one in data["inputs"]] == [3, 0]
    assert [one["dataset_version"] for one in data["inputs"]] == [
        str(await version_of(system, job)) for job in ("feed", "hot")
    ]
    prefix = data["export"]["prefix"]
    assert prefix == f"{system.kernel.access.objects.root}/exports/{system.org_id}/_batch/{task_id}/1/"
    assert (await site.record(query_id))["batch_status"] == "Running"
    await system.kernel.access.objects.put(f"{prefix}part-00000.parquet", b"rows")
    result = {"prefix": prefix, "files": [{"uri": f"{prefix}part-00000.parquet", "bytes": 4}], "row_count": 7}
    assert (await system.complete(claim, result=result)).status_code == 200
    view = await site.record(query_id)
    assert (view["outcome"], view["batch_status"], view["row_count"]) == ("Batched", "Completed", 7)
    assert (await system.http.get(view["export"]["files"][0]["url"])).content == b"rows"


async def test_reported_files_outside_the_prefix_are_not_signed(site: QuerySystem) -> None:
    reply = (await site.ask("select * from blocks", mode="batch")).json()
    claim = await site.system.claim(reply["task_id"])
    elsewhere = f"{site.system.kernel.access.objects.root}/dataset/of/another"
    result = {"prefix": elsewhere, "files": [{"uri": elsewhere, "bytes": 1}], "row_count": 1}
    assert (await site.system.complete(claim, result=result)).status_code == 200
    assert (await site.system.user("GET", f"/v1/queries/{reply['query_id']}")).status_code == 404


async def test_query_over_its_limits_becomes_a_batch_task_if_allowed(site: QuerySystem, hurried: QuerySystem) -> None:
    for where, sql in ((hurried, ENDLESS), (site, "select * from blocks a, blocks b")):
        reply = await where.ask(sql, mode="auto")
        assert (reply.status_code, reply.json()["outcome"]) == (202, "Batched")
    assert (await site.ask("select 1", mode="auto")).json()["rows"] == [[1]]
    refused = await site.ask("select * from nothing", mode="batch")
    assert refused.json()["code"] == "invalid_query"


async def test_job_of_a_batch_query_is_deleted_with_its_run(site: QuerySystem) -> None:
    task_id = (await site.ask("select * from blocks", mode="batch")).json()["task_id"]
    claim = await site.system.claim(task_id)
    await site.system.complete(claim, result={"prefix": "", "files": [], "row_count": 0})
    await site.system.settle()
    job_id = UUID(claim["task"]["job_id"])
    await site.system.value("update interlock.runs set ended_at = now() - interval '30 days' where job_id = $1", job_id)
    while await site.system.pass_of("retention"):
        continue
    assert await site.system.value("select count(*) from interlock.edges where job_id = $1", job_id) == 0
    assert await site.system.value("select count(*) from interlock.jobs where job_id = $1", job_id) == 0


# Misbehaving queries

ENDLESS = "with recursive t(n) as (select 1 union all select n + 1 from t) select count(*) from t"
GREEDY = """
    select list(a.miner || b.miner || c.miner || d.miner || e.miner)
    from blocks a, blocks b, blocks c, blocks d, blocks e
"""
LONG = "select a.* from blocks a, blocks b, blocks c, blocks d, blocks e, blocks f"


async def over_limit(site: QuerySystem, sql: str) -> str:
    reply = await site.ask(sql)
    assert reply.status_code == 413, reply.text
    assert "batch" in reply.json()["detail"]
    record = await site.newest()
    assert (record["outcome"], record["code"]) == ("OverLimit", reply.json()["code"])
    await site.idle()
    return str(record["code"])


async def test_endless_query_is_ended_and_frees_its_slot(hurried: QuerySystem) -> None:
    assert await over_limit(hurried, ENDLESS) == "query_timeout"


async def test_query_over_its_memory_is_ended_and_frees_its_slot(site: QuerySystem) -> None:
    assert await over_limit(site, GREEDY) == "query_memory"


async def test_reader_that_disconnects_mid_stream_frees_its_slot(site: QuerySystem) -> None:
    headers = {"Authorization": f"Bearer {site.system.admin_key}"}
    body = {"sql": LONG, "format": "arrow"}
    async with site.system.http.stream("POST", f"{site.url}/v1/query", headers=headers, json=body) as reply:
        async for _ in reply.aiter_raw():
            break
        query_id = reply.headers["interlock-query-id"]
    await site.idle()
    assert (await site.record(query_id))["outcome"] == "Canceled"


async def test_waiting_caller_that_disconnects_frees_its_slot(site: QuerySystem) -> None:
    (asking,) = await holding(site, 1)
    await leave(asking)
    await site.idle()

    async def canceled() -> bool:
        return bool((await site.newest())["outcome"] == "Canceled")

    await until(canceled)


async def holding(site: QuerySystem, places: int) -> list[asyncio.Task[httpx.Response]]:
    """Starts endless queries, and waits until each has a slot."""
    asking = [asyncio.create_task(site.ask(ENDLESS)) for _ in range(places)]
    await eventually(lambda: site.service.places.running == places)
    return asking


async def leave(*asking: asyncio.Task[httpx.Response]) -> None:
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_stream_past_its_timeout_is_cut_off_and_not_ended(site: QuerySystem, hurried: QuerySystem) -> None:
    if not await broken_off(hurried):
        # This machine is so busy that not even the first row arrived in time.
        async with querying(site.system, site.data_url, query_timeout_seconds=20.0) as patient:
            assert await broken_off(patient)


async def broken_off(site: QuerySystem) -> bool:
    try:
        reply = await site.ask(LONG, format="csv")
    except httpx.RemoteProtocolError:
        await site.idle()
        assert (await site.newest())["outcome"] == "OverLimit"
        return True
    assert reply.json()["code"] == "query_timeout"
    return False


async def test_killed_statement_is_an_error_and_frees_its_slot(site: QuerySystem) -> None:
    asking = asyncio.create_task(site.ask(ENDLESS))

    def statement() -> int | None:
        for child in psutil.Process().children():
            if any("zygote" in word for word in child.cmdline()) and len(running := child.children()) > 2:
                # The other processes wait for statements. The first two may have the same creation time.
                return min(running, key=lambda one: (one.create_time(), one.pid)).pid
        return None

    async def found() -> int | None:
        return await asyncio.to_thread(statement)

    os.kill(await until(found), signal.SIGKILL)
    reply = await asking
    assert (reply.status_code, reply.json()["code"]) == (500, "query_crashed")
    await site.idle()
    assert (await site.newest())["outcome"] == "Failed"
    assert await site.rows("select 1") == [[1]]


async def test_queries_beyond_the_slots_get_429_with_retry_after(site: QuerySystem) -> None:
    asking = await holding(site, LIMITS["query_concurrency"])
    replies = await asyncio.gather(*(site.ask("select 1") for _ in range(4)))
    assert [reply.status_code for reply in replies] == [429] * 4
    await leave(*asking)
    busy = next(reply for reply in replies if reply.status_code == 429)
    assert busy.json()["code"] == "queries_busy"
    assert int(busy.headers["retry-after"]) >= 1
    page = (await site.system.user("GET", "/v1/queries?limit=6")).json()["queries"]
    ended = [await site.record(query["query_id"]) for query in page]
    assert sorted(query["outcome"] for query in ended) == ["Busy"] * 4 + ["Canceled"] * 2
    await site.idle()


async def test_missing_file_is_503(site: QuerySystem) -> None:
    await bring(site.system, 100, 109)
    location = await site.system.value("select location from interlock.partitions where range_start = 100")
    path_of(location).rename(path_of(location).with_suffix(".away"))
    try:
        reply = await site.ask("select * from blocks where block_number = 105")
        assert (reply.status_code, reply.json()["code"]) == (503, "unavailable"), reply.text
        assert await site.rows("select count(*) from hot_logs") == [[10]]
    finally:
        await site.system.value("delete from interlock.partitions where range_start = 100 returning 1")


async def test_state_database_outage_gives_503_and_leaks_no_slot(
    site: QuerySystem, claim: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = await asyncpg.create_pool(site.data_url, min_size=0)
    await gone.close()
    with monkeypatch.context() as away:
        away.setattr(site.system.kernel.stores.database, "pool", gone)
        for reply in (await site.ask("select 1"), await site.ask_as(claim, "select 1")):
            assert (reply.status_code, reply.json()["code"]) == (503, "unavailable"), reply.text
            assert int(reply.headers["retry-after"]) >= 1
    await site.idle()
    assert await site.rows("select 1") == [[1]]


async def test_result_is_withheld_if_it_cannot_be_recorded(site: QuerySystem) -> None:
    async def lose() -> None:
        disarm("query.before_commit")
        raise ConnectionResetError("the state database is gone")

    arm("query.before_commit", lose)
    reply = await site.ask("select count(*) from blocks")
    assert (reply.status_code, reply.json()["code"]) == (503, "unavailable"), reply.text
    await site.idle()
    # No record shows that it was answered; the loop eventually gives up the record.
    assert await site.system.value("delete from interlock.query_audit where outcome = 'Running' returning 1") == 1
    assert await site.rows("select count(*) from blocks") == [[30]]


# History


async def test_history_is_paged_newest_first(site: QuerySystem) -> None:
    asked = [(await site.ask(f"select {n}")).json()["query_id"] for n in range(5)]
    found: list[str] = []
    cursor = ""
    while len(found) < 5:
        page = (await site.system.user("GET", f"/v1/queries?limit=2{cursor}")).json()
        found += [query["query_id"] for query in page["queries"]]
        cursor = f"&cursor={page['next_cursor']}"
    assert found[:5] == asked[::-1]
    assert (await site.system.user("GET", "/v1/queries?cursor=x")).json()["code"] == "bad_cursor"


async def test_records_of_a_killed_service_end_and_old_ones_are_deleted(site: QuerySystem) -> None:
    system = site.system
    record = await system.kernel.query.records.open(
        Asker(system.org_id, user="ghost"), QueryMode.INTERACTIVE, "select 1"
    )
    loop = QueryRetention(system.kernel.stores.database, system.kernel.settings)
    age = "update interlock.query_audit set started_at = now() - $2::interval where query_id = $1 returning 1"
    await system.value(age, record.query_id, timedelta(seconds=60))
    await loop.run_once()
    outcome = "select outcome from interlock.query_audit where query_id = $1"
    assert await system.value(outcome, record.query_id) == "Running"
    await system.value(age, record.query_id, timedelta(seconds=300))
    await loop.run_once()
    assert (await site.record(str(record.query_id)))["outcome"] == "Lost"
    await system.value(age, record.query_id, timedelta(days=100))
    assert await loop.run_once() >= 1
    assert (await system.user("GET", f"/v1/queries/{record.query_id}")).status_code == 404


async def test_metrics_count_queries_by_outcome(site: QuerySystem) -> None:
    await site.rows("select 1")
    headers = {"Authorization": f"Bearer {site.system.admin_key}"}
    text = (await site.system.http.get(f"{site.url}/metrics", headers=headers)).text
    assert 'interlock_queries_total{outcome="Completed"}' in text
    assert "interlock_queries_running 0.0" in text
    assert (await site.system.http.get(f"{site.url}/metrics")).status_code == 401
    reader = KeyRequest(user="reader", role=Role.READER)
    granted_by = await site.system.kernel.access.principals.authenticate(site.system.admin_key)
    made = await site.system.kernel.access.principals.create_key(reader, site.system.org_id, granted_by=granted_by)
    headers = {"Authorization": f"Bearer {made.key}"}
    assert (await site.system.http.get(f"{site.url}/metrics", headers=headers)).status_code == 403
    assert (await site.system.http.get(f"{site.url}/healthz")).json()["status"] == "ok"


# Command line and Python client


@pytest.fixture
def terminal(site: QuerySystem, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", site.system.gateway_url)
    monkeypatch.setenv("INTERLOCK_QUERY_URL", site.url)
    monkeypatch.setenv("INTERLOCK_API_KEY", site.system.admin_key)
    return Terminal(site.system, capsys)


async def test_query_runs_from_the_command_line(terminal: Terminal, tmp_path: Path) -> None:
    said = await terminal("sql", "select block_number, miner from blocks where block_number < 2 order by 1")
    assert said.code == 0, said.err
    assert said.out.splitlines()[0].split() == ["block_number", "miner"]
    assert "2 rows" in said.out
    answer = await terminal.json("sql", "select count(*) from blocks", "--dataset", "chain/feed/blocks")
    assert answer["rows"] == [[30]]
    cut = await terminal("sql", "select a.miner from blocks a, blocks b")
    assert "truncated" in cut.out
    csv_text = await terminal("sql", "select a.miner from blocks a, blocks b", "--csv")
    assert len(csv_text.out.splitlines()) == 901
    file = tmp_path / "rows.arrow"
    assert (await terminal("sql", "select * from blocks", "--arrow", str(file))).code == 0
    assert pa.ipc.open_stream(file.read_bytes()).read_all().num_rows == 30
    refused = await terminal("sql", "select * from nowhere")
    assert refused.code == 1
    assert "nowhere" in refused.err
    full = await terminal("sql", "select * from blocks", "--arrow", "/dev/full")
    assert (full.code, "No space left" in full.err) == (1, True), full.err


async def test_exports_batch_queries_and_history_are_shown(terminal: Terminal) -> None:
    exported = await terminal("sql", "select * from blocks", "--export")
    assert "result.parquet" in exported.out
    batch = await terminal.json("sql", "select * from blocks", "--batch")
    shown = await terminal("sql", "--show", batch["query_id"])
    assert "Queued" in shown.out
    history = await terminal("sql", "--history", "--limit", "3")
    assert "Batched" in history.out
    assert "select * from blocks" in history.out
    tables = await terminal("sql", "--tables")
    assert "chain:feed:blocks" in tables.out
    described = await terminal("sql", "describe blocks")
    assert "block_number" in described.out
    for words in ([], [" "], ["select 1", "--csv", "--export"], ["select 1", "--batch", "--auto"]):
        assert (await terminal("sql", *words)).code == 2


async def test_attempt_queries_through_its_client(site: QuerySystem, claim: dict[str, Any]) -> None:
    fenced = Fence(UUID(claim["task_id"]), claim["attempt"], UUID(claim["lease_token"]))
    async with TaskClient(site.system.internal_url, claim["capability_token"], fenced, query_url=site.url) as task:
        reply = await task.query("select max(block_number) from blocks")
    assert bytes(reply.rows) == b"[[29]]"


# Relayed by the gateway


async def test_page_queries_through_the_gateway_with_its_session(
    site: QuerySystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(site.system.kernel.settings), "query_url", site.url)
    key = await reader_of(site.system)
    async with httpx.AsyncClient(base_url=site.system.gateway_url, timeout=30) as page:
        session = (await page.post("/v1/sign-in/key", json={"key": key})).json()
        body = {"sql": "select count(*) from blocks"}
        assert (await page.post("/v1/query", json=body)).json()["code"] == "csrf"
        headers = {"X-Interlock-CSRF": session["csrf"]}
        reply = await page.post("/v1/query", json=body, headers=headers)
        assert (reply.status_code, reply.json()["rows"]) == (200, [[30]])
        record = await site.record(reply.json()["query_id"])
        assert record["user"] == session["user"]
        for sql, code in (("select * from secrets", "invalid_query"), ("delete from blocks", "invalid_query")):
            refused = await page.post("/v1/query", json={"sql": sql}, headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (400, code)
        csv = await page.post("/v1/query", json=body | {"format": "csv"}, headers=headers)
        assert (csv.status_code, csv.json()["code"]) == (400, "json_only")


async def test_gateway_reports_a_query_service_that_is_away(site: QuerySystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(site.system.kernel.settings), "query_url", "http://127.0.0.1:9")
    reply = await site.system.user("POST", "/v1/query", json={"sql": "select 1"})
    assert (reply.status_code, reply.json()["code"]) == (503, "unavailable")
