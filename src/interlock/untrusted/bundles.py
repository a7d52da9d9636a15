"""Bundles of user code: uploaded once, immutable, deleted when no job uses them.

The zip is an object and its metadata is a row. An upload stores the zip before the row; a deletion removes the row
before the zip. In between, another row holds the time at which to sweep the zip, so that a crash leaves no zip behind.

A job with `operator: udf` names a bundle in its config, which is validated and pinned here.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec

from interlock.archives import BOOTSTRAP, Language, Limits, check, modules
from interlock.errors import BadRequest, Conflict, NotFound, TooLarge
from interlock.failpoints import failpoint
from interlock.http.cursors import next_cursor
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.bundles import BundlePage, BundleView

UDF: Final = "udf"
"""The operator name, independent of the code in the bundle."""
DIGEST: Final = "sha256:"
_LANGUAGES: Final = ("python", "node", "bootstrap")
_REFERENCE: Final = re.compile(r"sha256:[0-9a-f]{64}|[A-Za-z0-9](?!.*\.\.)[A-Za-z0-9._-]{0,99}")
_ENTRYPOINT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Bundle:
    """The facts of a bundle that a job needs."""

    sha256: str
    modules: Mapping[str, Language]


def bundle_key(org_id: UUID, sha256: str) -> str:
    return f"bundles/{org_id}/{sha256}.zip"


def config_problem(config: Mapping[str, Any]) -> str | None:
    """Returns the problem of a configuration as a clause, without looking at the bundle."""
    reference, entrypoint = config.get("bundle"), config.get("entrypoint")
    if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference):
        return "udf needs a bundle, by its name or as sha256: and 64 hexadecimal digits"
    if entrypoint == BOOTSTRAP:
        return None
    if not isinstance(entrypoint, str) or not _ENTRYPOINT.fullmatch(entrypoint) or len(entrypoint) > 500:
        return "udf needs an entrypoint such as module.handler, or bootstrap"
    if config.get("language", "python") not in _LANGUAGES:
        return f"language of udf must be one of {', '.join(_LANGUAGES)}"
    return None


def bundle_problem(config: Mapping[str, Any], bundles: Mapping[str, Bundle]) -> str | None:
    """Returns the problem of the named bundle as a clause. The configuration itself must be valid."""
    bundle = bundles.get(config["bundle"])
    if bundle is None:
        return f"there is no bundle {config['bundle']!r}"
    module = module_of(config["entrypoint"])
    if module not in bundle.modules:
        return f"bundle {config['bundle']!r} has no module {module!r} for the entrypoint"
    if bundle.modules[module] == "python" and module.split(".")[0] in sys.stdlib_module_names:
        return f"module {module!r} of the entrypoint is also in Python's standard library, which would be loaded"
    if config.get("language") not in (None, bundle.modules[module]):
        return f"the entrypoint is in {bundle.modules[module]}, not in {config['language']}"
    return None


def pinned(config: Mapping[str, Any], bundles: Mapping[str, Bundle]) -> dict[str, Any]:
    """Replaces the bundle's name by its digest, so that a job's code never changes when the name moves."""
    bundle = bundles[config["bundle"]]
    language = bundle.modules[module_of(config["entrypoint"])]
    return {**config, "bundle": f"{DIGEST}{bundle.sha256}", "language": language}


def module_of(entrypoint: str) -> str:
    return entrypoint if entrypoint == BOOTSTRAP else entrypoint.rpartition(".")[0]


def references(configs: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Returns the bundle names and digests of all valid configurations."""
    called = {config["bundle"] for config in configs if config_problem(config) is None}
    digests = {name.removeprefix(DIGEST) for name in called if name.startswith(DIGEST)}
    return sorted(name for name in called if not name.startswith(DIGEST)), sorted(digests)


_sql = queries(__name__, "bundles")

NAME: Final = re.compile(r"[A-Za-z0-9](?!.*\.\.)[A-Za-z0-9._-]{0,99}")
_HEX: Final = re.compile(r"[0-9a-f]{8,64}")
_UPLOAD_SECONDS: Final = 3600.0
"""Time after which an unfinished upload counts as dead."""
_CHUNK: Final = 1 << 20
_BATCH: Final = 100

_modules = msgspec.json.Decoder(dict[str, Language])


class Bundles:
    def __init__(self, database: Database, settings: Settings, objects: Objects) -> None:
        self._database = database
        self._objects = objects
        self._limit = settings.bundle_limit_bytes
        self._limits = Limits(unpacked_bytes=settings.bundle_unpacked_bytes)
        self._grace = settings.sweep_grace_seconds

    # Upload

    async def upload(self, chunks: AsyncIterator[bytes], org_id: UUID, by: str, name: str | None) -> BundleView:
        """Stores a bundle. Uploading the same content again returns the same bundle and may add a name."""
        if name is not None and not NAME.fullmatch(name):
            raise BadRequest(
                "A bundle's name may have letters, digits, dots, dashes and underscores, at most 100 characters.",
                code="bad_bundle_name",
            )
        with tempfile.TemporaryDirectory(prefix="interlock-bundle-") as folder:
            file = Path(folder) / "bundle.zip"
            sha256 = await self._spool(chunks, file)
            archive = await asyncio.to_thread(check, file, self._limits)
            facts = {
                "size_bytes": (await asyncio.to_thread(file.stat)).st_size,
                "files": len(archive.files),
                "unpacked_bytes": archive.unpacked_bytes,
                "modules": msgspec.json.encode(modules(archive.files)).decode(),
                "uploaded_by": by,
            }
            if not await self._is_there(org_id, sha256):
                await self._store(file, org_id, sha256)
        return await self._register(org_id, sha256, name, facts)

    async def _spool(self, chunks: AsyncIterator[bytes], file: Path) -> str:
        digest, size = hashlib.sha256(), 0
        with await asyncio.to_thread(file.open, "wb") as spool:
            async for chunk in chunks:
                size += len(chunk)
                if size > self._limit:
                    raise TooLarge(
                        f"A bundle may have at most {self._limit} bytes; this one is larger.", code="bundle_too_large"
                    )
                digest.update(chunk)
                await asyncio.to_thread(spool.write, chunk)
        return digest.hexdigest()

    async def _is_there(self, org_id: UUID, sha256: str) -> bool:
        async with self._database.connection() as connection:
            return bool(await _sql.lock_bundles(connection, org_id=org_id, digests=[sha256]))

    async def _store(self, file: Path, org_id: UUID, sha256: str) -> None:
        async with self._database.connection() as connection:
            await _sql.expect_zip(connection, org_id=org_id, sha256=sha256, seconds=_UPLOAD_SECONDS)
        await self._objects.write(f"{self._objects.root}/{bundle_key(org_id, sha256)}", _chunks_of(file))
        await failpoint("bundle.stored")

    async def _register(self, org_id: UUID, sha256: str, name: str | None, facts: dict[str, Any]) -> BundleView:
        which = {"org_id": org_id, "sha256": sha256}

        async def work(connection: Connection) -> BundleView:
            await _sql.insert_bundle(connection, **which, **facts)
            await _sql.keep_zip(connection, **which)
            if name is not None:
                await _sql.name_bundle(connection, name=name, **which)
            row = await _sql.bundle(connection, **which)
            await failpoint("bundle.before_commit")
            return _view(row)

        return await self._database.run(work)

    # Reads

    async def page(self, org_id: UUID, cursor: str | None, limit: int) -> BundlePage:
        async with self._database.connection() as connection:
            rows = await _sql.list_bundles(connection, org_id=org_id, after=cursor or "", limit=limit)
        return BundlePage(bundles=[_view(row) for row in rows], next_cursor=next_cursor(rows, limit, "sha256"))

    async def bundle(self, which: str, org_id: UUID) -> BundleView:
        async with self._database.connection() as connection:
            return _view(await self._found(connection, which, org_id))

    async def _found(self, connection: Connection, which: str, org_id: UUID) -> Row:
        """Finds a bundle by name or by the start of its digest."""
        sha256 = await _digest(connection, which, org_id)
        row: Row | None = None
        if sha256 is not None:
            row = await _sql.bundle(connection, org_id=org_id, sha256=sha256)
        if row is None:
            raise NotFound(f"There is no bundle {which[:100]!r} in this org.")
        return row

    # Delete

    async def delete(self, which: str, org_id: UUID) -> BundleView:
        async def work(connection: Connection) -> BundleView:
            found = _view(await self._found(connection, which, org_id))
            key = {"org_id": org_id, "sha256": found.sha256}
            if await _sql.lock_bundle(connection, **key) is None:
                raise NotFound(f"There is no bundle {which[:100]!r} in this org.")
            if user := await _sql.job_using(connection, **key):
                raise Conflict(
                    f"Job {_title(user)} uses this bundle. Remove the job, or purge the DAG versions that have it.",
                    code="bundle_in_use",
                )
            await _sql.delete_names(connection, **key)
            await _sql.delete_bundle(connection, **key)
            await _sql.expect_zip(connection, seconds=self._grace, **key)
            await failpoint("bundle.before_commit")
            return found

        return await self._database.run(work)

    # Jobs

    async def named(self, configs: Iterable[Mapping[str, Any]], org_id: UUID) -> dict[str, Bundle]:
        """Returns the existing bundles that job configurations name."""
        async with self._database.connection() as connection:
            return await bundles_named(connection, configs, org_id)


async def bundles_named(
    connection: Connection, configs: Iterable[Mapping[str, Any]], org_id: UUID
) -> dict[str, Bundle]:
    names, digests = references(configs)
    if not names and not digests:
        return {}
    rows = await _sql.bundles_named(connection, org_id=org_id, names=names, digests=digests)
    return {row["called"]: Bundle(row["sha256"], _modules.decode(row["modules"])) for row in rows}


async def pin(connection: Connection, config: Mapping[str, Any], org_id: UUID) -> dict[str, Any]:
    """Pins the configuration of a job to a bundle digest and locks the bundle for this transaction."""
    if why := config_problem(config):
        raise BadRequest(f"{why[0].upper()}{why[1:]}.", code="bad_udf")
    bundles = await bundles_named(connection, [config], org_id)
    if why := bundle_problem(config, bundles):
        raise BadRequest(f"{why[0].upper()}{why[1:]}.", code="bad_udf")
    fixed = pinned(config, bundles)
    await hold(connection, [fixed], org_id)
    return fixed


async def hold(connection: Connection, configs: Iterable[Mapping[str, Any]], org_id: UUID) -> None:
    """Keeps the bundles that these configurations are pinned to from being deleted until this transaction ends."""
    digests = sorted({config["bundle"].removeprefix(DIGEST) for config in configs})
    if digests and len(await _sql.lock_bundles(connection, org_id=org_id, digests=digests)) < len(digests):
        raise Conflict("A bundle was deleted during this request; upload it again.", code="bundle_deleted")


class BundleSweep(Periodic):
    """Deletes zips that belong to no bundle."""

    name = "bundle_sweep"

    def __init__(self, database: Database, settings: Settings, objects: Objects) -> None:
        self.seconds = settings.sweep_seconds
        self._database = database
        self._objects = objects

    async def run_once(self) -> int:
        async with self._database.transaction() as connection:
            due = await _sql.due_sweeps(connection, limit=_BATCH)
            for row in due:
                if not row["needed"]:
                    await self._objects.delete(f"{self._objects.root}/{bundle_key(row['org_id'], row['sha256'])}")
            await _sql.swept(connection, org_ids=[row["org_id"] for row in due], digests=[row["sha256"] for row in due])
        return len(due)


async def _digest(connection: Connection, which: str, org_id: UUID) -> str | None:
    if NAME.fullmatch(which):
        named: str | None = await _sql.digest_of_name(connection, org_id=org_id, name=which)
        if named is not None:
            return named
    prefix = which.removeprefix(DIGEST)
    if not _HEX.fullmatch(prefix):
        return None
    rows = await _sql.bundles_by_prefix(connection, org_id=org_id, prefix=prefix)
    if len(rows) > 1:
        raise BadRequest(f"Several bundles start with {prefix!r}; give more of the digest.", code="ambiguous_bundle")
    return rows[0]["sha256"] if rows else None


async def _chunks_of(file: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(file.open, "rb") as source:
        while chunk := await asyncio.to_thread(source.read, _CHUNK):
            yield chunk


def _title(job: Row) -> str:
    if job["name"] is None:
        return str(job["job_id"])
    return f"{job['dag_name']}/{job['name']}" if job["dag_name"] else str(job["name"])


def _view(row: Row) -> BundleView:
    return BundleView(
        sha256=row["sha256"],
        names=list(row["names"]),
        size_bytes=row["size_bytes"],
        files=row["files"],
        unpacked_bytes=row["unpacked_bytes"],
        modules=dict(_modules.decode(row["modules"])),
        uploaded_by=row["uploaded_by"],
        uploaded_at=row["uploaded_at"],
    )
