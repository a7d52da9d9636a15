"""Places of runs that may have only so many tasks running at once: a counter in Valkey, whose truth is in Postgres.

claim ─► take ─► so many of a range, and no more ─► heartbeats, reports ─► give back ─► whoever waits
              └► none: the range waits, in a list in Valkey, and its message is gone

The loop below recounts in Postgres, and returns places that a crash has kept. While Valkey does not answer, no place
is granted, because two dispatchers that count in Postgres at the same time would both find the last one free; a range
keeps its message, which is delivered again a little later. When Valkey has lost a run's counter, its list of waiting
ranges counts as lost, too: the first dispatcher to notice has all queued ranges of the run sent again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import msgspec

from interlock.adapters.postgres import Database, Row, queries
from interlock.adapters.queue import Outgoing, Queue
from interlock.adapters.valkey import Coordination
from interlock.kernel.loop import Periodic
from interlock.kernel.shards import Shards
from interlock.kernel.tasks import enqueue, run_task_id
from interlock.settings import Settings

_sql = queries("shards")

_KEPT_MS: Final = 3_600_000
_MOST_WOKEN: Final = 20
_RUNS: Final = 1000
_AGAIN_SECONDS: Final = 1.0
"""Until a range that could not be put on the list in Valkey is tried again."""
_AGAIN_PER_SECOND: Final = 50
"""Ranges of one run that are tried again while Valkey is away; those of a large run come less often."""
_MANY_LOST: Final = 100_000

# -1: nobody knows how many run, and the caller has to say.
_TAKE: Final = """
local used = redis.call('GET', KEYS[1])
if not used then return -1 end
local granted = math.max(0, math.min(tonumber(ARGV[1]) - tonumber(used), tonumber(ARGV[2])))
redis.call('INCRBY', KEYS[1], granted)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return granted
"""
_KNOW: Final = "return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) and 1 or 0"
# A place may have been freed since it was refused: then one that waits goes at once, this or another.
_WAIT: Final = """
redis.call('RPUSH', KEYS[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
if tonumber(redis.call('GET', KEYS[1]) or ARGV[2]) < tonumber(ARGV[2]) then return {redis.call('LPOP', KEYS[2])} end
return {}
"""
# The first value tells whether the counter was there: it is kept as long as the list.
_GIVE_BACK: Final = """
local freed, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local used = redis.call('GET', KEYS[1])
if used then redis.call('SET', KEYS[1], math.max(0, tonumber(used) - freed), 'KEEPTTL') end
local woken = {used and 1 or 0}
for _ = 1, math.min(math.max(freed, 1), most) do
  local waiting = redis.call('LPOP', KEYS[2])
  if not waiting then break end
  woken[#woken + 1] = waiting
end
return woken
"""
_COUNTED: Final = "return {redis.call('GET', KEYS[1]), redis.call('LLEN', KEYS[2])}"


class _Waiting(msgspec.Struct, array_like=True, frozen=True):
    start: int
    end: int


_waiting = msgspec.json.Decoder(_Waiting)


@dataclass(frozen=True)
class _Counted:
    used: int | None
    """None: Valkey has no counter of the run, or does not answer."""
    waiting: int


class Turns:
    def __init__(
        self, database: Database, settings: Settings, coordination: Coordination | None, queue: Queue, shards: Shards
    ) -> None:
        self._direct = settings.queue_direct
        self._database = database
        self._coordination = coordination
        self._queue = queue
        self._shards = shards
        self._lost: set[UUID] = set()
        """Runs whose ranges were sent again, until Valkey counts for them again."""

    async def take(self, run_id: UUID, most: int, wanted: int) -> int | None:
        """Returns how many of the wanted places the run may have; None while Valkey does not answer."""
        granted = await self._script(_TAKE, run_id, most, wanted, _KEPT_MS)
        if granted == -1:
            await self._script(_KNOW, run_id, await self._running(run_id), _KEPT_MS)
            await self.recover(run_id)
            granted = await self._script(_TAKE, run_id, most, wanted, _KEPT_MS)
        if granted is None or granted == -1:
            return None
        self._lost.discard(run_id)
        return int(granted)

    async def wait(self, run_id: UUID, most: int, start: int, end: int) -> float | None:
        """Puts the range on the list of those that go on when a place is free; its message may go then.

        Returns None, or the seconds after which its message must come again because there is no list.
        """
        kept = msgspec.json.encode(_Waiting(start, end))
        woken = await self._script(_WAIT, run_id, kept, most, _KEPT_MS)
        if woken is not None:
            await self._wake(run_id, woken)
            return None
        run = await self._address(run_id)
        ranges = 1 if run is None else run["last_index"] // run["range_size"] + 1
        return max(_AGAIN_SECONDS, float(ranges / _AGAIN_PER_SECOND))

    async def ended(self, tasks: Mapping[UUID, int]) -> None:
        """Attempts of these runs have ended, so many of each."""
        limited = await self._shards.limited(tasks) if tasks else {}
        for run_id in limited:
            await self.give_back(run_id, tasks[run_id])

    async def give_back(self, run_id: UUID, places: int) -> None:
        known, *woken = await self._script(_GIVE_BACK, run_id, places, _MOST_WOKEN) or [0]
        await self._wake(run_id, woken)
        if not known:
            await self.recover(run_id)

    async def recover(self, run_id: UUID) -> bool:
        """Has the queued ranges of a run sent again whose list in Valkey is lost; once for each loss."""
        if self._coordination is None or run_id in self._lost:
            return False
        async with self._database.connection() as connection:
            asked: UUID | None = await _sql.send_again(connection, run_id=run_id)
        if asked is None:
            return False
        if len(self._lost) > _MANY_LOST:
            self._lost.clear()
        self._lost.add(run_id)
        return True

    async def counted(self, run_id: UUID) -> _Counted:
        found = await self._script(_COUNTED, run_id)
        if found is None:
            return _Counted(None, 0)
        used, waiting = found
        if used is not None:
            self._lost.discard(run_id)
        return _Counted(None if used is None else int(used), int(waiting))

    async def _script(self, text: str, run_id: UUID, *arguments: object) -> Any:  # as Valkey says it
        if self._coordination is None:
            return None
        keys = [f"interlock:places:{run_id}", f"interlock:waiting:{run_id}"]
        return await self._coordination.script(text, keys=keys, args=arguments)

    async def _running(self, run_id: UUID) -> int:
        async with self._database.connection() as connection:
            running: int | None = await _sql.running_of(connection, run_id=run_id)
        return running or 0

    async def _address(self, run_id: UUID) -> Row | None:
        async with self._database.connection() as connection:
            row: Row | None = await _sql.run_address(connection, run_id=run_id)
        return row

    async def _wake(self, run_id: UUID, waiting: Sequence[bytes]) -> None:
        ranges = [_waiting.decode(one) for one in waiting]
        if not ranges:
            return
        run = await self._address(run_id)
        if run is None:
            return
        if run["queue"] is None:
            ids = [run_task_id(run_id, index) for span in ranges for index in range(span.start, span.end + 1)]
            await self._database.run(lambda c: enqueue(c, ids, shard=run["shard"], direct=self._direct))
            return
        messages = []
        for span in ranges:
            body = {"job_id": run["job_id"], "run_id": run_id, "start": span.start, "end": span.end}
            key = f"{run_id}:{span.start // run['range_size']}"
            if span.start == span.end:
                key = str(run_task_id(run_id, span.start))
            text = msgspec.json.encode(body).decode()
            messages.append(Outgoing(text, run["priority"], key, org_id=run["org_id"], share_id=run_id))
        await self._queue.send_batch(run["queue"], messages)


class TurnKeeping(Periodic):
    """Counts anew what runs with a limit have running: what a crash has kept from them is theirs again."""

    name = "run-turns"

    def __init__(self, database: Database, settings: Settings, turns: Turns) -> None:
        self.seconds = settings.retry_seconds
        self._database = database
        self._turns = turns
        self._kept: dict[UUID, int] = {}

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            runs = await _sql.limited_runs(connection, most=_RUNS)
        before, self._kept, corrected = self._kept, {}, 0
        for run in runs:
            counted = await self._turns.counted(run["run_id"])
            if counted.used is None:
                corrected += run["started"] and await self._turns.recover(run["run_id"])
                if counted.waiting:
                    await self._turns.give_back(run["run_id"], 0)
                continue
            # A claim may be under way, or an end on its way here: only what was so the last time, too, is wrong.
            kept, known = counted.used - run["running"], before.get(run["run_id"], 0)
            wrong = 0 if kept * known <= 0 else min(kept, known, key=abs)
            self._kept[run["run_id"]] = kept - wrong
            if wrong or (counted.waiting and counted.used < run["max_concurrency"]):
                await self._turns.give_back(run["run_id"], wrong)
                corrected += 1
        return corrected
