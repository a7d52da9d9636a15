"""What a statement may read, by name: the inputs of a task, or datasets of an org. Nothing else exists for it.

A task has the versions that its capability token names, under the names that its inputs have. A user has the current
version of each dataset that his role may read, by its published name, `dag:job:output` (or with slashes) or its uuid.
Of files only committed ones count, all as of one moment.
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
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.errors import BadRequest, Fenced, Forbidden, NotFound, TooLarge
from interlock.kernel.files import input_names
from interlock.kernel.inputs import Inputs
from interlock.kernel.markers import FILES
from interlock.kernel.shards import find_task, shard_of
from interlock.schemas import DatasetSchema

_sql = queries("queries")
_schema = msgspec.json.Decoder(DatasetSchema)

MOST_FILES: Final = 10_000
"""Of one relation."""
MOST_RELATIONS: Final = 100
"""That a statement may name."""
_WORD: Final = re.compile(r'"((?:[^"]|"")+)"|([^\W\d]\w*)')

Find: TypeAlias = Callable[[Connection, str, Principal], Awaitable[Row]]
"""A dataset by any of its names, if the caller may read it."""


@dataclass(frozen=True)
class Version:
    """A dataset version that may be read."""

    dataset_uuid: UUID
    dataset_version: UUID
    storage: str
    schema: DatasetSchema | None

    @property
    def table(self) -> str | None:
        return None if self.storage == FILES else f"dataset_{self.dataset_version.hex}"

    @property
    def placed_by(self) -> str | None:
        """The column whose values lie within the range of their file, for every row."""
        if self.schema is None or self.schema.range_column is None:
            return None
        never_null = {column.name for column in self.schema.columns if not column.nullable}
        return self.schema.range_column if self.schema.range_column in never_null else None


@dataclass(frozen=True, slots=True)
class ReadableFile:
    """A committed file, and the range that it is about."""

    location: str
    start: int
    end: int
    bytes: int | None
    schema_hash: str | None


Granted: TypeAlias = Mapping[str, Version]
"""By the name that the statement has for it."""


@dataclass(frozen=True)
class Attempt:
    """Who asks, when it is a task: as its token and its body say it."""

    claims: Claims
    lease_token: UUID | None


class QueryRelations:
    def __init__(self, database: Database, inputs: Inputs, find: Find, range_operators: Iterable[str]) -> None:
        self._database = database
        self._inputs = inputs
        self._find = find
        self._range_operators = sorted(range_operators)

    # A task's

    async def of_task(self, asking: Attempt) -> Granted:
        """Raises Fenced for an attempt that no longer holds its task."""
        claims = asking.claims
        async with self._database.connection() as connection:
            # A body may leave its lease out: its task is looked for.
            shard = shard_of(asking.lease_token) if asking.lease_token else await find_task(connection, claims.task_id)
            task = await _sql.attempt_of(connection, shard=shard, task_id=claims.task_id, org_id=claims.org_id)
            job_id = _held_job(task, asking)
            edges = (await self._inputs.edges(connection, [job_id]))[job_id]
            versions = [claim.dataset_version for claim in claims.datasets]
            rows = await _sql.granted_versions(connection, versions=versions, org_id=claims.org_id)
        return _named_as_inputs(edges, {row["dataset_version"]: row for row in rows})

    # A user's

    async def of_user(self, caller: Principal, sql: str, given: Sequence[str] | None) -> Granted:
        """The datasets that the caller lists; without a list, those that the statement seems to name."""
        async with self._database.connection() as connection:
            if given is None:
                return await self._found(connection, caller, words_of(sql))
            return await self._given(connection, caller, given)

    async def _found(self, connection: Connection, caller: Principal, words: Collection[str]) -> Granted:
        """A word need not be meant as a relation, and what the caller may not read is no relation: the gate says so."""
        plain = sorted({*words, *(word.lower() for word in words)})
        rows = await _sql.published_among(connection, org_id=caller.org_id, names=plain, most=MOST_RELATIONS + 1)
        names = [row["name"] for row in rows] + sorted(word for word in words if _is_spelled_out(word))
        if len(names) > MOST_RELATIONS:
            raise BadRequest(
                f"The statement has more than {MOST_RELATIONS} names of datasets in it: list those that it reads in "
                "`datasets`.",
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
            raise NotFound(f"Dataset {name!r} has no version that can be read: its DAG was purged.")
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
            # Who may read ranges may not therefore read what they were cut from.
            await self._find(connection, str(rows[0]["dataset_uuid"]), caller)
        found: Row = rows[0]
        return found

    # Their files

    async def files(self, versions: Collection[Version], org_id: UUID) -> dict[UUID, list[ReadableFile]]:
        """The committed files of each, all as of one moment. Raises TooLarge."""
        wanted = sorted({one.dataset_version for one in versions if one.storage == FILES})
        files: defaultdict[UUID, list[ReadableFile]] = defaultdict(list)
        if wanted:
            async with self._database.connection() as connection:
                rows = await _sql.committed_files(connection, versions=wanted, org_id=org_id, most=MOST_FILES + 1)
            for row in rows:
                files[row["dataset_version"]].append(
                    ReadableFile(
                        row["location"], row["range_start"], row["range_end"], row["bytes"], row["schema_hash"]
                    )
                )
        for version, found in files.items():
            if len(found) > MOST_FILES:
                raise _too_many(version)
        return files


def _held_job(task: Row | None, asking: Attempt) -> UUID:
    """As the dispatcher's fence; a body without a lease token is held to the attempt alone."""
    attempt = asking.claims.attempt
    if task is None:
        raise Fenced("The attempt no longer holds this task.", stale="task")
    if task["attempt"] != attempt:
        raise Fenced(f"Attempt {attempt} is over; the task is at attempt {task['attempt']}.", stale="attempt")
    if task["status"] != "Running":
        raise Fenced(f"The task is {task['status']} already.", stale="status")
    if asking.lease_token is not None and task["lease_token"] != asking.lease_token:
        raise Fenced("The lease belongs to another worker.", stale="lease_token")
    if not task["leased"]:
        raise Fenced("The lease has expired; a heartbeat in time extends it.", stale="lease_token")
    job_id: UUID = task["job_id"]
    return job_id


def _named_as_inputs(edges: Sequence[Row], granted: Mapping[UUID, Row]) -> Granted:
    """An edge may have been turned to another version since the token was made: the token's is the one that counts."""
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
    """The output of `dag:job:output`; of other names all of it."""
    return name.replace("/", ":").rpartition(":")[2]


def words_of(sql: str) -> frozenset[str]:
    """Whatever may be a name in a statement, and more: strings and comments are not told apart.

    Reading it as SQL is left to a process that may be killed. Too many words do no harm: a relation that the caller may
    read anyway is there for a statement that does not use it.
    """
    return frozenset(
        quoted.replace('""', '"') if quoted else plain for quoted, plain in _WORD.findall(sql) if quoted or plain
    )


def _is_spelled_out(word: str) -> bool:
    """`dag:job:output`, or a uuid."""
    if word.replace("/", ":").count(":") == 2:
        return True
    try:
        UUID(word)
    except ValueError:
        return False
    return True


def mentioned(sql: str, granted: Granted) -> Granted:
    """Those that the statement may read. Their names differ in more than capitals, as SQL sees it."""
    folded: dict[str, str] = {}
    for name in granted:
        if other := folded.get(name.lower()):
            raise BadRequest(
                f"{other!r} and {name!r} differ in capitals only, which SQL does not tell apart: list one of them in "
                "`datasets` by its uuid.",
                code="ambiguous_relation",
            )
        folded[name.lower()] = name
    words = {word.lower() for word in words_of(sql)}
    return {name: granted[name] for lower, name in folded.items() if lower in words}


def _too_many(version: UUID) -> TooLarge:
    return TooLarge(
        f"Dataset version {version} has more than {MOST_FILES} files, which is more than a query reads: have it "
        "compacted by parquet_compact.",
        code="too_many_files",
    )
