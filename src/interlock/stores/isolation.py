"""Keeps an item that cannot be processed from failing the batch it is in.

Batches and loops serve all orgs together. An error caused by an item's content would recur with every retry and block
the items around it. Such an item is set aside: it is logged and counted in `interlock_set_aside_total`, and the other
items are processed. Errors of an unavailable store are not handled here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import asyncpg
import structlog

from interlock.errors import UnstorableText
from interlock.telemetry import SET_ASIDE

log = structlog.get_logger()

T = TypeVar("T")
R = TypeVar("R")

UNSTORABLE: Final = (asyncpg.DataError, asyncpg.ProgramLimitExceededError)
"""PostgreSQL errors about a value: text or a number it cannot represent, nesting or an index entry over its limit."""
CONTENT_ERRORS: Final = (*UNSTORABLE, UnstorableText, ValueError, OverflowError, RecursionError)
"""Errors caused by a value rather than by a store. msgspec and Unicode errors are ValueErrors."""


async def isolated(
    name: str, items: Sequence[T], work: Callable[[Sequence[T]], Awaitable[R]]
) -> tuple[list[R], list[tuple[T, Exception]]]:
    """Processes all items together. After a content error, bisects until the failing items are alone.

    `work` must leave no effect when it raises. Returns its results, and the items set aside with their errors.
    """
    try:
        return [await work(items)], []
    except CONTENT_ERRORS as error:
        if len(items) == 1:
            set_aside(name, error)
            return [], [(items[0], error)]
    middle = len(items) // 2
    done, aside = await isolated(name, items[:middle], work)
    more, others = await isolated(name, items[middle:], work)
    return done + more, aside + others


def set_aside(name: str, error: Exception, **where: str) -> None:
    """Counts and logs an item that is left out. Does not log the error's text, which may quote a payload."""
    SET_ASIDE.labels(loop=name).inc()
    log.warning("item.set_aside", loop=name, error=type(error).__name__, **where)
