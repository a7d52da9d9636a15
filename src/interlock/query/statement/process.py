"""Runs one statement, from its text to its rows, in a process that was forked for it and has dropped its privileges."""

from __future__ import annotations

import errno
import math
import os
import resource
import socket
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from interlock.errors import InvalidQuery
from interlock.processes import landlock, linux, seccomp
from interlock.query.sql_gate import parse
from interlock.query.statement import protocol
from interlock.query.statement.io_client import Lanes, LaneScan, StoreAway, dataset
from interlock.query.statement.protocol import (
    WHOLE,
    Done,
    Failed,
    Job,
    Kind,
    LaneTable,
    LocalFiles,
    Named,
    Plan,
    View,
    Why,
)

_HEADROOM: Final = 128 << 20
"""Private memory beyond DuckDB's own limit, for Arrow buffers and fragmentation. The largest spilling statements that
were measured used 75 MiB of it. With the memory of Python, DuckDB and Arrow at the start of a statement (about 105 MiB
resident), the process stays within QUERY_OVERHEAD_MB beyond the setting."""
_UNKNOWN_STACK: Final = 8 << 20
_OPEN_FILES: Final = 512


def drop_descriptors(kept: Collection[int]) -> None:
    """Closes all other descriptors and clears the environment."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    last = max((2, *kept))
    for number in range(3, last):
        if number not in kept:
            with suppress(OSError):
                os.close(number)
    os.closerange(last + 1, 65_536)
    os.environ.clear()


def set_common_limits() -> None:
    """Sets the limits that are the same for all statements.

    The number of processes is not limited, because the kernel counts all processes of the user. A statement cannot
    start
    any, because Landlock lets it execute no file.
    """
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    os.umask(0o077)
    if sys.platform == "linux":
        # If memory runs out, the kernel must kill this process first.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def set_limits(*, memory_mb: int, temp_mb: int, cpu_seconds: int, threads: int) -> None:
    """Sets the limits of one statement.

    DuckDB's `memory_limit` does not count memory that its functions and aggregates allocate (`repeat`, `string_agg`,
    `list`, regular expressions), nor Arrow's buffers. RLIMIT_DATA counts every private writable mapping, so the kernel
    refuses the allocation. RLIMIT_AS would also count reserved addresses.
    """
    _limit(resource.RLIMIT_CPU, cpu_seconds)
    _limit(resource.RLIMIT_FSIZE, temp_mb << 20)
    if sys.platform == "linux":
        _limit(resource.RLIMIT_DATA, _data_size() + (memory_mb << 20) + _HEADROOM + threads * _stack_size())


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (limit, limit))


def _data_size() -> int:
    """Returns the bytes that RLIMIT_DATA already counts."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def _stack_size() -> int:
    """Returns the bytes that each new thread maps for its stack and hardly uses."""
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return _UNKNOWN_STACK if soft == resource.RLIM_INFINITY else soft


def warm_up() -> None:
    """Loads what the other functions need from Python and the kernel, without dropping anything."""
    resource.getrlimit(resource.RLIMIT_DATA)
    _data_size()
    landlock.version()


def install_seccomp_filter() -> None:
    """Installs the seccomp filter for user code.

    It also refuses new sockets here; a statement already has those it needs.
    """
    if sys.platform == "linux" and seccomp.supported():
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.refuse(only_wall=True, same_user=True, sockets=False)


def confine(files: Collection[str], folder: Path) -> None:
    """Restricts the process to reading these files and writing to this folder. Raises without Landlock support."""
    os.chdir(folder)
    landlock.restrict(map(Path, files), [folder])


Connection = duckdb.DuckDBPyConnection

_BATCH_ROWS: Final = 8_192
_ROW_GROUP_ROWS: Final = 122_880
_CPU_SLACK: Final = 5
_SMALL: Final = 1 << 16


_job = msgspec.msgpack.Decoder(Job)
_plan = msgspec.msgpack.Decoder(Plan)


@dataclass(slots=True)
class _Channel:
    sock: socket.socket
    _held: bytes = b""

    def receive(self, kind: Kind) -> bytes:
        got, size = protocol.HEADER.unpack(protocol.receive_exactly(self.sock, protocol.HEADER.size))
        if got != kind:
            raise EOFError
        return protocol.receive_exactly(self.sock, size)

    def send(self, kind: Kind, payload: Any) -> None:
        """Sends a frame together with the held ones, so that the engine wakes up only once."""
        begin = self._held + protocol.HEADER.pack(kind, len(payload))
        self._held = b""
        if len(payload) <= _SMALL:
            self.sock.sendall(begin + bytes(payload))
        else:
            self.sock.sendall(begin)
            self.sock.sendall(payload)

    def send_message(self, kind: Kind, message: msgspec.Struct) -> None:
        self.send(kind, msgspec.msgpack.encode(message))

    def hold(self, kind: Kind, message: msgspec.Struct) -> None:
        """Queues a message to be sent with the next frame."""
        self._held += protocol.encoded(kind, message)


def warm(connection: Connection) -> None:
    """Performs the steps of a statement once in advance, so that memory pages are private and lookups are cached.

    It must not start a second thread: threads that exist before Landlock is applied are not restricted.
    """
    connection.execute("set TimeZone = 'UTC'")
    near, far = socket.socketpair()
    with near, far:
        _rehearse(connection, _Channel(near), _Channel(far))


_REHEARSED: Final = Job(
    "select one, count(*) as many from rehearsed group by one order by many limit 1",
    folder=".",
    files=[],
    confined=False,
    seconds=1.0,
    memory_mb=64,
    threads=1,
    temp_mb=1,
    rows=1,
    bytes=1 << 20,
)


def _rehearse(connection: Connection, process: _Channel, engine: _Channel) -> None:
    """Runs a statement without data and discards its output."""
    warm_up()
    engine.send_message(Kind.JOB, _REHEARSED)
    job = _job.decode(process.receive(Kind.JOB))
    process.send(Kind.TREE, parse(job.sql, connection))
    engine.receive(Kind.TREE)
    engine.send_message(Kind.PLAN, Plan([View("rehearsed", LocalFiles([], uniform=True), [Named("one", "INTEGER")])]))
    _plan.decode(process.receive(Kind.PLAN))
    connection.execute("; ".join(_settings(job)))
    connection.execute("create view rehearsed as select i % 7 as one from range(100) as t(i)")
    _execute(connection, job, process)
    connection.execute("drop view rehearsed")


def run(descriptors: list[int], connection: Connection) -> None:
    """Runs a statement. The first descriptor is the channel to the engine, the others are lanes. Reports all errors."""
    channel = _Channel(socket.socket(fileno=descriptors[0]))
    lanes = Lanes(descriptors[1:])
    try:
        job = _job.decode(channel.receive(Kind.JOB))
        _give_up_rights(job)
        channel.send(Kind.TREE, parse(job.sql, connection))
        plan = _plan.decode(channel.receive(Kind.PLAN))
        _prepare(connection, job, plan, lanes)
        _execute(connection, job, channel)
    except (EOFError, BrokenPipeError):
        return  # the engine needs nothing more
    except Exception as error:  # report the error before the process ends
        channel.send_message(Kind.FAILED, _failure(error, lanes))


def _give_up_rights(job: Job) -> None:
    cpu = math.ceil(job.seconds) * max(1, job.threads) + _CPU_SLACK
    threads = max(1, job.threads)
    set_limits(memory_mb=job.memory_mb, temp_mb=job.temp_mb, cpu_seconds=cpu, threads=threads)
    if job.confined:
        confine(job.files, Path(job.folder))
    install_seccomp_filter()


# Views


def _prepare(connection: Connection, job: Job, plan: Plan, lanes: Lanes) -> None:
    ordered = [*_settings(job), f"set threads = {job.threads:d}", "set enable_external_access = false"]
    connection.execute("; ".join(ordered))
    pa.set_cpu_count(max(1, job.threads))
    for view in plan.views:
        _make_view(connection, view, lanes)
    connection.execute("set lock_configuration = true")


def _settings(job: Job) -> list[str]:
    """Returns DuckDB's settings. Paths come first, because none can be added after external access is disabled."""
    values = {
        "memory_limit": f"{job.memory_mb}MiB",
        "temp_directory": f"{job.folder}/spill",
        "max_temp_directory_size": f"{job.temp_mb}MiB",
        "secret_directory": f"{job.folder}/none",
    }
    named = (f"set {name} = {_literal(value)}" for name, value in values.items())
    return [f"set allowed_paths = {_listed(job.files)}", *named]


def _make_view(connection: Connection, view: View, lanes: Lanes) -> None:
    if view.source == LocalFiles([], uniform=True) and view.columns:
        columns = ", ".join(f"null::{column.type} as {quoted(column.name)}" for column in view.columns)
        connection.execute(f"create view {quoted(view.name)} as select {columns} where false")
        return
    source = _source(connection, view, lanes)
    columns = ", ".join(_selected(connection, source, view)) or "*"
    # Names are quoted and paths are literals; nothing comes from the text of the statement.
    connection.execute(f"create view {quoted(view.name)} as select {columns} from {source}")  # noqa: S608


def _source(connection: Connection, view: View, lanes: Lanes) -> str:
    if isinstance(view.source, LocalFiles):
        by_name = "false" if view.source.uniform else "true"
        return f"read_parquet({_listed(view.source.paths)}, union_by_name={by_name}, hive_partitioning=false)"
    made: Any
    if isinstance(view.source, LaneTable):
        made = LaneScan(lanes, view.source.number, pa.ipc.read_schema(pa.py_buffer(view.source.schema)))
    else:
        made = dataset(lanes, view.source)
    name = f"__source of {view.name}"
    connection.register(name, made)
    return quoted(name)


def _selected(connection: Connection, source: str, view: View) -> Iterator[str]:
    """Yields the columns of the dataset schema, in order. Columns that no file has yet are null."""
    types = {column.name: column.type for column in view.source.types} if isinstance(view.source, LaneTable) else {}
    if view.columns is None and not types:
        return
    there = [str(row[0]) for row in connection.execute(f"describe from {source}").fetchall()]
    known = {name.lower(): name for name in there}
    for column in view.columns or [Named(name, "") for name in there]:
        found = known.get(column.name.lower())
        if found is None:
            yield f"null::{column.type} as {quoted(column.name)}"
        elif wanted := types.get(found):
            yield f"{_converted(found, wanted)} as {quoted(column.name)}"
        else:
            yield f"{quoted(found)} as {quoted(column.name)}"


def _converted(name: str, wanted: str) -> str:
    if wanted != WHOLE:
        return f"cast({quoted(name)} as {wanted})"
    # A cast alone would round.
    refusal = _literal(f"Column {name} has a number with a fraction, but only integers are expected.")
    return f"case when contains({quoted(name)}, '.') then error({refusal}) else cast({quoted(name)} as {WHOLE}) end"


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _listed(values: list[str]) -> str:
    return "[" + ", ".join(map(_literal, values)) + "]"


# Rows


def _execute(connection: Connection, job: Job, channel: _Channel) -> None:
    # `execute` would compute all rows before it returned the first one.
    relation = connection.sql(job.sql)
    if relation is None:
        raise InvalidQuery("The statement returns no rows: write one SELECT.")
    columns = [(str(name), str(kind)) for name, kind in zip(relation.columns, relation.types, strict=True)]
    reader = _portable(relation).to_arrow_reader(_ROW_GROUP_ROWS if job.export else _BATCH_ROWS)
    schema = _without_dictionaries(reader.schema)
    if job.export is None:
        channel.hold(Kind.SCHEMA, protocol.Schema(schema.serialize().to_pybytes(), columns))
        done = _send_rows(reader, schema, job, channel)
    else:
        done = _export(reader, schema, job.export)
        channel.hold(Kind.SCHEMA, protocol.Schema(schema.serialize().to_pybytes(), columns))
    channel.send_message(Kind.DONE, done)


def _portable(relation: Any) -> Any:
    """Casts big integers to text, because Arrow has no arbitrary-precision integer."""
    if not any(WHOLE in str(kind) for kind in relation.types):
        return relation
    listed = [
        f"cast(#{number} as {_portable_type(kind)}) as {quoted(str(name))}" if WHOLE in str(kind) else f"#{number}"
        for number, (name, kind) in enumerate(zip(relation.columns, relation.types, strict=True), 1)
    ]
    return relation.project(", ".join(listed))


def _portable_type(kind: Any) -> str:
    match kind.id:
        case "bignum":
            return "VARCHAR"
        case "list":
            return f"{_portable_type(dict(kind.children)['child'])}[]"
        case "array":
            parts = dict(kind.children)
            return f"{_portable_type(parts['child'])}[{parts['size']}]"
        case "map":
            parts = dict(kind.children)
            return f"MAP({_portable_type(parts['key'])}, {_portable_type(parts['value'])})"
        case "struct":
            return f"STRUCT({', '.join(f'{quoted(name)} {_portable_type(part)}' for name, part in kind.children)})"
        case _:
            return str(kind)


def _send_rows(reader: Any, schema: Any, job: Job, channel: _Channel) -> Done:
    rows = size = 0
    for read in reader:
        if not read.num_rows:
            continue
        batch = _plain(read, schema)
        fitting = _fitting(batch, job.rows - rows, job.bytes - size)
        if fitting.num_rows:
            for message in _messages(fitting):
                channel.send(Kind.BATCH, message)
            rows, size = rows + fitting.num_rows, size + fitting.nbytes
        elif not rows and job.rows:
            raise _RowTooLarge
        if fitting.num_rows < batch.num_rows:
            return Done(rows, size, truncated=True)
    return Done(rows, size, truncated=False)


class _RowTooLarge(Exception):
    pass


def _messages(batch: Any) -> Iterator[Any]:
    """Splits a batch into messages within the frame limit. Only batches with large rows are split."""
    if batch.nbytes <= protocol.MAX_FRAME:
        message = batch.serialize()
        if len(message) <= protocol.MAX_FRAME:
            yield message
            return
    if batch.num_rows == 1:
        raise _RowTooLarge
    half = batch.num_rows // 2
    yield from _messages(batch.slice(0, half))
    yield from _messages(batch.slice(half))


def _fitting(batch: Any, rows: int, size: int) -> Any:
    """Returns the first rows of a batch that fit the limits on rows and, approximately, on bytes."""
    count = min(batch.num_rows, rows)
    while count and batch.slice(0, count).nbytes > size:
        count //= 2
    return batch.slice(0, count)


def _export(reader: Any, schema: Any, path: str) -> Done:
    rows = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for read in reader:
            writer.write_batch(_plain(read, schema), row_group_size=_ROW_GROUP_ROWS)
            rows += read.num_rows
    return Done(rows, Path(path).stat().st_size, truncated=False)


def _plain(batch: Any, schema: Any) -> Any:
    return batch if batch.schema == schema else batch.cast(schema)


def _without_dictionaries(schema: Any) -> Any:
    """Replaces dictionary types, which need separate messages in an Arrow stream; enum values are short enough."""
    return pa.schema([field.with_type(_plain_type(field.type)) for field in schema])


def _plain_type(kind: Any) -> Any:
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    return kind


# Errors


def _failure(error: Exception, lanes: Lanes) -> Failed:
    """Converts an error to a message that never contains the text of the statement."""
    if lanes.broke or isinstance(error, StoreAway):
        return Failed("store", "a store is unavailable")
    if isinstance(error, InvalidQuery):
        return Failed("invalid", error.detail)
    if isinstance(error, _RowTooLarge):
        return Failed("row", "one row is larger than the limit of the response")
    return Failed(_why(error), _sentence(error))


_OUT_OF_MEMORY: Final = "Out of Memory Error"
_MET_BY_ARROW: Final = (_OUT_OF_MEMORY, "Conversion Error", "Invalid Input Error", "Out of Range Error")
"""DuckDB errors after the first rows: Arrow's reader turns them into an OSError with DuckDB's message."""


def _why(error: Exception) -> Why:
    if isinstance(error, duckdb.OutOfMemoryException | MemoryError | pa.ArrowMemoryError):
        return "memory"
    if isinstance(error, OSError) and str(error).startswith(_MET_BY_ARROW):
        return "memory" if str(error).startswith(_OUT_OF_MEMORY) else "invalid"
    if isinstance(error, duckdb.FatalException | duckdb.InternalException):
        return "crash"
    if isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
        return "temp"
    if isinstance(error, duckdb.IOException | OSError):
        return "store"
    return "invalid" if isinstance(error, duckdb.Error | pa.ArrowInvalid) else "crash"


def _sentence(error: Exception) -> str:
    lines = str(error).split("\n")
    shown = [lines[0]] + [line.strip() for line in lines[1:] if line.startswith("Candidate")]
    return " ".join(shown)[:1_000]
