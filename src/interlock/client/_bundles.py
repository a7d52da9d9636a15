"""Bundles of user code: upload, list, show, delete; one method per endpoint."""

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
    """`client.bundles`. A bundle is named by its name, or by the beginning of its digest."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def upload(self, content: bytes, *, name: str | None = None) -> BundleView:
        """The same content again is the same bundle. `name` moves to it from wherever it was."""
        target = query("/v1/bundles", name=name)
        async with self._caller.sending("application/zip") as caller:
            return await caller.call("POST", target, _view, Raw(content), timeout=_UPLOAD_SECONDS)

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> BundlePage:
        return await self._caller.call("GET", query("/v1/bundles", cursor=cursor, limit=limit), _page)

    async def bundle(self, which: str) -> BundleView:
        return await self._caller.call("GET", path("v1", "bundles", which), _view)

    async def delete(self, which: str) -> BundleView:
        """Only one that no job uses."""
        return await self._caller.call("DELETE", path("v1", "bundles", which), _view, repeatable=False)
