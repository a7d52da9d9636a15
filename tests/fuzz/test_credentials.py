"""Credentials: how they are presented, which attempts they cover, and what remains after they expire."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.apps.app import open_app
from interlock.clock import ManualClock
from interlock.errors import Unauthenticated
from interlock.wire.access import KeyRequest, Role
from tests.fuzz.forgeries import Genuine
from tests.fuzz.responses import exchanged, require_orderly
from tests.fuzz.schemathesis_driver import EXAMPLES
from tests.fuzz.seeded_state import DATASET, VERSION
from tests.fuzz.test_token_forgeries import TASK_PATHS, Victim, said
from tests.support.system import System, fence
from tests.support.token_parts import b64, es256, part

Claim = dict[str, Any]
OUTPUTS = [{"dataset_uuid": DATASET, "dataset_version": VERSION}]
OUTSIDE = st.sampled_from("ABCxyz019-_. \n\t\0é=%")


# Presentation


@dataclass(frozen=True)
class Door:
    """A request that requires one kind of credential, with a valid one."""

    url: str
    line: str
    header: str
    value: str
    body: bytes = b""

    async def knock(self, *headers: bytes, line: str | None = None) -> tuple[int, bytes]:
        lines = [
            (line or self.line).encode(),
            b"Host: x",
            b"Connection: close",
            b"Content-Length: %d" % len(self.body),
            *headers,
        ]
        answers = await exchanged(self.url, b"\r\n".join([*lines, b"", self.body]))
        assert len(answers) == 1
        return require_orderly(answers[0], headers), answers[0].content

    def line_with(self, value: str) -> bytes:
        return f"{self.header}: ".encode() + value.encode()


@pytest.fixture(scope="module")
async def doors(shared: System) -> dict[str, Door]:
    claim = await shared.claim(await shared.one(policy={"lease_seconds": 3600}))
    beat = httpx.Request("POST", "http://x", json=fence(claim)).content
    internal = shared.internal_url
    post, get = "POST /v1/task/heartbeat HTTP/1.1", f"GET /internal/task-fetch?task_id={claim['task_id']} HTTP/1.1"
    return {
        "user": Door(shared.gateway_url, "GET /v1/jobs HTTP/1.1", "Authorization", f"Bearer {shared.admin_key}"),
        "worker": Door(internal, get, "X-Trace-Worker-Token", shared.worker_token),
        "attempt": Door(internal, post, "X-Trace-Task-Capability", claim["capability_token"], beat),
    }


KINDS = ["user", "worker", "attempt"]


@pytest.mark.parametrize("kind", KINDS)
async def test_credential_header_name_is_case_insensitive(doors: dict[str, Door], kind: str) -> None:
    door = doors[kind]
    name, value = door.header.encode(), door.value.encode()
    for line in (name, name.lower(), name.upper()):
        assert (await door.knock(line + b": " + value))[0] == 200
    assert (await door.knock(name + b":" + value + b" \t"))[0] == 200


@pytest.mark.parametrize("kind", KINDS)
async def test_several_credentials_are_refused(doors: dict[str, Door], kind: str) -> None:
    door = doors[kind]
    good, bad, empty = door.line_with(door.value), door.line_with("nobody"), door.line_with("")
    joined = door.line_with(f"{door.value}, {door.value}")
    for several in ([good, good], [good, bad], [bad, good], [good, empty], [empty, good], [joined], [bad, bad]):
        assert (await door.knock(*several))[0] == 401, several


@pytest.mark.parametrize("kind", KINDS)
async def test_credential_outside_its_header_is_ignored(doors: dict[str, Door], kind: str) -> None:
    door, other = doors[kind], doors[KINDS[KINDS.index(kind) - 1]]
    method, path, version = door.line.split()
    token = door.value.removeprefix("Bearer ")
    separator = "&" if "?" in path else "?"
    for line in (
        f"{method} {path}{separator}{door.header}={token} {version}",
        f"{method} {path}{separator}token={token} {version}",
    ):
        assert (await door.knock(line=line))[0] == 401
    name = door.header.encode()
    elsewhere = [b"Cookie: " + name + b"=" + token.encode(), name.replace(b"-", b"_") + b"_: " + door.value.encode()]
    elsewhere += [b"X-" + name + b": " + door.value.encode(), b"Proxy-Authorization: " + door.value.encode()]
    elsewhere += [other.line_with(other.value)]
    for header in elsewhere:
        assert (await door.knock(header))[0] == 401, header


@pytest.mark.parametrize("kind", KINDS)
async def test_split_credential_header_is_refused(doors: dict[str, Door], kind: str) -> None:
    door = doors[kind]
    name, value = door.header.encode(), door.value.encode()
    for place in (1, len(value) // 2, len(value) - 1):
        for breach in (b"\r\n ", b"\r\n\t", b"\0", b"\r", b"\n", b"\x7f"):
            assert (await door.knock(name + b": " + value[:place] + breach + value[place:]))[0] in (400, 401)
    for line in (name + b" : " + value, b" " + name + b": " + value, name + b"\0: " + value, name + b"\t: " + value):
        assert (await door.knock(line))[0] in (400, 401), line


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", "Bearer: {}", "Bearer\t{}", "Token {}", "Basic {}", "{}", "Bearer,{}", "Bearer \"{}\"",
     "Bearer {} x", "BearerX {}", "Digest {}", "Bearer {},", "Bearer key={}", "Bear er {}"],
)  # fmt: skip
async def test_key_without_bearer_scheme_is_refused(doors: dict[str, Door], value: str) -> None:
    door = doors["user"]
    assert (await door.knock(door.line_with(value.format(door.value.removeprefix("Bearer ")))))[0] == 401
    assert (await door.knock(door.line_with(door.value.replace("Bearer", "bEARER  "))))[0] == 200


def near(secret: str) -> st.SearchStrategy[str]:
    """Generates strings that differ slightly from a secret."""
    place = st.integers(0, len(secret) - 1)
    return st.one_of(
        st.builds(lambda i, c: secret[:i] + c + secret[i + 1 :], place, OUTSIDE),
        st.builds(lambda i, c: secret[:i] + c + secret[i:], place, OUTSIDE),
        st.builds(lambda i, n: secret[:i] + secret[i + n :], place, st.integers(1, 5)),
        st.builds(lambda i: secret[:i] + secret[i:].swapcase(), place),
        st.builds(lambda i: secret[i:] + secret[:i], place),
        st.sampled_from(
            ["", secret * 2, secret + "\n", secret.upper(), secret.replace("ilk", "ilw"), secret + "=" * 3]
        ),
    ).filter(lambda made: made != secret)


KEY_WORDS = "The API key is not valid; create one with `interlock users create`."
WORKER_WORDS = "The worker token is not valid; create one with `interlock users worker-token`."


@settings(max_examples=20 * EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_mutated_key_or_worker_token_is_refused(shared: System, data: st.DataObject) -> None:
    """Malformed, unknown and wrong credentials all get the same message."""
    principals = shared.kernel.access.principals
    with pytest.raises(Unauthenticated) as key:
        await principals.authenticate(data.draw(near(shared.admin_key)))
    with pytest.raises(Unauthenticated) as worker:
        await principals.authenticate_worker(data.draw(near(shared.worker_token)))
    assert (key.value.detail, worker.value.detail) == (KEY_WORDS, WORKER_WORDS)


async def test_secret_of_one_key_is_refused_for_another(shared: System) -> None:
    principals = shared.kernel.access.principals
    other = (await principals.create_key(KeyRequest(user="x", role=Role.READER), shared.org_id, granted_by=None)).key
    (_, mine, secret), (_, theirs, _) = shared.admin_key.split("_", 2), other.split("_", 2)
    for forged in (f"ilk_{theirs}_{secret}", f"ilk_{uuid4().hex[:16]}_{secret}", f"ilw_{mine}_{secret}"):
        with pytest.raises(Unauthenticated):
            await principals.authenticate(forged)


# Ownership


async def attempt_of(system: System, *, org: str | None = None, **job: Any) -> Claim:
    reply = await system.user("POST", "/v1/jobs", key=org, json={"operator": "echo", "tasks": [1]} | job)
    assert reply.status_code == 201, reply.text
    claims: list[Claim] = (await system.claim_many(run_id=reply.json()["run_id"], start=0, end=0))["claims"]
    return claims[0]


@pytest.fixture(scope="module")
async def attempts(shared: System) -> dict[str, Claim]:
    """Attempts in every state, of two orgs, and one that does not exist."""
    rival = await shared.kernel.access.principals.create_org("rival")
    key = await shared.kernel.access.principals.create_key(
        KeyRequest(user="r", role=Role.ADMIN), rival.org_id, granted_by=None
    )
    several = [{"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())} for _ in range(40)]
    found = {
        "running": await attempt_of(shared),
        "another": await attempt_of(shared, outputs=OUTPUTS),
        "by reference": await attempt_of(shared, outputs=several),
        "foreign": await attempt_of(shared, org=key.key),
    }
    for status in ("Completed", "Failed", "Canceled"):
        found[status] = await attempt_of(shared, policy={"backoff_seconds": 3600})
        await shared.complete(found[status], status)
    found["dead"] = await attempt_of(shared, policy={"max_attempts": 1})
    await shared.complete(found["dead"], "Failed")
    nobody: Claim = {"task_id": str(uuid4()), "attempt": 1, "lease_token": str(uuid4()), "capability_token": ""}
    return found | {"nobody": nobody}


def victim_of(system: System, claim: Claim) -> Victim:
    key = system.kernel.access.keyring.signers.pem.private(part(claim["capability_token"], 0)["kid"])
    return Victim(system, claim, Genuine(claim["capability_token"], key, key))


@settings(max_examples=3 * EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_token_reveals_nothing_about_other_attempts(
    shared: System, attempts: dict[str, Claim], data: st.DataObject
) -> None:
    """Not even with the lease of that attempt; the message is the same in every state, and if it never existed."""
    holder = data.draw(st.sampled_from([name for name in attempts if name != "nobody"]))
    path = data.draw(st.sampled_from(TASK_PATHS))
    victim = victim_of(shared, attempts["another"])
    before, heard = await victim.rows(), set()
    for name, named in attempts.items():
        if name != holder:
            answer = await victim.ask(attempts[holder]["capability_token"], path, victim.body(path) | fence(named))
            assert require_orderly(answer, (holder, name)) == 403
            assert answer.json()["code"] == "token_mismatch"
            heard.add(str(said(answer)))
    assert len(heard) == 1
    assert await victim.rows() == before


# Expiry

Ending = Callable[[System, ManualClock, Claim], Awaitable[None]]


async def lease_lost(system: System, clock: ManualClock, claim: Claim) -> None:
    clock.advance(61)
    await system.settle()


async def taken_over(system: System, clock: ManualClock, claim: Claim) -> None:
    await lease_lost(system, clock, claim)
    clock.advance(2)
    await system.settle()
    assert (await system.claim(claim["task_id"], "second"))["status"] == "Claimed"


async def given_back_and_claimed_again(system: System, clock: ManualClock, claim: Claim) -> None:
    """The attempt number stays the same, so the old token still names it: only the lease differs."""
    await system.worker("POST", "/internal/task-release", json={"items": [fence(claim)]})
    again = await system.claim(claim["task_id"], "second")
    assert (again["status"], again["attempt"]) == ("Claimed", claim["attempt"])


async def completed(system: System, clock: ManualClock, claim: Claim) -> None:
    assert (await system.complete(claim, result={"said": "before"})).status_code == 200


async def failed(system: System, clock: ManualClock, claim: Claim) -> None:
    assert (await system.complete(claim, "Failed", error_class="Oops")).status_code == 200


async def canceled(system: System, clock: ManualClock, claim: Claim) -> None:
    assert (await system.user("POST", f"/v1/tasks/{claim['task_id']}/cancel")).status_code == 200
    assert (await system.complete(claim, "Canceled")).status_code == 200


ENDINGS: list[Ending] = [lease_lost, taken_over, given_back_and_claimed_again, completed, failed, canceled]
CHANGING = ["/v1/task/heartbeat", "/v1/task/events", "/v1/task/buffer-publish", "/v1/task/credentials"]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
async def test_token_of_an_ended_attempt_changes_nothing(still: System, clock: ManualClock, ending: Ending) -> None:
    claim = await still.claim(await still.one(outputs=OUTPUTS, policy={"backoff_seconds": 1, "jitter": 0}))
    victim = victim_of(still, claim)
    await ending(still, clock, claim)
    before = await victim.rows()
    for path in CHANGING:
        answer = await victim.ask(claim["capability_token"], path, victim.body(path))
        assert require_orderly(answer, path) == 409
        assert answer.json()["code"] == "fenced"
        assert "capability_token" not in answer.json()
    assert await victim.rows() == before


@pytest.mark.parametrize("ending", [completed, failed, canceled], ids=lambda ending: ending.__name__)
async def test_report_may_be_replayed_but_not_changed(still: System, clock: ManualClock, ending: Ending) -> None:
    claim = await still.claim(await still.one(policy={"backoff_seconds": 3600}))
    victim = victim_of(still, claim)
    await ending(still, clock, claim)
    before = await victim.rows()
    statuses = {
        status: await still.complete(claim, status, result={"said": "after"})
        for status in ("Completed", "Failed", "Canceled")
    }
    assert statuses[ending.__name__.capitalize()].json()["duplicate"] is True
    for answer in statuses.values():
        assert require_orderly(answer) == 409 or answer.json()["duplicate"] is True
    assert 409 in {answer.status_code for answer in statuses.values()}
    assert await victim.rows() == before


async def test_stolen_key_is_worthless_after_its_expiry(still: System, clock: ManualClock) -> None:
    """In every process that knew the key, for new tokens and for tokens seen before."""
    claim = await still.claim(await still.one(outputs=OUTPUTS, policy={"lease_seconds": 7000, "timeout_seconds": 7200}))
    victim = victim_of(still, claim)

    def forged(jti: str) -> str:
        now = int(clock.now().timestamp())
        payload = httpx.Request(
            "POST", "http://x", json=victim.genuine.claims | {"iat": now, "exp": now + 9000, "jti": jti}
        )
        text = f"{victim.genuine.text.split('.')[0]}.{b64(payload.content)}"
        return f"{text}.{es256(victim.genuine.key, text)}"

    async with open_app(still.kernel.settings, process="second", clock=clock) as second:
        seen = forged("seen")
        for tokens in (still.kernel.access.tokens, second.access.tokens):
            await tokens.verify(seen)
        await second.access.keyring.rotate()
        clock.advance(599)
        await still.kernel.access.tokens.verify(forged("late"))
        clock.advance(2)
        for tokens in (still.kernel.access.tokens, second.access.tokens):
            for token in (seen, forged("new")):
                with pytest.raises(Unauthenticated):
                    await tokens.verify(token)
    await victim.refuses(seen, "/v1/task/heartbeat")
