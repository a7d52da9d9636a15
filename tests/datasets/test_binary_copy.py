"""Rows encoded for binary COPY: Postgres returns the same rows, for any values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import cycle, islice
from typing import Any
from unittest.mock import patch

import asyncpg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from interlock.datasets.buffers import binary_copy
from interlock.datasets.buffers.shape import arrow_type
from interlock.schemas import table_type

DECIMALS = ["decimal(38,4)", "decimal(38,38)", "decimal(38,0)", "decimal(19,7)", "decimal(4,4)", "decimal(1,0)"]


def decimals(written: str) -> st.SearchStrategy[Decimal]:
    kind = arrow_type(written)
    limit = 10**kind.precision - 1
    return st.integers(-limit, limit).map(lambda number: Decimal((number < 0, _digits(number), -kind.scale)))


def _digits(number: int) -> tuple[int, ...]:
    return tuple(int(digit) for digit in str(abs(number)))


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "int": st.integers(-(2**31), 2**31 - 1),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "tinyint": st.integers(-128, 127),
    "double": st.floats(allow_nan=False),
    "float": st.floats(allow_nan=False, width=32),
    "boolean": st.booleans(),
    "date": st.dates(),
    "timestamp": st.datetimes(timezones=st.just(UTC)),
    "timestamp_ntz": st.datetimes(),
    "binary": st.binary(max_size=9),
    "string": st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=9),
} | {written: decimals(written) for written in DECIMALS}
EDGES: dict[str, list[Any]] = {
    "date": [date(1, 1, 1), date(1999, 12, 31), date(2000, 1, 1), date(9999, 12, 31)],
    "timestamp": [
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(2000, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    ],
    "string": ["", "\\N", "\\.", '"', "\r\n", "\x7f", "\u2028", "\U0001f600"],
    "binary": [b"", b"\x00", b"\xff\xff"],
    "double": [0.0, -0.0, float("inf"), 5e-324],
    "decimal(38,4)": [Decimal("-0.0001"), Decimal("9" * 34 + ".9999"), Decimal("-" + "9" * 34 + ".9999"), Decimal(0)],
    "decimal(38,38)": [Decimal("-0." + "9" * 38), Decimal("1e-38")],
    "bigint": [-(2**63), 2**63 - 1],
}

columns = st.sampled_from(sorted(VALUES)).flatmap(
    lambda written: st.tuples(st.just(written), st.lists(st.none() | VALUES[written], max_size=12))
)


@pytest.fixture(scope="module")
async def loop_of_tests() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


@pytest.fixture(scope="module")
async def server(postgres_url: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(postgres_url, statement_cache_size=0)
    yield connection
    await connection.close()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=st.lists(columns, min_size=1, max_size=5), chunks=st.integers(1, 3), skipped=st.integers(0, 2))
@example(made=[(written, [*edges, None, *edges]) for written, edges in EDGES.items()], chunks=1, skipped=1)
@example(made=list(EDGES.items()), chunks=2, skipped=0)
def test_copied_rows_equal_read_rows(
    server: asyncpg.Connection[Any],
    loop_of_tests: asyncio.AbstractEventLoop,
    made: list[tuple[str, list[Any]]],
    chunks: int,
    skipped: int,
) -> None:
    rows = max(len(values) for _, values in made)
    filled = [list(islice(cycle(values or [None]), rows)) for _, values in made]
    types = [written for written, _ in made]
    whole = pa.table({f"c{at}": pa.array(filled[at], arrow_type(written)) for at, written in enumerate(types)})
    cuts = [whole.slice(at * rows // chunks, (at + 1) * rows // chunks - at * rows // chunks) for at in range(chunks)]
    table = pa.concat_tables(cuts).slice(skipped)
    expected = [tuple(each.values()) for each in whole.slice(skipped).to_pylist()]
    # The limit allows a row or two per part, so that there is more than one part.
    with patch.object(binary_copy, "_BYTES_AT_ONCE", 100):
        found = loop_of_tests.run_until_complete(_copied(server, types, table))
    assert found == [tuple(map(_exactly, each)) for each in expected]


def _exactly(value: Any) -> Any:
    """Keeps the sign of float zeros, which `==` ignores."""
    return repr(value) if isinstance(value, float) else value


async def _copied(server: asyncpg.Connection[Any], types: list[str], table: pa.Table) -> list[Any]:
    async with server.transaction():
        listed = ", ".join(f"c{at} {table_type(written)}" for at, written in enumerate(types))
        await server.execute(
            f"create temp table copied (n bigint generated always as identity, {listed}) on commit drop"
        )
        await server.copy_to_table(
            "copied", columns=table.column_names, source=binary_copy.binary(table), format="binary"
        )
        rows = await server.fetch(f"select {', '.join(table.column_names)} from copied order by n")
    return [tuple(map(_exactly, row.values())) for row in rows]
