"""Embedded servers under kills, hangs, lost files and other faults, with real servers and real signals."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import psutil
import pytest
import valkey.asyncio as valkey

from interlock.stores.embedded import EmbeddedPostgres, EmbeddedServer, EmbeddedServerError, EmbeddedValkey, account
from interlock.stores.embedded.account import Account, AccountError
from interlock.stores.embedded.server import is_alive, trim_log
from tests.support.polls import answered

STARTER = """
import asyncio, json, sys
from pathlib import Path
from interlock.stores.embedded import EmbeddedPostgres, EmbeddedValkey

async def main(folder):
    log = folder / "server.log"
    servers = EmbeddedPostgres(folder / "postgres", name="postgres", log=log), EmbeddedValkey(
        folder / "valkey", name="valkey", log=log)
    urls = await asyncio.gather(*(server.start() for server in servers))
    print(json.dumps([[server.pid, url] for server, url in zip(servers, urls)]), file=sys.stderr, flush=True)
    sys.stdin.read()

asyncio.run(main(Path(sys.argv[1])))
"""


class Farm:
    """Creates servers in one scratch folder, and stops those that a test leaves running."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "logs" / "server.log"
        self._servers: list[EmbeddedServer] = []

    def postgres(self, place: str = "postgres", patience: float = 60.0) -> EmbeddedPostgres:
        server = EmbeddedPostgres(self.root / place, name=place, log=self.log, patience=patience)
        self._servers.append(server)
        return server

    def valkey(self, place: str = "valkey", patience: float = 60.0) -> EmbeddedValkey:
        server = EmbeddedValkey(self.root / place, name=place, log=self.log, patience=patience)
        self._servers.append(server)
        return server

    def either(self, kind: str, place: str | None = None, patience: float = 60.0) -> EmbeddedServer:
        make = self.postgres if kind == "postgres" else self.valkey
        return make(place or kind, patience)

    async def end(self) -> None:
        for server in sorted(self._servers, key=lambda server: -server.patience):
            await server.stop()


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A folder shared by all tests, because creating a cluster takes a second.

    A test either leaves its servers intact or uses a folder of its own. The folder is not one of pytest's temporary
    folders: pytest makes those accessible only to their owner, and servers started by root do not run as root.
    """
    path = Path(tempfile.mkdtemp(prefix="interlock-embedded-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def farm(root: Path) -> AsyncIterator[Farm]:
    farm = Farm(root)
    yield farm
    await farm.end()


async def run_sql(url: str, *statements: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements[:-1]:
            await connection.execute(statement)
        return await connection.fetchval(statements[-1])
    finally:
        await connection.close()


async def ping(url: str) -> bool:
    async with valkey.Valkey.from_url(url) as client:
        return bool(await client.ping())


async def answers(server: EmbeddedServer, url: str) -> bool:
    if isinstance(server, EmbeddedValkey):
        return await ping(url)
    return await run_sql(url, "SELECT 1") == 1


async def kill(server: EmbeddedServer) -> None:
    assert server.pid is not None
    process = psutil.Process(server.pid)
    process.kill()
    await asyncio.to_thread(process.wait, 10)


@contextmanager
def stranger_of(uid: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that belongs to the servers' user but is not a server."""
    # Resolved here, because PATH may contain folders that this user cannot enter.
    program = os.path.realpath(shutil.which("sleep") or "sleep")
    with subprocess.Popen([program, "600"], user=uid if os.geteuid() == 0 else None) as process:
        yield process
        process.kill()


@contextmanager
def altered(path: Path, text: str) -> Iterator[None]:
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_first_start_creates_a_database_with_an_unprivileged_owner(farm: Farm) -> None:
    url = await farm.postgres().start()
    assert urlsplit(url).path == "/interlock"
    assert await run_sql(url, "SELECT current_user::text") == "interlock"
    assert await run_sql(url, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is False
    assert await run_sql(url, "CREATE TABLE word (word text)", "SELECT upper('é')") == "É"


async def test_server_runs_with_our_settings(farm: Farm) -> None:
    url = await farm.postgres().start()
    wanted = {
        "fsync": "on",
        "jit": "off",
        "TimeZone": "UTC",
        "max_wal_size": "2GB",
        "synchronous_commit": "on",
    }
    connection = await asyncpg.connect(url)
    found = {name: await connection.fetchval("SELECT current_setting($1)", name) for name in wanted}
    await connection.close()
    assert found == wanted


async def test_restart_keeps_the_data_and_the_url(farm: Farm) -> None:
    server = farm.postgres()
    url = await server.start()
    await run_sql(url, "CREATE TABLE before_stop AS SELECT 7 AS n", "SELECT 1")
    await server.stop()
    assert not server.running()
    assert await server.start() == url
    assert await run_sql(url, "SELECT n FROM before_stop") == 7


async def test_all_servers_start_concurrently(farm: Farm) -> None:
    places = "postgres-state", "postgres-data"
    servers = [*(farm.postgres(place) for place in places), farm.valkey()]
    urls = await asyncio.gather(*(server.start() for server in servers))
    assert len({server.pid for server in servers}) == 3
    assert all(server.running() for server in servers)
    assert all([await answers(server, url) for server, url in zip(servers, urls, strict=True)])


async def test_servers_outlive_a_killed_starter_and_are_adopted(farm: Farm) -> None:
    starter = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        STARTER,
        str(farm.root),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert starter.stderr is not None
    line = await starter.stderr.readline()
    starter.kill()
    await starter.wait()
    for server, (pid, url) in zip((farm.postgres(), farm.valkey()), json.loads(line), strict=True):
        assert await server.start() == url
        assert server.pid == pid
        assert await answers(server, url)


@pytest.mark.parametrize("kind", ["postgres", "valkey"])
async def test_two_starts_on_one_folder_share_one_server(farm: Farm, kind: str) -> None:
    first, second = (farm.either(kind, place=f"contested-{kind}") for _ in range(2))
    urls = await asyncio.gather(first.start(), second.start())
    assert urls[0] == urls[1]
    assert first.pid == second.pid


async def test_killed_postgres_restarts_with_its_data_despite_an_orphan(farm: Farm) -> None:
    server = farm.postgres()
    url = await server.start()
    await run_sql(url, "CREATE TABLE before_kill AS SELECT 7 AS n", "SELECT 1")
    connection = await asyncpg.connect(url)
    orphan = psutil.Process(await connection.fetchval("SELECT pg_backend_pid()"))
    endless = asyncio.create_task(connection.execute("SELECT count(*) FROM generate_series(1, 1e12::bigint)"))
    # Once another connection sees the query, it is certain to be running.
    runs = "SELECT true FROM pg_stat_activity WHERE query LIKE '%1e12%' AND pid <> pg_backend_pid()"
    await answered(lambda: run_sql(url, runs))
    before = server.pid
    await kill(server)
    assert not server.running()
    assert await server.start() == url
    assert server.pid != before
    assert await run_sql(url, "SELECT n FROM before_kill") == 7
    assert not is_alive(orphan)
    with pytest.raises((asyncpg.PostgresError, OSError)):
        await endless


async def test_killed_valkey_restarts_under_its_url(farm: Farm) -> None:
    server = farm.valkey()
    url = await server.start()
    await kill(server)
    assert not server.running()
    assert await server.start() == url
    assert await ping(url)


@pytest.mark.parametrize(("kind", "pid_file"), [("postgres", "postmaster.pid"), ("valkey", "valkey.pid")])
async def test_stale_pid_file_with_a_reused_pid_is_detected(farm: Farm, kind: str, pid_file: str) -> None:
    server = farm.either(kind)
    await server.start()
    path = server.data / pid_file
    owner = path.stat()
    lines = path.read_text().splitlines()
    await server.stop()
    with stranger_of(owner.st_uid) as stranger:
        path.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
        os.chown(path, owner.st_uid, owner.st_gid)
        url = await server.start()
        assert server.pid != stranger.pid
        assert await answers(server, url)
        assert stranger.poll() is None


@pytest.mark.parametrize("kind", ["postgres", "valkey"])
async def test_server_whose_folder_was_deleted_starts_with_a_new_one(farm: Farm, kind: str) -> None:
    server = farm.either(kind)
    await server.start()
    assert server.pid is not None
    old = psutil.Process(server.pid)
    shutil.rmtree(server.directory)
    successor = farm.either(kind)
    url = await successor.start()
    assert await answers(successor, url)
    assert not server.running()
    assert not is_alive(old)


async def test_leftovers_of_a_killed_start_are_removed(farm: Farm) -> None:
    server = farm.postgres()
    draft = server.directory / "draft-old" / "base"
    draft.mkdir(parents=True)
    assert await answers(server, await server.start())
    assert not draft.parent.exists()


async def test_path_longer_than_a_socket_name_works(farm: Farm) -> None:
    deep = "/".join(["a folder's name"] * 12)
    servers = farm.postgres(f"{deep}/postgres"), farm.valkey(f"{deep}/valkey")
    for server in servers:
        assert len(str(server.directory)) > 107
        assert await answers(server, await server.start())
        assert not await restarted(server)


async def restarted(server: EmbeddedServer) -> bool:
    """Starts the server again and returns true if its process has changed."""
    before = server.pid
    await server.start()
    return server.pid != before


async def test_postgres_requires_the_password(farm: Farm) -> None:
    parts = urlsplit(await farm.postgres().start())
    address = f"{parts.hostname}:{parts.port}/interlock"
    for login in ("interlock:wrong", "interlock", "postgres", f"postgres:{parts.password}"):
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(f"postgresql://{login}@{address}", passfile=str(farm.root / "none"))


async def test_valkey_requires_the_password(farm: Farm) -> None:
    parts = urlsplit(await farm.valkey().start())
    for login in (":wrong@", ""):
        with pytest.raises(valkey.AuthenticationError):
            await ping(f"valkey://{login}{parts.hostname}:{parts.port}/0")


async def test_files_are_private_and_no_command_line_has_the_password(
    farm: Farm,
) -> None:
    servers = farm.postgres(), farm.valkey()
    for server in servers:
        password = urlsplit(await server.start()).password
        assert password
        assert mode_of(server.directory) == (0o710 if os.geteuid() == 0 else 0o700)
        assert {mode_of(path) for path in server.directory.rglob("*") if path.is_dir()} == {0o700}
        assert {mode_of(path) for path in server.directory.rglob("*") if path.is_file()} == {0o600}
        assert mode_of(farm.log) == 0o600
        assert password not in " ".join(psutil.Process(server.pid).cmdline())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs its servers as another user")
async def test_root_grants_only_traversal_of_the_parent_folders(farm: Farm) -> None:
    closed = farm.root / "closed"
    closed.mkdir(mode=0o700)
    server = farm.valkey("closed/valkey")
    await server.start()
    assert mode_of(closed) & stat.S_IRWXO == 0
    user = psutil.Process(server.pid).uids().real
    assert user != 0
    assert passes(closed, user)
    assert not passes(closed, 12_345)


def passes(folder: Path, user: int) -> bool:
    ended = subprocess.run(
        ["/bin/ls", "-d", str(folder / "valkey")],
        user=user,
        group=user,
        extra_groups=[],
        capture_output=True,
        check=False,
    )
    return ended.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs its servers as another user")
def test_without_acls_the_group_of_the_servers_gets_traversal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "let_pass", lambda *_: False)
    guest = Account(12_345, 12_345, "guest", switched=True)
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "shared").mkdir(mode=0o750)
    guest._add_passage(tmp_path / "closed", tmp_path)
    assert (mode_of(tmp_path / "closed"), (tmp_path / "closed").stat().st_gid) == (0o710, 12_345)
    with pytest.raises(AccountError, match=r"chmod o\+x"):
        guest._add_passage(tmp_path / "shared", tmp_path)
    assert mode_of(tmp_path / "shared") == 0o750


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs its servers as another user")
async def test_without_useradd_the_servers_run_as_nobody(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "SYSTEM_USER", "no-such-user")
    monkeypatch.setattr(account, "_USUAL_PLACES", ())
    monkeypatch.setenv("PATH", str(farm.root / "nothing"))
    for server in (farm.postgres("fresh"), farm.valkey("fresh-valkey")):
        await server.start()
        assert psutil.Process(server.pid).username() == "nobody"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs its servers as another user")
def test_useradd_is_found_outside_of_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "useradd"
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('called with ' + sys.argv[-1])\n")
    program.chmod(0o755)
    monkeypatch.setattr(account, "SYSTEM_USER", "no-such-user")
    monkeypatch.setattr(account, "_USUAL_PLACES", (str(tmp_path),))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert account._useradd() == "called with no-such-user"


@pytest.mark.parametrize("kind", ["postgres", "valkey"])
async def test_taken_port_is_replaced_by_a_free_one(farm: Farm, kind: str) -> None:
    server = farm.either(kind)
    url = await server.start()
    await server.stop()
    with socket.create_server(("127.0.0.1", urlsplit(url).port or 0)):
        moved = await server.start()
    assert urlsplit(moved).port != urlsplit(url).port
    assert await answers(server, moved)


@pytest.mark.parametrize("kind", ["postgres", "valkey"])
async def test_hanging_server_is_reported_and_adopted_once_it_resumes(farm: Farm, kind: str) -> None:
    server = farm.either(kind)
    url = await server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(EmbeddedServerError, match=rf"kill -KILL {server.pid}") as refusal:
        await farm.either(kind, patience=0.2).start()
    os.kill(server.pid, signal.SIGCONT)
    assert str(farm.log) in str(refusal.value)
    assert (urlsplit(url).password or "") not in str(refusal.value)
    assert not await restarted(server)


@pytest.mark.parametrize("kind", ["postgres", "valkey"])
async def test_hanging_server_is_killed_on_stop(farm: Farm, kind: str) -> None:
    server = farm.either(kind, patience=0.2)
    patient = farm.either(kind)
    await patient.start()
    assert patient.pid is not None
    os.kill(patient.pid, signal.SIGSTOP)
    await server.stop()
    assert not patient.running()
    assert await answers(patient, await patient.start())


async def test_failed_start_shows_the_end_of_the_log(farm: Farm) -> None:
    server = farm.postgres()
    await server.start()
    await server.stop()
    with (
        altered(server.data / "postgresql.conf", "no_such_setting = 1\n"),
        pytest.raises(EmbeddedServerError, match="no_such_setting") as refusal,
    ):
        await server.start()
    assert str(farm.log) in str(refusal.value)
    assert not server.running()


async def test_lost_password_file_is_replaced_at_the_next_start(farm: Farm) -> None:
    server = farm.postgres()
    first = await server.start()
    (server.directory / "password").unlink()
    with pytest.raises(EmbeddedServerError, match="password file"):
        await server.start()
    await server.stop()
    second = await server.start()
    assert urlsplit(first).password != urlsplit(second).password
    assert await answers(server, second)
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(first)


async def test_refused_password_is_reported_immediately(farm: Farm) -> None:
    server = farm.postgres()
    await server.start()
    with (
        altered(server.directory / "password", "another\n"),
        pytest.raises(EmbeddedServerError, match="rejects the password"),
    ):
        await server.start()


async def test_folder_of_another_version_is_not_changed(farm: Farm) -> None:
    server = farm.postgres()
    await server.start()
    await server.stop()
    with (
        altered(server.data / "PG_VERSION", "16\n"),
        pytest.raises(EmbeddedServerError, match="data of PostgreSQL 16"),
    ):
        await server.start()


async def test_failed_statement_and_its_values_are_not_logged(
    farm: Farm,
) -> None:
    url = await farm.postgres().start()
    await run_sql(url, "CREATE TABLE token (value text PRIMARY KEY)", "INSERT INTO token VALUES ('hush-hush')")
    with pytest.raises(asyncpg.UniqueViolationError):
        await run_sql(url, "INSERT INTO token VALUES ('hush-hush')")
    log = farm.log.read_text()
    assert "duplicate key" in log
    assert "hush-hush" not in log


def test_long_log_is_rotated_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with path.open("a") as writer:
        writer.write("early\n" * 10)
        writer.flush()
        trim_log(path, limit=20)
        writer.write("late\n")
    assert path.read_text() == "late\n"
    assert (tmp_path / "server.log.1").read_text() == "early\n" * 10
