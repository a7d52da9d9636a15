"""A complete system with services that send each other commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec

from interlock.access.secrets import Seal, purpose
from interlock.bus.path.delivery import target_queue
from interlock.bus.path.slow_stage import SlowStage
from interlock.bus.telemetry import expanded, telemetry_queue
from interlock.processes.loop import forever
from interlock.wire.access import KeyRequest, Role
from tests.support.signed_commands import SECRET, signed
from tests.support.system import System

PRODUCER, TARGET, NAME = "billing", "mailer", "send-mail"


@dataclass
class Bus:
    """`billing` may send `send-mail` to `mailer`, whose queue is `mail`."""

    system: System
    key: str
    """The API key of `billing`."""

    async def execute(self, sql: str, *arguments: Any) -> None:
        async with self.system.kernel.stores.database.connection() as connection:
            await connection.execute(sql, *arguments)

    async def changed(self, kind: str) -> None:
        await self.execute(
            "insert into interlock.bus_versions as v values ($1, $2, 1)"
            " on conflict (org_id, kind) do update set version = v.version + 1",
            self.system.org_id,
            kind,
        )

    async def route(self, name: str = NAME, **columns: Any) -> str:
        """Creates a route to a queue with its own name, and returns the queue."""
        values = {"queue": name, "dlq": f"{name}-dlq"} | columns
        names = ", ".join(values)
        places = ", ".join(f"${n}" for n in range(4, 4 + len(values)))
        await self.execute(
            f"insert into interlock.bus_routes (org_id, target, name, version, changed_by, {names})"
            f" values ($1, $2, $3, 1, 'test', {places})",
            self.system.org_id,
            TARGET,
            name,
            *values.values(),
        )
        await self.changed("routes")
        return str(values["queue"])

    async def acl(self, name: str = NAME, sensitivity: str = "moderate", source: str = PRODUCER) -> None:
        await self.execute(
            "insert into interlock.bus_acls (org_id, target, name, source, sensitivity, version, changed_by)"
            " values ($1, $2, $3, $4, $5, 1, 'test')",
            self.system.org_id,
            TARGET,
            name,
            source,
            sensitivity,
        )
        await self.changed("acls")

    async def revoke(self, name: str, source: str = PRODUCER) -> None:
        await self.execute(
            "with gone as (delete from interlock.bus_acls where org_id = $1 and name = $2 and source = $3)"
            " insert into interlock.bus_changes (org_id, kind, action, subject, version, changed_by)"
            " values ($1, 'acls', 'delete', $4, 2, 'test')",
            self.system.org_id,
            name,
            source,
            f"{TARGET}/{name}/{source}",
        )
        await self.changed("acls")

    async def limit(self, name: str, rate: int, window: float = 3600.0, *, source: str = "", **columns: Any) -> None:
        await self._limit(TARGET, name, source, rate, window, **columns)

    async def source_limit(self, rate: int, window: float = 3600.0, *, source: str = PRODUCER, **columns: Any) -> None:
        """Sets a limit on everything that a source sends."""
        await self._limit("", "", source, rate, window, **columns)

    async def _limit(self, target: str, name: str, source: str, rate: int, window: float, **columns: Any) -> None:
        await self.execute(
            "insert into interlock.bus_limits (org_id, target, name, source, rate, window_seconds, enforcement,"
            " cooldown_seconds, version, changed_by) values ($1, $2, $3, $4, $5, $6, $7, $8, 1, 'test')",
            self.system.org_id,
            target,
            name,
            source,
            rate,
            window,
            columns.get("enforcement", "strict"),
            columns.get("cooldown_seconds", 0.0),
        )
        await self.changed("limits")

    async def service(self, name: str) -> str:
        """Registers a service with a secret, and returns an API key of it."""
        org_id = self.system.org_id
        await self.execute(
            "insert into interlock.services (org_id, name, version, changed_by) values ($1, $2, 1, 'test')",
            org_id,
            name,
        )
        seal = Seal(self.system.kernel.settings.signing_keys_dir)
        await self.execute(
            "insert into interlock.bus_keys (org_id, service, number, sealed, created_by, rotates_at)"
            " values ($1, $2, 1, $3, 'test', interlock.clock() + interval '30 days')",
            org_id,
            name,
            seal.seal(SECRET, purpose(org_id, name, 1)),
        )
        await self.changed("keys")
        principals = self.system.kernel.access.principals
        made = await principals.create_key(
            KeyRequest(user=name, role=Role.WRITER, service=name),
            org_id,
            granted_by=await principals.authenticate(self.system.admin_key),
        )
        return made.key

    async def lane(self, name: str, *, sensitivity: str = "moderate", **columns: Any) -> str:
        queue = await self.route(name, **columns)
        await self.acl(name, sensitivity)
        await self.refreshed()
        return queue

    async def refreshed(self) -> None:
        """Refreshes the caches of the gateway, as happens a moment after a change."""
        caches = self.system.kernel.bus.ingress._caches
        await caches.refresh(caches.tenant(self.system.org_id), unless_since=float("inf"))

    def message(self, name: str = NAME, **more: Any) -> bytes:
        return signed(self.system.kernel.stores.clock.now().timestamp(), name=name, **{"target": TARGET} | more)

    async def send(self, message: bytes | dict[str, Any], *, key: str | None = None) -> dict[str, Any]:
        content = message if isinstance(message, bytes) else msgspec.json.encode(message)
        reply = await self.system.user(
            "POST",
            "/v1/commands",
            key=key or self.key,
            content=content,
            headers={"Content-Type": "application/json"},
        )
        assert reply.status_code == 202, reply.text
        verdict: dict[str, Any] = reply.json()
        return verdict

    async def batch(self, messages: list[bytes], *, key: str | None = None) -> list[dict[str, Any]]:
        body = b'{"commands":[' + b",".join(messages) + b"]}"
        results: list[dict[str, Any]] = (await self.send(body, key=key))["results"]
        return results

    def slow(self) -> SlowStage:
        kernel = self.system.kernel
        return SlowStage(kernel.stores.database, kernel.settings, kernel.stores.wakeups)

    async def settle(self) -> None:
        """Runs the slow stage until no hand-off is left."""
        slow = self.slow()
        while await slow.run_once():
            continue

    async def looked_after(self) -> None:
        """Waits for the maintenance that the gateway does between requests."""
        await self.system.kernel.bus.ingress.maintenance.settled()

    async def queue(self, queue: str) -> list[Any]:
        """Returns the bodies in a target's queue, oldest first."""
        async with self.system.kernel.stores.database.connection() as connection:
            rows = await connection.fetch(
                "select body from interlock.queue_messages where queue = $1 order by message_id",
                target_queue(self.system.org_id, queue),
            )
        return [msgspec.json.decode(row["body"]) for row in rows]

    async def events(self, command_id: str | None = None) -> list[dict[str, Any]]:
        """Returns the telemetry of the org so far, or of one command."""
        async with self.system.kernel.stores.database.connection() as connection:
            # A single statement: an event that a bus process moves in the meantime is seen exactly once.
            rows = await connection.fetch(
                "select body from interlock.queue_messages where queue = $2 union all"
                " (select json_build_object('events', events) from interlock.bus_telemetry"
                "  where org_id = $1 order by batch_id)",
                self.system.org_id,
                telemetry_queue(self.system.org_id),
            )
        found = [event for row in rows for event in msgspec.json.decode(expanded(row["body"]))["events"]]
        return [event for event in found if command_id is None or event.get("command_id") == command_id]

    async def outcomes(self, command_id: str) -> list[str]:
        return [event["event"].removeprefix("snavio.command.") for event in await self.events(command_id)]


async def opened(system: System) -> Bus:
    bus = Bus(system, "")
    await bus.service(TARGET)
    bus.key = await bus.service(PRODUCER)
    await bus.lane(NAME)
    return bus


@asynccontextmanager
async def slow_stage(system: System) -> AsyncIterator[None]:
    """Runs a slow stage in the background."""
    kernel = system.kernel
    slow = SlowStage(kernel.stores.database, kernel.settings, kernel.stores.wakeups)
    task = asyncio.create_task(forever(slow))
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def fresh() -> str:
    return str(uuid4())
