"""Valid requests with one odd value: valid but unexpected JSON, in every position of every body."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fuzz.listeners import FuzzedListeners
from tests.fuzz.request_bodies import DISPATCHER, GATEWAY, PUT, Body
from tests.fuzz.responses import require_orderly
from tests.fuzz.schemathesis_driver import EXAMPLES
from tests.fuzz.seeded_state import CAPABILITY, HOOK, HOOK_TOKEN, RUNNING, State, names_of
from tests.support.system import System, fence

Place = tuple[Any, ...]

ODD: dict[str, bytes] = {
    "null": b"null",
    "true": b"true",
    "minus zero": b"-0",
    "zero as a float": b"-0.0",
    "less than nothing": b"-1",
    "past 32 bits": b"2147483648",
    "past 64 bits": b"18446744073709551616",
    "past every integer": b"9" * 5000,
    "past every float": b"1e999",
    "nearly nothing": b"5e-324",
    "nothing": b"1e-999",
    "not a number": b"NaN",
    "infinity": b"-Infinity",
    "empty text": b'""',
    "NUL": b'"a\\u0000b"',
    "a raw NUL": b'"\x00"',
    "half a character": b'"\\ud800"',
    "a surrogate pair": b'"\\ud83d\\ude00"',
    "not UTF-8": b'"\xff\xfe"',
    "an overlong slash": b'"\xc0\xaf"',
    "long text": b'"' + b"x" * 20_000 + b'"',
    "a line end": b'"platform\\n"',
    "right to left": '"\u202eplatform"'.encode(),
    "a quote": b'"\'; drop table interlock.tasks; --"',
    "a path": b'"../../../etc/passwd"',
    "a format": b'"%s%n{0}{{}}"',
    "an empty list": b"[]",
    "an empty object": b"{}",
    "a list of nulls": b"[null, null]",
    "a deep list": b"[" * 2000 + b"]" * 2000,
    "a deeper object": b'{"a":' * 50_000,
    "the same key twice": b'{"task_id": 1, "task_id": 2}',
    "a comment": b"1 /* one */",
    "single quotes": b"'x'",
}

SHARP = ["NUL", "half a character", "past 64 bits"]
"""Values that a decoder accepts and a database rejects: these go into every position, the others into random ones."""

REQUESTS = [(path, body) for bodies in (GATEWAY, DISPATCHER) for path, several in bodies.items() for body in several]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Yields the position of every value, and of the whole."""
    yield at
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*at, key))


def with_odd(body: Any, place: Place, odd: bytes) -> bytes:
    """Encodes the body with raw bytes in place of a value; no encoder would write most of them."""
    mark = "the odd value"

    def put(value: Any, at: Place) -> Any:
        if not at:
            return mark
        if isinstance(value, dict):
            return {k: put(v, at[1:]) if k == at[0] else v for k, v in value.items()}
        return [put(v, at[1:]) if n == at[0] else v for n, v in enumerate(value)]

    return json.dumps(put(body, place)).encode().replace(json.dumps(mark).encode(), odd)


def prepared(site: FuzzedListeners, state: State, body: Body) -> tuple[Body, dict[str, str]]:
    """Returns the body with existing objects, and all credentials that the request may need."""
    claim = state.take(RUNNING)
    real: Body = state.exchange(body, names_of(claim) if body.get("task_id") == RUNNING else None)
    return real, {
        "Authorization": f"Bearer {site.admin_key}",
        "X-Trace-Worker-Token": site.worker_token,
        CAPABILITY: claim["capability_token"],
        "X-Interlock-Token": state.take(HOOK_TOKEN),
        "Content-Type": "application/json",
    }


def url_of(site: FuzzedListeners, state: State, path: str) -> str:
    return (site.gateway_url if path in GATEWAY else site.internal_url) + path.replace("{hook_id}", state.take(HOOK))


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[path for path, _ in REQUESTS])
async def test_odd_value_gets_an_orderly_response(
    site: FuzzedListeners, state: State, http: httpx.AsyncClient, path: str, body: Body
) -> None:
    async def ask(place: Place, name: str) -> int:
        real, headers = prepared(site, state, body)
        content, method = with_odd(real, place, ODD[name]), "PUT" if path in PUT else "POST"
        reply = await http.request(method, url_of(site, state, path), content=content, headers=headers)
        return require_orderly(reply, (path, place, name))

    pairs = [(place, name) for place in places(body) for name in ODD]
    sharp = [pair for pair in pairs if pair[1] in SHARP]
    blunt = [pair for pair in pairs if pair[1] not in SHARP]
    chosen = sharp + random.Random(path).sample(blunt, min(len(blunt), 6 * EXAMPLES))
    groups = [chosen[n : n + 8] for n in range(0, len(chosen), 8)]
    statuses = [status for group in groups for status in await asyncio.gather(*(ask(*pair) for pair in group))]
    assert 400 in statuses
    assert site.complaints() == []


async def test_non_ascii_digit_is_not_a_list_index(shared: System) -> None:
    for body in ({"dedupe_by": "/²"}, {"scaling": {"key": "/²", "max_concurrency_per_key": 1}}):
        job = {"operator": "echo", "tasks": [["a", "b", "c"]]} | body
        require_orderly(await shared.user("POST", "/v1/jobs", json=job), body)


async def test_tiny_progress_value_is_accepted(shared: System) -> None:
    claim = await shared.claim(await shared.one())
    for progress in (1e-45, 1e-46, 5e-324, 1.0):
        body = fence(claim) | {"progress": progress}
        reply = await shared.attempt("/v1/task/heartbeat", claim["capability_token"], body)
        assert require_orderly(reply, progress) == 200
