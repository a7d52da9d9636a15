"""Keeps an item that cannot be processed from failing the batch it is in.

Batches and loops serve all orgs at once. An error that comes from what an item contains would come again with every
retry, and would stop everyone whose items are next to it. Such an item is set aside: it is logged, it is counted in
`interlock_set_aside_total`, and the others go on. An error that comes from a store that is away is no such error.
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
"""What PostgreSQL says of a value: text or a number it has no form for, nesting or an index entry past its limits."""
CONTENT_ERRORS: Final = (*UNSTORABLE, UnstorableText, ValueError, OverflowError, RecursionError)
"""Errors of a value rather than of a store; msgspec and Unicode errors are ValueErrors."""


async def isolated(
    name: str, items: Sequence[T], work: Callable[[Sequence[T]], Awaitable[R]]
) -> tuple[list[R], list[tuple[T, Exception]]]:
    """Processes all items together; after an error of content by halves, until the items that cause it are alone.

    `work` must leave nothing behind when it raises. Returns its results, and the items set aside with their errors.
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
    """Counts and logs an item that is left out. The error's own text may quote a payload, and so it is not logged."""
    SET_ASIDE.labels(loop=name).inc()
    log.warning("item.set_aside", loop=name, error=type(error).__name__, **where)
