"""Types that handlers of all capabilities share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.params import QueryParameter

from interlock.settings import Settings
from interlock.wire.base import MAX_PAGE

Connection = ASGIConnection[Any, Any, Any, Any]
Headers = Callable[[str], Sequence[str]]
"""Returns all values of a header, by its name in lower case."""
Http = Request[Any, Any, State]
Cursor = Annotated[
    str | None, QueryParameter(name="cursor", required=False, description="next_cursor of the previous page")
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="maximum number of items")]


def settings_of(connection: Connection) -> Settings:
    settings: Settings = connection.app.state.settings
    return settings
