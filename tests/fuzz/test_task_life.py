"""Odd payloads, keys, configs and reports through the whole life of a task, next to an org that must be unaffected.

It uses a seeded generator, real servers, and a clock that the test moves. The latency of an org is the number of rounds
from its submission to its result, which must be one round whatever the other org sends.
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from valkey.asyncio import Valkey

from interlock.clock import ManualClock
from interlock.stores.embedded import EmbeddedValkey
from interlock.wire.access import KeyRequest, Role
from interlock.wire.attempts import ClaimBatchReply
from tests.fuzz.test_odd_bodies import ODD
from tests.support.system import System, running

ROUNDS, EACH = 8, 8
LONG = "".join(chr(0x10000 + secrets.randbelow(0x10000)) for _ in range(1000))
ODDER: dict[str, bytes] = {
    "a far exponent": b"1e-99999",
    "a long fraction": b"0." + b"1" * 5000,
    "an integer that fits": b"9" * 4000,
    "deep, but not too deep": b"[" * 500 + b"]" * 500,
    "a little too deep": b"[" * 520 + b"]" * 520,
    "a long key": json.dumps(LONG).encode(),
    "a host that is none": b'"http://[::"',
    "an escaped key": rb'{"\u0061": 1, "a": 2}',
    "a list of a thousand": json.dumps([{}] * 1000).encode(),
}
VALUES = [*ODD.values(), *ODDER.values()]
POINTERS = ["/h", "/h/0", "/h/a", "/", "/~1", "/h~0", "host", "/" * 400]
STORED = [b'{"h": 1e400}', rb'{"h": "\u0000", "url": "\u0000"}', b'{"h": 1, "h": 2}', b"[" * 700 + b"]" * 700]
"""Values that earlier versions accepted and that submissions now reject."""


@dataclass
class Life:
    system: System
    rng: random.Random
    attacker: str
    submitted: list[str] = field(default_factory=list)
    refused: int = 0

    def odd(self) -> bytes:
        return self.rng.choice(VALUES)

    def submission(self) -> bytes:
        """Returns a valid job except for one to three odd values."""
        rng = self.rng
        payloads = [rng.choice([b'{"h": %b, "url": "http://a.example/"}', b'{"url": %b}', b"%b"]) % v for v in
                    (self.odd() if rng.random() < 0.5 else b'"x"' for _ in range(rng.randint(1, 5)))]  # fmt: skip
        body = [b'"operator": "echo"', b'"tasks": [%b]' % b", ".join(payloads)]
        if rng.random() < 0.4:
            body.append(b'"limits": {"rate": {"key": %b, "per_second": 50}}' % self.pointer())
        if rng.random() < 0.3:
            body.append(b'"scaling": {"key": %b, "max_concurrency_per_key": 3}' % self.pointer())
        if rng.random() < 0.2:
            body.append(b'"dedupe_by": ' + self.pointer())
        if rng.random() < 0.2:
            body.append(b'"config": {"a": %b}' % self.odd())
        if rng.random() < 0.1:
            body.append(b'"name": ' + self.odd())
        return b"{" + b", ".join(body) + b"}"

    def pointer(self) -> bytes:
        return json.dumps(self.rng.choice(POINTERS)).encode() if self.rng.random() < 0.9 else self.odd()

    async def attack(self) -> None:
        keys = [b"", b"k" * 255, b"\xff", b"{}"]
        headers = {"Idempotency-Key": self.rng.choice(keys)} if self.rng.random() < 0.1 else {}
        reply = await self.system.user(
            "POST", "/v1/jobs", key=self.attacker, content=self.submission(), headers=headers
        )
        assert reply.status_code in (201, 400, 409, 413), reply.text
        if reply.status_code == 201:
            self.submitted.append(reply.json()["run_id"])
        else:
            self.refused += 1

    async def spoil(self) -> None:
        """Changes some waiting tasks to values that an earlier version accepted."""
        for run_id in self.submitted[-EACH:]:
            if self.rng.random() < 0.3:
                spoilt = "update interlock.tasks set payload = $2::text::json where run_id = $1 and status = 'Queued'"
                await self.system.value(spoilt, run_id, self.rng.choice(STORED).decode())
            if self.rng.random() < 0.1:
                spoilt = (
                    "update interlock.tasks set slot_key = $2 where run_id = $1 and status = 'Queued' and not parked"
                )
                await self.system.value(spoilt, run_id, LONG)

    async def work(self) -> None:
        """Runs one round of a worker that takes all tasks: receive, claim, heartbeat and report in batches."""
        waiting = list[dict[str, Any]]()
        while messages := await self.system.receive(max_messages=100):
            for message in messages:
                receipt = {"queue": "platform", "message_id": message["message_id"], "receipt": message["receipt"]}
                waiting.append(message["body"] | {"message": receipt})
        spans = [{k: w[k] for k in ("run_id", "start", "end", "message")} for w in waiting if "run_id" in w]
        singles = [{k: w[k] for k in ("task_id", "message")} for w in waiting if "run_id" not in w]
        held = list[tuple[dict[str, Any], str]]()
        for claim in [{"ranges": spans, "grouped": True, "tokens": False}] * bool(spans) + singles:
            held += await self.claim(claim)
        if held:
            await self.beat(held)
            await self.report(held)

    async def claim(self, what: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
        reply = await self.system.worker("POST", "/internal/task-claim", json={"worker_id": "w"} | what)
        assert reply.status_code == 200, reply.text
        if "task_id" in what:
            found = json.loads(reply.content, parse_int=str)
            if found["status"] != "Claimed":
                return []
            fence = {k: found[k] for k in ("task_id", "lease_token")} | {"attempt": int(found["attempt"])}
            return [(fence, found["task"]["org_id"])]
        batch = msgspec.json.decode(reply.content, type=ClaimBatchReply)
        held = [
            ({"task_id": str(task.task_id), "attempt": group.attempt, "lease_token": str(group.lease_token)},
             str(group.org_id))
            for group in batch.groups for task in group.tasks
        ]  # fmt: skip
        for one in batch.claims:
            if one.status == "Claimed" and one.task is not None:
                fence = {"task_id": str(one.task_id), "attempt": one.attempt, "lease_token": str(one.lease_token)}
                held.append((fence, str(one.task.org_id)))
        return held

    async def beat(self, held: list[tuple[dict[str, Any], str]]) -> None:
        items = [fence | {"progress": self.rng.random(), "progress_text": "a\x00\U0010ffff" * 3} for fence, _ in held]
        reply = await self.system.worker("POST", "/internal/task-heartbeat", json={"items": items})
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["items"]) == len(held)

    async def report(self, held: list[tuple[dict[str, Any], str]]) -> None:
        """Reports odd results and errors for the attacker, in the same batch as the victim's."""
        lawful = [value for value in VALUES if _is_json(value) and len(value) < 10_000]
        items = []
        for fence, org_id in held:
            start = json.dumps(fence)[:-1].encode()
            if org_id == str(self.system.org_id):
                items.append(start + b', "status": "Completed", "result": 1}')
            elif self.rng.random() < 0.3:
                items.append(start + b', "status": "Failed", "error_class": "a\\u0000", "error_message": "\\u0000"}')
            else:
                items.append(start + b', "status": "Completed", "result": %b}' % self.rng.choice(lawful))
        content = b'{"items": [' + b", ".join(items) + b"]}"
        reply = await self.system.worker("POST", "/internal/task-complete", content=content)
        assert reply.status_code == 200, reply.text
        assert not {r["task_id"] for r in reply.json().get("refused", [])} & {
            fence["task_id"] for fence, org_id in held if org_id == str(self.system.org_id)
        }

    async def read(self) -> None:
        for run_id in self.submitted[-EACH:]:
            for path in (f"/v1/runs/{run_id}", f"/v1/tasks?run={run_id}", f"/v1/results/{run_id}/0"):
                reply = await self.system.user("GET", path, key=self.attacker)
                assert reply.status_code < 500, (path, reply.text)


def _is_json(value: bytes) -> bool:
    """Returns True for valid JSON, as a dispatcher requires in a report; otherwise the whole request fails."""
    try:
        msgspec.json.decode(value, type=msgspec.Raw)
        pairs = json.loads(value.decode("utf-8", "replace"), object_pairs_hook=list, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return not (isinstance(pairs, list) and len(pairs) == 2 and pairs[0] and pairs[0][0] == pairs[1][0])


@pytest.fixture
async def paced(state_url: str, tmp_path: Path, clock: ManualClock, valkey: EmbeddedValkey) -> AsyncIterator[System]:
    url = await valkey.start()
    async with Valkey.from_url(url) as client:
        await client.flushall()
    async with running(state_url, tmp_path, clock, valkey_url=url) as system:
        yield system


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_odd_input_of_one_org_does_not_delay_another(paced: System, clock: ManualClock, seed: int) -> None:
    org = await paced.kernel.access.principals.create_org("attacker")
    grant = KeyRequest(user="root", role=Role.ADMIN)
    key = await paced.kernel.access.principals.create_key(grant, org.org_id, granted_by=None)
    life = Life(paced, random.Random(seed), key.key)
    for _ in range(ROUNDS):
        for _ in range(EACH):
            await life.attack()
        victim = await paced.submit([{"n": 1}], limits={"rate": {"key": "/n", "per_second": 5}})
        plain = await paced.submit([1, 2])
        await life.spoil()
        await life.work()
        await paced.settle()
        for run in (victim, plain):
            assert (await paced.run(run["run_id"]))["state"] == "Completed"
        await life.read()
        clock.advance(2)
    assert life.refused
    assert life.submitted
    left = "select count(*) from interlock.tasks where status in ('Queued', 'Running')"
    for _ in range(40):
        clock.advance(90)
        await paced.settle()
        await paced.pass_of("reconciler")
        await life.work()
        if await paced.value(left) == 0:
            break
    assert await paced.value(left) == 0
    assert await paced.value("select count(*) from interlock.queue_messages where dead_at is not null") == 0
