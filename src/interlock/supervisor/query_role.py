"""The role by which the query service reads tables of datasets in the embedded data database, and nothing else."""

from __future__ import annotations

import secrets
from importlib import resources
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg

from interlock.adapters.postgres import queries

ROLE: Final = "interlock_query"
_SCHEMAS: Final = ("follower_schema.sql", "sink_schema.sql")
"""What others keep beside the tables of datasets: made first, so that it does not become readable."""

_sql = queries("query_role", "data")


async def make_query_role(data_url: str) -> str:
    """Its password: a new one each time, kept nowhere."""
    password = secrets.token_urlsafe(32)
    connection = await asyncpg.connect(data_url, timeout=10)
    try:
        async with connection.transaction():
            await _sql.lock_schema(connection)
            for name in _SCHEMAS:
                await connection.execute((resources.files("interlock.sql") / "data" / name).read_text())
            await _sql.keep_password(connection, password=password)
            await _sql.make_role(connection)
    finally:
        await connection.close()
    return password


def as_role(url: str, password: str) -> str:
    """The same database, for the role."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{ROLE}:{quote(password, safe='')}@{place}"))
