"""Guarantees of both listeners: separate routes, problem documents, request ids, limits."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import ValidationError

from interlock.access.principals import ROLE_SCOPES
from interlock.apps import dispatcher, gateway
from interlock.apps.bus import bus
from interlock.apps.ingest import ingest
from interlock.apps.process import listener_of
from interlock.apps.sink import sink
from interlock.errors import ConfigurationError
from interlock.http.listener import bind, require_safe
from interlock.settings import Settings
from interlock.stores.embedded import EmbeddedValkey
from interlock.wire.access import KeyRequest, Role
from tests.support.system import System, fence, running, until

Operation = tuple[str, str]
BOTH = {("GET", "/healthz"), ("GET", "/metrics")}
NOBODY = "00000000-0000-4000-8000-00000000000f"
UUID_TEXT = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def assert_problem(reply: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = reply.json()
    assert (problem["status"], problem["code"]) == (status, code), reply.text
    assert problem["type"] == f"urn:interlock:problem:{code}"
    assert problem["title"]
    assert problem["detail"].endswith((".", "`."))
    assert problem["request_id"] == reply.headers["x-request-id"] != ""
    return problem


async def document(system: System, url: str) -> dict[str, Any]:
    reply = await system.http.get(f"{url}/openapi.json")
    assert reply.status_code == 200
    loaded: dict[str, Any] = reply.json()
    return loaded


async def operations(system: System, url: str) -> set[Operation]:
    paths = (await document(system, url))["paths"]
    return {(method.upper(), path) for path, item in paths.items() for method in item}


async def everyone(system: System) -> dict[str, str]:
    """Returns all credentials: a 404 must come from the listener and not from a guard."""
    claim = await system.claim(await system.one())
    return {
        "Authorization": f"Bearer {system.admin_key}",
        "X-Trace-Worker-Token": system.worker_token,
        "X-Trace-Task-Capability": claim["capability_token"],
    }


# Separate routes


async def test_routes_of_one_listener_do_not_exist_on_the_other(shared: System) -> None:
    public = await operations(shared, shared.gateway_url)
    internal = await operations(shared, shared.internal_url)
    assert public & internal == BOTH
    headers = await everyone(shared)
    for url, foreign in ((shared.gateway_url, internal - BOTH), (shared.internal_url, public - BOTH)):
        assert len(foreign) > 12
        for method, path in foreign:
            concrete = path.replace("{task_id}", str(uuid4())).replace("{run_id}", str(uuid4()))
            for shape in (concrete, f"/{concrete}/"):
                reply = await shared.http.request(method, url + shape, headers=headers, json={})
                assert reply.status_code in (404, 405), (url, method, shape, reply.text)
                assert reply.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("path", ["/internal/task-claim", "/internal/jwks/task", "/v1/task/heartbeat", "/internal"])
async def test_gateway_does_not_know_internal_paths(shared: System, path: str) -> None:
    for method in ("GET", "POST"):
        reply = await shared.http.request(method, shared.gateway_url + path, headers=await everyone(shared), json={})
        assert_problem(reply, 404, "not_found")


async def test_openapi_documents_list_every_route_and_its_problems(shared: System) -> None:
    for module, url in ((gateway, shared.gateway_url), (dispatcher, shared.internal_url)):
        handled = {
            (method, re.sub(r":\w+}", "}", path))
            for handler in module.HANDLERS
            if handler.include_in_schema is not False  # all but the dashboard's files and its stream of events
            for path in handler.paths
            for method in handler.http_methods
        }
        loaded = await document(shared, url)
        assert loaded["openapi"].startswith("3.1")
        listed = {(method.upper(), path): item for path, p in loaded["paths"].items() for method, item in p.items()}
        assert {key for key in listed if key[0] != "OPTIONS"} == handled
        for item in listed.values():
            assert item["summary"]
            assert "application/problem+json" in item["responses"]["401"]["content"]
        references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(loaded)))
        assert references <= set(loaded["components"]["schemas"])


async def test_path_ids_are_documented_as_texts_that_may_be_prefixes(shared: System) -> None:
    parameters = (await document(shared, shared.gateway_url))["paths"]["/v1/tasks/{task_id}"]["get"]["parameters"]
    assert [(p["name"], p["schema"]["type"]) for p in parameters] == [("task_id", "string")]


# Problems and request ids


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/nowhere/at/all", 404, "not_found"),
        ("POST", "/", 405, "method_not_allowed"),
        ("PUT", "/v1/jobs", 405, "method_not_allowed"),
        ("GET", "/v1/tasks/cancel", 405, "method_not_allowed"),
        ("GET", "/v1/tasks/not-a-uuid", 400, "invalid_request"),
        ("GET", "/v1/tasks/not-a-uuid/explain", 400, "invalid_request"),
        ("POST", "/v1/tasks/12345678-1234-1234-1234-12345678901z/retry", 400, "invalid_request"),
        ("GET", "/v1/runs/7", 400, "invalid_request"),
        ("GET", "/v1/tasks?run=not-a-uuid", 400, "invalid_request"),
        ("GET", "/v1/tasks?status=Sleeping", 400, "invalid_request"),
        ("GET", "/v1/tasks?limit=0", 400, "invalid_request"),
        ("GET", "/v1/tasks?limit=1001", 400, "invalid_request"),
        ("GET", "/v1/tasks?limit=many", 400, "invalid_request"),
        ("GET", "/v1/tasks?cursor=bm9uc2Vuc2U", 400, "bad_cursor"),
        ("GET", "/v1/tasks?cursor=%00%ff", 400, "bad_cursor"),
        ("GET", "/v1/jobs?cursor=x", 400, "bad_cursor"),
        ("GET", f"/v1/tasks/{NOBODY}", 404, "not_found"),
        ("GET", f"/v1/runs/{NOBODY}", 404, "not_found"),
        ("GET", f"/v1/tasks?run={NOBODY}", 404, "not_found"),
        ("GET", "/v1/jobs/none-such", 404, "not_found"),
        ("GET", "/v1/jobs/%00", 404, "not_found"),
        ("GET", "/v1/tasks?job=%00", 404, "not_found"),
        ("GET", "/v1/queues/none-such/dead-letters", 404, "not_found"),
        ("DELETE", "/v1/keys/none-such", 404, "not_found"),
        ("DELETE", "/v1/keys/%00", 400, "bad_request"),
        ("DELETE", "/v1/worker-tokens/%00", 400, "bad_request"),
    ],
)
async def test_wrong_address_gets_a_problem_document(
    shared: System, method: str, path: str, status: int, code: str
) -> None:
    assert_problem(await shared.user(method, path), status, code)


async def test_internal_listener_answers_in_the_same_way(shared: System) -> None:
    assert_problem(await shared.worker("GET", "/nowhere"), 404, "not_found")
    assert_problem(await shared.worker("PUT", "/internal/task-claim"), 405, "method_not_allowed")
    assert_problem(await shared.worker("GET", "/internal/task-fetch"), 400, "invalid_request")
    assert_problem(await shared.worker("GET", "/internal/task-fetch?task_id=x"), 400, "invalid_request")
    assert_problem(await shared.worker("GET", f"/internal/task-fetch?task_id={uuid4()}"), 404, "not_found")
    assert_problem(await shared.http.get(shared.internal_url + "/internal/task-fetch"), 401, "unauthenticated")


@pytest.mark.parametrize("given", ["a", "0af7651916cd43dd8448eb211c80319c", "web:1.2_3-4", "x" * 128])
async def test_valid_request_id_is_kept_in_every_reply(shared: System, given: str) -> None:
    headers = {"X-Request-Id": given}
    for path in ("/v1/jobs", "/nowhere", "/v1/tasks/x", "/healthz"):
        reply = await shared.user("GET", path, headers=headers)
        assert reply.headers["x-request-id"] == given
        assert reply.json().get("request_id", given) == given


@pytest.mark.parametrize("given", ["", "x" * 129, "with space", 'quo"te', "semi;colon", "<script>"])
async def test_unsafe_request_id_is_replaced(shared: System, given: str) -> None:
    reply = await shared.user("GET", "/nowhere", headers={"X-Request-Id": given})
    assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"])
    assert reply.json()["request_id"] == reply.headers["x-request-id"]


async def test_requests_without_an_id_get_one_each(shared: System) -> None:
    replies = [await shared.user("GET", "/v1/jobs") for _ in range(3)]
    assert len({reply.headers["x-request-id"] for reply in replies}) == 3


# Bodies

MALFORMED: dict[str, bytes] = {
    "nothing": b"",
    "a space": b" ",
    "null": b"null",
    "a list": b"[]",
    "a number": b"7",
    "cut short": b'{"operator": "echo", "tasks": [',
    "two documents": b'{"operator": "echo", "tasks": []}{}',
    "single quotes": b"{'operator': 'echo', 'tasks': []}",
    "a trailing comma": b'{"operator": "echo", "tasks": [],}',
    "NaN": b'{"operator": "echo", "tasks": [NaN]}',
    "a control character": b'{"operator": "echo", "tasks": ["\x01"]}',
    "UTF-16": '{"operator": "echo", "tasks": []}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"operator": "echo", "tasks": []}',
    "not UTF-8 in a name": b'{"operator": "e\xff", "tasks": []}',
    "deep": b'{"operator": "echo", "tasks": [' + b"[" * 100_000,
    "deep and closed": b'{"operator": "echo", "tasks": [' + b"[" * 50_000 + b"]" * 50_000 + b"]}",
    "deep elsewhere": b'{"operator": "echo", "config": ' + b'{"a":' * 50_000,
    "a form": b"operator=echo&tasks=1",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_json_is_a_bad_request_on_every_endpoint_with_a_body(shared: System, name: str) -> None:
    body, json_type = MALFORMED[name], {"Content-Type": "application/json"}
    for path in ("/v1/jobs", "/v1/tasks/cancel", "/v1/keys"):
        assert_problem(await shared.user("POST", path, content=body, headers=json_type), 400, "invalid_request")
    for path in ("/internal/task-claim", "/internal/queue/receive", "/internal/task-complete"):
        assert_problem(await shared.worker("POST", path, content=body, headers=json_type), 400, "invalid_request")


@pytest.mark.parametrize(
    "wrong",
    [
        {"operator": 7, "tasks": []},
        {"operator": "echo", "source": {"format": "jsonl"}},
        {"operator": "echo", "tasks": {}},
        {"operator": "rm -rf", "tasks": []},
        {"operator": "echo", "tasks": [], "unknown": 1},
        {"operator": "echo", "tasks": [], "policy": {"max_attempts": 0}},
        {"operator": "echo", "tasks": [], "policy": {"retries": 3}},
        {"operator": "echo", "tasks": [], "policy": {"jitter": 2}},
        {"operator": "echo", "tasks": [], "scaling": {"key": "no-slash"}},
        {"operator": "echo", "tasks": [], "priority": "urgent"},
        {"operator": "echo", "tasks": [], "name": "../etc"},
        {"operator": "echo", "tasks": [], "name": "x" * 201},
        {"operator": "echo", "tasks": [], "outputs": [{"dataset_uuid": "x", "dataset_version": "y"}]},
    ],
    ids=lambda wrong: json.dumps(wrong)[:60],
)
async def test_body_of_another_shape_is_a_bad_request_that_names_the_field(shared: System, wrong: Any) -> None:
    problem = assert_problem(await shared.user("POST", "/v1/jobs", json=wrong), 400, "invalid_request")
    assert "`" in problem["detail"]


async def test_job_without_a_list_gets_an_error_with_the_three_options(shared: System) -> None:
    problem = assert_problem(await shared.user("POST", "/v1/jobs", json={"operator": "echo"}), 400, "no_list")
    assert all(word in problem["detail"] for word in ("`tasks`", "`source`", "`open`"))


@pytest.mark.parametrize("field", ["task_id", "lease_token"])
async def test_malformed_uuid_in_a_body_is_a_bad_request(shared: System, field: str) -> None:
    claim = await shared.claim(await shared.one())
    for wrong in ("x", "", 7, None, claim[field][:-1], claim[field] + "0"):
        reply = await shared.attempt("/v1/task/heartbeat", claim["capability_token"], fence(claim) | {field: wrong})
        problem = assert_problem(reply, 400, "invalid_request")
        assert f"$.{field}" in problem["detail"]


async def test_unknown_fields_from_workers_are_ignored(shared: System) -> None:
    task_id = await shared.one()
    claim = await shared.claim_many(task_id=task_id, hint="from a newer worker")
    assert claim["status"] == "Claimed"
    body = fence(claim) | {"status": "Completed", "energy_joules": 12}
    assert (await shared.attempt("/v1/task/complete", claim["capability_token"], body)).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json", "nonsense", ""]
)
async def test_body_with_a_non_json_media_type_is_refused(shared: System, kind: str) -> None:
    headers = {"Content-Type": kind}
    good = b'{"operator": "echo", "tasks": [1]}'
    assert_problem(await shared.user("POST", "/v1/jobs", content=good, headers=headers), 415, "unsupported_media_type")
    claim = await shared.worker("POST", "/internal/task-claim", content=b"{}", headers=headers)
    assert_problem(claim, 415, "unsupported_media_type")


@pytest.mark.parametrize("kind", [None, "application/json", "Application/JSON; charset=utf-8", "application/x+json"])
async def test_body_is_accepted_with_a_json_media_type_or_none(shared: System, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    good = b'{"operator": "echo", "tasks": [1]}'
    assert (await shared.user("POST", "/v1/jobs", content=good, headers=headers)).status_code == 201


async def _pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 100_000):
        yield b"x" * 100_000


@pytest.mark.parametrize("how", ["with its length", "in chunks"])
async def test_body_of_10_mb_is_too_large(shared: System, how: str) -> None:
    size = 10_000_000
    for call, path in ((shared.user, "/v1/jobs"), (shared.worker, "/internal/task-complete")):
        content: Any = b"x" * size if how == "with its length" else _pieces(size)
        assert_problem(await call("POST", path, content=content), 413, "too_large")
    claim = await shared.claim(await shared.one())
    headers = {"X-Trace-Task-Capability": claim["capability_token"]}
    content = b"x" * size if how == "with its length" else _pieces(size)
    reply = await shared.http.post(shared.internal_url + "/v1/task/complete", content=content, headers=headers)
    assert_problem(reply, 413, "too_large")
    assert (await shared.user("GET", "/v1/jobs")).status_code == 200


async def test_missing_key_is_reported_before_any_body_error(shared: System) -> None:
    for content in (b"{", b"x" * 10_000_000, b""):
        reply = await shared.http.post(shared.gateway_url + "/v1/jobs", content=content)
        assert_problem(reply, 401, "unauthenticated")


# TLS


def self_signed(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "interlock test")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


async def test_both_listeners_speak_tls_when_given_a_certificate(state_url: str, tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    async with running(state_url, tmp_path / "dir", tls_cert=cert, tls_key=key) as system:
        trust = ssl.create_default_context(cafile=str(cert))
        async with httpx.AsyncClient(verify=trust) as client:
            for url in (system.gateway_url, system.internal_url):
                assert url.startswith("https://")
                assert (await client.get(f"{url}/healthz")).json()["status"] == "ok"
        for url in (system.gateway_url, system.internal_url):
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await system.http.get(f"{url}/healthz")
            with pytest.raises(httpx.RemoteProtocolError):
                await system.http.get(url.replace("https", "http") + "/healthz")


@pytest.mark.parametrize("address", ["0.0.0.0:7070", "[::]:7070", "10.0.0.7:7070", "example.com:7070", "[fe80::1]:1"])
def test_listener_that_is_not_loopback_needs_tls(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="tls_cert") as refused:
        require_safe(address, Settings())
    assert address in refused.value.detail
    cert, key = self_signed(tmp_path)
    require_safe(address, Settings(tls_cert=cert, tls_key=key))
    require_safe(address, Settings(allow_plaintext_listener=True))


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.8.9.1:7070", "[::1]:7070", "localhost:7070"])
def test_loopback_listener_may_do_without_tls(address: str) -> None:
    require_safe(address, Settings())


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "0", "[::ffff:0.0.0.0]"])  # noqa: S104 - the refused addresses
@pytest.mark.parametrize("setting", ["gateway", "internal", "query"])
def test_wildcard_listener_needs_a_public_url(setting: str, host: str) -> None:
    address = f"{host}:7070"
    given: dict[str, Any] = {setting: address, "allow_plaintext_listener": True}
    with pytest.raises(ConfigurationError, match=f'Write {setting}_url = "https://') as refused:
        listener_of(Settings(**given), "127.0.0.1:0", setting, None)
    assert address in refused.value.detail
    given |= {f"{setting}_url": "https://interlock.example"}
    listener_of(Settings(**given), "127.0.0.1:0", setting, None).close()


def test_public_url_must_not_be_a_wildcard_address() -> None:
    for name in ("gateway_url", "internal_url", "query_url", "objects_public_url"):
        with pytest.raises(ValidationError, match="is a wildcard address"):
            Settings.model_validate({name: "http://0.0.0.0:7070"})


def test_port_in_use_error_has_advice() -> None:
    first = bind("127.0.0.1:0", setting="gateway")
    with pytest.raises(ConfigurationError, match="--gateway"):
        bind(f"127.0.0.1:{first.getsockname()[1]}", setting="gateway")
    first.close()


# Metrics and health


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def metrics(system: System, key: str | None = None) -> httpx.Response:
    """Reads the dispatcher's metrics."""
    headers = {"Authorization": f"Bearer {key or system.admin_key}"}
    return await system.http.get(system.internal_url + "/metrics", headers=headers)


@pytest.fixture
def _unthrottled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_GAUGE_SECONDS", 0.0)


@pytest.mark.usefixtures("_unthrottled")
async def test_metrics_change_with_work(still: System) -> None:
    async def read() -> dict[str, float]:
        reply = await metrics(still)
        assert reply.headers["content-type"].startswith("text/plain")
        return samples(reply.text)

    before = await read()
    accepted = await still.submit(list(range(5)))
    waiting = await read()
    claims = (await still.claim_many(run_id=accepted["run_id"], start=0, end=2))["claims"]
    await still.complete(claims[0])
    after = await read()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert waiting['interlock_queue_depth{queue="platform"}'] == 1
    assert grown('interlock_tasks_created_total{runtime="platform"}') == 5
    assert grown("interlock_tasks_claimed_total") == 3
    assert grown('interlock_attempts_ended_total{outcome="Completed"}') == 1
    assert after['interlock_tasks_in_flight{operator="echo",runtime="platform"}'] == 2
    posted = 'interlock_http_requests_total{listener="gateway",route="/v1/jobs",status="201"}'
    assert grown(posted) == 1


@pytest.mark.usefixtures("_unthrottled")
async def test_no_metric_carries_an_id(shared: System) -> None:
    task_id = await shared.one()
    await shared.user("GET", f"/v1/tasks/{task_id}")
    await shared.user("GET", f"/v1/nowhere/{task_id}")
    await shared.user("GET", "/v1/jobs/some-name")
    texts = [
        (await metrics(shared)).text,
        (await shared.user("GET", "/metrics")).text,
    ]
    for text in texts:
        assert 'route="/v1/tasks/{task_id}"' in text
        assert not UUID_TEXT.search(text)
        assert "some-name" not in text
        assert shared.admin_key[:20] not in text
        assert shared.worker_token[:20] not in text


@pytest.mark.parametrize("role", list(Role))
async def test_metrics_need_the_platform_scope(shared: System, role: Role) -> None:
    """They contain operators, targets and commands of every org, so no role of one org is sufficient."""
    request = KeyRequest(user="curious", role=role, scopes=sorted(ROLE_SCOPES[role]))
    principal = await shared.kernel.access.principals.authenticate(shared.admin_key)
    key = (await shared.kernel.access.principals.create_key(request, shared.org_id, granted_by=principal)).key
    for reply in (await shared.user("GET", "/metrics", key=key), await metrics(shared, key)):
        assert_problem(reply, 403, "forbidden")
    for url in (shared.gateway_url, shared.internal_url):
        assert_problem(await shared.http.get(f"{url}/metrics"), 401, "unauthenticated")


@pytest.mark.parametrize("process", [bus, ingest, sink])
async def test_metrics_of_background_processes_need_the_platform_scope(shared: System, process: Any) -> None:
    """Operators can connect to loopback addresses."""
    principal = await shared.kernel.access.principals.authenticate(shared.admin_key)
    request = KeyRequest(user="curious", role=Role.ADMIN, scopes=["admin"])
    key = (await shared.kernel.access.principals.create_key(request, shared.org_id, granted_by=principal)).key
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    changed = {f"{process.__name__}_metrics": address, "data_url": shared.kernel.settings.state_url}
    async with process(shared.kernel.settings.model_copy(update=changed)):
        url = f"http://{address}/metrics"
        assert_problem(await shared.http.get(url), 401, "unauthenticated")
        assert_problem(await shared.http.get(url, headers={"Authorization": f"Bearer {key}"}), 403, "forbidden")
        reply = await shared.http.get(url, headers={"Authorization": f"Bearer {shared.admin_key}"})
        assert "interlock_http_requests_total" in reply.text
        assert (await shared.http.get(f"http://{address}/")).status_code == 404


async def test_metrics_listener_closes_connections_that_send_nothing(shared: System) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    changed = {"ingest_metrics": f"127.0.0.1:{port}", "request_head_seconds": 0.1}
    async with ingest(shared.kernel.settings.model_copy(update=changed)):
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(80)]
        async with asyncio.timeout(20):
            for reader, writer in opened:
                await reader.read()
                writer.close()


async def test_metrics_are_served_on_loopback_addresses_only(shared: System) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        addresses = {
            "0.0.0.0:0": "is not a loopback address",
            f"127.0.0.1:{taken.getsockname()[1]}": "Choose another address in the setting ingest_metrics",
        }
        for address, why in addresses.items():
            changed = shared.kernel.settings.model_copy(update={"ingest_metrics": address})
            with pytest.raises(ConfigurationError, match=why):
                async with ingest(changed):
                    pass


async def test_health_is_open_on_both_listeners(shared: System) -> None:
    for url in (shared.gateway_url, shared.internal_url):
        reply = await shared.http.get(f"{url}/healthz")
        assert (reply.status_code, reply.json()) == (
            200,
            {"status": "ok", "checks": {"database": "ok", "valkey": "not configured"}},
        )


# Limits in Valkey


async def test_too_many_requests_get_429_with_retry_after(
    state_url: str, tmp_path: Path, valkey: EmbeddedValkey
) -> None:
    url = await valkey.start()
    async with running(state_url, tmp_path, valkey_url=url, requests_per_second=5) as system:
        replies = [await system.user("GET", "/v1/jobs") for _ in range(40)]
        refused = [reply for reply in replies if reply.status_code == 429]
        assert refused, "no request was limited: fewer than 5 requests per second were sent"
        assert {reply.status_code for reply in replies} == {200, 429}
        problem = assert_problem(refused[0], 429, "too_many_requests")
        assert refused[0].headers["retry-after"] == "1"
        assert 0 < problem["retry_after_ms"] <= 1000
        other = await system.user("POST", "/v1/keys", json={"user": "second", "role": "reader"})
        while other.status_code == 429:
            other = await system.user("POST", "/v1/keys", json={"user": "second", "role": "reader"})
        assert (await system.user("GET", "/v1/jobs", key=other.json()["key"])).status_code == 200


async def test_gateway_limits_requests_locally_without_valkey(
    state_url: str, tmp_path: Path, valkey: EmbeddedValkey
) -> None:
    url = await valkey.start()
    async with running(state_url, tmp_path, valkey_url=url, requests_per_second=1) as system:
        assert (await system.http.get(system.gateway_url + "/healthz")).json()["checks"]["valkey"] == "ok"
        await valkey.stop()
        health = await system.http.get(system.gateway_url + "/healthz")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert health.json()["checks"] == {"database": "ok", "valkey": "away"}
        replies = [await system.user("GET", "/v1/jobs") for _ in range(5)]
        assert {reply.status_code for reply in replies} == {200, 429}
        assert await valkey.start() == url

        async def limited() -> bool:
            return (await system.user("GET", "/v1/jobs")).status_code == 429

        assert await until(limited)
        assert (await system.http.get(system.gateway_url + "/healthz")).json()["status"] == "ok"
