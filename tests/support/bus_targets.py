"""Services with messages in their queues, without sending commands."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from interlock.bus.path.delivery import target_queue
from interlock.tasks.queue import Outgoing
from tests.support.system import System


@dataclass
class Target:
    system: System
    service: str
    queue: str
    key: str
    org_id: UUID

    async def call(self, what: str, body: Any = None, *, method: str = "POST", queue: str | None = None) -> Any:
        return await self.system.user(
            method, f"/v1/inbox/{queue or self.queue}/{what}", key=self.key, **({} if body is None else {"json": body})
        )

    async def send(self, *payloads: Any) -> list[UUID]:
        """Puts messages into the queue as the bus does."""
        ids = [uuid4() for _ in payloads]
        bodies = [message(id_, self.service, payload) for id_, payload in zip(ids, payloads, strict=True)]
        await self.system.kernel.tasks.queue.send(
            target_queue(self.org_id, self.queue), [Outgoing(body) for body in bodies]
        )
        return ids

    async def received(self, **wanted: Any) -> list[dict[str, Any]]:
        reply = await self.call("receive", {"wait_seconds": 0} | wanted)
        assert reply.status_code == 200, reply.text
        messages: list[dict[str, Any]] = reply.json()["messages"]
        return messages


def message(command_id: UUID, target: str, payload: Any) -> str:
    metadata = {
        "id": str(command_id),
        "timestamp": "2026-01-31T12:00:00Z",
        "type": "snavio.command-sent",
        "version_id": "hmac-v1",
        "hmac": "0" * 64,
    }
    command = {"source": "default/billing", "target": target, "name": "post", "payload": payload}
    return json.dumps({"metadata": metadata, "command": command})


async def target(system: System, *, org_id: UUID | None = None, drain: float = 300.0) -> Target:
    """Registers a service with one route to its own queue, and creates an API key of it."""
    org_id = org_id or system.org_id
    service, queue = f"bot-{uuid4().hex[:8]}", f"posts-{uuid4().hex[:8]}"
    await system.value(
        "insert into interlock.services (org_id, name, version, changed_by) values ($1, $2, 1, 'test')", org_id, service
    )
    await system.value(
        "insert into interlock.bus_routes"
        " (org_id, target, name, queue, dlq, expected_drain_seconds, version, changed_by)"
        " values ($1, $2, 'post', $3, $3 || '-dead', $4, 1, 'test')",
        org_id,
        service,
        queue,
        drain,
    )
    return Target(system, service, queue, await service_key(system, service, org_id), org_id)


async def service_key(system: System, service: str, org_id: UUID | None = None) -> str:
    name = await system.value("select name from interlock.orgs where org_id = $1", org_id or system.org_id)
    asked = {"user": service, "role": "reader", "service": service, "org": name}
    reply = await system.user("POST", "/v1/keys", json=asked)
    assert reply.status_code == 201, reply.text
    key: str = reply.json()["key"]
    return key
