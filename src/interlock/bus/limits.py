"""The authoritative count of each limit: one row in the database, whatever the number of dispatchers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.bus import metrics
from interlock.bus.model import Limit
from interlock.bus.tokens import Tokens

_sql = queries("bus_limits")

TOKEN_SECONDS: Final = 45.0
"""How long a prefetched token is good, unless its window ends before."""


WindowKey = tuple[UUID, str, str, str]
"""The org, and the limit's own key in it."""


class Ask(NamedTuple):
    org_id: UUID
    limit: Limit
    amount: int

    @property
    def key(self) -> WindowKey:
        return self.org_id, *self.limit.key


class Grant(NamedTuple):
    amount: int
    wait_seconds: float
    """Until there is more."""


class Usage(NamedTuple):
    over: bool
    wait_seconds: float


async def take(connection: Connection, asks: Sequence[Ask]) -> dict[WindowKey, Grant]:
    """As much of each as there is, in the caller's transaction: rolled back, it is there again."""
    if not asks:
        return {}
    rows = await _sql.take_tokens(connection, **_columns(asks))
    return {_key(row): Grant(row["granted"], row["wait_seconds"]) for row in rows}


async def give_back(connection: Connection, amounts: Mapping[WindowKey, int]) -> None:
    """What was taken in this transaction for commands that another limit has refused."""
    if amounts:
        org_ids, targets, names, sources = (list(column) for column in zip(*amounts, strict=True))
        await _sql.give_back(
            connection, org_ids=org_ids, targets=targets, names=names, sources=sources, amounts=list(amounts.values())
        )


async def count(connection: Connection, asks: Sequence[Ask]) -> dict[WindowKey, Usage]:
    """What was sent, whether or not there was room for it."""
    if not asks:
        return {}
    rows = await _sql.count_used(connection, **_columns(asks))
    return {_key(row): Usage(row["over"], row["wait_seconds"]) for row in rows}


class Limits:
    """What the fast stage does between commands, never during one: fetches tokens, and pays what it owes."""

    def __init__(self, database: Database, *, prefetchers: int = 5) -> None:
        self._database = database
        self._prefetchers = prefetchers

    async def settle(self, pockets: Iterable[Tokens], now: float) -> int:
        """`now` is from before: a token ends by the clock of whoever uses it, counted from the question."""
        known = {tokens.org_id: tokens for tokens in pockets}
        spent = [Ask(o, *each) for o, tokens in known.items() for each in tokens.spent()]
        wanted = [Ask(o, *each) for o, tokens in known.items() for each in tokens.wanted(now)]
        if not spent and not wanted:
            return 0
        enforcement = {ask.key: ask.limit.enforcement.value for ask in spent}

        async def work(connection: Connection) -> tuple[list[Row], dict[WindowKey, Usage]]:
            # In the order of the slow stage, which locks the same rows: what is taken, then what is counted.
            return await self._prefetch(connection, wanted), await count(connection, spent)

        granted, used = await self._database.run(work)
        for key, usage in used.items():
            if usage.over:
                metrics.LIMITS_EXCEEDED.labels(enforcement[key]).inc()
                known[key[0]].deny(key[1:], now + usage.wait_seconds)
        for row in granted:
            ends_at = now + min(TOKEN_SECONDS, row["left_seconds"])
            known[row["org_id"]].fetched(_key(row)[1:], row["granted"], ends_at, row["remaining"])
        return len(used) + len(granted)

    async def _prefetch(self, connection: Connection, wanted: Sequence[Ask]) -> list[Row]:
        if not wanted:
            return []
        columns = _columns(wanted)
        keys = {name: columns[name] for name in ("org_ids", "targets", "names", "sources")}
        leases = await _sql.may_prefetch(connection, **keys, most=self._prefetchers)
        allowed = {_key(row) for row in leases}
        asks = [ask for ask in wanted if ask.key in allowed]
        rows: list[Row] = await _sql.take_tokens(connection, **_columns(asks)) if asks else []
        return rows


def _key(row: Row) -> WindowKey:
    return row["org_id"], row["target"], row["name"], row["source"]


def _columns(asks: Sequence[Ask]) -> dict[str, list[Any]]:
    return {
        "org_ids": [ask.org_id for ask in asks],
        "targets": [ask.limit.target for ask in asks],
        "names": [ask.limit.name for ask in asks],
        "sources": [ask.limit.source or "" for ask in asks],
        "rates": [ask.limit.rate for ask in asks],
        "seconds": [ask.limit.window_seconds for ask in asks],
        "bursts": [ask.limit.burst for ask in asks],
        "cooldowns": [ask.limit.cooldown_seconds for ask in asks],
        "asked": [ask.amount for ask in asks],
    }
