"""The way to the gateway: the environment's, else that of the `interlock up` whose folder is given."""

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
"""A gateway that is being restarted is back by then; a person should not wait longer to hear that it is not there."""
_MOST_PER_PAGE: Final = 1_000


class Page(Protocol):
    @property
    def next_cursor(self) -> str | None: ...


P = TypeVar("P", bound=Page)


def ask(folder: Path | None, question: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    """Opens a client, asks, closes it."""
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
    """Follows pages until there are `limit` items; with the cursor to go on from."""
    found: list[Item] = []
    while True:
        page = await read(cursor, min(limit - len(found), _MOST_PER_PAGE))
        found += items(page)
        cursor = page.next_cursor
        if cursor is None or len(found) >= limit:
            return found, cursor
