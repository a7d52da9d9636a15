"""DAGs: deploy, roll back, and see what is deployed; one method per endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import urlencode

import msgspec

from interlock.client._caller import Caller, path, query
from interlock.wire import (
    DagDeployed,
    DagDocument,
    DagPage,
    DagRequest,
    DagVersionPage,
    DagVersionView,
    DagView,
    PurgeRequest,
    RollbackRequest,
)

PAGE: Final = 100

_deployed = msgspec.json.Decoder(DagDeployed)
_page = msgspec.json.Decoder(DagPage)
_dag = msgspec.json.Decoder(DagView)
_versions = msgspec.json.Decoder(DagVersionPage)
_version = msgspec.json.Decoder(DagVersionView)
_document = msgspec.json.Decoder(DagDocument)


class DagCalls:
    """`client.dags`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def deploy(self, yaml: str, *, dry_run: bool = False, operators: Sequence[str] = ()) -> DagDeployed:
        """`operators`: names that your workers register operators by."""
        parameters = [("dry_run", str(dry_run).lower()), *(("operator", name) for name in operators)]
        target = f"/v1/dags?{urlencode(parameters)}"
        return await self._caller.call("POST", target, _deployed, DagRequest(yaml=yaml))

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> DagPage:
        return await self._caller.call("GET", query("/v1/dags", cursor=cursor, limit=limit), _page)

    async def dag(self, name: str) -> DagView:
        return await self._caller.call("GET", path("v1", "dags", name), _dag)

    async def versions(self, name: str, cursor: str | None = None, limit: int = PAGE) -> DagVersionPage:
        target = query(path("v1", "dags", name, "versions"), cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, _versions)

    async def document(self, name: str) -> DagDocument:
        return await self._caller.call("GET", path("v1", "dags", name, "document"), _document)

    async def rollback(self, name: str, to: str | None = None) -> DagVersionView:
        """`to`: the beginning of a content hash; without it, to the version that was current before."""
        target = path("v1", "dags", name, "rollback")
        return await self._caller.call("POST", target, _version, RollbackRequest(to=to), repeatable=to is not None)

    async def cut_over(self, name: str) -> DagVersionView:
        return await self._caller.call("POST", path("v1", "dags", name, "cutover"), _version, repeatable=False)

    async def purge(self, name: str, version: str) -> DagVersionView:
        return await self._caller.call(
            "POST", path("v1", "dags", name, "purge"), _version, PurgeRequest(version=version)
        )
