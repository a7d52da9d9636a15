"""`interlock openapi`: the HTTP interface as a document, without a server or a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.conventions import Panel, command
from interlock.cli.output import print_json

if TYPE_CHECKING:
    from interlock.wiring import Kernel

app = typer.Typer()


@command(
    app, "openapi", panel=Panel.OPERATION, example="interlock openapi > gateway.json\ninterlock openapi --internal"
)
def openapi(
    internal: Annotated[bool, typer.Option("--internal", help="The dispatcher's instead of the gateway's.")] = False,
    query: Annotated[bool, typer.Option("--query", help="The query service's instead of the gateway's.")] = False,
) -> None:
    """Print the OpenAPI document of the gateway, of the dispatcher, or of the query service."""
    import asyncio

    asyncio.run(_print("query" if query else "dispatcher" if internal else "gateway"))


async def _print(listener: str) -> None:
    from interlock.api.dispatcher import dispatcher
    from interlock.api.gateway import gateway
    from interlock.api.openapi import exact
    from interlock.api.query import query

    describe = {"gateway": gateway, "dispatcher": dispatcher, "query": query}[listener]
    print_json(exact(describe(_without_stores()).openapi_schema.to_schema()))


def _without_stores() -> Kernel:
    """Routes are described by a kernel that is put together and never opened."""
    import asyncpg

    from interlock.adapters.postgres import Database
    from interlock.clock import SystemClock
    from interlock.settings import load
    from interlock.wiring import assemble

    nowhere = "postgresql://nowhere"
    database = Database(asyncpg.create_pool(nowhere, min_size=0), SystemClock())
    return assemble(load(), database, coordination=None, state_url=nowhere)
