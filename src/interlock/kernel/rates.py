"""How often tasks of one key may begin: per host of a URL, or per whatever a JSON pointer names in the payload.

Each key of a run has a bucket in Valkey: it fills at the run's rate, holds a second's worth, and a task that begins
takes one. What finds its bucket empty stays queued, and the message of its range comes again when there is something in
it. While Valkey does not answer, no task with a key begins: its range comes again a little later.
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

from interlock.adapters.valkey import Coordination
from interlock.clock import Clock
from interlock.kernel.shards import Rate
from interlock.pointers import as_key, resolved
from interlock.telemetry import LIMITS_UNAVAILABLE

HOST: Final = "host"
"""Of the URL that is the payload, or its `url`."""
_UNREADABLE: Final = "\x00"
_KEPT_MS: Final = 3_600_000
_ASKED_PER_SECOND: Final = 50
"""Messages of one run that may ask in vain: the others come later, or they would go round in circles."""
_LONGEST_DEFERRAL_SECONDS: Final = 20.0

# For each key: how many may begin now, and in how long the next one may.
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
    """Which of the tasks may begin, by their place; and in how many seconds the next one of the others may."""

    places: Sequence[int]
    wait_seconds: float = 0.0


class Deferrals:
    """How long ranges wait whose limits cannot be checked. The more of them ask, the longer: they come back spread out,
    and keep neither the queue nor, once it is back, Valkey busy."""

    def __init__(
        self, seconds: Callable[[], float] = time.monotonic, dice: Callable[[], float] = random.random
    ) -> None:
        self._seconds = seconds
        self._dice = dice
        self._window = 0
        self._asked = 0

    def next(self, limit: str) -> float:
        LIMITS_UNAVAILABLE.labels(limit=limit).inc()
        if int(self._seconds()) != self._window:
            self._window, self._asked = int(self._seconds()), 0
        self._asked += 1
        return min(_LONGEST_DEFERRAL_SECONDS, max(1.0, self._asked / _ASKED_PER_SECOND)) * (0.5 + self._dice())


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
    """Returns the key of a payload, None when it has none and so no limit. ValueError says why there can be none."""
    if pointer != HOST:
        return as_key(resolved(value, pointer))
    url = value.get("url") if isinstance(value, dict) else value
    try:
        return urlsplit(url).hostname if isinstance(url, str) else None
    except ValueError:  # no URL, and so no host
        return None


def _key(pointer: str, payload: str) -> str | None:
    """Payloads that cannot be read share one key: a payload must neither escape its rate nor fail the claim."""
    try:
        return rate_key(pointer, msgspec.json.decode(payload))
    except (ValueError, RecursionError):
        return _UNREADABLE
