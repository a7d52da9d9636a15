"""Orgs, services, routes and ACLs, registered over HTTP."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx

from interlock.wire.access import KeyRequest, Role
from tests.support.system import System

_numbers = itertools.count(1)


@dataclass
class Tenant:
    """A new org, and the API key of its admin."""

    system: System
    org: str
    org_id: UUID
    key: str

    async def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        return await self.system.user(method, path, key=self.key, **more)

    async def put(self, kind: str, **entry: Any) -> dict[str, Any]:
        reply = await self.ask("POST", f"/v1/{kind}", json=entry)
        assert reply.status_code == 200, reply.text
        change: dict[str, Any] = reply.json()
        return change

    async def get(self, path: str) -> Any:
        reply = await self.ask("GET", path)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def refusal(self, method: str, path: str, **more: Any) -> tuple[int, str]:
        reply = await self.ask(method, path, **more)
        return reply.status_code, reply.json()["code"]

    async def services(self, *names: str) -> None:
        for name in names:
            await self.put("services", name=name)

    async def service_key(self, service: str) -> str:
        """Returns an API key of the service."""
        reply = await self.ask("POST", "/v1/keys", json={"user": service, "service": service})
        assert reply.status_code == 201, reply.text
        key: str = reply.json()["key"]
        return key

    async def config(self, key: str) -> dict[str, Any]:
        reply = await self.system.user("GET", "/v1/tenant-config", key=key)
        assert reply.status_code == 200, reply.text
        config: dict[str, Any] = reply.json()
        return config


async def tenant(system: System, role: Role = Role.ADMIN) -> Tenant:
    org = await system.kernel.access.principals.create_org(f"org-{next(_numbers)}")
    request = KeyRequest(user="ada", role=role)
    made = await system.kernel.access.principals.create_key(request, org.org_id, granted_by=None)
    return Tenant(system, org.name, org.org_id, made.key)
