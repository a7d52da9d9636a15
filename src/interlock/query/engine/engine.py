"""Runs statements, each in its own process, restricted by the SQL gate and by the kernel."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from interlock.errors import BadRequest, ConfigurationError, InvalidQuery
from interlock.processes import landlock
from interlock.query import sql_gate
from interlock.query.engine.files import Lanes, OpenStore, Reading, opened_by_duckdb, pruned
from interlock.query.engine.jobs import MAX_RELATIONS, DataFile, Files, Limits, QueryJob, Relation, Table
from interlock.query.engine.pool import Warm
from interlock.query.engine.result import Result, Statement
from interlock.query.engine.tables import Snapshot, UnknownType, duckdb_type
from interlock.query.sql_gate import Scan
from interlock.query.sql_pushdown import folded
from interlock.query.statement.protocol import Job, Kind, LaneFiles, LaneTable, LocalFiles, Named, Plan, View

_STORE_LANES: Final = 6
"""Concurrent range reads of a statement from an object store."""
_TABLE_LANES: Final = 1
_CHECK_SECONDS: Final = 5.0
_LARGE_TREE: Final = 1 << 18

Judge = Callable[[str, bytes, Collection[str], Collection[str]], sql_gate.Statement]


@dataclass(slots=True)
class _Numbered:
    """Files of a statement that are read through lanes, by number."""

    files: list[DataFile]

    def add(self, file: DataFile) -> int:
        self.files.append(file)
        return len(self.files) - 1


class Engine:
    def __init__(
        self,
        folder: Path,
        *,
        store: OpenStore | None = None,
        data_url: str | None = None,
        judge: Judge = sql_gate.judge,
        most_processes: int = 1000,
    ) -> None:
        """`most_processes` limits the processes that use memory at any time, including those that are being killed.

        Further statements wait.
        """
        self.folder = folder
        self._reading = Reading(store)
        self._data_url = data_url
        self._judge = judge
        self._warm: Warm | None = None
        self._warming = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._processes = asyncio.Semaphore(most_processes)
        self.confined = landlock.version() > 0
        """True if Landlock restricts a statement to its files. Otherwise DuckDB gets no paths, and the engine reads all
        files
        for it."""

    @property
    def running(self) -> int:
        """Number of processes that are not dead yet."""
        return 0 if self._warm is None else self._warm.running

    @property
    def warm_pid(self) -> int | None:
        return None if self._warm is None else self._warm.pid

    async def start(self) -> None:
        """Starts the warm process. Deletes temp files of an engine that was killed earlier."""
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, mode=0o700)
        await self._ready()

    async def stop(self) -> None:
        """Stops the engine and all running statements."""
        if self._warm is not None:
            await self._warm.stop()
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    async def _ready(self) -> Warm:
        async with self._warming:
            if self._warm is None or not self._warm.alive:
                if self._warm is not None:
                    await self._warm.stop()
                self._warm = await Warm.start()
            return self._warm

    async def check(self, sql: str, relations: Sequence[Relation]) -> sql_gate.Statement:
        """Returns the scans of a statement. Raises InvalidQuery. Runs nothing and reads from no store."""
        limits = Limits(seconds=_CHECK_SECONDS)
        statement = await self._begun(QueryJob(sql, [], limits))
        try:
            return await self._judged(statement, relations)
        finally:
            await statement.close()

    async def run(self, job: QueryJob, *, allowed: Callable[[], Awaitable[object]] | None = None) -> Result:
        """Returns when the first rows are available; the caller must close the result.

        The gate checks the statement first. Then `allowed` is awaited, and data is read only after it returns.
        """
        _check_job(job)
        statement = await self._begun(job)
        try:
            judged = await self._judged(statement, job.relations)
            planned = partial(self._planned, statement, judged)
            # Planning may query other stores with blocking calls; for files that DuckDB opens itself, everything is
            # known.
            plan, details = await asyncio.to_thread(planned) if self._lane_count(job) else planned()
            if allowed is not None:
                await allowed()
            await statement.send(Kind.PLAN, plan)
            result = Result(statement, tuple(judged.scans), details)
            await result.begin()
        except BaseException:
            await statement.close()
            raise
        return result

    async def _judged(self, statement: Statement, relations: Sequence[Relation]) -> sql_gate.Statement:
        tree = (await statement.receive(Kind.TREE)).payload
        names = [relation.name for relation in relations]
        columns = [column.name for relation in relations for column in relation.columns or ()]
        judge = partial(self._judge, statement.job.sql, tree, names, columns)
        return await asyncio.to_thread(judge) if len(tree) > _LARGE_TREE else judge()

    # The process

    async def _begun(self, job: QueryJob) -> Statement:
        """Forks a process and sends the text to parse. The process is confined before it parses the text."""
        sql_gate.check_text(job.sql)
        warm = await self._ready()
        await self._processes.acquire()
        try:
            statement, ours = self._forked(warm, job)
        except BaseException:
            self._processes.release()
            raise
        try:
            await statement.connect(ours)
            await statement.send(Kind.JOB, self._job(statement))
        except BaseException:
            await statement.close()
            raise
        return statement

    def _forked(self, warm: Warm, job: QueryJob) -> tuple[Statement, socket.socket]:
        """Returns the statement, whose process releases its permit when it is dead, and our end of its socket."""
        folder = self.folder / str(next(self._numbers))
        (folder / "spill").mkdir(parents=True, mode=0o700)
        lanes = Lanes([], None)
        ours, theirs = socket.socketpair()
        with ExitStack() as closed:
            closed.enter_context(theirs)
            others = lanes.open(self._lane_count(job))
            for other in others:
                closed.enter_context(other)
            try:
                fork = warm.fork([theirs.fileno(), *(other.fileno() for other in others)])
            except BaseException:
                ours.close()
                lanes.close()
                shutil.rmtree(folder, ignore_errors=True)
                raise
        fork.when_dead(self._processes.release)
        return Statement(job, folder, fork, lanes), ours

    def _lane_count(self, job: QueryJob) -> int:
        count = 0
        for relation in job.relations:
            if isinstance(relation.source, Table):
                count = max(count, _TABLE_LANES)
            elif any(self._path(file) is None for file in relation.source.files):
                count = _STORE_LANES
        return count

    def _path(self, file: DataFile) -> str | None:
        return opened_by_duckdb(file.location, confined=self.confined)

    def _job(self, statement: Statement) -> Job:
        job, limits = statement.job, statement.job.limits
        files = [
            path
            for relation in job.relations
            if isinstance(relation.source, Files)
            for file in relation.source.files
            if (path := self._path(file)) is not None
        ]
        return Job(
            sql=job.sql,
            folder=str(statement.folder),
            files=sorted(set(files)),
            confined=self.confined,
            seconds=limits.seconds,
            memory_mb=limits.memory_mb,
            threads=limits.threads,
            temp_mb=limits.temp_mb,
            rows=limits.rows,
            bytes=limits.bytes,
            export=statement.export,
        )

    # The plan: the source of each relation

    def _planned(self, statement: Statement, judged: sql_gate.Statement) -> tuple[Plan, dict[str, int]]:
        numbered = _Numbered([])
        views = []
        details = {"files": 0, "files_left_out": 0, "tables": 0}
        for relation in statement.job.relations:
            scan = judged.scans.get(relation.name)
            if scan is None:
                continue
            if isinstance(relation.source, Files):
                kept = pruned(relation.source.files, scan.filters)
                details["files"] += len(kept)
                details["files_left_out"] += len(relation.source.files) - len(kept)
                views.append(self._files_view(relation, kept, relation.source.files, numbered))
            else:
                details["tables"] += 1
                views.append(self._table_view(statement, relation, relation.source, scan))
        statement.lanes.readers = [self._reading.reader(file) for file in numbered.files]
        return Plan(views), details

    def _files_view(
        self, relation: Relation, kept: Sequence[DataFile], granted: Sequence[DataFile], numbered: _Numbered
    ) -> View:
        columns = _named(relation)
        # If no rows are needed and the columns are unknown, one file is read for its columns.
        files = kept or ([] if columns else granted[:1])
        if not files and not columns:
            raise InvalidQuery(f"Relation {relation.name} has no rows yet, and its columns are unknown.")
        hashes = {file.schema_hash for file in files}
        uniform = len(files) < 2 or (len(hashes) == 1 and None not in hashes)
        paths = [path for file in files if (path := self._path(file)) is not None]
        if len(paths) == len(files):
            return View(relation.name, LocalFiles(paths, uniform or not files), columns)
        numbers = [(numbered.add(file), self._reading.size(file)) for file in files]
        return View(relation.name, LaneFiles(numbers, uniform), columns)

    def _table_view(self, statement: Statement, relation: Relation, table: Table, scan: Scan) -> View:
        lanes, columns = statement.lanes, _named(relation)
        if lanes.snapshot is None:
            if self._data_url is None:
                raise ConfigurationError("Tables cannot be read: set query_data_url.")
            lanes.snapshot = Snapshot(self._data_url, statement.job.limits.seconds)
            lanes.snapshot.open()
        planned = lanes.snapshot.planned(relation, table, scan)
        if planned is None:
            if not columns:
                raise InvalidQuery(f"Relation {relation.name} has no rows yet, and its columns are unknown.")
            return View(relation.name, LocalFiles([], uniform=True), columns)
        lanes.scans.append(planned)
        statement.unsized_numbers += planned.unsized_numbers
        schema = planned.schema.serialize().to_pybytes()
        # Columns that the statement does not use are left out, so that they do not appear as null.
        shown = [column for column in columns or () if scan.columns is None or folded(column.name) in scan.columns]
        source = LaneTable(len(lanes.scans) - 1, schema, planned.types)
        return View(relation.name, source, shown or None)


def _named(relation: Relation) -> list[Named] | None:
    if not relation.columns:
        return None
    try:
        return [Named(column.name, duckdb_type(column.type)) for column in relation.columns]
    except UnknownType:
        raise InvalidQuery(f"Relation {relation.name} has a column with a type that queries do not support.") from None


def _check_job(job: QueryJob) -> None:
    names = [folded(relation.name) for relation in job.relations]
    if len(names) > MAX_RELATIONS:
        raise BadRequest(f"A query may be granted at most {MAX_RELATIONS} relations, got {len(names)}.")
    if len(set(names)) < len(names):
        raise BadRequest("Two relations have the same name.")
