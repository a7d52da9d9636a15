"""The folder of `interlock up`, which one process owns at a time, and the files in it, with the credentials of clients.

{dir}/lock                locked by the running `up`, contains its pid
{dir}/credentials.json    an admin key and a worker token, mode 0600; kept across restarts
{dir}/endpoints.json      addresses of all listeners, mode 0600; exists while `up` runs
{dir}/logs/               one file per process
{dir}/state data valkey   the embedded servers
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from interlock.access.principals import Principals
from interlock.clock import SystemClock
from interlock.errors import ConfigurationError, Conflict, Unauthenticated
from interlock.stores.postgres import Database
from interlock.wire.access import KeyRequest, OrgView, Role, WorkerTokenRequest

log = structlog.get_logger()

_OTHERS_READ_OR_WRITE: Final = 0o066


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.logs = self.path / "logs"
        self.credentials_file = self.path / "credentials.json"
        self.endpoints_file = self.path / "endpoints.json"
        self._lock_file = self.path / "lock"

    def log_of(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Creates the folder and locks it. The kernel releases the lock when this process ends for any reason."""
        try:
            self._prepare()
            handle = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot store state in {self.path} ({error.strerror or error}); choose another folder with --dir."
            ) from error
        try:
            self._take(handle)
            yield
        finally:
            os.close(handle)

    def _prepare(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Keep the execute bit for others: as root, the servers run as another user, who must be able to traverse the
        # folder.
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if mode & _OTHERS_READ_OR_WRITE:
            self.path.chmod(mode & ~_OTHERS_READ_OR_WRITE)
        self.logs.mkdir(mode=0o700, exist_ok=True)

    def _take(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"Another `interlock up`{self._holder()} is running in {self.path}; use it, stop it, "
                "or choose another folder with --dir."
            ) from None
        os.truncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)

    def _holder(self) -> str:
        pid = self._lock_file.read_text().strip()
        return f" (pid {pid})" if pid else ""

    @property
    def left_by_a_crash(self) -> bool:
        """True if the last `up` ended without cleaning up."""
        return self.endpoints_file.exists()

    def read_credentials(self) -> dict[str, str]:
        """Returns the credentials that the last `up` wrote, or an empty dict."""
        if not self.credentials_file.is_file():
            return {}
        if stat.S_IMODE(self.credentials_file.stat().st_mode) != 0o600:
            log.warning("credentials.were_readable", file=str(self.credentials_file), now="mode 0600")
            self.credentials_file.chmod(0o600)
        try:
            return msgspec.json.decode(self.credentials_file.read_bytes(), type=dict[str, str])
        except msgspec.MsgspecError as error:
            raise ConfigurationError(
                f"{self.credentials_file} cannot be read ({error}); fix it, or delete it to create new credentials."
            ) from error

    def write_credentials(self, credentials: Mapping[str, str]) -> None:
        _write(self.credentials_file, credentials)

    def write_endpoints(self, endpoints: Mapping[str, str]) -> None:
        _write(self.endpoints_file, endpoints)

    def remove_endpoints(self) -> None:
        self.endpoints_file.unlink(missing_ok=True)


def _write(file: Path, values: Mapping[str, str]) -> None:
    from interlock.stores.embedded.server import write_private

    write_private(file, msgspec.json.format(msgspec.json.encode(values), indent=2).decode() + "\n")


ORG: Final = "default"
ADMIN: Final = "admin"
WORKER: Final = "up"


@dataclass(frozen=True)
class Credentials:
    admin_key: str
    worker_token: str


async def ensure_credentials(state_url: str, folder: Folder) -> Credentials:
    """Returns the credentials in the folder if the database accepts them; otherwise creates new ones and logs why."""
    database = await Database.open(state_url, size=1, name="interlock-up")
    try:
        return await _ensure(Principals(database, SystemClock()), folder)
    finally:
        await database.close()


async def _ensure(principals: Principals, folder: Folder) -> Credentials:
    left = folder.read_credentials()
    org, is_new = await _org(principals)
    admin_key, worker_token = left.get("admin_key", ""), left.get("worker_token", "")
    made = []
    if not await _key_works(principals, admin_key):
        admin_key = await _new_key(principals, org)
        made.append("admin_key")
    if not await _token_works(principals, worker_token):
        worker_token = await _new_token(principals)
        made.append("worker_token")
    credentials = Credentials(admin_key, worker_token)
    if made:
        _log_created(folder, made, is_new=is_new, were_there=bool(left))
        folder.write_credentials({"org": ORG, "admin_key": admin_key, "worker_token": worker_token})
    return credentials


def _log_created(folder: Folder, made: list[str], *, is_new: bool, were_there: bool) -> None:
    file = str(folder.credentials_file)
    if is_new:
        log.info("credentials.made", file=file)
    else:
        why = "the database rejects the ones in the file" if were_there else "the file was missing"
        log.warning(
            "credentials.made_again",
            file=file,
            made=made,
            why=why,
            hint="earlier keys stay valid: `interlock users list` lists them, `interlock users revoke` revokes one",
        )


async def _org(principals: Principals) -> tuple[OrgView, bool]:
    try:
        return await principals.create_org(ORG), True
    except Conflict:
        return await principals.org(ORG), False


async def _key_works(principals: Principals, key: str) -> bool:
    try:
        await principals.authenticate(key)
    except Unauthenticated:
        return False
    return True


async def _token_works(principals: Principals, token: str) -> bool:
    try:
        await principals.authenticate_worker(token)
    except Unauthenticated:
        return False
    return True


async def _new_key(principals: Principals, org: OrgView) -> str:
    request = KeyRequest(user=ADMIN, role=Role.ADMIN)
    return (await principals.create_key(request, org.org_id, granted_by=None)).key


async def _new_token(principals: Principals) -> str:
    return (await principals.create_worker_token(WorkerTokenRequest(name=WORKER))).token
