"""Attacks on capability tokens, generated randomly and, where there are few enough, exhaustively.

Every forged token is refused with a message that reveals nothing about the task, and changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.access import keyring
from interlock.access.jwt import MAX_PRESENTED_BYTES
from interlock.errors import Unauthenticated
from tests.fuzz.forgeries import Genuine, drawn, listed
from tests.fuzz.request_bodies import DISPATCHER
from tests.fuzz.responses import require_orderly
from tests.fuzz.schemathesis_driver import EXAMPLES
from tests.fuzz.seeded_state import DATASET, VERSION
from tests.support.system import System, fence
from tests.support.token_parts import part

TASK_PATHS = [path for path in DISPATCHER if path.startswith("/v1/task/")]
TABLES = ["tasks", "attempts", "slots", "outbox", "queue_messages", "output_commits", "dataset_events"]
TABLES += ["buffer_publishes", "capabilities", "run_deltas", "signing_keys", "file_sweeps"]


@dataclass(frozen=True)
class Victim:
    """A running attempt with all permissions that an attempt can have, when called with its own token."""

    system: System
    claim: dict[str, Any]
    genuine: Genuine

    def body(self, path: str, **more: Any) -> dict[str, Any]:
        prefix = self.claim["task"]["outputs"][0]["buffer_prefix"]
        dataset = {"dataset_uuid": DATASET, "dataset_version": VERSION}
        own: dict[str, dict[str, Any]] = {
            "/v1/task/heartbeat": {"progress": 0.5, "token": True},
            "/v1/task/complete": {"status": "Completed", "result": 1},
            "/v1/task/events": {"events": [dataset | {"cursor": 1}]},
            "/v1/task/buffer-publish": dataset | {"batch_uri": f"{prefix}x", "record_count": 1},
            "/v1/task/credentials": {},
        }
        return fence(self.claim) | own[path] | more

    async def rows(self) -> str:
        """Returns a fingerprint of everything that a request of an attempt could change."""
        text = " || ".join(f"coalesce((select string_agg(t::text, ';') from interlock.{t} t), '')" for t in TABLES)
        return str(await self.system.value(f"select md5({text})"))

    async def refuses(self, token: str, path: str) -> None:
        """Checks the refusal, with the same message for a task that exists and for one that does not."""
        known = await self.ask(token, path, self.body(path))
        unknown = await self.ask(token, path, self.body(path, task_id=str(uuid4()), lease_token=str(uuid4())))
        for answer in (known, unknown):
            assert require_orderly(answer) == 401, token
            assert answer.json()["code"] in ("bad_token", "token_expired", "unauthenticated")
        assert said(known) == said(unknown)

    async def ask(self, token: str, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {b"X-Trace-Task-Capability": token.encode()}
        return await self.system.http.post(self.system.internal_url + path, headers=headers, json=body)


def said(answer: httpx.Response) -> tuple[Any, ...]:
    """Returns the parts of a response that do not differ between requests."""
    names = {name: value for name, value in answer.headers.items() if name not in ("x-request-id", "date")}
    return answer.status_code, sorted(names), {k: v for k, v in answer.json().items() if k != "request_id"}


def sendable(token: str) -> bool:
    """Returns False for tokens that a header cannot carry: with outer spaces or control characters."""
    return token.strip(" \t") == token and not any(ord(c) < 32 or ord(c) == 127 for c in token) and len(token) < 60_000


@pytest.fixture(scope="module")
async def victim(shared: System) -> Victim:
    outputs = [{"dataset_uuid": DATASET, "dataset_version": VERSION}]
    claim = await shared.claim(await shared.one(outputs=outputs, policy={"lease_seconds": 3600}))
    token = claim["capability_token"]
    key = shared.kernel.access.keyring.signers.pem.private(part(token, 0)["kid"])
    return Victim(shared, claim, Genuine(token, key, ec.generate_private_key(ec.SECP256R1())))


@pytest.fixture(autouse=True, scope="module")
def _impatient() -> Iterator[None]:
    """Removes the wait before an unknown kid causes a database read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyring, "_REFRESH_SECONDS", 0.0)
        yield


@pytest.fixture
async def _unchanged(victim: Victim) -> AsyncIterator[None]:
    before = await victim.rows()
    yield
    assert await victim.rows() == before


@pytest.mark.usefixtures("_unchanged")
async def test_every_listed_forgery_is_refused(victim: Victim) -> None:
    attacks = [token for token in listed(victim.genuine) if token != victim.genuine.token]
    assert len(attacks) > 400
    for number, token in enumerate(attacks):
        with pytest.raises(Unauthenticated):
            await victim.system.kernel.access.tokens.verify(token)
        if number % 6 == 0 and sendable(token):
            await victim.refuses(token, TASK_PATHS[number // 6 % len(TASK_PATHS)])


@pytest.mark.usefixtures("_unchanged")
@settings(max_examples=10 * EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_every_generated_forgery_is_refused(victim: Victim, data: st.DataObject) -> None:
    token = data.draw(drawn(victim.genuine))
    path = data.draw(st.sampled_from(TASK_PATHS))
    with pytest.raises(Unauthenticated):
        await victim.system.kernel.access.tokens.verify(token)
    if sendable(token):
        await victim.refuses(token, path)


async def test_flipping_any_bit_of_a_token_is_refused(victim: Victim) -> None:
    token, verify = victim.genuine.token, victim.system.kernel.access.tokens.verify
    await verify(token)
    for place, character in enumerate(token):
        for bit in range(7):
            with pytest.raises(Unauthenticated):
                await verify(token[:place] + chr(ord(character) ^ 1 << bit) + token[place + 1 :])


async def test_token_with_missing_moved_or_repeated_parts_is_refused(victim: Victim) -> None:
    token, verify = victim.genuine.token, victim.system.kernel.access.tokens.verify
    for n in range(len(token)):
        pieces = [token[:n], token[n + 1 :], token[:n] + token[n + 1 :], token[:n] + token[n] + token[n:]]
        pieces.append(token[:n] + token[n : n + 2][::-1] + token[n + 2 :])
        for piece in pieces:
            if piece != token:
                with pytest.raises(Unauthenticated):
                    await verify(piece)


@pytest.mark.usefixtures("_unchanged")
@pytest.mark.parametrize("size", [MAX_PRESENTED_BYTES, MAX_PRESENTED_BYTES + 1, 50_000])
async def test_oversized_token_is_refused_regardless_of_its_signature(victim: Victim, size: int) -> None:
    head, payload = victim.genuine.text.split(".")
    for token in ("a" * size, f"{head}.{payload + 'A' * (size - len(victim.genuine.token))}.{'A' * 86}"):
        await victim.refuses(token, "/v1/task/heartbeat")


async def test_original_token_is_accepted(victim: Victim) -> None:
    """The baseline of the tests above: the same requests with the original token."""
    for path in sorted(TASK_PATHS, key=lambda path: path.endswith("complete")):
        assert require_orderly(await victim.ask(victim.genuine.token, path, victim.body(path))) == 200
