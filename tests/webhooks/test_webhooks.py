"""Webhooks for ended runs: each end is reported under one id and signed; a receiver that is down delays no other."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from interlock.access.secrets import Seal
from interlock.client import Client, verify_webhook
from interlock.clock import ManualClock
from interlock.errors import BadRequest, Conflict, NotFound, Unauthenticated
from interlock.failpoints import FailpointError, arm, disarm
from interlock.outbound.guard import Exceptions, Guard
from interlock.telemetry import SET_ASIDE
from interlock.webhooks import delivery as webhook_delivery
from interlock.webhooks.delivery import WebhookDeliveries
from interlock.wire.webhooks import SIGNATURE, DeliveryStatus, RunEnd, WebhookRequest, signed
from tests.cli.test_cli import Terminal
from tests.conftest import copied
from tests.support.polls import eventually
from tests.support.system import System, fence, running, until
from tests.support.webhook_receiver import Answer, Receiver, receiving

HOUR = 3600.0


@pytest.fixture(scope="module")
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as started:
        yield started


@pytest.fixture(scope="module")
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="module")
async def shared(
    postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory, clock: ManualClock
) -> AsyncIterator[System]:
    """A system on a clock that only tests advance. Each test has its own job, webhook and path."""
    some = {"outbound_allow": ["127.0.0.1"], "webhook_tries": 6, "webhook_timeout_seconds": 5.0, "webhook_keep": 5}
    async with (
        copied(postgres_url, template) as url,
        running(url, tmp_path_factory.mktemp("webhooks"), clock, **some) as started,
    ):
        yield started


class JobWithWebhook:
    """A job, and a webhook that receives only events of its runs."""

    def __init__(self, system: System, receiver: Receiver, clock: ManualClock) -> None:
        self.system, self.receiver, self.clock = system, receiver, clock
        self.name = f"w{uuid4().hex[:12]}"
        self.path = f"/{self.name}"
        self.secret = ""

    async def made(self, **request: Any) -> JobWithWebhook:
        body = {"name": self.name, "job": self.name, "url": self.receiver.url + self.path} | request
        reply = await self.system.user("POST", "/v1/webhooks", json=body)
        assert reply.status_code == 201, reply.text
        self.secret = reply.json()["secret"]
        return self

    async def ask(self, method: str, rest: str = "", **more: Any) -> Any:
        reply = await self.system.user(method, f"/v1/webhooks/{self.name}{rest}", **more)
        assert reply.status_code < 300, reply.text
        return reply.json()

    async def begun(self, tasks: int = 1, **job: Any) -> str:
        job = {"name": self.name, "policy": {"max_attempts": 1}} | job
        return str((await self.system.submit([{"n": n} for n in range(tasks)], **job))["run_id"])

    async def end(self, run_id: str, *statuses: str, first: int = 0) -> None:
        """Ends tasks of a run with the given statuses, and folds them into the counters of the run."""
        last = first + len(statuses) - 1
        claims = (await self.system.claim_many(run_id=run_id, start=first, end=last))["claims"]
        items = [fence(claim) | {"status": status} for claim, status in zip(claims, statuses, strict=True)]
        reply = await self.system.worker("POST", "/internal/task-complete", json={"items": items})
        assert reply.status_code == 200, reply.text
        await self.system.pass_of("run-counters")

    async def ended(self, *statuses: str) -> str:
        run_id = await self.begun(len(statuses))
        await self.end(run_id, *statuses)
        return run_id

    async def deliver(self) -> int:
        return await self.system.pass_of("webhooks")

    async def later(self, seconds: float = HOUR) -> int:
        self.clock.advance(seconds)
        return await self.deliver()

    @property
    def calls(self) -> list[Any]:
        return self.receiver.at(self.path)

    @property
    def told(self) -> list[str]:
        return [call.event["type"] for call in self.calls]

    def answers(self, *answers: Answer) -> None:
        self.receiver.answers[self.path] = list(answers)

    async def deliveries(self, query: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.ask("GET", f"/deliveries{query}"))["deliveries"]
        return found

    async def only(self) -> dict[str, Any]:
        (found,) = await self.deliveries()
        return found


@pytest.fixture
async def site(shared: System, receiver: Receiver, clock: ManualClock) -> AsyncIterator[JobWithWebhook]:
    one = JobWithWebhook(shared, receiver, clock)
    yield one
    await shared.user("DELETE", f"/v1/webhooks/{one.name}")


# Events


@pytest.mark.parametrize(
    ("statuses", "event", "state"),
    [
        (["Completed", "Completed"], "run.completed", "Completed"),
        (["Completed", "Failed"], "run.completed_with_failures", "CompletedWithFailures"),
        (["Failed"], "run.failed", "Failed"),
        (["Canceled"], "run.canceled", "Canceled"),
    ],
)
async def test_run_end_event_contains_the_run_at_that_moment(
    site: JobWithWebhook, statuses: list[str], event: str, state: str
) -> None:
    await site.made()
    run_id = await site.ended(*statuses)
    await site.deliver()
    (call,) = site.calls
    told = call.verified(site.secret, site.clock.now().timestamp())
    assert (str(told.type), call.headers["x-interlock-event"]) == (event, event)
    assert call.event["run"] == await site.system.run(run_id)
    assert call.event["run"]["state"] == state
    assert (told.org, told.webhook, told.job.name if told.job else None) == ("test", site.name, site.name)
    found = await site.only()
    assert (found["status"], found["http_status"], found["tries"], found["run_id"]) == ("Delivered", 204, 1, run_id)
    assert call.delivery == str(told.id) == found["delivery_id"] == call.headers["idempotency-key"]


async def test_webhook_receives_only_subscribed_events(site: JobWithWebhook) -> None:
    await site.made(events=["run.failed"])
    await site.ended("Completed")
    await site.ended("Failed")
    await site.deliver()
    assert site.told == ["run.failed"]


async def test_webhook_of_a_job_ignores_other_jobs_and_dags(site: JobWithWebhook) -> None:
    await site.made(job=site.name, dag="no-such-dag")
    await site.ended("Completed")
    assert await site.deliveries() == []


async def test_webhook_ignores_runs_of_other_orgs(site: JobWithWebhook) -> None:
    await site.made(job=None)
    name = f"rival-{uuid4().hex[:8]}"
    await site.system.user("POST", "/v1/orgs", json={"name": name})
    key = (await site.system.user("POST", "/v1/keys", json={"user": "x", "role": "admin", "org": name})).json()["key"]
    body = {"operator": "echo", "name": "theirs", "tasks": [1]}
    run_id = (await site.system.user("POST", "/v1/jobs", json=body, key=key)).json()["run_id"]
    await site.end(run_id, "Completed")
    assert await site.deliveries() == []


async def test_run_without_tasks_is_delivered_immediately(site: JobWithWebhook) -> None:
    await site.made()
    await site.begun(0)
    await site.deliver()
    assert site.told == ["run.completed"]


async def test_run_that_ends_again_is_delivered_again(site: JobWithWebhook) -> None:
    await site.made()
    run_id = await site.ended("Failed")
    await site.system.user("POST", "/v1/tasks/redrive", json={"run": run_id})
    await site.end(run_id, "Completed")
    await site.deliver()
    assert site.told == ["run.failed", "run.completed"]


async def test_progress_share_is_delivered_once_per_run(site: JobWithWebhook) -> None:
    await site.made(events=[], failed_share=0.5, done_share=0.75)
    run_id = await site.begun(4)
    seen = []
    for index, status in enumerate(["Failed", "Failed", "Failed", "Completed"]):
        await site.end(run_id, status, first=index)
        await site.deliver()
        seen.append(sorted(site.told))
    half, limit = "run.failed_share", "run.done_share"
    assert seen == [[], [half], [limit, half], [limit, half]]
    assert site.calls[0].event["run"]["counts"]["dead"] == 2


async def test_task_with_a_pending_retry_is_not_delivered_as_failed(site: JobWithWebhook) -> None:
    await site.made(events=[], failed_share=0.1)
    run_id = await site.begun(1, policy={"max_attempts": 2, "backoff_seconds": 3600})
    await site.end(run_id, "Failed")
    assert await site.deliveries() == []


async def test_delivery_is_committed_atomically_with_the_run_end(site: JobWithWebhook) -> None:
    await site.made()
    run_id = await site.begun()

    async def dies() -> None:
        raise FailpointError("fold.before_commit")

    arm("fold.before_commit", dies)
    try:
        with pytest.raises(FailpointError):
            await site.end(run_id, "Completed")
    finally:
        disarm("fold.before_commit")
    assert (await site.system.run(run_id))["state"] == "Running"
    assert await site.deliveries() == []
    await site.system.pass_of("run-counters")
    assert len(await site.deliveries()) == 1


# Behaviour of receivers


async def test_failed_call_is_retried_with_the_same_id_and_body(site: JobWithWebhook) -> None:
    await site.made()
    site.answers(Answer(500), Answer(204))
    await site.ended("Completed")
    await site.deliver()
    found = await site.only()
    assert (found["status"], found["http_status"], found["reason"]) == ("Pending", 500, "The receiver answered 500.")
    assert await site.deliver() == 0
    assert await site.later(7) == 1
    first, second = site.calls
    assert (first.delivery, first.body) == (second.delivery, second.body)
    assert first.headers["x-interlock-signature"] != second.headers["x-interlock-signature"]
    assert ((await site.only())["status"], (await site.only())["tries"]) == ("Delivered", 2)


async def test_call_that_exhausts_its_retries_is_dead_until_redriven(site: JobWithWebhook) -> None:
    await site.made()
    site.answers(Answer(500))
    await site.ended("Completed")
    await site.deliver()
    while (await site.only())["status"] == "Pending":
        await site.later()
    dead = await site.only()
    assert (dead["status"], dead["tries"], dead["reason"]) == ("Dead", 6, "The receiver answered 500.")
    assert await site.later() == 0
    site.answers(Answer(200))
    assert (await site.ask("POST", "/redrive", json={"delivery_ids": [str(uuid4())]}))["matched"] == 0
    assert (await site.ask("POST", "/redrive", json={"delivery_ids": [dead["delivery_id"]]}))["matched"] == 1
    await site.later()
    assert (await site.only())["status"] == "Delivered"
    assert {call.delivery for call in site.calls} == {dead["delivery_id"]}
    assert (await site.ask("POST", "/redrive", json={}))["matched"] == 0


async def _ended_twice(site: JobWithWebhook) -> tuple[UUID, UUID]:
    """Returns the ids of two due deliveries, in order."""
    await site.made()
    for _ in range(2):
        await site.ended("Completed")
    first, second = sorted(UUID(each["delivery_id"]) for each in await site.deliveries())
    return first, second


async def _outcome_of(site: JobWithWebhook, delivery_id: UUID) -> tuple[str, str]:
    where = "from interlock.webhook_deliveries where delivery_id = $1"
    status, reason = [await site.system.value(f"select {each} {where}", delivery_id) for each in ("status", "reason")]
    return str(status), str(reason)


async def test_call_that_http_cannot_express_is_dead_and_blocks_no_other(site: JobWithWebhook) -> None:
    bad, good = await _ended_twice(site)
    damage = "update interlock.webhook_deliveries set event = E'a\\nb' where delivery_id = $1 returning 1"
    await site.system.value(damage, bad)
    await site.deliver()
    assert len(site.calls) == 1
    assert await _outcome_of(site, bad) == ("Dead", "The request cannot be encoded as HTTP.")
    assert (await _outcome_of(site, good))[0] == "Delivered"


async def test_call_that_cannot_be_composed_is_dead_and_blocks_no_other(
    site: JobWithWebhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = await _ended_twice(site)
    before = SET_ASIDE.labels(loop="webhooks")._value.get()
    original = webhook_delivery._request

    def broken(kind: Any, row: Any, secrets: Any, now: Any) -> Any:
        if row["delivery_id"] == bad:
            raise ValueError("broken")
        return original(kind, row, secrets, now)

    monkeypatch.setattr(webhook_delivery, "_request", broken)
    await site.deliver()
    assert len(site.calls) == 1
    assert await _outcome_of(site, bad) == ("Dead", "The call cannot be made: ValueError.")
    assert (await _outcome_of(site, good))[0] == "Delivered"
    assert SET_ASIDE.labels(loop="webhooks")._value.get() == before + 1


async def test_receiver_that_answers_410_is_not_called_again(site: JobWithWebhook) -> None:
    await site.made()
    site.answers(Answer(410))
    await site.ended("Completed")
    await site.deliver()
    found = await site.only()
    assert (found["status"], found["tries"], found["http_status"]) == ("Dead", 1, 410)


async def test_webhook_redirect_is_not_followed(site: JobWithWebhook) -> None:
    await site.made()
    site.answers(Answer(307, {"Location": f"{site.receiver.url}/elsewhere-{site.name}"}))
    await site.ended("Completed")
    await site.deliver()
    assert (await site.only())["http_status"] == 307
    assert site.receiver.at(f"/elsewhere-{site.name}") == []


async def test_retry_after_of_a_receiver_is_respected(site: JobWithWebhook) -> None:
    await site.made()
    site.answers(Answer(429, {"Retry-After": "600"}), Answer(204))
    await site.ended("Completed")
    await site.deliver()
    assert await site.later(599) == 0
    assert await site.later(2) == 1


async def test_reply_of_a_receiver_is_read_up_to_a_limit_and_not_stored(site: JobWithWebhook) -> None:
    await site.made()
    site.answers(Answer(200, body=b"secret-answer " * 100_000))
    await site.ended("Completed")
    await site.deliver()
    found = await site.only()
    assert found["status"] == "Delivered"
    assert "secret-answer" not in json.dumps(found)


async def test_unreachable_receiver_error_names_the_host_without_the_path(site: JobWithWebhook) -> None:
    await site.made(url="http://127.0.0.1:1/secret-path")
    await site.ended("Completed")
    await site.deliver()
    reason = (await site.only())["reason"]
    assert "127.0.0.1" in reason
    assert "secret-path" not in reason


async def test_failing_receiver_is_paused_and_then_probed_with_one_call(site: JobWithWebhook) -> None:
    await site.made()
    site.answers(Answer(500))
    for _ in range(8):
        await site.ended("Completed")
    await site.deliver()
    view = await site.ask("GET")
    assert view["failures"] == 5
    assert view["resting_until"] is not None
    before = len(site.calls)
    assert before == 5
    assert await site.deliver() == 0
    # Longer than any backoff at this point. The first call fails, so the webhook backs off again.
    await site.later(60)
    assert len(site.calls) == before + 1
    site.answers(Answer(204))
    await site.later()
    view = await site.ask("GET")
    assert (view["failures"], view["resting_until"]) == (0, None)
    assert {found["status"] for found in await site.deliveries()} == {"Delivered"}


async def test_hanging_receiver_delays_no_other_and_has_few_open_calls(
    site: JobWithWebhook, shared: System, receiver: Receiver, clock: ManualClock
) -> None:
    await site.made()
    gate = asyncio.Event()
    site.answers(Answer(204, gate=gate))
    for _ in range(6):
        await site.ended("Completed")
    other = await JobWithWebhook(shared, receiver, clock).made()
    passing = asyncio.create_task(shared.pass_of("webhooks"))
    await eventually(lambda: len(site.calls) == 4 or None)
    # Four calls of the pass hang. The same pass still delivers new events of other webhooks.
    await other.ended("Completed")
    await eventually(lambda: other.told == ["run.completed"] or None)
    assert len(site.calls) == 4
    assert not passing.done()
    gate.set()
    await passing
    assert len(site.calls) == 6
    await other.ask("DELETE")


async def test_two_dispatchers_send_each_delivery_once(site: JobWithWebhook) -> None:
    await site.made()
    for _ in range(8):
        await site.ended("Completed")
    await asyncio.gather(site.deliver(), site.deliver(), site.deliver())
    while await site.deliver():
        continue
    assert len(site.calls) == len({call.delivery for call in site.calls}) == 8


async def test_delivery_of_a_killed_dispatcher_is_sent_by_another(site: JobWithWebhook) -> None:
    await site.made()
    await site.ended("Completed")

    async def dies() -> None:
        raise FailpointError("webhook.sent")

    arm("webhook.sent", dies)
    try:
        with pytest.raises(FailpointError):
            await site.deliver()
    finally:
        disarm("webhook.sent")
    assert await site.deliver() == 0
    await site.later(8)
    first, second = site.calls
    assert first.delivery == second.delivery
    assert (await site.only())["tries"] == 2


async def test_late_result_of_an_older_call_changes_nothing(site: JobWithWebhook) -> None:
    await site.made()
    await site.ended("Completed")
    site.answers(Answer(500), Answer(204))

    async def meanwhile() -> None:
        disarm("webhook.sent")
        await site.later(8)

    arm("webhook.sent", meanwhile)
    await site.deliver()
    found = await site.only()
    assert (found["status"], found["tries"], found["http_status"]) == ("Delivered", 2, 204)


# Allowed addresses


@pytest.mark.parametrize(
    "url",
    ["http://169.254.169.254/latest", "http://10.0.0.1/", "http://[::1]/", "http://[::ffff:169.254.169.254]/"],
)
async def test_webhook_to_a_forbidden_address_is_refused_on_creation(shared: System, url: str) -> None:
    reply = await shared.user("POST", "/v1/webhooks", json={"name": "inside", "url": url})
    assert (reply.status_code, reply.json()["code"]) == (400, "address_refused")


async def test_name_that_resolves_to_a_private_address_is_refused_per_call(site: JobWithWebhook) -> None:
    await site.made(url=f"http://hooks.example:{site.receiver.port}{site.path}")
    leads_to = ["127.0.0.1"]

    async def resolve(_host: str, _port: int) -> list[str]:
        return leads_to

    kernel = site.system.kernel
    guard = Guard(Exceptions.read(["127.0.0.1"]), resolve=resolve)
    service = WebhookDeliveries(
        kernel.stores.database, kernel.settings, kernel.stores.wakeups, guard, Seal(kernel.settings.signing_keys_dir)
    )
    await site.ended("Completed")
    await service.run_once()
    assert (site.told, site.calls[0].headers["host"]) == (["run.completed"], f"hooks.example:{site.receiver.port}")
    leads_to[:] = ["127.0.0.1", "169.254.169.254"]
    await site.ended("Completed")
    await service.run_once()
    assert len(site.calls) == 1
    found, _ = await site.deliveries()
    assert (found["status"], found["tries"]) == ("Dead", 1)
    assert "link-local" in found["reason"]


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a.example/",
        "a.example",
        "http://",
        "https://u:p@a.example/",
        "http://a.example/#x",
        "http://a b/",
        "http://a.example:99999/",
        "file:///etc/passwd",
        "http://a.example\\@b.example/",
    ],
)
async def test_invalid_webhook_url_is_refused(shared: System, url: str) -> None:
    reply = await shared.user("POST", "/v1/webhooks", json={"name": "odd", "url": url})
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_webhook_url")


# Creating, pausing and removing webhooks


async def test_webhook_is_created_once_per_idempotency_key(shared: System, receiver: Receiver) -> None:
    body = {"name": f"w{uuid4().hex[:8]}", "url": receiver.url, "job": "none"}
    headers = {"Idempotency-Key": str(uuid4())}
    replies = [await shared.user("POST", "/v1/webhooks", json=body, headers=headers) for _ in range(2)]
    assert replies[0].json() == replies[1].json()
    other = await shared.user("POST", "/v1/webhooks", json=body | {"job": "other"}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")
    again = await shared.user("POST", "/v1/webhooks", json=body)
    assert (again.status_code, again.json()["code"]) == (409, "webhook_exists")
    await shared.user("DELETE", f"/v1/webhooks/{body['name']}")


async def test_webhook_without_any_event_is_refused(shared: System, receiver: Receiver) -> None:
    reply = await shared.user("POST", "/v1/webhooks", json={"name": "mute", "url": receiver.url, "events": []})
    assert (reply.status_code, reply.json()["code"]) == (400, "nothing_to_tell")


async def test_number_of_webhooks_per_org_is_limited(shared: System, receiver: Receiver) -> None:
    name = f"many-{uuid4().hex[:8]}"
    await shared.user("POST", "/v1/orgs", json={"name": name})
    key = (await shared.user("POST", "/v1/keys", json={"user": "x", "role": "admin", "org": name})).json()["key"]
    await shared.value(
        "insert into interlock.webhooks (org_id, name, url, events, sealed, created_by)"
        " select org_id, 'n' || n, 'https://a.example/', '{}', 's', 'x'"
        " from interlock.orgs, generate_series(1, 99) n where name = $1",
        name,
    )
    one, two = [
        await shared.user("POST", "/v1/webhooks", json={"name": n, "url": receiver.url}, key=key) for n in ("a", "b")
    ]
    assert one.status_code == 201
    assert (two.status_code, two.json()["code"]) == (409, "too_many_webhooks")
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await shared.user("GET", f"/v1/webhooks?limit=40&cursor={cursor}", key=key)).json()
        seen += [each["name"] for each in page["webhooks"]]
        cursor = page["next_cursor"]
    assert (len(seen), seen) == (100, sorted(set(seen)))


async def test_secret_is_shown_once_and_the_url_only_to_admins(site: JobWithWebhook) -> None:
    await site.made(url=f"{site.receiver.url}/a/secret-path?token=secret-query")
    reader = (await site.system.user("POST", "/v1/keys", json={"user": "r", "role": "reader"})).json()["key"]
    for key, url in ((reader, site.receiver.url), (None, f"{site.receiver.url}/a/secret-path?token=secret-query")):
        for path in (f"/v1/webhooks/{site.name}", "/v1/webhooks"):
            reply = await site.system.user("GET", path, key=key)
            assert site.secret not in reply.text
            shown = reply.json() if "webhooks" not in reply.json() else reply.json()["webhooks"][-1]
            assert shown["url"] == url or path == "/v1/webhooks"
            assert ("secret-path" in reply.text) == (key is None)


async def test_paused_webhook_receives_missed_events_when_resumed(site: JobWithWebhook) -> None:
    await site.made()
    assert (await site.ask("POST", "/pause"))["paused"]
    await site.ended("Completed")
    assert await site.deliver() == 0
    refused = await site.system.user("POST", f"/v1/webhooks/{site.name}/test")
    assert (refused.status_code, refused.json()["code"]) == (409, "webhook_paused")
    assert not (await site.ask("POST", "/resume"))["paused"]
    assert await site.deliver() == 1


async def test_delivery_past_its_deadline_is_dead(site: JobWithWebhook) -> None:
    await site.made(paused=True)
    await site.ended("Completed")
    site.clock.advance(24 * HOUR)
    await site.system.pass_of("webhook_sweep")
    assert (await site.only())["status"] == "Pending"
    site.clock.advance(1)
    await site.system.pass_of("webhook_sweep")
    found = await site.only()
    assert (found["status"], found["reason"]) == ("Dead", "expired")
    # A redriven delivery gets as much time as a new one.
    await site.ask("POST", "/redrive", json={})
    await site.system.pass_of("webhook_sweep")
    assert (await site.only())["status"] == "Pending"


async def test_removed_webhook_gets_no_calls_and_loses_its_history(site: JobWithWebhook) -> None:
    await site.made()
    await site.ended("Completed")
    (delivery,) = await site.deliveries()
    await site.ask("DELETE")
    assert await site.deliver() == 0
    assert (await site.system.user("GET", f"/v1/webhooks/{site.name}")).status_code == 404
    while await site.system.pass_of("webhook_sweep"):
        continue
    left = "select count(*) from interlock.webhook_deliveries where delivery_id = $1"
    assert await site.system.value(left, delivery["delivery_id"]) == 0


async def test_delivery_history_is_limited_by_count_and_age(site: JobWithWebhook) -> None:
    await site.made()
    for _ in range(7):
        await site.ended("Completed")
    await site.deliver()
    newest = [found["delivery_id"] for found in await site.deliveries()][:5]
    while await site.system.pass_of("webhook_sweep"):
        continue
    assert [found["delivery_id"] for found in await site.deliveries()] == newest
    site.clock.advance(14 * 24 * HOUR + 1)
    await site.system.pass_of("webhook_sweep")
    assert await site.deliveries() == []


async def test_deliveries_are_paginated_and_filtered_by_status(site: JobWithWebhook) -> None:
    await site.made()
    for _ in range(3):
        await site.ended("Completed")
    site.answers(Answer(410), Answer(204))
    await site.deliver()
    assert len(await site.deliveries("?status=Dead")) == 1
    assert len(await site.deliveries("?status=Delivered")) == 2
    page = await site.ask("GET", "/deliveries?limit=2")
    rest = await site.ask("GET", f"/deliveries?limit=2&cursor={page['next_cursor']}")
    ids = [found["delivery_id"] for found in page["deliveries"] + rest["deliveries"]]
    assert (len(ids), ids) == (3, sorted(ids, reverse=True))
    bad = await site.system.user("GET", f"/v1/webhooks/{site.name}/deliveries?cursor=x")
    assert (bad.status_code, bad.json()["code"]) == (400, "bad_cursor")


# Signatures


async def test_both_secrets_sign_during_a_rotation(site: JobWithWebhook) -> None:
    await site.made()
    old, now = site.secret, site.clock.now().timestamp
    made = await site.ask("POST", "/rotate", json={"overlap_seconds": 60})
    new = made["secret"]
    assert (made["view"]["key_version"], made["view"]["previous_until"] is not None) == (2, True)
    await site.ended("Completed")
    await site.deliver()
    for secret in (old, new):
        assert site.calls[-1].verified(secret, now()).webhook == site.name
    assert site.calls[-1].headers["x-interlock-key-version"] == "2"
    site.clock.advance(61)
    await site.ended("Completed")
    await site.deliver()
    assert site.calls[-1].verified([old, new], now()).webhook == site.name
    with pytest.raises(Unauthenticated):
        site.calls[-1].verified(old, now())


async def test_rotation_without_overlap_ends_the_old_secret_immediately(site: JobWithWebhook) -> None:
    await site.made()
    old = site.secret
    await site.ask("POST", "/rotate", json={"overlap_seconds": 0})
    await site.ask("POST", "/test")
    await site.deliver()
    with pytest.raises(Unauthenticated):
        site.calls[-1].verified(old, site.clock.now().timestamp())


BODY = json.dumps(
    {
        "id": "0192f0c1-0000-7000-8000-000000000000",
        "type": "webhook.test",
        "created_at": "2026-01-01T00:00:00Z",
        "org": "o",
        "webhook": "w",
    }
).encode()


def test_receiver_refuses_a_call_with_an_invalid_signature() -> None:
    good = {SIGNATURE.lower(): signed(["right"], 1_000, BODY)}
    assert verify_webhook("right", good, BODY, now=1_299).org == "o"
    assert verify_webhook(["other", "right"], good, BODY, now=701).org == "o"
    header = good[SIGNATURE.lower()]
    refused: list[tuple[Any, dict[str, str], bytes, float]] = [
        ("wrong", good, BODY, 1_000),
        ([], good, BODY, 1_000),
        ("", {SIGNATURE: signed([""], 1_000, BODY)}, BODY, 1_000),
        ("right", good, BODY + b" ", 1_000),
        ("right", {}, BODY, 1_000),
        ("right", good, BODY, 1_301),
        ("right", good, BODY, 699),
        ("right", {SIGNATURE: header.replace("t=1000", "t=1001")}, BODY, 1_000),
        ("right", {SIGNATURE: header[:-1]}, BODY, 1_000),
        ("right", {SIGNATURE: header + "\n"}, BODY, 1_000),
        ("right", {SIGNATURE: header, SIGNATURE.lower(): header}, BODY, 1_000),
        ("right", {SIGNATURE: header.replace("1000", "\N{ARABIC-INDIC DIGIT ONE}000", 1)}, BODY, 1_000),
        ("right", good, BODY, float("nan")),
    ]
    for secrets, headers, body, now in refused:
        with pytest.raises(Unauthenticated):
            verify_webhook(secrets, headers, body, now=now)


def test_signed_body_that_is_no_event_is_reported() -> None:
    with pytest.raises(BadRequest):
        verify_webhook("right", {SIGNATURE: signed(["right"], 1, b"{}")}, b"{}", now=1)


def test_documented_receiver_example_verifies_a_call() -> None:
    page = (Path(__file__).parents[2] / "docs" / "webhooks.md").read_text()
    (example,) = [part.split("```")[0] for part in page.split("```python\n")[1:] if "def receive" in part]
    space: dict[str, Any] = {"SECRETS": ["old", "new"], "handled": set()}
    exec(example, space)  # noqa: S102 - the documentation's own code
    moment = int(time.time())
    headers = {SIGNATURE: signed(["new"], moment, BODY)}
    assert [space["receive"](headers, BODY) for _ in range(2)] == [204, 204]
    assert len(space["handled"]) == 1
    assert space["receive"]({SIGNATURE: signed(["else"], moment, BODY)}, BODY) == 401


# The SDK


async def test_sdk_creates_tests_and_removes_a_webhook(site: JobWithWebhook) -> None:
    async with Client(site.system.gateway_url, site.system.admin_key) as client:
        hooks = client.webhooks
        made = await hooks.create(
            WebhookRequest(name=site.name, url=site.receiver.url + site.path, job=site.name, events=[RunEnd.FAILED])
        )
        assert made.view == await hooks.webhook(made.view.webhook_id) == await hooks.webhook(site.name)
        assert site.name in [view.name for view in (await hooks.page()).webhooks]
        with pytest.raises(Conflict):
            await hooks.create(WebhookRequest(name=site.name, url=site.receiver.url))
        tried = await hooks.test(site.name)
        await site.deliver()
        assert (await hooks.delivery(site.name, tried.delivery_id)).status is DeliveryStatus.DELIVERED
        assert site.calls[0].verified(made.secret, site.clock.now().timestamp()).id == tried.delivery_id
        assert [one.delivery_id for one in (await hooks.deliveries(site.name)).deliveries] == [tried.delivery_id]
        assert (await hooks.redrive(site.name)).matched == 0
        assert (await hooks.rotate(site.name, overlap_seconds=0)).secret != made.secret
        assert (await hooks.pause(site.name)).paused
        assert not (await hooks.resume(site.name)).paused
        await hooks.delete(site.name)
        with pytest.raises(NotFound):
            await hooks.webhook(site.name)


# The command line


@pytest.fixture
def terminal(site: JobWithWebhook, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", site.system.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", site.system.admin_key)
    return Terminal(site.system, capsys)


async def test_webhook_is_managed_from_the_command_line(
    site: JobWithWebhook, terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    url = site.receiver.url + site.path
    added = await terminal.json("webhook", "add", site.name, url, "--event", "run.failed", "--job", site.name)
    assert (added["view"]["events"], bool(added["secret"])) == (["run.failed"], True)
    assert site.name in (await terminal("webhook", "list")).out
    assert url in (await terminal("webhook", "show", site.name)).out.replace("\n", "")
    site.answers(Answer(410), Answer(204))
    await site.ended("Failed")
    await site.deliver()
    capsys.readouterr()  # discards the log of the dispatcher in this process, which reports the dead delivery
    (dead,) = (await terminal.json("webhook", "deliveries", site.name, "--status", "Dead"))["deliveries"]
    assert "410" in (await terminal("webhook", "deliveries", site.name)).out
    assert "1 delivery is retried" in (await terminal("webhook", "redrive", site.name)).out
    await site.deliver()
    assert {call.delivery for call in site.calls} == {dead["delivery_id"]}
    assert (await terminal.json("webhook", "pause", site.name))["paused"]
    assert not (await terminal.json("webhook", "resume", site.name))["paused"]
    rotated = await terminal.json("webhook", "rotate", site.name, "--overlap-hours", "0")
    assert rotated["secret"] != added["secret"]
    assert (await terminal("webhook", "remove", site.name, "--yes")).code == 0
    gone = await terminal("webhook", "show", site.name)
    assert (gone.code, "no webhook" in gone.err) == (1, True)


async def test_trial_call_from_the_command_line_shows_its_outcome(site: JobWithWebhook, terminal: Terminal) -> None:
    await site.made()
    site.answers(Answer(500), Answer(204))
    for code, shown in ((1, "The receiver answered 500."), (0, "Delivered")):
        trying = asyncio.create_task(terminal("webhook", "test", site.name))
        await eventually_delivered(site)
        said = await trying
        assert said.code == code
        assert shown in said.out
    unseen = await terminal("webhook", "test", site.name, "--wait", "0")
    assert (unseen.code, "Pending" in unseen.out) == (1, True)


async def eventually_delivered(site: JobWithWebhook) -> None:
    """Repeats passes until one has delivered; a command that runs concurrently creates the delivery."""
    await until(site.deliver)


async def test_ends_and_no_ends_exclude_each_other(site: JobWithWebhook, terminal: Terminal) -> None:
    said = await terminal("webhook", "add", site.name, "https://a.example/", "--no-ends", "--event", "run.failed")
    assert said.code == 2
    assert "--no-ends" in said.err
    shares = await terminal.json(
        "webhook", "add", site.name, site.receiver.url, "--no-ends", "--failed-share", "0.1", "--dag", "none"
    )
    assert (shares["view"]["events"], shares["view"]["failed_share"]) == ([], 0.1)
