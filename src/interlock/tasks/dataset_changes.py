"""Dataset changes reported by attempts: checks them and their files, and writes them with their events.

Lock order: dataset versions first, tasks second. Call `admit`, then lock the task, then call `write`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from interlock.access.tokens import read_prefix, write_prefix
from interlock.calendars import BadDate, calendar_of
from interlock.errors import BadRequest, Conflict, Forbidden, InterlockError
from interlock.schemas import MARKER, MAX_MARKER_BYTES, DatasetSchema, Marker, SchemaClash, evolved, hash_of
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Row, queries
from interlock.tasks.shards import SMALL_SHARD
from interlock.wire.attempts import Completion, Event, Output, TaskInput
from interlock.wire.jobs import DatasetRef

_sql = queries(__name__, "datasets")
_effects_sql = queries(__name__, "effects")

PARTITION: Final = "partition"
CURSOR: Final = "cursor"
BUFFERED: Final = "buffered"
"""The storage whose rows arrive in published batches. Only the sink reports that they are loaded."""


@dataclass(frozen=True, slots=True)
class Change:
    """The events and outputs that one attempt reports."""

    task_id: UUID
    attempt: int
    org_id: UUID
    events: Sequence[Event]
    outputs: Sequence[Output] = ()
    prefixes: Sequence[str] = ()
    """By output: the prefix that the attempt may write to."""
    markers: Mapping[int, Marker] = field(default_factory=dict)
    """Markers of files, by output_index."""
    by_sink: bool = False

    def files(self) -> Iterator[tuple[UUID, DatasetSchema]]:
        for output in self.outputs:
            if output.output_index in self.markers:
                yield output.dataset_version, self.markers[output.output_index].schema

    def items(self) -> Iterator[Event | Output]:
        yield from self.events
        yield from self.outputs

    def versions(self) -> Iterator[UUID]:
        yield from (item.dataset_version for item in self.items())

    def scopes(self) -> Iterator[_Scope]:
        for item in self.items():
            if item.start is not None and item.end is not None:
                yield _Scope(self.task_id, item.dataset_version, item.start, item.end)


@dataclass(frozen=True, slots=True)
class _Scope:
    task_id: UUID
    dataset_version: UUID
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"


@dataclass(frozen=True, slots=True)
class Admitted:
    commit_id: int
    partitioned: frozenset[UUID]
    """Versions that consist of partitions; the others are streams."""
    refused: dict[UUID, InterlockError]
    """The error of each task whose change was refused as a whole."""
    versions: Mapping[UUID, Row]


class _Clash(Struct, frozen=True):
    n: int
    start: int
    end: int


_clashes = msgspec.json.Decoder(list[_Clash])


def check(events: Sequence[Event], outputs: Sequence[Output], granted: Sequence[DatasetRef]) -> None:
    """Checks that an attempt reports only outputs of its own job, with valid scopes."""
    for event in events:
        check_scope(event.cursor, event.partition_key, event.start, event.end)
        check_granted(event.dataset_uuid, event.dataset_version, granted)
    slots = [(output.output_index, output.dataset_uuid) for output in outputs]
    if len(set(slots)) != len(slots):
        raise BadRequest("Two outputs have the same output_index and dataset_uuid.", code="duplicate_output")
    for output in outputs:
        check_granted(output.dataset_uuid, output.dataset_version, granted)
        if output.cursor is not None or _partitioned(output.partition_key, output.start, output.end):
            check_scope(output.cursor, output.partition_key, output.start, output.end)


def check_granted(dataset: UUID, version: UUID, granted: Sequence[DatasetRef]) -> None:
    if not any(ref.dataset_uuid == dataset and ref.dataset_version == version for ref in granted):
        raise Forbidden(
            f"Dataset {dataset} version {version} is not an output of this job; declare it under `outputs`.",
            code="dataset_not_granted",
        )


def check_scope(cursor: int | None, key: str | None, start: int | None, end: int | None) -> None:
    if _partitioned(key, start, end) == (cursor is not None):
        raise BadRequest(
            "A scope must be either `cursor`, or `partition_key` with `start` and `end`.",
            code="bad_event_scope",
        )
    if cursor is None:
        _check_partition(key, start, end)
    elif cursor < 0:
        raise BadRequest("A cursor must be at least 0.", code="bad_event_scope")


def _partitioned(key: str | None, start: int | None, end: int | None) -> bool:
    return key is not None or start is not None or end is not None


def _check_partition(key: str | None, start: int | None, end: int | None) -> None:
    if start is None or end is None or start > end or key not in (None, f"{start}-{end}"):
        raise BadRequest(
            "A partition needs `start` <= `end`, both inclusive, and `partition_key` equal to '{start}-{end}'.",
            code="bad_partition",
        )


async def lock_versions(connection: Connection, versions: Sequence[UUID]) -> list[Row]:
    """Locks versions for a change. A concurrent change waits, and then gets a higher commit number."""
    rows: list[Row] = await _sql.lock_versions(connection, versions=versions)
    return rows


async def partitions_at(
    connection: Connection, *, versions: Sequence[UUID], starts: Sequence[int | None], ends: Sequence[int | None]
) -> list[Row]:
    """Returns the partitions with exactly these bounds; `n` counts the requested ones from 1."""
    rows: list[Row] = await _sql.partitions_at(connection, versions=versions, starts=starts, ends=ends)
    return rows


async def admit(connection: Connection, changes: Sequence[Change]) -> Admitted:
    """Locks the versions and determines which changes conflict with their state."""
    versions = sorted({version for change in changes for version in change.versions()})
    rows = {row["dataset_version"]: row for row in await lock_versions(connection, versions)}
    streams = _streams(changes, rows)
    refused: dict[UUID, InterlockError] = {}
    for change in changes:
        try:
            _check_progress(change, rows, streams)
            _check_places(change, rows)
            _check_calendar(change, rows)
        except InterlockError as error:
            refused[change.task_id] = error
    fitting = [change for change in changes if change.task_id not in refused]
    scopes = [scope for change in fitting for scope in change.scopes() if scope.dataset_version not in streams]
    examined = await _sql.examine_scopes(
        connection,
        versions=[scope.dataset_version for scope in scopes],
        starts=[scope.start for scope in scopes],
        ends=[scope.end for scope in scopes],
    )
    for clash in _clashes.decode(examined["clashing"] or "[]"):
        scope = scopes[clash.n - 1]
        refused.setdefault(scope.task_id, _overlap(scope, f"{clash.start}-{clash.end}"))
    for scope, other in _overlaps([scope for scope in scopes if scope.task_id not in refused]):
        refused.setdefault(scope.task_id, _overlap(scope, str(other)))
    await _check_files(connection, changes, rows, refused)
    return Admitted(examined["commit_id"], frozenset(versions) - streams.keys(), refused, rows)


def _streams(changes: Sequence[Change], rows: dict[UUID, Row]) -> dict[UUID, int]:
    """Returns the versions that are streams or become one now, with the cursor they then have."""
    streams = {version: row["cursor"] for version, row in rows.items() if row["progress"] == CURSOR}
    for change in changes:
        for item in change.items():
            known = rows.get(item.dataset_version)
            if item.cursor is not None and (known is None or known["progress"] != PARTITION):
                streams[item.dataset_version] = max(streams.get(item.dataset_version, 0), item.cursor)
    return streams


def _check_progress(change: Change, rows: dict[UUID, Row], streams: dict[UUID, int]) -> None:
    for item in change.items():
        version = item.dataset_version
        known = rows.get(version)
        if known is not None and known["storage"] == BUFFERED and not change.by_sink:
            raise Conflict(
                f"Dataset version {version} is buffered: publish batches with /v1/task/buffer-publish. The sink "
                "notifies readers once the rows are loaded.",
                code="buffered_dataset",
            )
        if item.cursor is not None and version not in streams:
            raise Conflict(
                f"Dataset version {version} consists of partitions; report `partition_key`, `start` and `end`.",
                code="scope_kind",
            )
        if item.end is not None and version in streams and item.end > streams[version]:
            raise Conflict(
                f"Dataset version {version} is a stream that is complete up to {streams[version]}; a rewritten "
                f"range must end there or earlier, got {item.start}-{item.end}. Report the cursor first.",
                code="scope_kind",
            )
    for output in change.outputs:
        known = rows.get(output.dataset_version)
        if output.cursor is not None and known is not None and output.cursor < (known["cursor"] or 0):
            raise Conflict(
                f"Dataset version {output.dataset_version} is complete up to {known['cursor']}; its cursor cannot "
                f"move back to {output.cursor}. Report a rewritten range as a partition.",
                code="cursor_backwards",
            )


def _check_calendar(change: Change, rows: dict[UUID, Row]) -> None:
    """Checks that time partitions begin and end with an hour, day or month."""
    for scope in change.scopes():
        known = rows.get(scope.dataset_version)
        if known is None or known["partition"] is None or known["progress"] == CURSOR:
            continue
        try:
            calendar_of(known["partition"]).check(scope.start, scope.end)
        except BadDate as error:
            raise BadRequest(
                f"Dataset version {scope.dataset_version} has partitions that are {known['partition']}, but {error}.",
                code="misaligned_partition",
            ) from None


def _check_places(change: Change, rows: dict[UUID, Row]) -> None:
    """Checks that files lie under the attempt's own prefix."""
    for output, prefix in zip(change.outputs, change.prefixes, strict=True):
        known = rows.get(output.dataset_version)
        if known is not None and known["storage"] == FILES:
            require_under(output.location, prefix)


async def _check_files(
    connection: Connection, changes: Sequence[Change], rows: dict[UUID, Row], refused: dict[UUID, InterlockError]
) -> None:
    """Checks schema evolution, and that rows were added to the current version of a partition."""
    schemas = Schemas(rows)
    for change in changes:
        if change.markers and change.task_id not in refused:
            try:
                schemas.follow(change.files())
            except InterlockError as error:
                refused[change.task_id] = error
    added = [
        (change.task_id, output, change.markers[output.output_index])
        for change in changes
        if change.task_id not in refused
        for output in change.outputs
        if output.output_index in change.markers and rows[output.dataset_version]["unique_key"]
    ]
    if added:
        await _check_bases(connection, added, refused)


async def _check_bases(
    connection: Connection, added: Sequence[tuple[UUID, Output, Marker]], refused: dict[UUID, InterlockError]
) -> None:
    found = await partitions_at(
        connection,
        versions=[output.dataset_version for _, output, _ in added],
        starts=[output.start for _, output, _ in added],
        ends=[output.end for _, output, _ in added],
    )
    commits = {row["n"]: row["commit_id"] for row in found}
    for n, (task_id, output, marker) in enumerate(added, 1):
        if commits.get(n) != marker.based_on:
            refused[task_id] = Conflict(
                f"Another task changed partition {output.start}-{output.end} of dataset version "
                f"{output.dataset_version} after this attempt read it; the next attempt starts from the "
                "current partition.",
                code="partition_changed",
            )


def _overlaps(scopes: Sequence[_Scope]) -> Iterator[tuple[_Scope, _Scope]]:
    """Yields each scope that overlaps an earlier one of the same list. Two identical scopes do not overlap."""
    by_version: defaultdict[UUID, list[_Scope]] = defaultdict(list)
    for scope in scopes:
        by_version[scope.dataset_version].append(scope)
    for found in by_version.values():
        found.sort(key=lambda scope: (scope.start, scope.end))
        reaching = found[0]
        for scope in found[1:]:
            if scope.start <= reaching.end and (scope.start, scope.end) != (reaching.start, reaching.end):
                yield scope, reaching
            if scope.end > reaching.end:
                reaching = scope


def _overlap(scope: _Scope, other: str) -> Conflict:
    return Conflict(
        f"Partition {scope} of dataset version {scope.dataset_version} overlaps {other}. Partitions of a version are "
        "disjoint: report the same bounds to replace one.",
        code="partition_overlap",
    )


async def write(
    connection: Connection, changes: Sequence[Change], admitted: Admitted, *, shard: int = SMALL_SHARD
) -> int:
    """Writes changes by tasks of one shard. Returns the number of new events."""
    schemas = Schemas(admitted.versions)
    for change in changes:
        schemas.follow(change.files())
    await schemas.write(connection)
    if any(change.outputs for change in changes):
        await _effects_sql.insert_outputs(connection, **_output_bodies(changes))
    events = [(change, event) for change in changes for event in change.events]
    outputs = [(change, output) for change in changes for output in change.outputs]
    row = await _sql.write_changes(
        connection,
        commit_id=admitted.commit_id,
        shard=shard,
        partitioned_versions=list(admitted.partitioned),
        task_ids=[change.task_id for change, _ in events],
        attempts=[change.attempt for change, _ in events],
        org_ids=[change.org_id for change, _ in events],
        uuids=[event.dataset_uuid for _, event in events],
        versions=[event.dataset_version for _, event in events],
        cursors=[event.cursor for _, event in events],
        starts=[event.start for _, event in events],
        ends=[event.end for _, event in events],
        sequences=[event.sequence for _, event in events],
        o_task_ids=[change.task_id for change, _ in outputs],
        o_attempts=[change.attempt for change, _ in outputs],
        o_versions=[output.dataset_version for _, output in outputs],
        o_cursors=[output.cursor for _, output in outputs],
        o_starts=[output.start for _, output in outputs],
        o_ends=[output.end for _, output in outputs],
        o_locations=[output.location for _, output in outputs],
        o_row_counts=[output.row_count for _, output in outputs],
        o_bytes=[output.bytes for _, output in outputs],
        o_schema_hashes=[output.schema_hash for _, output in outputs],
    )
    accepted: int = row["accepted"]
    return accepted


def _output_bodies(changes: Sequence[Change]) -> dict[str, Any]:
    outputs = [(change, output) for change in changes for output in change.outputs]
    return {
        "task_ids": [change.task_id for change, _ in outputs],
        "attempts": [change.attempt for change, _ in outputs],
        "org_ids": [change.org_id for change, _ in outputs],
        "indexes": [output.output_index for _, output in outputs],
        "uuids": [output.dataset_uuid for _, output in outputs],
        "versions": [output.dataset_version for _, output in outputs],
        "bodies": [msgspec.json.encode(output).decode() for _, output in outputs],
    }


_marker = msgspec.json.Decoder(Marker)
_schema = msgspec.json.Decoder(DatasetSchema)

FILES = "parquet"
"""The storage that keeps rows in files."""


@dataclass(frozen=True, slots=True)
class Found:
    """Markers of one completion, by output_index."""

    by_output: Mapping[int, Marker]
    refused: InterlockError | None = None


class Markers:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def of(self, items: Sequence[Completion]) -> dict[UUID, Found]:
        """Reads markers, by task. Call it before the transaction that commits them: an object store is slow."""
        wanted = [item for item in items if any(self._has_file(output) for output in item.outputs)]
        found = await asyncio.gather(*(self._of_one(item) for item in wanted))
        return {item.task_id: each for item, each in zip(wanted, found, strict=True)}

    def _has_file(self, output: Output) -> bool:
        return output.start is not None and output.location.startswith(f"{self._objects.root}/")

    async def _of_one(self, item: Completion) -> Found:
        try:
            return Found(
                {
                    output.output_index: await self._read(item, output)
                    for output in item.outputs
                    if self._has_file(output)
                }
            )
        except InterlockError as error:
            return Found({}, error)

    async def _read(self, item: Completion, output: Output) -> Marker:
        prefix = self.prefix(item, output)
        require_under(output.location, prefix)
        raw = await self._objects.read(prefix + MARKER, MAX_MARKER_BYTES)
        if raw is None:
            raise Conflict(
                f"There is no {MARKER} next to {output.location}: an attempt must write the marker "
                "after the file, as its last step.",
                code="marker_missing",
            )
        try:
            marker = _marker.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(
                f"{MARKER} next to {output.location} is not a valid marker: {error}.", code="bad_marker"
            ) from None
        _check_agreement(output, marker, output.location[len(prefix) :])
        return marker

    def prefix(self, item: Completion, output: Output) -> str:
        root = self._objects.root
        return write_prefix(root, item.task_id, item.attempt, output.dataset_uuid, output.dataset_version)


def require_under(location: str, prefix: str) -> None:
    rest = location.removeprefix(prefix)
    if not location.startswith(prefix) or not rest or "/" in rest or rest in (".", ".."):
        raise Forbidden(
            "The location of an output must be a file directly under the attempt's own prefix "
            "(`outputs[].write_prefix` of the task).",
            code="location_outside_prefix",
        )


def _check_agreement(output: Output, marker: Marker, name: str) -> None:
    fields = {
        "file": (name, marker.file),
        "row_count": (output.row_count, marker.row_count),
        "bytes": (output.bytes, marker.bytes),
        "schema_hash": (output.schema_hash, hash_of(marker.schema)),
    }
    for what, (reported, written) in fields.items():
        if reported is not None and reported != written:
            raise BadRequest(
                f"{what} of the output is {reported}, but its marker has {written}: report the marker's value.",
                code="marker_differs",
            )


class Schemas:
    """Schemas of the dataset versions that a batch of changes writes. The caller has locked the versions."""

    def __init__(self, versions: Mapping[UUID, Row]) -> None:
        self._versions = versions
        self._known: dict[UUID, DatasetSchema] = {}

    def follow(self, files: Iterable[tuple[UUID, DatasetSchema]]) -> None:
        """Merges the schemas of an attempt's files, all or none. Raises Conflict for an incompatible one."""
        after: dict[UUID, DatasetSchema] = {}
        for version, schema in files:
            before = after.get(version) or self._schema(version)
            after[version] = schema if before is None else _evolved(version, before, schema)
        self._known |= after

    def _schema(self, version: UUID) -> DatasetSchema | None:
        if version in self._known:
            return self._known[version]
        row = self._versions.get(version)
        return None if row is None or row["schema"] is None else _schema.decode(row["schema"])

    async def write(self, connection: Connection) -> None:
        hashes = {version: hash_of(schema) for version, schema in self._known.items()}
        changed = [version for version in hashes if self._versions[version]["schema_hash"] != hashes[version]]
        if changed:
            await _sql.set_schemas(
                connection,
                versions=changed,
                schemas=[msgspec.json.encode(self._known[version]).decode() for version in changed],
                hashes=[hashes[version] for version in changed],
            )


def _evolved(version: UUID, before: DatasetSchema, after: DatasetSchema) -> DatasetSchema:
    try:
        return evolved(before, after)
    except SchemaClash as clash:
        raise Conflict(
            f"The file's schema does not match dataset version {version}: {clash}. Only nullable columns can be added; "
            "for any other change edit the job's definition and deploy it, which creates a new version.",
            code="schema_mismatch",
        ) from None


class Inputs:
    def __init__(self, root: str, range_operators: Iterable[str]) -> None:
        self._root = root
        self._range_operators = sorted(range_operators)

    async def edges(self, connection: Connection, jobs: Iterable[UUID]) -> defaultdict[UUID, list[Row]]:
        """Returns the resolved edges by job, in input order."""
        found: defaultdict[UUID, list[Row]] = defaultdict(list)
        wanted = sorted(set(jobs))
        for row in await _sql.data_of_inputs(connection, job_ids=wanted, range_operators=self._range_operators):
            found[row["job_id"]].append(row)
        return found

    async def of(self, connection: Connection, jobs: Sequence[UUID]) -> dict[UUID, list[TaskInput]]:
        """Returns the task inputs by job, still without a scope."""
        if not jobs:
            return {}
        edges = await self.edges(connection, jobs)
        return {job: [self._input(edge) for edge in found] for job, found in edges.items()}

    def _input(self, edge: Row) -> TaskInput:
        return TaskInput(
            input_index=edge["input_index"],
            dataset_uuid=edge["dataset_uuid"],
            dataset_version=edge["dataset_version"],
            storage=edge["storage"],
            read_prefix=read_prefix(self._root, edge["dataset_uuid"], edge["dataset_version"]),
            where=_where(edge["conditions"]),
        )


def _where(conditions: Sequence[str]) -> str | None:
    if len(conditions) < 2:
        return conditions[0] if conditions else None
    return " AND ".join(f"({condition})" for condition in conditions)
