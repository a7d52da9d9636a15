"""Resolves the names that a statement may read: inputs of a task, or datasets of an org. No other relation exists.

A task reads the versions in its capability token, under the names of its inputs. A user reads the current version of
each dataset that the role allows, by published name, `dag:job:output` (or with slashes) or uuid. Only committed files
are visible, all from one snapshot.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias
from uuid import UUID

import msgspec

from interlock.access.principals import Principal
from interlock.access.tokens import Claims
from interlock.datasets.files import input_names
from interlock.errors import BadRequest, Fenced, Forbidden, NotFound, TooLarge
from interlock.schemas import DatasetSchema
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.dataset_changes import FILES, Inputs
from interlock.tasks.shards import find_task, shard_of

_sql = queries(__name__, "queries")
_schema = msgspec.json.Decoder(DatasetSchema)

MAX_FILES: Final = 10_000
"""Limit per relation."""
MAX_RELATIONS: Final = 100
"""Number of relations that a statement may name."""
_WORD: Final = re.compile(r'"((?:[^"]|"")+)"|([^\W\d]\w*)')

Find: TypeAlias = Callable[[Connection, str, Principal], Awaitable[Row]]
"""Finds a dataset by any of its names if the caller may read it."""


@dataclass(frozen=True)
class Version:
    """A dataset version that the caller may read."""

    dataset_uuid: UUID
    dataset_version: UUID
    storage: str
    schema: DatasetSchema | None

    @property
    def table(self) -> str | None:
        return None if self.storage == FILES else f"dataset_{self.dataset_version.hex}"

    @property
    def placed_by(self) -> str | None:
        """The column whose values lie within the file's range in every row."""
        if self.schema is None or self.schema.range_column is None:
            return None
        never_null = {column.name for column in self.schema.columns if not column.nullable}
        return self.schema.range_column if self.schema.range_column in never_null else None


@dataclass(frozen=True, slots=True)
class ReadableFile:
    """A committed file and its range."""

    location: str
    start: int
    end: int
    bytes: int | None
    schema_hash: str | None


Granted: TypeAlias = Mapping[str, Version]
"""Versions by their name in the statement."""


@dataclass(frozen=True)
class Attempt:
    """The calling task attempt, from its token and its request body."""

    claims: Claims
    lease_token: UUID | None


class QueryRelations:
    def __init__(self, database: Database, inputs: Inputs, find: Find, range_operators: Iterable[str]) -> None:
        self._database = database
        self._inputs = inputs
        self._find = find
        self._range_operators = sorted(range_operators)

    # Relations of a task

    async def of_task(self, asking: Attempt) -> Granted:
        """Returns the relations of a task. Raises Fenced for an attempt that no longer holds it."""
        claims = asking.claims
        async with self._database.connection() as connection:
            # The request may omit the lease token. Then the shard has to be looked up.
            shard = shard_of(asking.lease_token) if asking.lease_token else await find_task(connection, claims.task_id)
            task = await _sql.attempt_of(connection, shard=shard, task_id=claims.task_id, org_id=claims.org_id)
            job_id = _held_job(task, asking)
            edges = (await self._inputs.edges(connection, [job_id]))[job_id]
            versions = [claim.dataset_version for claim in claims.datasets]
            rows = await _sql.granted_versions(connection, versions=versions, org_id=claims.org_id)
        return _named_as_inputs(edges, {row["dataset_version"]: row for row in rows})

    # Relations of a user

    async def of_user(self, caller: Principal, sql: str, given: Sequence[str] | None) -> Granted:
        """Returns the datasets that the caller lists; without a list, those that the statement seems to name."""
        async with self._database.connection() as connection:
            if given is None:
                return await self._found(connection, caller, words_of(sql))
            return await self._given(connection, caller, given)

    async def _found(self, connection: Connection, caller: Principal, words: Collection[str]) -> Granted:
        """Ignores words that are not readable datasets. The SQL gate refuses a relation that is missing here."""
        plain = sorted({*words, *(word.lower() for word in words)})
        rows = await _sql.published_among(connection, org_id=caller.org_id, names=plain, limit=MAX_RELATIONS + 1)
        names = [row["name"] for row in rows] + sorted(word for word in words if _is_spelled_out(word))
        if len(names) > MAX_RELATIONS:
            raise BadRequest(
                f"The statement mentions more than {MAX_RELATIONS} datasets: list those that it reads in `datasets`.",
                code="too_many_relations",
            )
        found = {}
        for name in names:
            try:
                found[name] = await self._version(connection, caller, name)
            except (NotFound, Forbidden):
                continue
        return found

    async def _given(self, connection: Connection, caller: Principal, given: Sequence[str]) -> Granted:
        versions = {name: await self._version(connection, caller, name) for name in dict.fromkeys(given)}
        short = Counter(_segment(name) for name in versions)
        outputs = {
            _segment(name): version
            for name, version in versions.items()
            if short[_segment(name)] == 1 and _segment(name) not in versions
        }
        return {**outputs, **versions}

    async def _version(self, connection: Connection, caller: Principal, name: str) -> Version:
        dataset = await self._find(connection, name.replace("/", ":"), caller)
        row = await self._current(connection, caller, dataset)
        if row is None:
            raise NotFound(f"Dataset {name!r} has no readable version: its DAG was purged.")
        return _version(row)

    async def _current(self, connection: Connection, caller: Principal, dataset: Row) -> Row | None:
        (behind,) = await _sql.behind_ranges(
            connection,
            versions=[dataset["current_version"]],
            org_id=caller.org_id,
            range_operators=self._range_operators,
        )
        rows = await _sql.granted_versions(connection, versions=[behind["dataset_version"]], org_id=caller.org_id)
        if not rows:
            return None
        if rows[0]["dataset_uuid"] != dataset["dataset_uuid"]:
            # Permission to read ranges does not include the dataset that they were cut from.
            await self._find(connection, str(rows[0]["dataset_uuid"]), caller)
        found: Row = rows[0]
        return found

    # Files

    async def files(self, versions: Collection[Version], org_id: UUID) -> dict[UUID, list[ReadableFile]]:
        """Returns the committed files of each version, from one snapshot. Raises TooLarge."""
        wanted = sorted({one.dataset_version for one in versions if one.storage == FILES})
        files: defaultdict[UUID, list[ReadableFile]] = defaultdict(list)
        if wanted:
            async with self._database.connection() as connection:
                rows = await _sql.committed_files(connection, versions=wanted, org_id=org_id, limit=MAX_FILES + 1)
            for row in rows:
                files[row["dataset_version"]].append(
                    ReadableFile(
                        row["location"], row["range_start"], row["range_end"], row["bytes"], row["schema_hash"]
                    )
                )
        for version, found in files.items():
            if len(found) > MAX_FILES:
                raise _too_many(version)
        return files


def _held_job(task: Row | None, asking: Attempt) -> UUID:
    """Applies the dispatcher's fence. A request without a lease token is checked against the attempt only."""
    attempt = asking.claims.attempt
    if task is None:
        raise Fenced("The attempt no longer holds this task.", stale="task")
    if task["attempt"] != attempt:
        raise Fenced(f"Attempt {attempt} has ended; the task is at attempt {task['attempt']}.", stale="attempt")
    if task["status"] != "Running":
        raise Fenced(f"The task is already {task['status']}.", stale="status")
    if asking.lease_token is not None and task["lease_token"] != asking.lease_token:
        raise Fenced("The lease belongs to another worker.", stale="lease_token")
    if not task["leased"]:
        raise Fenced("The lease has expired; send heartbeats in time to extend it.", stale="lease_token")
    job_id: UUID = task["job_id"]
    return job_id


def _named_as_inputs(edges: Sequence[Row], granted: Mapping[UUID, Row]) -> Granted:
    """Names versions like the inputs. If an edge has moved to another version since, the token's version counts."""
    by_dataset = {row["dataset_uuid"]: row for row in granted.values()}
    named = {
        name: _version(granted.get(edge["dataset_version"]) or by_dataset[edge["dataset_uuid"]])
        for edge, name in zip(edges, input_names(edges), strict=True)
        if edge["dataset_uuid"] in by_dataset
    }
    seen = {version.dataset_version for version in named.values()}
    unnamed = {row["output_name"]: _version(row) for row in granted.values() if row["dataset_version"] not in seen}
    return {**{name: version for name, version in unnamed.items() if name}, **named}


def _version(row: Row) -> Version:
    return Version(
        dataset_uuid=row["dataset_uuid"],
        dataset_version=row["dataset_version"],
        storage=row["storage"],
        schema=_schema.decode(row["schema"]) if row["schema"] else None,
    )


def _segment(name: str) -> str:
    """Returns the output of `dag:job:output`, or any other name unchanged."""
    return name.replace("/", ":").rpartition(":")[2]


def words_of(sql: str) -> frozenset[str]:
    """Returns every word of a statement that may be a name, including words in strings and comments.

    Parsing SQL is left to a process that can be killed. Extra words are harmless: they only add relations that the
    caller may read anyway.
    """
    return frozenset(
        quoted.replace('""', '"') if quoted else plain for quoted, plain in _WORD.findall(sql) if quoted or plain
    )


def _is_spelled_out(word: str) -> bool:
    """Recognises `dag:job:output` or a uuid."""
    if word.replace("/", ":").count(":") == 2:
        return True
    try:
        UUID(word)
    except ValueError:
        return False
    return True


def mentioned(sql: str, granted: Granted) -> Granted:
    """Returns the relations that the statement mentions. Refuses names that differ only in case."""
    folded: dict[str, str] = {}
    for name in granted:
        if other := folded.get(name.lower()):
            raise BadRequest(
                f"{other!r} and {name!r} differ only in case, and SQL names are case-insensitive: list one of them in "
                "`datasets` by its uuid.",
                code="ambiguous_relation",
            )
        folded[name.lower()] = name
    words = {word.lower() for word in words_of(sql)}
    return {name: granted[name] for lower, name in folded.items() if lower in words}


def _too_many(version: UUID) -> TooLarge:
    return TooLarge(
        f"Dataset version {version} has more than {MAX_FILES} files, the limit of a query: compact it with "
        "parquet_compact.",
        code="too_many_files",
    )
