"""The relations that a user may query: for lists, `show tables`, `describe`, and suggestions for an unknown name."""

from __future__ import annotations

import difflib
import re
from typing import Any, Final, NamedTuple

import msgspec

from interlock.access.principals import Principal
from interlock.errors import InvalidQuery
from interlock.http.cursors import FIRST, next_cursor, uuid_cursor
from interlock.schemas import DatasetSchema
from interlock.stores.postgres import Database, Row, queries
from interlock.wire.queries import QueryColumn, RelationColumn, RelationPage, RelationView

_sql = queries(__name__, "queries")
_schema = msgspec.json.Decoder(DatasetSchema)

MAX_SHOWN: Final = 1_000
"""Relations that `show tables` lists and suggestions are taken from."""
_LISTED: Final = 20
_NEAREST: Final = 3
_PLAIN: Final = re.compile(r"[a-z_][a-z0-9_]*")
_KEYWORDS: Final = """
    all analyse analyze and any array as asc asymmetric both case cast check collate column constraint create default
    deferrable desc describe distinct do else end except false fetch for foreign from grant group having in initially
    intersect into lateral leading limit not null offset on only or order pivot placing primary qualify references
    returning select show some summarize symmetric table then to trailing true union unique unpivot using variadic when
    where window with
"""
_RESERVED: Final = frozenset(_KEYWORDS.split())
"""Words that DuckDB does not accept as a name without quotes."""
_SHOW: Final = re.compile(r"\s*show\s+(?:all\s+)?tables\s*;?\s*", re.IGNORECASE)
_DESCRIBE: Final = re.compile(
    r'\s*(?:describe|desc)\s+(?:table\s+)?(?:"((?:[^"]|"")+)"|([^\s";]+))\s*;?\s*', re.IGNORECASE
)


class Answer(NamedTuple):
    """Rows that come from the catalogue instead of a dataset."""

    columns: list[QueryColumn]
    rows: list[list[Any]]
    truncated: bool = False


class Catalogue:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, caller: Principal, cursor: str | None, limit: int) -> RelationPage:
        async with self._database.connection() as connection:
            rows = await _sql.readable_relations(
                connection,
                org_id=caller.org_id,
                role=caller.role.value,
                after=uuid_cursor(cursor, FIRST),
                limit=limit,
            )
        return RelationPage(
            relations=[_relation(row) for row in rows], next_cursor=next_cursor(rows, limit, "dataset_uuid")
        )

    async def tables(self, caller: Principal) -> Answer:
        """Answers `show tables`."""
        page = await self.page(caller, None, MAX_SHOWN)
        found = sorted(page.relations, key=lambda each: (not each.published, each.name))
        columns = [QueryColumn("name", "VARCHAR"), QueryColumn("dataset", "VARCHAR"), QueryColumn("columns", "VARCHAR")]
        rows = [[each.sql_name, each.dataset, ", ".join(c.name for c in each.columns)] for each in found]
        return Answer(columns, rows, truncated=page.next_cursor is not None)

    async def unknown(self, caller: Principal, unknown: str) -> InvalidQuery:
        """Returns the error for an unknown relation with the nearest names, and the names that there are."""
        page = await self.page(caller, None, MAX_SHOWN)
        names = {each.name: each.sql_name for each in page.relations}
        by_part = {part.lower(): name for name in names for part in (*name.split(":"), name)}
        close = difflib.get_close_matches(unknown.lower(), by_part, n=2 * _NEAREST, cutoff=0.6)
        near = list(dict.fromkeys(names[by_part[part]] for part in close))[:_NEAREST]
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        if not names:
            there = " No dataset of this org has a readable version yet: `interlock dag deploy` creates datasets."
        else:
            shown = sorted(names.values())
            more = f", and {'more' if page.next_cursor else len(shown) - _LISTED}: `show tables` lists them"
            there = f" There are: {', '.join(shown[:_LISTED])}{more if len(shown) > _LISTED else ''}."
        return InvalidQuery(f"{unknown[:80]!r} is no dataset that you can query.{hint}{there}")


def shows_tables(sql: str) -> bool:
    return _SHOW.fullmatch(sql) is not None


def described(sql: str) -> str | None:
    """Returns the name in `describe NAME`, or None for any other statement."""
    found = _DESCRIBE.fullmatch(sql)
    if found is None:
        return None
    return found[1].replace('""', '"') if found[1] else str(found[2])


def description(schema: DatasetSchema | None) -> Answer:
    """Answers `describe NAME`."""
    columns = [QueryColumn("column", "VARCHAR"), QueryColumn("type", "VARCHAR"), QueryColumn("nullable", "BOOLEAN")]
    return Answer(columns, [[each.name, each.type, each.nullable] for each in (schema.columns if schema else [])])


def _relation(row: Row) -> RelationView:
    dataset = f"{row['dag_name']}:{row['job_name']}:{row['output_name']}"
    name = row["names"][0] if row["names"] else dataset
    schema = _schema.decode(row["schema"]) if row["schema"] else None
    return RelationView(
        name=name,
        sql_name=_in_sql(name),
        dataset=dataset,
        dataset_uuid=row["dataset_uuid"],
        published=bool(row["names"]),
        storage=row["storage"],
        columns=[RelationColumn(each.name, each.type, each.nullable) for each in (schema.columns if schema else [])],
    )


def _in_sql(name: str) -> str:
    plain = _PLAIN.fullmatch(name) is not None and name not in _RESERVED
    return name if plain else '"' + name.replace('"', '""') + '"'
