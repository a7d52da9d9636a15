"""Statements touch a few rows per item in a database of a million tasks, and never scan history."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from interlock.stores.postgres import Connection, Database
from tests.conftest import copied
from tests.plans import (
    buffers,
    bulk_operations,
    bundles,
    bus_operations,
    bus_path,
    bus_registry,
    credentials,
    deploys,
    expectations,
    files,
    ingests,
    overview,
    pipelines,
    queries,
    registry,
    results,
    routes,
    sessions,
    webhooks,
)
from tests.plans.expectations import Bounded, Exempt, Live
from tests.plans.measurement import Touched, prepare, statements, touched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MILLION = 1_000_000
HERE = Path(__file__).parent
LITTLE = {"signing_keys", "workers", "run_deltas"}
"""Tables with a handful of rows, or emptied ten times a second: a full scan of them is cheap."""
STATEMENTS = {statement.key: statement for statement in statements()}
EXPECTED = (
    expectations.EXPECTED
    | registry.EXPECTED
    | deploys.EXPECTED
    | routes.EXPECTED
    | pipelines.EXPECTED
    | files.EXPECTED
    | credentials.EXPECTED
    | buffers.EXPECTED
    | bundles.EXPECTED
    | bus_path.EXPECTED
    | bus_registry.EXPECTED
    | queries.EXPECTED
    | webhooks.EXPECTED
    | results.EXPECTED
    | ingests.EXPECTED
    | bus_operations.EXPECTED
    | sessions.EXPECTED
    | bulk_operations.EXPECTED
    | overview.EXPECTED
)
CASES = {
    f"{key}-{number}" if len(cases) > 1 else key: (key, case)
    for key, cases in EXPECTED.items()
    for number, case in enumerate(cases)
    if not isinstance(case, Exempt)
}
STATES = ("grown", "analyzed")
"""A connection plans before there are rows, and plans again once tables have grown and once they were analyzed."""


@dataclass(frozen=True)
class Measured:
    """For each case: the measurement and its number of items, or the error that prevented it."""

    found: dict[str, tuple[Touched, int] | Exception]

    def of(self, name: str) -> tuple[Touched, int]:
        found = self.found[name]
        if isinstance(found, Exception):
            raise found
        return found


@asynccontextmanager
async def _seeded(url: str, mass: int) -> AsyncIterator[tuple[Database, asyncpg.Connection[asyncpg.Record]]]:
    """Yields a product connection that has planned every statement before there were rows, and a second connection."""
    beside = await asyncpg.connect(url, server_settings={"seed.mass": str(mass), "synchronous_commit": "off"})
    await beside.execute((HERE / "seed_names.sql").read_text())
    await beside.execute(_LEAVE_ALONE)
    database = await Database.open(url, size=1)
    async with database.connection() as connection:
        await connection.execute(f"set seed.mass = {mass}")
        for statement in STATEMENTS.values():
            await prepare(connection, statement)
    await beside.execute((HERE / "seed.sql").read_text())
    yield database, beside
    await beside.close()
    await database.close()


# Only the product's own effects are measured; autovacuum would interfere at arbitrary times.
_LEAVE_ALONE = """
do $$ declare name regclass; begin
    for name in select oid::regclass from pg_class where relnamespace = 'interlock'::regnamespace and relkind = 'r' loop
        execute format('alter table %s set (autovacuum_enabled = off)', name);
    end loop;
end $$
"""


async def _measured(database: Database) -> Measured:
    async with database.connection() as connection:
        return Measured({name: await _case(connection, *case) for name, case in CASES.items()})


async def _case(connection: Connection, key: str, case: Bounded | Live) -> tuple[Touched, int] | Exception:
    """Returns the error of a failing case, such as a timeout, so that only the case's own test fails."""
    try:
        return await touched(connection, STATEMENTS[key], case.arguments), await _items(connection, case)
    except Exception as error:
        return error


async def _items(connection: Connection, case: Bounded | Live) -> int:
    return case.items if isinstance(case, Bounded) else int(await connection.fetchval(case.count))


@pytest.fixture(scope="module")
async def large(postgres_url: str, template: str) -> AsyncIterator[dict[str, Measured]]:
    """Measurements by state of the plans."""
    async with copied(postgres_url, template) as url, _seeded(url, MILLION) as (database, beside):
        grown = await _measured(database)
        await beside.execute("analyze")
        yield {"grown": grown, "analyzed": await _measured(database)}


@pytest.fixture(scope="module")
async def small(postgres_url: str, template: str) -> AsyncIterator[Measured]:
    async with copied(postgres_url, template) as url, _seeded(url, 0) as (database, beside):
        await beside.execute("analyze")
        yield await _measured(database)


def test_every_statement_has_a_cost_limit() -> None:
    assert set(EXPECTED) == set(STATEMENTS)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("state", STATES)
def test_statement_touches_little_of_a_million_tasks(large: dict[str, Measured], state: str, name: str) -> None:
    _, case = CASES[name]
    found, items = large[state].of(name)
    assert found.scanned <= LITTLE, found.plan
    assert found.rows <= case.rows * items + 20, found.plan
    assert found.pages <= case.pages * items + 40, found.plan


@pytest.mark.parametrize("name", [name for name, (_, case) in CASES.items() if isinstance(case, Bounded)])
def test_statement_costs_about_the_same_in_an_empty_database(
    large: dict[str, Measured], small: Measured, name: str
) -> None:
    """Allows a level or two more of an index per item, but no more rows."""
    (much, items), (little, _) = large["analyzed"].of(name), small.of(name)
    assert much.pages <= 2 * little.pages + 3 * items + 40, f"{much.plan}\n{little.plan}"
