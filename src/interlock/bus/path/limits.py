"""Rate limits: the authoritative count of each in the database, and the tokens that this process has prefetched.

A token was taken from a window of the limit before it came here, so its use cannot exceed the limit. It expires with
that window and is then lost; it is never used in the next window. Processes share no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from interlock.bus import metrics
from interlock.bus.model import Limit, LimitKey
from interlock.stores.postgres import Connection, Database, Row, queries

_MAX_PREFETCH: Final = 1_000
_SHARE_OF_REST: Final = 20
"""A dispatcher prefetches at most one part in 20 of what a window has left. The slow stage needs tokens for commands on
their way to it, and a dispatcher that stops loses few. A limit smaller than this is never prefetched."""


class TokenStock:
    """Prefetched tokens of one limit."""

    __slots__ = ("ends_at", "left", "remaining", "requested")

    def __init__(self) -> None:
        self.left = 0
        self.ends_at = 0.0
        self.requested = 0
        """Commands since the last fetch: the amount to fetch next."""
        self.remaining = 0
        """Tokens left in the window until `ends_at`, at the last fetch."""


class Wanted(NamedTuple):
    limit: Limit
    amount: int


class Tokens:
    """TokenStock tokens of one org, and its use of limits that are counted after dispatch."""

    def __init__(self, org_id: UUID) -> None:
        self.org_id = org_id
        self._stocks: dict[LimitKey, TokenStock] = {}
        self._wanted: dict[LimitKey, Limit] = {}
        self._spent: dict[LimitKey, tuple[Limit, int]] = {}
        self._denied: dict[LimitKey, float] = {}

    def take(self, limits: Sequence[Limit], now: float) -> bool:
        """Takes one token of each limit, or none at all: a command that one limit refuses uses up no other. Limits
        without tokens are marked for the next fetch."""
        stocks = [self._stock(limit) for limit in limits]
        out = [stock.left <= 0 or now >= stock.ends_at for stock in stocks]
        admitted = not any(out)
        for limit, stock, empty in zip(limits, stocks, out, strict=True):
            if admitted:
                stock.left -= 1
            if admitted or empty:
                stock.requested += 1
            if empty or stock.left == 0:
                self._wanted[limit.key] = limit
        return admitted

    def _stock(self, limit: Limit) -> TokenStock:
        key = limit.key
        stock = self._stocks.get(key)
        if stock is None:
            stock = self._stocks[key] = TokenStock()
        return stock

    def wanted(self, now: float) -> list[Wanted]:
        """Returns the limits that ran out, with the amount to fetch for each, and clears the list."""
        found = [Wanted(limit, self._worth(key, limit, now)) for key, limit in self._wanted.items()]
        self._wanted.clear()
        return [each for each in found if each.amount > 0]

    def _worth(self, key: LimitKey, limit: Limit, now: float) -> int:
        stock = self._stocks[key]
        rest = stock.remaining if now < stock.ends_at else limit.rate
        return min(stock.requested, rest // _SHARE_OF_REST, _MAX_PREFETCH)

    def fetched(self, key: LimitKey, granted: int, ends_at: float, remaining: int) -> None:
        stock = self._stocks.setdefault(key, TokenStock())
        stock.left, stock.ends_at, stock.requested, stock.remaining = granted, ends_at, 0, remaining

    def spend(self, limit: Limit) -> None:
        """Counts one command for a limit that is counted after dispatch."""
        key = limit.key
        known = self._spent.get(key)
        self._spent[key] = (limit, 1 if known is None else known[1] + 1)

    def spent(self) -> list[Wanted]:
        found = [Wanted(limit, count) for limit, count in self._spent.values()]
        self._spent.clear()
        return found

    def deny(self, key: LimitKey, until: float) -> None:
        self._denied[key] = until

    def denied(self, limit: Limit, now: float) -> float | None:
        """Returns the seconds until this process admits commands again, or None if it admits them now."""
        until = self._denied.get(limit.key) if self._denied else None
        return None if until is None or until <= now else until - now

    @property
    def owes(self) -> bool:
        return bool(self._wanted or self._spent)


# The authoritative counts

_sql = queries(__name__, "limits")

TOKEN_SECONDS: Final = 45.0
"""Lifetime of a prefetched token, if its window does not end before."""


WindowKey = tuple[UUID, str, str, str]
"""The org, and the key of the limit in it."""


class LimitUse(NamedTuple):
    """Commands of one org that a limit is charged for."""

    org_id: UUID
    limit: Limit
    amount: int

    @property
    def key(self) -> WindowKey:
        return self.org_id, *self.limit.key


class Grant(NamedTuple):
    amount: int
    wait_seconds: float
    """Seconds until the limit grants more."""


class Usage(NamedTuple):
    over: bool
    wait_seconds: float


async def take(connection: Connection, uses: Sequence[LimitUse]) -> dict[WindowKey, Grant]:
    """Takes as many tokens of each limit as it has, in the caller's transaction: a rollback returns them."""
    if not uses:
        return {}
    rows = await _sql.take_tokens(connection, **_columns(uses))
    return {_key(row): Grant(row["granted"], row["wait_seconds"]) for row in rows}


async def give_back(connection: Connection, amounts: Mapping[WindowKey, int]) -> None:
    """Returns tokens that this transaction took for commands that another limit refused."""
    if amounts:
        org_ids, targets, names, sources = (list(column) for column in zip(*amounts, strict=True))
        await _sql.give_back(
            connection, org_ids=org_ids, targets=targets, names=names, sources=sources, amounts=list(amounts.values())
        )


async def count(connection: Connection, uses: Sequence[LimitUse]) -> dict[WindowKey, Usage]:
    """Counts commands that were sent, even beyond the limit."""
    if not uses:
        return {}
    rows = await _sql.count_used(connection, **_columns(uses))
    return {_key(row): Usage(row["over"], row["wait_seconds"]) for row in rows}


class Limits:
    """Fetches tokens and reports counts for the fast stage, between commands: no command waits for it."""

    def __init__(self, database: Database, *, prefetchers: int = 5) -> None:
        self._database = database
        self._prefetchers = prefetchers

    async def settle(self, orgs: Iterable[Tokens], now: float) -> int:
        """Returns the number of limits that were updated. The lifetime of a token starts at `now`, the time before the
        query, by the clock of this process."""
        known = {tokens.org_id: tokens for tokens in orgs}
        spent = [LimitUse(o, *each) for o, tokens in known.items() for each in tokens.spent()]
        wanted = [LimitUse(o, *each) for o, tokens in known.items() for each in tokens.wanted(now)]
        if not spent and not wanted:
            return 0
        enforcement = {use.key: use.limit.enforcement.value for use in spent}

        async def work(connection: Connection) -> tuple[list[Row], dict[WindowKey, Usage]]:
            # Locks rows in the order of the slow stage: first those to take tokens from, then those to count.
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

    async def _prefetch(self, connection: Connection, wanted: Sequence[LimitUse]) -> list[Row]:
        if not wanted:
            return []
        columns = _columns(wanted)
        keys = {name: columns[name] for name in ("org_ids", "targets", "names", "sources")}
        leases = await _sql.may_prefetch(connection, **keys, limit=self._prefetchers)
        allowed = {_key(row) for row in leases}
        uses = [use for use in wanted if use.key in allowed]
        rows: list[Row] = await _sql.take_tokens(connection, **_columns(uses)) if uses else []
        return rows


def _key(row: Row) -> WindowKey:
    return row["org_id"], row["target"], row["name"], row["source"]


def _columns(uses: Sequence[LimitUse]) -> dict[str, list[Any]]:
    return {
        "org_ids": [use.org_id for use in uses],
        "targets": [use.limit.target for use in uses],
        "names": [use.limit.name for use in uses],
        "sources": [use.limit.source or "" for use in uses],
        "rates": [use.limit.rate for use in uses],
        "seconds": [use.limit.window_seconds for use in uses],
        "bursts": [use.limit.burst for use in uses],
        "cooldowns": [use.limit.cooldown_seconds for use in uses],
        "asked": [use.amount for use in uses],
    }
