"""The admin key and the worker token of an installation, created at the first start and kept in the folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import structlog

from interlock.access.principals import Principals
from interlock.apps.up.folder import Folder
from interlock.clock import SystemClock
from interlock.errors import Conflict, Unauthenticated
from interlock.stores.postgres import Database
from interlock.wire import KeyRequest, OrgView, Role, WorkerTokenRequest

log = structlog.get_logger()

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
