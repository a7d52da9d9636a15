"""The connection to the gateway: from the environment, or from the folder of an `interlock up`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from interlock.client import Client

T = TypeVar("T")
Item = TypeVar("Item")

_PATIENCE_SECONDS: Final = 2.0
"""Long enough for a gateway that restarts. A user should not wait longer to learn that it is not running."""
_MAX_PER_PAGE: Final = 1_000


class Page(Protocol):
    @property
    def next_cursor(self) -> str | None: ...


P = TypeVar("P", bound=Page)


def ask(folder: Path | None, question: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    """Runs `question` with a client and closes the client."""
    return asyncio.run(_ask(folder, question))


async def _ask(folder: Path | None, question: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    from interlock.client import Client, gateway_access
    from interlock.settings import load

    settings = load(dir=folder)
    access, patience = gateway_access(settings), _PATIENCE_SECONDS
    async with Client(access.url, access.secret, verify=access.verify, patience=patience, org=settings.org) as client:
        return await question(client)


async def collect(
    read: Callable[[str | None, int], Awaitable[P]],
    items: Callable[[P], list[Item]],
    cursor: str | None,
    limit: int,
) -> tuple[list[Item], str | None]:
    """Follows pages until there are `limit` items. Returns them with the cursor of the next page."""
    found: list[Item] = []
    while True:
        page = await read(cursor, min(limit - len(found), _MAX_PER_PAGE))
        found += items(page)
        cursor = page.next_cursor
        if cursor is None or len(found) >= limit:
            return found, cursor
