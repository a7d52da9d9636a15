"""Services, routes and ACLs for the benchmark, inserted directly into the registry."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import asyncpg
import msgspec

from interlock.access.secrets import Seal, purpose
from interlock.client import Client
from interlock.settings import Settings
from interlock.wire.access import KeyRequest, Role
from interlock.wire.commands import compose

SECRET: Final = b"benchmark" * 4
PRODUCER, TARGET, NAME = "producer", "target", "command-0"
PAYLOAD: Final = {"order": 4711, "customer": "c-1234567", "lines": [{"sku": "a-1", "count": 2}], "note": "as usual"}


@dataclass(frozen=True)
class Registered:
    org_id: UUID
    key: str
    """API key of the producer."""


async def register(
    connection: asyncpg.Connection[Any], client: Client, folder: Path, *, routes: int, strict: bool = False
) -> Registered:
    """Registers `routes` commands of one target, all of which the producer may send."""
    org_id: UUID = await connection.fetchval("select org_id from interlock.orgs order by org_id limit 1")
    for service in (PRODUCER, TARGET):
        await connection.execute(
            "insert into interlock.services (org_id, name, version, changed_by) values ($1, $2, 1, 'bench')",
            org_id,
            service,
        )
    seal = Seal(Settings(dir=folder).signing_keys_dir)
    await connection.execute(
        "insert into interlock.bus_keys (org_id, service, number, sealed, created_by) values ($1, $2, 1, $3, 'bench')",
        org_id,
        PRODUCER,
        seal.seal(SECRET, purpose(org_id, PRODUCER, 1)),
    )
    await connection.execute(
        "insert into interlock.bus_routes (org_id, target, name, queue, dlq, dedupe_mode, version, changed_by)"
        " select $1, $2, 'command-' || n, 'bench', 'bench-dlq', $4, 1, 'bench' from generate_series(0, $3 - 1) n",
        org_id,
        TARGET,
        routes,
        "strict" if strict else "none",
    )
    await connection.execute(
        "insert into interlock.bus_acls (org_id, target, name, source, sensitivity, version, changed_by)"
        " select $1, $2, 'command-' || n, $4, 'low', 1, 'bench' from generate_series(0, $3 - 1) n",
        org_id,
        TARGET,
        routes,
        PRODUCER,
    )
    await connection.execute(
        "insert into interlock.bus_versions (org_id, kind, version)"
        " select $1, kind::interlock.bus_kind, 1 from unnest(array['services', 'keys', 'routes', 'acls']) kind",
        org_id,
    )
    made = await client.create_key(KeyRequest(user=PRODUCER, role=Role.WRITER, service=PRODUCER))
    return Registered(org_id, made.key)


def message(name: str = NAME) -> bytes:
    return compose(
        SECRET,
        command_id=str(uuid4()),
        timestamp=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        version_id="hmac-v1",
        target=TARGET,
        name=name,
        payload=msgspec.json.encode(PAYLOAD),
    )
