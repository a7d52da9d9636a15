"""Signed commands and small registries for tests of the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import msgspec

from interlock.bus.model import Acl, Ban, Key, Kind, Limit, Route, Service
from interlock.wire.commands import compose

SECRET = b"s" * 32
SOURCE = "acme/billing"


def timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def signed(
    at: float,
    *,
    secret: bytes = SECRET,
    target: str = "mailer",
    name: str = "send-mail",
    payload: Any = None,
    command_id: str | None = None,
    version_id: str = "hmac-v1",
) -> bytes:
    """Returns a message of a producer, signed at `now`."""
    return compose(
        secret,
        command_id=command_id or str(uuid4()),
        timestamp=timestamp(at),
        version_id=version_id,
        target=target,
        name=name,
        payload=msgspec.json.encode(payload if payload is not None else {"n": 1}),
    )


@dataclass
class Shelf:
    """A registry in memory that counts its queries."""

    key_list: Sequence[Key] = ()
    route_list: Sequence[Route] = ()
    acl_list: Sequence[Acl] = ()
    limit_list: Sequence[Limit] = ()
    ban_list: Sequence[Ban] = ()
    numbers: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 1))
    asked: int = 0
    loads: int = 0
    away: Exception | None = None
    slowly: bool = False
    """Yields to the event loop before each reply."""

    async def versions(self, org_id: UUID) -> Mapping[Kind, int]:
        self.asked += 1
        if self.away is not None:
            raise self.away
        return dict(self.numbers)

    async def services(self, org_id: UUID) -> list[Service]:
        return await self._load([])

    async def keys(self, org_id: UUID) -> list[Key]:
        return await self._load(self.key_list)

    async def routes(self, org_id: UUID) -> list[Route]:
        return await self._load(self.route_list)

    async def acls(self, org_id: UUID) -> list[Acl]:
        return await self._load(self.acl_list)

    async def limits(self, org_id: UUID) -> list[Limit]:
        return await self._load(self.limit_list)

    async def bans(self, org_id: UUID) -> list[Ban]:
        return await self._load(self.ban_list)

    async def _load(self, items: Sequence[Any]) -> list[Any]:
        self.loads += 1
        if self.slowly:
            await asyncio.sleep(0)  # noqa: TID251 - gives way, and waits for nothing
        return list(items)
