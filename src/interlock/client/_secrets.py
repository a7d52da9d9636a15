"""Calls for an org's secrets: one method per endpoint. A value is sent and never read back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from interlock.client._caller import Caller, path, query
from interlock.wire import OrgSecretPage, OrgSecretRequest, OrgSecretView

PAGE: Final = 100

_view = msgspec.json.Decoder(OrgSecretView)
_page = msgspec.json.Decoder(OrgSecretPage)


class SecretCalls:
    """`client.secrets`, for admins of the org."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def set(self, name: str, value: str, *, hosts: Iterable[str] = ()) -> OrgSecretView:
        """Sets the value and the hosts that it may be sent to. Without hosts, it may be sent to any."""
        request = OrgSecretRequest(value=value, hosts=list(hosts))
        return await self._caller.call("PUT", path("v1", "secrets", name), _view, request)

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> OrgSecretPage:
        return await self._caller.call("GET", query("/v1/secrets", cursor=cursor, limit=limit), _page)

    async def remove(self, name: str) -> OrgSecretView:
        return await self._caller.call("DELETE", path("v1", "secrets", name), _view, repeatable=False)
