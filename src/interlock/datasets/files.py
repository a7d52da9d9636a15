"""Resolves an attempt's data: the committed files or the table of each input, and the prefix of each output.

An attempt resolves its data once, when it starts. A rewrite that commits later points the partition at another file;
the resolved file is kept until no attempt can still be reading it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec
from msgspec import Struct

from interlock.access.tokens import write_grants
from interlock.errors import InterlockError, TooLarge
from interlock.failpoints import failpoint
from interlock.jobs.spark_loads import BATCH_QUERY, batch_prefix, list_loads, run_exports
from interlock.processes.loop import Periodic
from interlock.schemas import MARKER, MAX_MARKER_BYTES, DatasetSchema, Marker
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.completion import Attempts, outputs_of
from interlock.tasks.dataset_changes import BUFFERED, FILES, Inputs, partitions_at
from interlock.tasks.shards import by_shard
from interlock.telemetry import FILES_SWEPT
from interlock.wire.attempts import (
    BufferLoad,
    DataReply,
    ExportGrant,
    InputData,
    LoadBatch,
    OutputData,
    Refusal,
    Release,
    TaskData,
    TaskFile,
    WriteGrant,
)

_sql = queries(__name__, "files")
_buffers_sql = queries(__name__, "buffers")
_schema = msgspec.json.Decoder(DatasetSchema)

BUFFER_LOAD: Final = "buffer_load"
"""The operator of tasks that the sink creates for batches too large to load itself."""
MAX_FILES: Final = 10_000
"""Limit per input of one task."""


class _Scope(Struct, frozen=True):
    """The scope in a task's payload."""

    start: int
    end: int
    input_index: int = 0


_scope = msgspec.json.Decoder(_Scope)


@dataclass(frozen=True, slots=True)
class _Read:
    """One input of one attempt."""

    edge: Row
    name: str
    scope: _Scope | None


@dataclass(frozen=True, slots=True)
class _Place:
    """A prefix that an attempt may write to. If `committed` is false, its files are deleted after the attempt ends."""

    prefix: str
    committed: bool


@dataclass(frozen=True, slots=True)
class WrittenPrefix:
    """A prefix that an attempt may write to until its timeout."""

    prefix: str
    dataset_version: UUID
    task_id: UUID
    attempt: int
    timeout_at: datetime
    committed: bool
    """If false, the files are deleted after the attempt ends."""


async def expect_files(connection: Connection, written: Sequence[WrittenPrefix], *, grace: float) -> None:
    """Records prefixes before anything is written there, so that the sweeper checks them."""
    await _sql.expect_files(
        connection,
        places=[each.prefix for each in written],
        versions=[each.dataset_version for each in written],
        task_ids=[each.task_id for each in written],
        attempts=[each.attempt for each in written],
        timeouts=[each.timeout_at for each in written],
        buffers=[not each.committed for each in written],
        grace=grace,
    )


class Files:
    def __init__(self, database: Database, settings: Settings, tasks: Attempts, inputs: Inputs) -> None:
        self._database = database
        self._settings = settings
        self._root = settings.objects_root
        self._grace = settings.sweep_grace_seconds
        self._batch_limit = settings.sink_batch_limit_bytes
        self._export_seconds = settings.query_export_hours * 3600
        self._keep_seconds = settings.replaced_files_seconds
        self._tasks = tasks
        self._edges = inputs

    async def data(self, items: Sequence[Release]) -> DataReply:
        """Resolves the data of attempts that hold their tasks, and registers their prefixes for the sweep."""
        unique = list({item.task_id: item for item in items}.values())
        found, refused = await self._database.run(lambda connection: self._data(connection, unique))
        known = {data.task_id for data in found} | {refusal.task_id for refusal in refused}
        refused += await self._tasks.refusals([item for item in unique if item.task_id not in known])
        return DataReply(items=found, refused=refused)

    async def _held(self, connection: Connection, items: Sequence[Release]) -> list[Row]:
        held: list[Row] = []
        for shard, part in by_shard(items, lambda item: item.lease_token).items():
            held += await _sql.held_attempts(
                connection,
                shard=shard,
                task_ids=[item.task_id for item in part],
                attempts=[item.attempt for item in part],
                leases=[item.lease_token for item in part],
            )
        return held

    async def _data(self, connection: Connection, items: Sequence[Release]) -> tuple[list[TaskData], list[Refusal]]:
        held = await self._held(connection, items)
        if not held:
            return [], []
        inputs, refused = await self._inputs(connection, held)
        outputs = await self._outputs(connection, held)
        exports = await self._exports(connection, held)
        loads = await self._loads(connection, held)
        lists = await list_loads(connection, self._settings, held)
        whole_runs = await run_exports(connection, self._root, held)
        await failpoint("files.before_commit")
        answered = [
            TaskData(
                task_id=row["task_id"],
                inputs=inputs[row["task_id"]],
                outputs=outputs[row["task_id"]],
                export=exports.get(row["task_id"]),
                load=loads.get(row["task_id"]),
                list_load=lists.get(row["task_id"]),
                run_export=whole_runs.get(row["task_id"]),
            )
            for row in held
            if row["task_id"] not in refused
        ]
        return answered, [
            Refusal(task_id=task_id, code=error.code, detail=error.detail) for task_id, error in refused.items()
        ]

    # Inputs

    async def _inputs(
        self, connection: Connection, held: Sequence[Row]
    ) -> tuple[dict[UUID, list[InputData]], dict[UUID, InterlockError]]:
        edges = await self._edges.edges(connection, [row["job_id"] for row in held])
        reads = [(row["task_id"], read) for row in held for read in _reads(row, edges[row["job_id"]])]
        files = await self._files(connection, [read for _, read in reads])
        found: dict[UUID, list[InputData]] = {row["task_id"]: [] for row in held}
        refused: dict[UUID, InterlockError] = {}
        for (task_id, read), of_input in zip(reads, files, strict=True):
            if len(of_input) > MAX_FILES:
                refused[task_id] = _too_many(read)
            found[task_id].append(_input(read, of_input))
        return found, refused

    async def _files(self, connection: Connection, reads: Sequence[_Read]) -> list[list[TaskFile]]:
        """Returns the files of each read, in the same order."""
        files: list[list[TaskFile]] = [[] for _ in reads]
        wanted = [
            (at, read.edge["dataset_version"], read.scope)
            for at, read in enumerate(reads)
            if read.scope is not None and read.edge["storage"] == FILES
        ]
        if not wanted:
            return files
        rows = await _sql.files_of(
            connection,
            versions=[version for _, version, _ in wanted],
            starts=[scope.start for _, _, scope in wanted],
            ends=[scope.end for _, _, scope in wanted],
            limit=MAX_FILES + 1,
        )
        for row in rows:
            files[wanted[row["n"] - 1][0]].append(_file(row, row["range_start"], row["range_end"]))
        return files

    # Outputs

    async def _outputs(self, connection: Connection, held: Sequence[Row]) -> dict[UUID, list[OutputData]]:
        grants, versions = await self._grants(connection, held)
        current = await self._current(connection, held, grants, versions)
        await self._expect(connection, held, grants, versions)
        return {
            task_id: [
                _output(grant, versions[grant.dataset_version], current.get((task_id, grant.output_index)))
                for grant in each
            ]
            for task_id, each in grants.items()
        }

    async def _current(
        self,
        connection: Connection,
        held: Sequence[Row],
        grants: Mapping[UUID, Sequence[WriteGrant]],
        versions: Mapping[UUID, Row],
    ) -> dict[tuple[UUID, int], TaskFile]:
        """Returns the current file in each task's scope, for outputs that rows are added to."""
        wanted = [
            (row["task_id"], grant, scope)
            for row in held
            if (scope := _scope_of(row)) is not None
            for grant in grants[row["task_id"]]
            if versions[grant.dataset_version]["unique_key"]
        ]
        if not wanted:
            return {}
        rows = await partitions_at(
            connection,
            versions=[grant.dataset_version for _, grant, _ in wanted],
            starts=[scope.start for _, _, scope in wanted],
            ends=[scope.end for _, _, scope in wanted],
        )
        found = {}
        for row in rows:
            task_id, grant, scope = wanted[row["n"] - 1]
            if row["location"] is not None:
                found[task_id, grant.output_index] = _file(row, scope.start, scope.end)
        return found

    async def expect(self, connection: Connection, held: Sequence[Row]) -> None:
        """Registers for the sweep every prefix that the attempts have credentials for."""
        grants, versions = await self._grants(connection, held)
        await self._expect(connection, held, grants, versions, everywhere=True)

    async def _grants(
        self, connection: Connection, held: Sequence[Row]
    ) -> tuple[dict[UUID, list[WriteGrant]], dict[UUID, Row]]:
        """Returns the grants by task, and their dataset versions."""
        grants = {
            row["task_id"]: write_grants(self._root, row["task_id"], row["attempt"], outputs_of(row)) for row in held
        }
        wanted = sorted({grant.dataset_version for each in grants.values() for grant in each})
        return grants, {row["dataset_version"]: row for row in await _sql.versions_written(connection, versions=wanted)}

    async def _expect(
        self,
        connection: Connection,
        held: Sequence[Row],
        grants: Mapping[UUID, Sequence[WriteGrant]],
        versions: Mapping[UUID, Row],
        *,
        everywhere: bool = False,
    ) -> None:
        expected = [
            WrittenPrefix(
                place.prefix,
                grant.dataset_version,
                row["task_id"],
                row["attempt"],
                row["timeout_at"],
                committed=place.committed,
            )
            for row in held
            for grant in grants[row["task_id"]]
            for place in _places(grant, versions[grant.dataset_version]["storage"], everywhere=everywhere)
        ]
        if expected:
            await expect_files(connection, expected, grace=self._grace)

    async def _loads(self, connection: Connection, held: Sequence[Row]) -> dict[UUID, BufferLoad]:
        """Returns the loads by sink task. The records of the batches name the task that loads them."""
        asking = [row["task_id"] for row in held if row["operator"] == BUFFER_LOAD]
        if not asking:
            return {}
        batches: defaultdict[UUID, list[Row]] = defaultdict(list)
        for row in await _buffers_sql.batches_of_loads(connection, task_ids=asking):
            batches[row["load_task"]].append(row)
        return {task_id: _load(rows, self._batch_limit) for task_id, rows in batches.items()}

    async def _exports(self, connection: Connection, held: Sequence[Row]) -> dict[UUID, ExportGrant]:
        """Returns the export prefixes by batch query task. The prefix never comes from the payload."""
        asking = [row for row in held if row["operator"] == BATCH_QUERY]
        grants = {
            row["task_id"]: ExportGrant(
                prefix=f"{batch_prefix(self._root, row['org_id'], row['task_id'])}{row['attempt']}/",
                org_id=row["org_id"],
            )
            for row in asking
        }
        if asking:
            await _sql.expect_exports(
                connection,
                places=[grants[row["task_id"]].prefix for row in asking],
                timeouts=[row["timeout_at"] for row in asking],
                seconds=self._export_seconds,
                keep=self._keep_seconds,
            )
        return grants


def _places(grant: WriteGrant, storage: str, *, everywhere: bool) -> list[_Place]:
    """Returns the prefixes where an attempt may leave files of an output.

    An attempt with credentials may write to both prefixes, whatever the storage.
    """
    files = _Place(grant.write_prefix, committed=storage == FILES)
    batches = _Place(grant.buffer_prefix, committed=False)
    if everywhere:
        return [files, batches]
    return {FILES: [files], BUFFERED: [batches]}.get(storage, [])


def _load(rows: Sequence[Row], limit: int) -> BufferLoad:
    version = rows[0]
    return BufferLoad(
        batches=[
            LoadBatch(publish_id=row["publish_id"], batch_uri=row["batch_uri"], record_count=row["record_count"])
            for row in rows
        ],
        schema=_schema.decode(version["schema"]),
        unique_key=version["unique_key"],
        replace_rows=version["replace_rows"],
        limit_bytes=limit,
    )


def _reads(row: Row, edges: Sequence[Row]) -> list[_Read]:
    names = input_names(edges)
    scope = _scope_of(row)
    together = row["wait_for_all"] or len(edges) == 1
    return [
        _Read(edge, name, scope if scope and (together or edge["input_index"] == scope.input_index) else None)
        for edge, name in zip(edges, names, strict=True)
    ]


def input_names(edges: Sequence[Row]) -> list[str]:
    """Returns unique input names. Outputs with the same name get their job's name as a prefix."""
    plain = [edge["output_name"] or f"input_{edge['input_index']}" for edge in edges]
    seen = Counter(plain)
    jobs = [edge["job_name"] for edge in edges]
    longer = [name if seen[name] == 1 else f"{job}_{name}" for name, job in zip(plain, jobs, strict=True)]
    seen = Counter(longer)
    return [name if seen[name] == 1 else f"{name}_{at}" for at, name in enumerate(longer)]


def _scope_of(row: Row) -> _Scope | None:
    try:
        scope = _scope.decode(row["payload"])
    except msgspec.MsgspecError:
        return None
    return scope if scope.start <= scope.end and max(-scope.start, scope.end) <= 2**62 else None


def _input(read: _Read, files: list[TaskFile]) -> InputData:
    edge, scope = read.edge, read.scope
    conditions = [f"({condition})" for condition in edge["conditions"]]
    return InputData(
        input_index=edge["input_index"],
        name=read.name,
        dataset_uuid=edge["dataset_uuid"],
        dataset_version=edge["dataset_version"],
        storage=edge["storage"],
        start=scope.start if scope else None,
        end=scope.end if scope else None,
        where=" AND ".join(conditions) or None,
        schema=_schema.decode(edge["schema"]) if edge["schema"] else None,
        files=files,
        table=None if edge["storage"] == FILES else f"dataset_{edge['dataset_version'].hex}",
    )


def _output(grant: WriteGrant, version: Row, current: TaskFile | None) -> OutputData:
    return OutputData(
        output_index=grant.output_index,
        name=version["output_name"] or f"output_{grant.output_index}",
        dataset_uuid=grant.dataset_uuid,
        dataset_version=grant.dataset_version,
        storage=version["storage"],
        write_prefix=grant.write_prefix,
        schema=_schema.decode(version["schema"]) if version["schema"] else None,
        unique_key=version["unique_key"],
        current=current,
    )


def _file(row: Row, start: int, end: int) -> TaskFile:
    return TaskFile(
        start=start,
        end=end,
        location=row["location"],
        commit=row["commit_id"],
        row_count=row["row_count"],
        bytes=row["bytes"],
    )


def _too_many(read: _Read) -> TooLarge:
    return TooLarge(
        f"Input {read.name!r} has more than {MAX_FILES} files in the scope of this task: split the scope with "
        "range_splitter, or compact the input with parquet_compact.",
        code="too_many_files",
    )


_marker = msgspec.json.Decoder(Marker)
_BATCH: Final = 200
_MIN_AGAIN_SECONDS: Final = 60.0
"""Delay before a failed sweep is retried, or an attempt that was still running is checked again."""


class Sweeper(Periodic):
    name = "sweep"

    def __init__(self, database: Database, settings: Settings, objects: Objects) -> None:
        self.seconds = settings.sweep_seconds
        self._database = database
        self._objects = objects
        self._again = max(settings.sweep_grace_seconds, _MIN_AGAIN_SECONDS)
        self._keep = settings.replaced_files_seconds
        self._stale = timedelta(seconds=settings.upload_stale_seconds)

    async def run_once(self) -> int:
        judged = await self._database.run(self._condemn)
        condemned = [row["place"] for row in judged if row["verdict"] == "sweep"]
        for place in condemned:
            FILES_SWEPT.inc(await self._sweep(place))
        if condemned:
            await failpoint("sweep.before_forgotten")
            async with self._database.connection() as connection:
                await _sql.swept(connection, places=condemned)
        return len(judged) + await self._sweep_uploads()

    async def _sweep_uploads(self) -> int:
        """Deletes parts of unfinished uploads, which only the store lists."""
        swept = await self._objects.sweep_uploads(self._database.clock.now() - self._stale)
        FILES_SWEPT.inc(swept)
        return swept

    async def _sweep(self, place: str) -> int:
        if place.endswith("/"):
            return await self._objects.delete_under(place)
        folder, _, name = place.rpartition("/")
        marked = await self._marked(f"{folder}/{MARKER}")
        await self._objects.delete(place)
        if marked in (name, None):
            await self._objects.delete(f"{folder}/{MARKER}")
        return 1

    async def _marked(self, marker: str) -> str | None:
        """Returns the file that a marker describes, or None if the marker is gone or unreadable.

        An attempt wrote the marker, so its content must not prevent a sweep.
        """
        try:
            raw = await self._objects.read(marker, MAX_MARKER_BYTES)
            return None if raw is None else _marker.decode(raw).file
        except (TooLarge, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    async def _condemn(self, connection: Connection) -> list[Row]:
        rows: list[Row] = await _sql.condemn(connection, limit=_BATCH, keep=self._keep, again=self._again)
        await failpoint("sweep.before_commit")
        return rows
