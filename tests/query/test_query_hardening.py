"""The sandbox alone: behind a gate that accepts everything, an attack still reaches nothing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interlock.errors import InterlockError, QueryTooLarge
from interlock.processes import landlock, seccomp
from interlock.query import sql_gate
from interlock.query.engine import DataFile, Engine, Files, Limits, QueryJob, Relation, rows_of
from interlock.query.sql_gate import Scan
from interlock.settings.query import QUERY_OVERHEAD_MB
from tests.query.corpus import ATTACKS, Attack
from tests.support.polls import eventually

SECRET = "a-secret-that-no-statement-contains"
UNNAMED = "a-file-that-no-statement-names"
AT_ONCE = 3
KINDS = sorted({attack.kind for attack in ATTACKS})

pytestmark = pytest.mark.skipif(landlock.version() == 0, reason="the kernel has no Landlock")


def open_gate(sql: str, _tree: bytes, relations: Collection[str], _columns: Collection[str]) -> sql_gate.Statement:
    return sql_gate.Statement(sql, {name: Scan(None) for name in relations})


@dataclass(frozen=True)
class Place:
    """A folder with data that an attack wants to read, and a listener that it wants to reach."""

    folder: Path
    listener: socket.socket

    @property
    def granted(self) -> Path:
        return self.folder / "granted.parquet"

    @property
    def names(self) -> dict[str, object]:
        return {
            "canary": self.folder / "canary.txt",
            "folder": self.folder,
            "granted": self.granted,
            "other": self.folder / "other.parquet",
            "out": self.folder / "out",
            "port": self.listener.getsockname()[1],
        }

    def contents(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def was_called(self) -> bool:
        try:
            self.listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("data")
    pq.write_table(pa.table({"a": [1, 2], "b": ["x", "y"]}), folder / "granted.parquet")
    pq.write_table(pa.table({"a": [SECRET]}), folder / "other.parquet")
    (folder / "canary.txt").write_text(f"{SECRET}\n")
    (folder / UNNAMED).write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield Place(folder, listener)


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    os.environ["INTERLOCK_TEST_CANARY"] = SECRET
    running = Engine(tmp_path_factory.mktemp("engine") / "temp", judge=open_gate)
    await running.start()
    del os.environ["INTERLOCK_TEST_CANARY"]
    yield running
    await running.stop()


class PeakOfChildren:
    """The maximum resident memory of any child of a process during the block."""

    def __init__(self, parent: int | None) -> None:
        self.resident_mb = 0
        self._parent = psutil.Process(parent)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            for child in self._parent.children():
                with suppress(OSError, IndexError):
                    status = Path(f"/proc/{child.pid}/status").read_text()
                    kib = int(status.split("VmHWM:")[1].split()[0])
                    self.resident_mb = max(self.resident_mb, kib >> 10)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


async def outcome(engine: Engine, place: Place, sql: str, limits: Limits) -> str:
    """Returns what the caller sees: rows, or an error."""
    relation = Relation("granted", Files([DataFile(str(place.granted))]))
    try:
        async with await engine.run(QueryJob(sql, [relation], limits)) as result:
            return str([rows_of(batch) async for batch in result.batches()])
    except InterlockError as error:
        return f"{type(error).__name__}: {error.detail}"


@pytest.mark.parametrize("kind", KINDS)
async def test_attack_is_harmless_without_the_gate(engine: Engine, place: Place, kind: str) -> None:
    before = place.contents()
    places = asyncio.Semaphore(AT_ONCE)
    limits = Limits(seconds=1.5, memory_mb=128, threads=1, temp_mb=16, rows=2_000)

    async def attacked(attack: Attack) -> None:
        async with places:
            seen = await outcome(engine, place, attack.text(place.names), limits)
        assert SECRET not in seen, attack.name
        assert UNNAMED not in seen, attack.name
        assert not seen.startswith("Unavailable"), attack.name

    await asyncio.gather(*(attacked(attack) for attack in ATTACKS if attack.kind == kind))
    assert place.contents() == before
    assert not place.was_called()


@pytest.mark.parametrize(
    "sql",
    [
        "set enable_external_access = true",
        "set allowed_paths = ['{canary}']",
        "set memory_limit = '1TB'",
        "set lock_configuration = false",
        "set threads = 64",
        "set allow_unsigned_extensions = true",
        "reset temp_directory",
        "pragma memory_limit = '1TB'",
    ],
)
async def test_duckdb_configuration_is_locked(engine: Engine, place: Place, sql: str) -> None:
    text = sql.replace("{canary}", str(place.folder / "canary.txt"))
    assert (await outcome(engine, place, text, Limits())).startswith("InvalidQuery")


@pytest.mark.parametrize("kind", ["csv", "parquet", "json"])
async def test_copy_cannot_write_to_a_granted_file(engine: Engine, place: Place, kind: str) -> None:
    """DuckDB alone would allow it, because it can write to readable paths."""
    before = place.granted.read_bytes()
    seen = await outcome(engine, place, f"copy (select 42) to '{place.granted}' (format {kind})", Limits())
    assert seen.startswith(("InvalidQuery", "Unavailable"))
    assert place.granted.read_bytes() == before
    assert sorted(path.name for path in place.folder.iterdir()) == sorted(
        ["granted.parquet", "other.parquet", "canary.txt", UNNAMED]
    )


async def test_warm_process_has_no_service_environment(engine: Engine) -> None:
    assert SECRET not in str(psutil.Process(engine.warm_pid).environ())


@pytest.mark.parametrize(
    "sql",
    [
        "select repeat(repeat('x', 1000000), 4000)",
        "select list_sum(range(2000000000))",
        "select list(a.a || repeat('y', 1000)) from granted a, (select unnest(range(2000000))) b",
        "select string_agg(repeat('z', 10000000)) from (select unnest(range(200)))",
    ],
)
async def test_unlimited_allocation_hits_the_memory_limit(engine: Engine, place: Place, sql: str) -> None:
    limits = Limits(seconds=20, memory_mb=64, threads=1, temp_mb=16)
    assert (await outcome(engine, place, sql, limits)).startswith(("QueryTooLarge", "InvalidQuery"))


@pytest.mark.parametrize(
    "sql",
    [
        "select length(repeat(repeat('x', 1000000), 700))",
        "select length(string_agg(repeat('z', 1000000), '')) from (select unnest(range(1500)))",
        "select len(string_split(repeat('a,', 20000000), ','))",
        "select repeat('x', 100000) from (select unnest(range(100000)))",
        "select " + ", ".join(f"repeat('x', 1000000) as c{number}" for number in range(900)),
    ],
    ids=["repeat", "string_agg", "split", "arrow_batch", "many_columns"],
)
async def test_memory_outside_duckdb_accounting_stays_within_the_limit(engine: Engine, place: Place, sql: str) -> None:
    limits = Limits(seconds=60, memory_mb=128, threads=1, temp_mb=16, rows=10**6, bytes=1 << 32)
    with PeakOfChildren(engine.warm_pid) as peak:
        said = await outcome(engine, place, sql, limits)
    assert "more than 128 MB of memory" in said
    assert peak.resident_mb <= limits.memory_mb + QUERY_OVERHEAD_MB


async def test_statement_waits_until_an_earlier_process_is_dead(tmp_path: Path) -> None:
    narrow = Engine(tmp_path / "temp", judge=open_gate, most_processes=1)
    await narrow.start()
    try:
        unread = "select repeat('x', 1000000) from (select unnest(range(100)))"
        first = await narrow.run(QueryJob(unread, [], Limits(bytes=1 << 30)))
        second = asyncio.create_task(narrow.run(QueryJob("select 2", [], Limits())))
        finished, _ = await asyncio.wait([second], timeout=0.3)
        assert not finished
        assert narrow.running == 1
        await first.close()
        await (await second).close()
    finally:
        await narrow.stop()


async def test_endless_statement_is_killed(engine: Engine, place: Place) -> None:
    endless = "with recursive r(n) as (select 1 union all select n + 1 from r) select max(n) from r"
    relation = Relation("granted", Files([DataFile(str(place.granted))]))
    with pytest.raises(QueryTooLarge) as ended:
        await engine.run(QueryJob(endless, [relation], Limits(seconds=0.5)))
    assert ended.value.code == "query_timeout"
    assert engine.running == 0


async def test_endless_parsing_is_killed(engine: Engine) -> None:
    with pytest.raises(QueryTooLarge) as ended:
        await engine.run(QueryJob("select " + "(" * 20_000, [], Limits(seconds=0.5)))
    assert ended.value.code == "query_timeout"


# Landlock itself

CONFINED = """
import os, socket, sys
from pathlib import Path
from interlock.processes import landlock
folder, port = Path(sys.argv[1]), int(sys.argv[2])
landlock.restrict([folder / "readable"], [folder / "writable"])
def tried(name, action):
    try:
        action()
        print(name, "done")
    except OSError as error:
        print(name, "refused")
tried("read", (folder / "readable").read_bytes)
tried("write-readable", lambda: (folder / "readable").write_text("x"))
tried("read-other", (folder / "other").read_bytes)
tried("list", lambda: list(folder.iterdir()))
tried("make", lambda: (folder / "writable" / "new").write_text("x"))
tried("make-outside", lambda: (folder / "new").write_text("x"))
tried("rename-out", lambda: os.rename(folder / "writable" / "new", folder / "new"))
tried("link-in", lambda: os.symlink(folder / "other", folder / "writable" / "link"))
tried("execute", lambda: os.execv("/bin/true", ["true"]))
tried("connect", lambda: socket.create_connection(("127.0.0.1", port), timeout=5))
tried("listen", lambda: socket.create_server(("127.0.0.1", 0)))
"""


async def test_landlock_restricts_a_process_to_the_given_paths(tmp_path: Path, place: Place) -> None:
    (tmp_path / "writable").mkdir()
    (tmp_path / "readable").write_text("readable")
    (tmp_path / "other").write_text("other")
    arguments = ["-c", CONFINED, str(tmp_path), str(place.names["port"])]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    tcp = "refused" if landlock.version() >= 4 else "done"
    assert dict(line.split() for line in said.decode().splitlines()) == {
        "read": "done",
        "write-readable": "refused",
        "read-other": "refused",
        "list": "refused",
        "make": "done",
        "make-outside": "refused",
        "rename-out": "refused",
        "link-in": "refused",
        "execute": "refused",
        "connect": tcp,
        "listen": tcp,
    }
    assert not place.was_called() or tcp == "done"


REFUSED_CALLS = """
import ctypes, json, os, socket
from interlock.query.statement import process

process.install_seccomp_filter()
libc = ctypes.CDLL(None, use_errno=True)

def refused(action):
    try:
        return action() == -1
    except OSError:
        return True

print(json.dumps({
    "a socket": refused(lambda: socket.socket().close()),
    "a new user namespace": refused(lambda: libc.unshare(0x10000000)),
    "the mode of a file": refused(lambda: os.chmod(".", 0o755)),
    "a limit of another process": refused(lambda: libc.prlimit(os.getppid(), 7, None, None)),
    "reading": refused(lambda: os.stat(".")),
}))
"""


@pytest.mark.skipif(not seccomp.supported(), reason="no filter for this machine")
async def test_statement_process_is_refused_unneeded_system_calls(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", REFUSED_CALLS, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
    )
    said, _ = await process.communicate()
    assert json.loads(said) == {
        "a socket": True,
        "a new user namespace": True,
        "the mode of a file": True,
        "a limit of another process": True,
        "reading": False,
    }


@pytest.mark.skipif(not seccomp.supported(), reason="no filter for this machine")
async def test_statement_runs_under_its_own_system_call_filter(engine: Engine, place: Place) -> None:
    endless = "with recursive r(n) as (select 1 union all select n + 1 from r) select max(n) from r"
    running = asyncio.create_task(outcome(engine, place, endless, Limits(seconds=5.0)))
    warm = psutil.Process(engine.warm_pid)

    def filtered() -> bool:
        return running.done() or any(_filters(child.pid) == _filters(warm.pid) + 1 for child in warm.children())

    await eventually(filtered)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def _filters(pid: int) -> int:
    """Returns the number of seccomp filters of a process, including those of a container, or -1 once it has exited."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().split("Seccomp_filters:")[1].split()[0])
    except (OSError, IndexError):
        return -1
