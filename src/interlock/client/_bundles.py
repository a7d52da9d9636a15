"""Calls for bundles of user code, as `Client.bundles`: one method per endpoint."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from interlock.client._caller import Caller, path, query
from interlock.wire import BundlePage, BundleView

PAGE: Final = 100
_UPLOAD_SECONDS: Final = 300.0

_view = msgspec.json.Decoder(BundleView)
_page = msgspec.json.Decoder(BundlePage)


class BundleCalls:
    """A bundle is identified by its name or by a prefix of its digest."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def upload(self, content: bytes, *, name: str | None = None) -> BundleView:
        """Uploads a bundle. Idempotent: equal content is the same bundle. `name`, if in use, moves to this bundle."""
        target = query("/v1/bundles", name=name)
        async with self._caller.sending("application/zip") as caller:
            return await caller.call("POST", target, _view, Raw(content), timeout=_UPLOAD_SECONDS)

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> BundlePage:
        return await self._caller.call("GET", query("/v1/bundles", cursor=cursor, limit=limit), _page)

    async def bundle(self, which: str) -> BundleView:
        return await self._caller.call("GET", path("v1", "bundles", which), _view)

    async def delete(self, which: str) -> BundleView:
        """Deletes a bundle that no job uses."""
        return await self._caller.call("DELETE", path("v1", "bundles", which), _view, repeatable=False)
