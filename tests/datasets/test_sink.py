"""Published batches become rows: each batch once, completely or not at all, for the publishing org."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interlock.apps.doctor_checks import stores
from interlock.apps.sink import sink
from interlock.clock import ManualClock
from interlock.settings import BUFFER_QUEUE
from tests.cli.test_cli import Terminal
from tests.conftest import copied
from tests.support.buffered_datasets import Dataset, Depot, depot, lines, row, write
from tests.support.datasets import claim_of, stranger
from tests.support.system import fence


@pytest.fixture(scope="module")
async def site(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Depot]:
    async with (
        copied(postgres_url, template) as url,
        depot(postgres_url, url, tmp_path_factory.mktemp("sink"), sink_batch_limit_bytes=200_000) as made,
    ):
        yield made


@pytest.fixture(scope="module")
async def first_wins(site: Depot) -> Dataset:
    return await site.deploy("first")


@pytest.fixture
async def dataset(site: Depot) -> Dataset:
    return await site.deploy(f"d{uuid4().hex[:8]}")


@pytest.fixture
async def replacing(site: Depot) -> Dataset:
    return await site.deploy(f"r{uuid4().hex[:8]}", on_conflict="update")


WHOLE = {
    "id": 1,
    "name": 'a "quoted", text\nof two lines',
    "small": -32768,
    "exact": "12345678901234567890123456789012.1234",
    "ratio": 1.5,
    "good": True,
    "day": "2024-02-29",
    "at": "2024-02-29T12:00:00.000001+02:00",
    "local": "2024-02-29T12:00:00",
    "raw": "0x00ff",
    "must": 7,
}
STORED = {
    "id": 1,
    "name": 'a "quoted", text\nof two lines',
    "small": -32768,
    "exact": Decimal("12345678901234567890123456789012.1234"),
    "ratio": 1.5,
    "good": True,
    "day": date(2024, 2, 29),
    "at": datetime(2024, 2, 29, 10, 0, 0, 1, tzinfo=UTC),
    "local": datetime(2024, 2, 29, 12, 0, 0),  # noqa: DTZ001 - the column stores timestamps without a zone
    "raw": b"\x00\xff",
    "must": 7,
}


async def test_json_rows_are_stored_with_their_types_and_org(site: Depot, dataset: Dataset) -> None:
    publish_id = await dataset.publish([WHOLE, row(2), row(3, name="", exact=4)])
    await site.drain()
    first, second, third = await dataset.rows()
    assert {name: first[name] for name in STORED} == STORED
    assert (second["name"], third["name"], third["exact"]) == (None, "", Decimal(4))
    assert {(each["org_id"], str(each["_publish_id"]), each["_batch"]) for each in (first, second, third)} == {
        (site.system.org_id, publish_id, 1)
    }
    view = await site.buffer(publish_id)
    assert (view["status"], view["batch"], view["rows"], view["refusal"]) == ("Loaded", 1, 3, None)
    assert await dataset.events() == [1]
    assert await site.system.kernel.tasks.queue.depth(BUFFER_QUEUE) == 0


def parquet(rows: list[dict[str, Any]], **types: Any) -> bytes:
    table = pa.Table.from_pylist(rows)
    for name, kind in types.items():
        table = table.set_column(table.column_names.index(name), name, table.column(name).cast(kind))
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


async def test_parquet_rows_equal_json_rows(site: Depot, dataset: Dataset) -> None:
    wide = {"small": pa.int64(), "at": pa.timestamp("ns", "Europe/Paris"), "name": pa.large_string()}
    await dataset.publish(parquet([STORED, {"id": 2, "must": 2}], **wide), "a.parquet", 2)
    await site.drain()
    stored, sparse = await dataset.rows()
    assert {name: stored[name] for name in STORED} == STORED
    assert (sparse["must"], sparse["name"], sparse["raw"]) == (2, None, None)


async def test_reader_receives_the_batches_of_its_event(site: Depot, dataset: Dataset) -> None:
    for number in (1, 2):
        await dataset.publish([row(number)])
        await site.drain()
    await site.system.settle()
    task = await site.system.value(
        "select t.payload from interlock.tasks t join interlock.jobs j on j.job_id = t.job_id"
        " where j.dag_name = $1 and j.name = 'read'",
        dataset.dag,
    )
    assert json.loads(task)["start"] == 0
    assert json.loads(task)["end"] >= 1


async def test_waiting_batches_are_loaded_together_in_publishing_order(site: Depot, dataset: Dataset) -> None:
    ids = [await dataset.publish([row(number), row(number + 100)]) for number in range(20)]
    assert await site.pass_of() == 20
    stored = await dataset.rows("id, _publish_id, _batch")
    assert len(stored) == 40
    assert {(str(one["_publish_id"]), one["_batch"]) for one in stored} == {(id_, n) for n, id_ in enumerate(ids, 1)}
    assert await dataset.events() == list(range(1, 21))
    same = await site.data.fetchval(f"select count(distinct xmin::text) from {dataset.table}")
    assert same == 1, "one transaction"


# Keys


async def test_on_conflict_nothing_keeps_the_first_row_of_a_key(site: Depot, dataset: Dataset) -> None:
    await dataset.publish([row(1, name="first")])
    await site.drain()
    await dataset.publish([row(1, name="second"), row(2, name="new")])
    await site.drain()
    assert [(one["id"], one["name"]) for one in await dataset.rows()] == [(1, "first"), (2, "new")]


async def test_on_conflict_update_keeps_the_last_published_row(site: Depot, replacing: Dataset) -> None:
    claim = await claim_of(site.system, replacing.dag, "produce")
    for number, names in enumerate([["a", "b"], ["c"], ["d"]]):
        await replacing.published(claim, [row(1, name=name) for name in names], f"{number}.jsonl")
    await site.system.value("update interlock.queue_messages set visible_at = visible_at - interval '1 day'"
                            " where body ->> 'batch_uri' like '%/2.jsonl'")  # fmt: skip
    await site.system.value("update interlock.queue_messages set visible_at = visible_at + interval '1 hour'"
                            " where body ->> 'batch_uri' not like '%/2.jsonl'")  # fmt: skip
    assert await site.pass_of() == 1, "the newest comes first"
    await site.system.value("update interlock.queue_messages set visible_at = interlock.clock()")
    await site.drain()
    assert [(one["id"], one["name"]) for one in await replacing.rows()] == [(1, "d")]
    assert await replacing.events() == [1, 2, 3]


async def test_repeated_key_in_a_batch_is_refused_with_on_conflict_nothing(site: Depot, dataset: Dataset) -> None:
    publish_id = await dataset.publish([row(1), row(2), row(1)])
    await site.drain()
    refusal = (await site.buffer(publish_id))["refusal"]
    assert refusal["rows"] == [{"line": 3, "reason": "it repeats the unique_key of line 1"}]


# Bad batches

ROWS = [row(1), row(2)]
BAD: list[tuple[str, bytes | None, str, list[tuple[int, str]]]] = [
    ("no.jsonl", None, "missing", []),
    ("text.jsonl", lines(ROWS) + b'{"id": 3, "must": 3, "name": 5}\n', "bad_rows", [(3, "'name' is a number")]),
    ("range.jsonl", b'{"id": 1, "must": 2147483648}\n', "bad_rows", [(1, "'must' has a value that int")]),
    ("null.jsonl", b'{"id": 1}\n{"id": null, "must": 1}\n', "bad_rows", [(1, "'must' is null"), (2, "'id' is null")]),
    ("more.jsonl", b'{"id": 1, "must": 1, "other": 1}\n', "bad_rows", [(1, "'other' is not declared")]),
    (
        "org.jsonl",
        b'{"id": 1, "must": 1, "org_id": "00000000-0000-0000-0000-000000000000"}\n',
        "bad_rows",
        [(1, "'org_id' is not declared")],
    ),
    ("own.jsonl", b'{"id": 1, "must": 1, "_batch": 1}\n', "bad_rows", [(1, "'_batch' is not declared")]),
    ("digits.jsonl", b'{"id": 1, "must": 1, "exact": "1.23456"}\n', "bad_rows", [(1, "cannot hold")]),
    ("hex.jsonl", b'{"id": 1, "must": 1, "raw": "0x0"}\n', "bad_rows", [(1, "'raw' has a value that binary")]),
    ("day.jsonl", b'{"id": 1, "must": 1, "day": "2023-02-29"}\n', "bad_rows", [(1, "'day' has a value that date")]),
    ("zone.jsonl", b'{"id": 1, "must": 1, "at": "2023-01-01T00:00:00"}\n', "bad_rows", [(1, "'at' has a value")]),
    ("nan.jsonl", b'{"id": 1, "must": 1, "ratio": NaN}\n', "bad_rows", [(1, "is not JSON")]),
    ("nul.jsonl", b'{"id": 1, "must": 1, "name": "a\\u0000"}\n', "bad_rows", [(1, "NUL character")]),
    ("twice.jsonl", b'{"id": 1, "must": 1, "must": 1}\n', "bad_rows", [(1, "occurs twice")]),
    ("two.jsonl", b'{"id": 1, "must": 1}{"id": 2, "must": 1}\n', "bad_rows", [(1, "JSON")]),
    ("list.jsonl", b"[1]\n", "bad_rows", [(1, "is not a JSON object")]),
    ("cut.jsonl", lines(ROWS) + b'{"id": 3, "mu', "bad_rows", [(3, "is not JSON")]),
    ("latin.jsonl", b'{"id": 1, "must": 1, "name": "\xe4"}\n', "bad_rows", [(1, "JSON")]),
    ("wide.jsonl", lines(ROWS).decode().encode("utf-16"), "bad_encoding", []),
    ("zip.jsonl", b"\x1f\x8b\x08\x00", "bad_encoding", []),
    ("called.jsonl", b"PAR1 and PAR1", "bad_encoding", []),
    ("none.parquet", lines(ROWS), "truncated", []),
    ("cut.parquet", parquet(ROWS)[:-9], "truncated", []),
    ("broken.parquet", b"PAR1" + b"\x00" * 64 + b"PAR1", "truncated", []),
    ("kind.parquet", parquet([{"id": "1", "must": 1}]), "bad_columns", []),
    ("more.parquet", parquet([{"id": 1, "must": 1, "org_id": "x"}]), "bad_columns", []),
    ("null.parquet", parquet([*ROWS, {"id": 3, "must": None}]), "bad_rows", [(3, "'must' is null")]),
    ("range.parquet", parquet([row(1, small=1), row(2, small=2**15)]), "bad_rows", [(2, "'small' has a value")]),
    ("large.jsonl", b" " * 200_001, "too_large", []),
    ("bomb.parquet", parquet([row(n, name="x" * 50_000) for n in range(2_000)]), "too_large", []),
]


@pytest.fixture(scope="module")
async def refused(site: Depot, first_wins: Dataset) -> dict[str, dict[str, Any]]:
    """Publishes all bad batches in one pass, among good ones."""
    await first_wins.publish([row(1_000)])
    counts = {"kind.parquet": 1, "more.parquet": 1, "null.parquet": 3, "range.parquet": 2, "bomb.parquet": 2_000}
    ids = {name: await first_wins.publish(content, name, counts.get(name)) for name, content, _, _ in BAD}
    await first_wins.publish([row(1_001)])
    await site.drain()
    return {name: await site.buffer(publish_id) for name, publish_id in ids.items()}


@pytest.mark.parametrize(("name", "code", "bad"), [(name, code, bad) for name, _, code, bad in BAD])
def test_bad_batch_is_refused_with_lines_and_reasons(
    refused: dict[str, dict[str, Any]], name: str, code: str, bad: list[tuple[int, str]]
) -> None:
    view = refused[name]
    assert (view["status"], view["refusal"]["code"]) == ("Refused", code)
    found = view["refusal"]["rows"]
    assert [one["line"] for one in found] == [line for line, _ in bad]
    for one, (_, reason) in zip(found, bad, strict=True):
        assert reason in one["reason"]
    assert view["refusal"]["bad_rows"] == len(bad)


async def test_bad_batches_do_not_block_good_ones(first_wins: Dataset, refused: dict[str, dict[str, Any]]) -> None:
    assert [one["id"] for one in await first_wins.rows("id")] == [1_000, 1_001]
    assert await first_wins.events() == [1, 2]


async def test_batch_above_the_size_limit_is_refused(site: Depot, dataset: Dataset) -> None:
    publish_id = await dataset.publish(None, count=1)
    uri = (await site.buffer(publish_id))["batch_uri"]
    write(uri, b"")
    os.truncate(uri.removeprefix("file://"), 1 << 30)  # sparse: it takes no space on the disk
    await site.drain()
    assert (await site.buffer(publish_id))["refusal"]["code"] == "too_large"


async def test_byte_order_mark_crlf_and_blank_lines_are_accepted(site: Depot, dataset: Dataset) -> None:
    content = b'\xef\xbb\xbf{"id": 1, "must": 1}\r\n\r\n  \n{"id": 2, "must": 2}\r\n{"id": 3, "must": 3}'
    await dataset.publish(content)
    empty = await dataset.publish(b"", "empty.jsonl")
    bad = await dataset.publish(b'\n\n{"id": 4, "must": 4}\n\n{"id": 5}\n', "bad.jsonl")
    await site.drain()
    assert [one["id"] for one in await dataset.rows("id")] == [1, 2, 3]
    assert (await site.buffer(empty))["rows"] == 0
    assert [one["line"] for one in (await site.buffer(bad))["refusal"]["rows"]] == [5]


async def test_batch_with_a_wrong_record_count_is_refused(site: Depot, dataset: Dataset) -> None:
    publish_id = await dataset.publish([row(1), row(2)], count=3)
    await site.drain()
    assert (await site.buffer(publish_id))["refusal"]["code"] == "record_count"
    assert await dataset.rows("id") == []


async def test_first_hundred_bad_rows_are_named_and_all_are_counted(site: Depot, dataset: Dataset) -> None:
    publish_id = await dataset.publish(lines([row(n, small="x") for n in range(1_500)]))
    await site.drain()
    refusal = (await site.buffer(publish_id))["refusal"]
    assert (refusal["bad_rows"], [one["line"] for one in refusal["rows"]]) == (1_500, list(range(1, 101)))
    listed = (await site.system.user("GET", "/v1/buffers?status=Refused&limit=1")).json()
    assert (listed["buffers"][0]["publish_id"], listed["buffers"][0]["refusal"]["rows"]) == (publish_id, [])
    assert listed["buffers"][0]["dataset"] == f"{dataset.dag}:produce:rows"


async def test_batch_refused_by_the_database_does_not_affect_others(site: Depot) -> None:
    dataset = await site.deploy("longkeys", columns="id: bigint, name: string", key="id, name")
    noise = "".join(chr(0x4E00 + n * 7919 % 20000) for n in range(4_000))
    bad = await dataset.publish([{"id": 1, "name": noise}])
    good = await dataset.publish([{"id": 2, "name": "short"}])
    await site.drain()
    assert (await site.buffer(bad))["refusal"]["code"] == "refused_by_database"
    assert (await site.buffer(good))["status"] == "Loaded"


async def test_batch_for_an_unbuffered_dataset_is_refused(site: Depot, dataset: Dataset) -> None:
    publish_id = await dataset.publish([row(1)])
    await site.system.value(
        "update interlock.dataset_versions set storage = 'parquet' where dataset_version = $1", dataset.version
    )
    await site.drain()
    assert (await site.buffer(publish_id))["refusal"]["code"] == "not_buffered"


# Redrive


async def test_refused_batch_is_loaded_after_a_fix_and_a_redrive(site: Depot, dataset: Dataset) -> None:
    publish_id = await dataset.publish(None, count=1)
    await site.drain()
    view = await site.buffer(publish_id)
    write(view["batch_uri"], lines([row(1)]))
    reply = await site.system.user("POST", f"/v1/buffers/{publish_id}/redrive")
    assert (reply.status_code, reply.json()["status"], reply.json()["redrives"]) == (200, "Pending", 1)
    again = await site.system.user("POST", f"/v1/buffers/{publish_id}/redrive")
    assert (again.status_code, again.json()["code"]) == (409, "not_redrivable")
    await site.drain()
    assert (await site.buffer(publish_id))["status"] == "Loaded"
    assert len(await dataset.rows()) == 1


async def test_other_org_sees_and_redrives_no_batch(site: Depot, dataset: Dataset) -> None:
    publish_id = await dataset.publish(None)
    await site.drain()
    other = await stranger(site.system)
    for method, path in (("GET", ""), ("POST", "/redrive")):
        assert (await site.system.user(method, f"/v1/buffers/{publish_id}{path}", key=other)).status_code == 404
    assert (await site.system.user("GET", "/v1/buffers", key=other)).json() == {"buffers": [], "next_cursor": None}


async def test_pages_lead_through_all_batches_newest_first(site: Depot, dataset: Dataset) -> None:
    ids = [await dataset.publish([row(number)]) for number in range(3)]
    first = (await site.system.user("GET", "/v1/buffers?limit=2&status=Pending")).json()
    rest = (await site.system.user("GET", f"/v1/buffers?limit=2&status=Pending&cursor={first['next_cursor']}")).json()
    assert [one["publish_id"] for one in first["buffers"] + rest["buffers"]] == ids[::-1]
    assert (await site.system.user("GET", "/v1/buffers?cursor=x")).status_code == 400
    await site.drain()


# Messages are only wake-ups


async def test_forged_repeated_and_broken_messages_are_harmless(site: Depot, dataset: Dataset) -> None:
    publish_id = await dataset.publish([row(1)])
    body = await site.system.value("select body::text from interlock.queue_messages where dedupe_key = $1", publish_id)
    forged = json.loads(body) | {"org_id": str(uuid4()), "dataset_version": str(uuid4()), "record_count": 7}
    unknown = json.loads(body) | {"batch_uri": "file:///etc/passwd"}
    for each in (body, json.dumps(forged), json.dumps(unknown), "{}", "[1]", '"x"'):
        await site.system.value(
            "insert into interlock.queue_messages (queue, body) values ($1, $2::text::json)", BUFFER_QUEUE, each
        )
    await site.drain()
    await site.system.value(
        "insert into interlock.queue_messages (queue, body) values ($1, $2::text::json)", BUFFER_QUEUE, body
    )
    await site.drain()
    assert [(one["id"], one["org_id"]) for one in await dataset.rows()] == [(1, site.system.org_id)]
    assert await dataset.events() == [1]
    assert await site.system.value("select count(*) from interlock.queue_messages where queue = $1", BUFFER_QUEUE) == 0


async def test_two_sinks_that_load_the_same_batches_load_them_once(site: Depot, replacing: Dataset) -> None:
    for number in range(30):
        await replacing.publish([row(number % 5, name=str(number))])
    async with sink(site.system.kernel.settings, wait_seconds=0) as others:
        for _ in range(4):
            await site.visible()
            await asyncio.gather(site.pass_of(), others[0].run_once())
    await site.drain()
    assert [one["name"] for one in await replacing.rows()] == ["25", "26", "27", "28", "29"]
    assert sorted(await replacing.events()) == list(range(1, 31))


async def test_two_passes_of_one_sink_at_once_load_each_batch_once(
    site: Depot, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.datasets.buffers.sink._MESSAGES", 3)
    for number in range(6):
        await dataset.publish([row(number), row(100)])
    passes = [service for service in site.services if service.name == "sink"]
    assert await asyncio.gather(*(each.run_once() for each in passes)) == [3, 3]
    assert [one["id"] for one in await dataset.rows("id")] == [0, 1, 2, 3, 4, 5, 100]
    assert sorted(await dataset.events()) == [1, 2, 3, 4, 5, 6]
    assert await site.pass_of() == 0


async def test_large_batch_is_read_through_a_file(
    site: Depot, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.datasets.buffers.sink._TOGETHER_BYTES", 50)
    await dataset.publish([row(1)])
    await dataset.publish([row(number) for number in range(2, 10)])
    bad = await dataset.publish([*(row(number) for number in range(10, 20)), row(20, small="x")])
    await site.drain()
    assert [one["id"] for one in await dataset.rows("id")] == list(range(1, 10))
    assert [each["line"] for each in (await site.buffer(bad))["refusal"]["rows"]] == [11]


async def test_batch_that_grows_before_the_read_is_read_completely(
    site: Depot, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def was_small(*_: object) -> int:
        return 1

    monkeypatch.setattr("interlock.datasets.buffers.sink._TOGETHER_BYTES", 50)
    monkeypatch.setattr("interlock.datasets.buffers.sink.Sink._size", was_small)
    await dataset.publish([row(number) for number in range(10)])
    large = await dataset.publish([row(number, name="x" * 200_000) for number in range(10, 12)])
    await site.drain()
    assert [one["id"] for one in await dataset.rows("id")] == list(range(10))
    assert (await site.buffer(large))["refusal"]["code"] == "too_large"


async def test_lost_message_of_a_batch_is_sent_again(site: Depot, dataset: Dataset) -> None:
    publish_id = await dataset.publish([row(1)])
    await site.system.value("delete from interlock.queue_messages where dedupe_key = $1", publish_id)
    await site.system.value(
        "update interlock.buffer_publishes set published_at = published_at - interval '1 hour' where publish_id = $1",
        publish_id,
    )
    assert await site.pass_of("buffer_reconciler") == 1
    await site.drain()
    assert (await site.buffer(publish_id))["status"] == "Loaded"
    assert await site.pass_of("buffer_reconciler") == 0


async def test_batch_that_crashes_every_sink_is_given_up(site: Depot, dataset: Dataset) -> None:
    publish_id = await dataset.publish([row(1)])
    await site.system.value(
        "update interlock.queue_messages set dead_at = interlock.clock() where dedupe_key = $1", publish_id
    )
    await site.system.value(
        "update interlock.buffer_publishes set published_at = published_at - interval '1 hour' where publish_id = $1",
        publish_id,
    )
    assert await site.pass_of("buffer_reconciler") == 1
    view = await site.buffer(publish_id)
    assert (view["status"], view["refusal"]["code"]) == ("Failed", "too_many_receives")
    await site.system.user("POST", f"/v1/buffers/{publish_id}/redrive")
    await site.drain()
    assert (await site.buffer(publish_id))["status"] == "Loaded"


# Restrictions of attempts


async def test_attempt_may_not_emit_events_of_a_buffered_dataset(site: Depot, dataset: Dataset) -> None:
    claim = await claim_of(site.system, dataset.dag, "produce")
    grant = claim["task"]["outputs"][0]
    ref = {name: grant[name] for name in ("dataset_uuid", "dataset_version")}
    reply = await site.system.attempt(
        "/v1/task/events", claim["capability_token"], fence(claim) | {"events": [ref | {"cursor": 5}]}
    )
    assert (reply.status_code, reply.json()["code"]) == (409, "buffered_dataset")


# Tables


async def test_dropped_table_is_created_again(site: Depot, dataset: Dataset) -> None:
    await dataset.publish([row(1)])
    await site.drain()
    await site.data.execute(f"drop table {dataset.table}")
    await dataset.publish([row(2)])
    await site.drain()
    assert [one["id"] for one in await dataset.rows()] == [2]
    assert await dataset.events() == [1, 2]


async def test_new_declared_column_is_added_to_the_table(site: Depot, dataset: Dataset) -> None:
    await dataset.publish([row(1)])
    await site.drain()
    await site.system.value(
        "update interlock.dataset_versions set schema = jsonb_insert(schema::jsonb, '{columns,0}',"
        """ '{"name": "joined", "type": "string", "nullable": true}') where dataset_version = $1""",
        dataset.version,
    )
    await dataset.publish([row(2, joined="here")])
    await site.drain()
    assert [(one["id"], one["joined"]) for one in await dataset.rows()] == [(1, None), (2, "here")]


# Expired files


async def test_expired_batch_files_are_deleted(
    postgres_url: str, state_url: str, tmp_path: Path, clock: ManualClock
) -> None:
    async with depot(postgres_url, state_url, tmp_path, clock, buffer_keep_seconds=3600) as site:
        dataset = await site.deploy("swept")
        loaded, refused = await dataset.publish([row(1)]), await dataset.publish(b"x", "bad.jsonl")
        await site.drain()
        paths = {one: Path((await site.buffer(one))["batch_uri"].removeprefix("file://")) for one in (loaded, refused)}
        assert await site.pass_of("buffer_sweep") == 0
        clock.advance(3601)
        assert await site.pass_of("buffer_sweep") == 1
        assert [path.exists() for path in paths.values()] == [False, True]
        assert await site.data.fetchval("select count(*) from datasets.sink_commits") == 0
        clock.advance(14 * 86_400)
        assert await site.pass_of("buffer_sweep") == 1
        assert not paths[refused].exists()
        gone = await site.system.user("POST", f"/v1/buffers/{refused}/redrive")
        assert (gone.status_code, gone.json()["code"]) == (409, "batch_swept")
        assert await site.pass_of("buffer_sweep") == 0


async def test_staging_tables_are_dropped_when_no_batch_needs_them(site: Depot, dataset: Dataset) -> None:
    publish_id = await dataset.publish([row(1)])
    waited_for, left = uuid4(), uuid4()
    await site.drain()
    for task_id in (waited_for, left):
        await site.data.execute(f"create table datasets.staging_{task_id.hex}_1 ()")
    loading = "update interlock.buffer_publishes set status = $3, load_task = $2 where publish_id = $1"
    await site.system.value(loading, UUID(publish_id), waited_for, "Loading")
    staged = "select tablename from pg_tables where tablename like 'staging%'"
    await site.pass_of("buffer_sweep")
    assert await site.data.fetchval(staged) == f"staging_{waited_for.hex}_1"
    await site.system.value(loading, UUID(publish_id), waited_for, "Loaded")
    await site.pass_of("buffer_sweep")
    assert await site.data.fetchval(staged) is None


async def test_unpublished_files_of_an_attempt_are_swept(
    postgres_url: str, state_url: str, tmp_path: Path, clock: ManualClock
) -> None:
    async with depot(
        postgres_url, state_url, tmp_path, clock, buffer_keep_seconds=3600, sweep_grace_seconds=10
    ) as site:
        dataset = await site.deploy("left")
        claim = await claim_of(site.system, "left", "produce")
        body = {"items": [fence(claim)]}
        assert (await site.system.worker("POST", "/internal/task-data", json=body)).status_code == 200
        await dataset.published(claim, [row(1)])
        left = write(claim["task"]["outputs"][0]["buffer_prefix"] + "never.jsonl", b"")
        clock.advance(11)
        await site.system.pass_of("sweep")
        assert left.exists(), "the attempt still runs"
        await site.drain()
        assert (await site.system.complete(claim)).status_code == 200
        clock.advance(61)
        await site.system.pass_of("sweep")
        assert left.exists(), "the published batch is kept for a while"
        clock.advance(3601)
        await site.pass_of("buffer_sweep")
        await site.system.pass_of("sweep")
        assert not left.exists()


# Command line


@pytest.fixture
def terminal(site: Depot, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", site.system.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", site.system.admin_key)
    return Terminal(site.system, capsys)


async def test_batches_are_listed_shown_and_redriven_from_the_command_line(
    site: Depot, dataset: Dataset, terminal: Terminal
) -> None:
    publish_id = await dataset.publish([row(1), row(2, small="x")])
    await site.drain()
    assert publish_id in "".join((await terminal("buffer", "list")).out.split())
    listed = await terminal.json("buffer", "list", "--status", "Refused", "--limit", "1")
    assert listed["buffers"][0]["publish_id"] == publish_id
    printed = await terminal("buffer", "show", publish_id)
    assert "column 'small' is text, but declared as smallint" in " ".join(printed.out.split())
    assert (await terminal.json("buffer", "redrive", publish_id))["status"] == "Pending"
    again = await terminal("buffer", "redrive", str(uuid4()))
    assert (again.code, "There is no published batch" in again.err) == (1, True)
    await site.drain()


async def test_doctor_reports_batches_that_are_not_loaded(site: Depot, dataset: Dataset) -> None:
    settings = site.system.kernel.settings
    assert [one.result for one in await stores(settings) if one.check == "sink"] == ["ok"]
    publish_id = await dataset.publish([row(1)])
    await site.system.value(
        "update interlock.buffer_publishes set published_at = published_at - interval '1 hour' where publish_id = $1",
        publish_id,
    )
    (found,) = [one for one in await stores(settings) if one.check == "sink"]
    assert (found.result, found.detail) == ("warn", "1 published batches have waited for more than 5 minutes")
    await site.drain()
