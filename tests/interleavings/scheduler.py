"""Plays racing operations, move by move, in an order that the test chooses.

Each operation runs in its own task on its own connections. Its gates are failpoints: there it stops, with its
transaction open and its locks held, until its next move. A move lets one operation run until every operation has
stopped: at a gate, at its end, or behind a lock that another holds. PostgreSQL reports the lock waits, so nothing here
depends on time. An operation that is unblocked by another's commit continues within that move.

    orders(reap="reap.before_commit", complete="complete.before_commit")

returns the six ways to shuffle two moves of each: start (and stop at its gate), and end.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import pytest

from interlock import failpoints
from interlock.errors import InterlockError
from interlock.failpoints import FailpointError

Gates = str | tuple[str, ...]
Operation = Callable[[], Awaitable[Any]]

OWN_GATE = "own"
"""The gate of an operation defined by a test: it is no failpoint, the operation calls `stand_at` itself."""
_PATIENCE_SECONDS = 60
_MOMENT_SECONDS = 0.003
_WAITS = """
    select w.application_name as waiter, h.application_name as holder
    from pg_stat_activity w
    cross join lateral unnest(pg_blocking_pids(w.pid)) as pid
    join pg_stat_activity h on h.pid = pid.pid
    where w.datname = current_database() and w.application_name = any($1) and h.application_name = any($1)
"""


@dataclass(frozen=True)
class Order:
    """The order of moves. Every operation appears once more than it has gates."""

    gates: Mapping[str, tuple[str, ...]]
    moves: tuple[str, ...]
    breaking: str | None = None
    """The operation that does not commit: its last gate raises, and its transaction is rolled back."""

    @property
    def first(self) -> str:
        return self.moves[0]

    @property
    def second(self) -> str:
        """The next operation to start."""
        return next(name for name in self.moves if name != self.first)

    def meeting(self, *, after: str | None = None) -> set[tuple[str, str]]:
        """Returns the expected waits if the second operation waits for the first when they overlap.

        With `after`, only if that operation started first.
        """
        return {(self.second, self.first)} if self.overlap and after in (None, self.first) else set()

    def before(self, one: str, other: str) -> bool:
        """True if `one` had ended when `other` started."""
        return self._last(one) < self.moves.index(other)

    @property
    def overlap(self) -> bool:
        """True if any two operations overlap."""
        return any(
            not self.before(one, other) and not self.before(other, one)
            for one in self.gates
            for other in self.gates
            if one != other
        )

    def _last(self, name: str) -> int:
        return len(self.moves) - 1 - self.moves[::-1].index(name)

    def __str__(self) -> str:
        return ", ".join(f"{name} {self._word(place, name)}" for place, name in enumerate(self.moves))

    def _word(self, place: int, name: str) -> str:
        if not self.gates[name]:
            return "runs"
        if place == self.moves.index(name):
            return "begins"
        if place < self._last(name):
            return "goes on"
        return "breaks" if name == self.breaking else "ends"


def orders(*, alike: tuple[str, ...] = (), **gates: Gates) -> list[Order]:
    """Returns every order in which operations with these gates can move.

    Operations that are `alike` do the same, so one of two mirrored orders is enough.
    """
    stops = {name: (gate,) if isinstance(gate, str) else gate for name, gate in gates.items()}
    left = {name: len(gate) + 1 for name, gate in stops.items()}
    return [Order(stops, moves) for moves in _shuffled(left) if sorted(alike, key=moves.index) == list(alike)]


def _shuffled(left: dict[str, int]) -> Iterator[tuple[str, ...]]:
    if not any(left.values()):
        yield ()
    for name, moves in left.items():
        if moves:
            yield from ((name, *rest) for rest in _shuffled(left | {name: moves - 1}))


def in_every_order(*, alike: tuple[str, ...] = (), **gates: Gates) -> pytest.MarkDecorator:
    """Runs a test once per order; the test plays it."""
    return pytest.mark.parametrize("order", orders(alike=alike, **gates), ids=str)


def while_one_breaks(**gates: str) -> pytest.MarkDecorator:
    """Runs a test once per pair: the survivor starts while the failing operation waits at its gate."""
    stops = {name: (gate,) for name, gate in gates.items()}
    pairs = [(one, other) for one in gates for other in gates if one != other]
    broken = [Order(stops, (one, other, one, other), breaking=one) for one, other in pairs]
    return pytest.mark.parametrize("order", broken, ids=str)


@dataclass
class Played:
    """The outcome of a race: an answer or a refusal per operation, and the lock waits."""

    answers: dict[str, Any]
    waits: set[tuple[str, str]]
    """Pairs of (waiter, holder), collected whenever all operations had stopped."""

    def __getitem__(self, name: str) -> Any:
        return self.answers[name]

    def refusal(self, name: str) -> tuple[str, str | None]:
        """Returns the code of a refused operation, and the stale part of its fence."""
        error = self.answers[name]
        assert isinstance(error, InterlockError), f"{name} was not refused: {error}"
        return error.code, error.extra.get("stale")


class _Racer:
    """A running operation. The context variable distinguishes two operations at the same failpoint."""

    current: ContextVar[_Racer | None] = ContextVar("racer", default=None)

    def __init__(
        self, name: str, gates: Sequence[str], operation: Operation, *, breaks: bool, news: asyncio.Event
    ) -> None:
        self.name = name
        self._gates = list(gates)
        self._operation = operation
        self._breaks = breaks
        self._news = news
        self._turns = asyncio.Semaphore(0)
        self._at_gate = False
        self.task: asyncio.Task[Any] | None = None

    def move(self) -> None:
        self._at_gate = False
        if self.task is None:
            self.task = asyncio.create_task(self._run())
            self.task.add_done_callback(lambda _: self._news.set())
        else:
            # Blocked by a lock, it keeps the permit and will pass its gate without stopping.
            self._turns.release()

    async def _run(self) -> Any:
        self.current.set(self)
        return await self._operation()

    async def pass_gate(self, failpoint: str) -> None:
        if self._gates[:1] != [failpoint]:
            return
        self._gates.pop(0)
        self._at_gate = self._turns.locked()
        self._news.set()
        await self._turns.acquire()
        if self._breaks and not self._gates:
            raise FailpointError(failpoint)

    @property
    def moving(self) -> bool:
        return self.task is not None and not self.task.done() and not self._at_gate

    @property
    def ended(self) -> bool:
        return self.task is not None and self.task.done()

    def answer(self) -> Any:
        """Returns the result. Refusals are results; any other exception is a defect and fails the test."""
        assert self.task is not None
        error = self.task.exception()
        if error is not None and not isinstance(error, InterlockError | FailpointError):
            raise error
        return error or self.task.result()

    async def dismiss(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


@dataclass
class Race:
    """Operations by name, and the application name of the connections of each."""

    order: Order
    operations: Mapping[str, Operation]
    applications: Mapping[str, str]
    watcher: asyncpg.Connection[Any]
    waits: set[tuple[str, str]] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an operation reaches a gate or its end."""

    async def play(self) -> Played:
        assert set(self.operations) == set(self.order.gates), "an operation without gates, or gates without operation"
        racers = {
            name: _Racer(name, self.order.gates[name], operation, breaks=name == self.order.breaking, news=self.news)
            for name, operation in self.operations.items()
        }
        armed = {gate for gates in self.order.gates.values() for gate in gates if gate != OWN_GATE}
        for gate in armed:
            failpoints.arm(gate, functools.partial(stand_at, gate))
        try:
            for name in self.order.moves:
                racers[name].move()
                await self._until_everybody_stands(racers)
            assert all(racer.ended for racer in racers.values()), f"never ended; waits: {self.waits}"
            return Played({name: racer.answer() for name, racer in racers.items()}, self.waits)
        finally:
            for gate in armed:
                failpoints.disarm(gate)
            for racer in racers.values():
                await racer.dismiss()

    async def _until_everybody_stands(self, racers: Mapping[str, _Racer]) -> None:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while moving := [name for name, racer in racers.items() if racer.moving]:
                if await self._somebody_arrives():
                    continue
                waits = await self._who_waits()
                if set(moving) <= {waiter for waiter, _ in waits}:
                    self.waits |= waits
                    assert not (ring := _ring(waits)), f"deadlock: {' waits for '.join(ring)}"
                    return

    async def _somebody_arrives(self) -> bool:
        """Waits only briefly: an operation that waits for a lock does not arrive, and PostgreSQL reports it."""
        try:
            async with asyncio.timeout(_MOMENT_SECONDS):
                await self.news.wait()
        except TimeoutError:
            return False
        self.news.clear()
        return True

    async def _who_waits(self) -> set[tuple[str, str]]:
        """Returns waits among the operations. Background processes of the server release their locks without help."""
        named = {application: name for name, application in self.applications.items()}
        rows = await self.watcher.fetch(_WAITS, list(named))
        return {(named[row["waiter"]], named[row["holder"]]) for row in rows}


async def stand_at(gate: str) -> None:
    """Stops at a gate: called by an armed failpoint, or by an operation that a test defines."""
    racer = _Racer.current.get()
    if racer is not None:
        await racer.pass_gate(gate)


def _ring(waits: set[tuple[str, str]]) -> list[str]:
    """Returns a cycle of waiting operations, if there is one."""
    for start, _ in waits:
        if path := _way_back(waits, [start]):
            return path
    return []


def _way_back(waits: set[tuple[str, str]], path: list[str]) -> list[str]:
    for waiter, holder in waits:
        if waiter == path[-1] and holder == path[0]:
            return [*path, holder]
        if waiter == path[-1] and holder not in path and (found := _way_back(waits, [*path, holder])):
            return found
    return []
