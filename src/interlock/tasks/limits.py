"""Limits of runs: rates per key, and tasks that may run at once.

Each key of a run has a token bucket in Valkey. It fills at the run's rate and holds one second's worth of tokens; a
task that starts takes one. A task that finds its bucket empty stays queued, and the message of its range becomes
visible again when there are tokens. While Valkey does not answer, no task with a key starts: its range is deferred.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import UUID

import msgspec

from interlock.clock import Clock
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import Database, Row, queries
from interlock.stores.valkey import Coordination
from interlock.strict_json import as_key, resolved
from interlock.tasks.queue import Outgoing, Queue, enqueue
from interlock.tasks.shards import Rate, Shards, run_task_id
from interlock.telemetry import LIMITS_UNAVAILABLE

HOST: Final = "host"
"""The host of the URL in the payload, or in its `url`."""
_UNREADABLE: Final = "\x00"
_KEPT_MS: Final = 3_600_000
_ASKED_PER_SECOND: Final = 50
"""Refused messages of one run per second. With more, the delay grows, so that they do not circulate in a busy loop."""
_LONGEST_DEFERRAL_SECONDS: Final = 20.0

# For each key: how many tasks may start now, and when the next one may.
_ADMIT: Final = """
local now, rate, kept = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local full, answers, wait, denied = math.max(1, rate), {}, nil, false
for n = 2, #KEYS do
  local seen = redis.call('HMGET', KEYS[n], 'at', 'left')
  local left = math.min(full, (tonumber(seen[2]) or full) + math.max(0, now - (tonumber(seen[1]) or now)) * rate)
  local granted = math.min(math.floor(left + 0.000001), tonumber(ARGV[2 + n]))
  left = left - granted
  redis.call('HSET', KEYS[n], 'at', tostring(now), 'left', tostring(left))
  redis.call('PEXPIRE', KEYS[n], kept)
  answers[#answers + 1] = granted
  if granted < tonumber(ARGV[2 + n]) then
    local next = (1 - left) / rate
    denied, wait = true, wait and math.min(wait, next) or next
  end
end
if denied then
  local asked = redis.call('INCR', KEYS[1])
  if asked == 1 then redis.call('PEXPIRE', KEYS[1], 1000) end
  wait = math.max(wait, asked / tonumber(ARGV[#ARGV]))
end
table.insert(answers, 1, tostring(wait or 0))
return answers
"""


@dataclass(frozen=True)
class Admitted:
    """Positions of the tasks that may start, and the delay until another one may."""

    places: Sequence[int]
    wait_seconds: float = 0.0


class Deferrals:
    """Delays for ranges whose limits cannot be checked.

    The delay grows with the number of requests. It spreads the retries, so that they overload neither the queue nor
    Valkey when it is back.
    """

    def __init__(
        self, seconds: Callable[[], float] = time.monotonic, uniform: Callable[[], float] = random.random
    ) -> None:
        self._seconds = seconds
        self._uniform = uniform
        self._window = 0
        self._asked = 0

    def next(self, limit: str) -> float:
        LIMITS_UNAVAILABLE.labels(limit=limit).inc()
        if int(self._seconds()) != self._window:
            self._window, self._asked = int(self._seconds()), 0
        self._asked += 1
        return min(_LONGEST_DEFERRAL_SECONDS, max(1.0, self._asked / _ASKED_PER_SECOND)) * (0.5 + self._uniform())


class Rates:
    def __init__(self, coordination: Coordination | None, clock: Clock) -> None:
        self._coordination = coordination
        self._clock = clock
        self.deferrals = Deferrals()

    async def admit(self, run_id: UUID, rate: Rate, payloads: Sequence[str]) -> Admitted:
        keys = [_key(rate.key, payload) for payload in payloads]
        counts = Counter(key for key in keys if key is not None)
        if not counts:
            return Admitted(range(len(payloads)))
        answer = await self._ask(run_id, rate, counts)
        if answer is None:
            unlimited = [place for place, key in enumerate(keys) if key is None]
            return Admitted(unlimited, self.deferrals.next("rate"))
        left = dict(zip(counts, map(int, answer[1:]), strict=True))
        places = []
        for place, key in enumerate(keys):
            if key is None or left[key] > 0:
                places.append(place)
                left |= {} if key is None else {key: left[key] - 1}
        return Admitted(places, float(answer[0]))

    async def _ask(self, run_id: UUID, rate: Rate, counts: Mapping[str, int]) -> Any:
        if self._coordination is None:
            return None
        buckets = [f"interlock:bucket:{run_id}:{hashlib.sha256(key.encode()).hexdigest()}" for key in counts]
        now = self._clock.now().timestamp()
        return await self._coordination.script(
            _ADMIT,
            keys=[f"interlock:asked:{run_id}", *buckets],
            args=[now, rate.per_second, _KEPT_MS, *counts.values(), _ASKED_PER_SECOND],
        )


def rate_key(pointer: str, value: Any) -> str | None:
    """Returns the key of a payload, or None if it has none and so no limit. Raises ValueError for an unusable key."""
    if pointer != HOST:
        return as_key(resolved(value, pointer))
    url = value.get("url") if isinstance(value, dict) else value
    try:
        return urlsplit(url).hostname if isinstance(url, str) else None
    except ValueError:  # not a URL, so it has no host
        return None


def _key(pointer: str, payload: str) -> str | None:
    """Returns the key. Unreadable payloads share one: a payload must neither bypass its rate nor fail the claim."""
    try:
        return rate_key(pointer, msgspec.json.decode(payload))
    except (ValueError, RecursionError):
        return _UNREADABLE


_sql = queries(__name__, "shards")

_MAX_WOKEN: Final = 20
_RUNS: Final = 1000
_RETRY_SECONDS: Final = 1.0
"""Delay before retrying a range that could not be put on the list in Valkey."""
_RETRIES_PER_SECOND: Final = 50
"""Ranges of one run that are retried per second while Valkey is away; those of a large run are retried less often."""
_MANY_LOST: Final = 100_000

# Returns -1 if the counter is missing; the caller must set it.
_TAKE: Final = """
local used = redis.call('GET', KEYS[1])
if not used then return -1 end
local granted = math.max(0, math.min(tonumber(ARGV[1]) - tonumber(used), tonumber(ARGV[2])))
redis.call('INCRBY', KEYS[1], granted)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return granted
"""
_SET_IF_MISSING: Final = "return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) and 1 or 0"
# A slot may have been freed since the claim was refused. Then the first waiting range is woken now.
_WAIT: Final = """
redis.call('RPUSH', KEYS[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
if tonumber(redis.call('GET', KEYS[1]) or ARGV[2]) < tonumber(ARGV[2]) then return {redis.call('LPOP', KEYS[2])} end
return {}
"""
# The first value is 1 if the counter exists. The counter is kept as long as the list.
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
    """None if Valkey has no counter of the run or does not answer."""
    waiting: int


class RunSlots:
    def __init__(
        self, database: Database, settings: Settings, coordination: Coordination | None, queue: Queue, shards: Shards
    ) -> None:
        self._direct = settings.queue_direct
        self._database = database
        self._coordination = coordination
        self._queue = queue
        self._shards = shards
        self._lost: set[UUID] = set()
        """Runs whose ranges were sent again, until Valkey has a counter for them again."""

    async def take(self, run_id: UUID, limit: int, wanted: int) -> int | None:
        """Takes up to `wanted` slots of the run. Returns the number granted; None while Valkey does not answer."""
        granted = await self._script(_TAKE, run_id, limit, wanted, _KEPT_MS)
        if granted == -1:
            await self._script(_SET_IF_MISSING, run_id, await self._running(run_id), _KEPT_MS)
            await self.recover(run_id)
            granted = await self._script(_TAKE, run_id, limit, wanted, _KEPT_MS)
        if granted is None or granted == -1:
            return None
        self._lost.discard(run_id)
        return int(granted)

    async def wait(self, run_id: UUID, limit: int, start: int, end: int) -> float | None:
        """Adds the range to the list that continues when a slot is free, so that its message can be acked.

        Returns None, or the delay in seconds after which the message must be redelivered because Valkey has no list.
        """
        kept = msgspec.json.encode(_Waiting(start, end))
        woken = await self._script(_WAIT, run_id, kept, limit, _KEPT_MS)
        if woken is not None:
            await self._wake(run_id, woken)
            return None
        run = await self._address(run_id)
        ranges = 1 if run is None else run["last_index"] // run["range_size"] + 1
        return max(_RETRY_SECONDS, float(ranges / _RETRIES_PER_SECOND))

    async def ended(self, tasks: Mapping[UUID, int]) -> None:
        """Frees slots of these runs for attempts that have ended."""
        limited = await self._shards.limited(tasks) if tasks else {}
        for run_id in limited:
            await self.give_back(run_id, tasks[run_id])

    async def give_back(self, run_id: UUID, places: int) -> None:
        known, *woken = await self._script(_GIVE_BACK, run_id, places, _MAX_WOKEN) or [0]
        await self._wake(run_id, woken)
        if not known:
            await self.recover(run_id)

    async def recover(self, run_id: UUID) -> bool:
        """Sends the queued ranges of a run again after Valkey has lost its list; once per loss."""
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

    async def _script(self, text: str, run_id: UUID, *arguments: object) -> Any:  # Any: a Valkey reply
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
        await self._queue.send(run["queue"], messages)


class RunSlotRecount(Periodic):
    """Recounts the running tasks of runs with a limit, and frees slots that a crash has kept."""

    name = "run-turns"

    def __init__(self, database: Database, settings: Settings, turns: RunSlots) -> None:
        self.seconds = settings.retry_seconds
        self._database = database
        self._turns = turns
        self._kept: dict[UUID, int] = {}

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            runs = await _sql.limited_runs(connection, limit=_RUNS)
        before, self._kept, corrected = self._kept, {}, 0
        for run in runs:
            counted = await self._turns.counted(run["run_id"])
            if counted.used is None:
                corrected += run["started"] and await self._turns.recover(run["run_id"])
                if counted.waiting:
                    await self._turns.give_back(run["run_id"], 0)
                continue
            # A claim or an end may be in progress. Only a difference that was there in the last pass too is an error.
            kept, known = counted.used - run["running"], before.get(run["run_id"], 0)
            wrong = 0 if kept * known <= 0 else min(kept, known, key=abs)
            self._kept[run["run_id"]] = kept - wrong
            if wrong or (counted.waiting and counted.used < run["max_concurrency"]):
                await self._turns.give_back(run["run_id"], wrong)
                corrected += 1
        return corrected
