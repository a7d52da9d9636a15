"""One embedded PostgreSQL per test process; a separate database for each test that requests one."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from hypothesis import settings

from interlock.clock import ManualClock
from interlock.stores.embedded import EmbeddedPostgres, EmbeddedValkey
from interlock.stores.postgres import migrate
from tests.support.aws import Aws, ministack
from tests.support.s3 import S3, seaweed
from tests.support.system import System, running

# A busy machine must not fail a test.
settings.register_profile("interlock", deadline=None)
settings.load_profile("interlock")

# A shell that starts pytest in the background ignores SIGINT, and every process that a test starts would inherit
# that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start hundreds of processes. Without cached bytecode each would spend more than half its time compiling.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests that start all of Interlock in parallel must not compete for the default port.
os.environ.setdefault("INTERLOCK_QUERY", "127.0.0.1:0")

# In memory, if there is enough: copying a database takes a tenth of the time, and most tests copy one.
MEMORY, ROOMY_BYTES = Path("/dev/shm"), 8 << 30
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOMY_BYTES:
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

_numbers = itertools.count(1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs modules with slow tests first, so that no process waits for the last of them at the end.

    Alternates between folders: tests of one folder strain the machine in the same way, and three Sparks at the same
    time slow each other down.
    """
    slow = dict.fromkeys(item.path for item in items if any(map(item.get_closest_marker, ("slow", "crash"))))
    numbers: defaultdict[Path, Iterator[int]] = defaultdict(itertools.count)
    turns = {path: next(numbers[path.parent]) for path in slow}
    items.sort(key=lambda item: turns.get(item.path, len(turns)))


def _database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


@pytest.fixture(scope="session")
async def postgres_url() -> AsyncIterator[str]:
    """The server's own empty database; tests connect to copies of the template instead."""
    # Not under pytest's temporary folder: each run closes that to other users, and as root the server runs as another.
    with tempfile.TemporaryDirectory(prefix="interlock-test-") as folder:
        server = EmbeddedPostgres(Path(folder) / "postgres", name="test", log=Path(folder) / "postgres.log")
        url = await server.start()
        _forgo_durability(server)
        yield url
        await server.stop()


def _forgo_durability(server: EmbeddedPostgres) -> None:
    """Disables syncs: this server is never recovered, and creating or dropping a database is ten times as fast."""
    with (server.data / "postgresql.conf").open("a") as settings:
        settings.write("fsync = off\nfull_page_writes = off\n")
    os.kill(server.pid or 0, signal.SIGHUP)


@pytest.fixture(scope="session")
async def template(postgres_url: str) -> str:
    """A migrated database to copy from, which is far faster than migrating each one."""
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("create database template_state")
    await connection.close()
    await migrate(_database(postgres_url, "template_state"))
    return "template_state"


@asynccontextmanager
async def copied(postgres_url: str, template: str) -> AsyncIterator[str]:
    name = f"state_{next(_numbers)}"
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(f"create database {name} template {template} strategy file_copy")
    yield _database(postgres_url, name)
    await connection.execute(f"drop database {name} with (force)")
    await connection.close()


@pytest.fixture
async def state_url(postgres_url: str, template: str) -> AsyncIterator[str]:
    async with copied(postgres_url, template) as url:
        yield url


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def system(state_url: str, tmp_path: Path) -> AsyncIterator[System]:
    """The whole system on the real clock."""
    async with running(state_url, tmp_path) as started:
        yield started


@pytest.fixture
async def still(state_url: str, tmp_path: Path, clock: ManualClock) -> AsyncIterator[System]:
    """The whole system on a clock that only the test moves."""
    async with running(state_url, tmp_path, clock) as started:
        yield started


@pytest.fixture(scope="module")
async def shared(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """One system on the real clock for tests of a module that only read, or use only their own tasks."""
    async with (
        copied(postgres_url, template) as url,
        running(url, tmp_path_factory.mktemp("shared")) as started,
    ):
        yield started


@pytest.fixture(scope="session")
async def valkey() -> AsyncIterator[EmbeddedValkey]:
    """One server per test process. If a test stops it, `start()` starts it again."""
    with tempfile.TemporaryDirectory(prefix="interlock-test-") as folder:
        server = EmbeddedValkey(Path(folder) / "valkey", name="test", log=Path(folder) / "valkey.log")
        await server.start()
        yield server
        await server.stop()


@pytest.fixture(scope="session")
async def aws() -> AsyncIterator[Aws]:
    """One server per test process. Its keys are in its `environment`, not in that of the tests."""
    with tempfile.TemporaryDirectory(prefix="interlock-test-") as folder:
        async with ministack(Path(folder)) as started:
            yield started


@pytest.fixture(scope="session")
async def s3() -> AsyncIterator[S3]:
    """One server per test process. Its keys are in its `environment`, not in that of the tests."""
    with tempfile.TemporaryDirectory(prefix="interlock-test-") as folder:
        async with seaweed(Path(folder)) as started:
            yield started
