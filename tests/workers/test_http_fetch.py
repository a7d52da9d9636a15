"""http_fetch: its requests, its results, and its limits per host."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.jobs.definitions import NEVER_RETRIED
from interlock.outbound import guard
from interlock.outbound.guard import Binding, HostNotBound, OutboundFailed
from interlock.wire.access import TaskSecret
from interlock.workers import TaskContext, TaskFailed
from interlock.workers.http_fetch import (
    FetchConfig,
    HostBusy,
    Hosts,
    WaitBudget,
    hosts_of_this_machine,
    http_fetch,
    read_config,
    rendered,
    retry_after,
)
from interlock.workers.operator_requests import Placeholders
from interlock.workers.protocol import Assignment, Outbound, Work
from tests.support.dags import valid
from tests.support.documentation import blocks, read, rows
from tests.support.third_party_servers import SILENCE, Stranger, answer, chunked, stranger
from tests.workers.test_operators import Recorded

HERE = ["127.0.0.1"]


@pytest.fixture(autouse=True)
def own_politeness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uses a separate folder: a port with a Retry-After from one test may be the port of another test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hosts_of_this_machine.cache_clear()
    yield
    if hosts_of_this_machine.cache_info().currsize:
        hosts_of_this_machine().close()
    hosts_of_this_machine.cache_clear()


@pytest.fixture
async def there() -> AsyncIterator[Stranger]:
    async with stranger() as started:
        yield started


def context(outbound: Outbound, secrets: list[TaskSecret], **config: Any) -> TaskContext:
    body = msgspec.json.encode(config)
    work = Work("http_fetch", (None, None), uuid4(), 1, body, [], [], outbound=outbound, secrets=secrets)
    return TaskContext(work, Assignment(1, uuid4(), 0, b"null"), Recorded())


async def fetched(
    payload: Any, outbound: Outbound | None = None, secrets: Sequence[TaskSecret] = (), **config: Any
) -> dict[str, Any]:
    """Runs the operator like a child process of a worker, in a thread with its own event loop."""
    settings = Outbound(HERE) if outbound is None else outbound
    return await asyncio.to_thread(http_fetch, payload, context(settings, list(secrets), **config))


async def failed(
    payload: Any, outbound: Outbound | None = None, secrets: Sequence[TaskSecret] = (), **config: Any
) -> TaskFailed:
    with pytest.raises(TaskFailed) as raised:
        await fetched(payload, outbound, secrets, **config)
    return raised.value


# Results


async def test_result_contains_the_response(there: Stranger) -> None:
    there.says("/page", answer(b"<p>hello</p>", content_type="text/html; charset=utf-8", etag='"1"', set_cookie="a=b"))
    for payload in ({"url": there.url("/page")}, there.url("/page")):
        result = await fetched(payload)
        assert result.pop("elapsed_ms") >= 0
        assert result == {
            "url": there.url("/page"),
            "status": 200,
            "headers": {"content-length": "12", "content-type": "text/html; charset=utf-8", "etag": '"1"'},
            "bytes": 12,
            "sha256": hashlib.sha256(b"<p>hello</p>").hexdigest(),
            "body": "<p>hello</p>",
            "body_encoding": "text",
        }


@pytest.mark.parametrize(
    ("body", "content_type", "text"),
    [
        ("grüß".encode(), "text/plain", "grüß"),
        ("grüß".encode("latin-1"), "text/plain; charset=ISO-8859-1", "grüß"),
        (b"\xff\xfe\x00", "image/png", None),
        (b"with a \0 in it", "text/plain", None),
        (b"plain", "text/plain; charset=no-such", "plain"),
        (b"00ff", "text/plain; charset=hex", "00ff"),
        (b"plain", 'text/plain; charset="', "plain"),
        (b"", "", ""),
    ],
)
async def test_body_is_text_if_possible_and_base64_otherwise(
    body: bytes, content_type: str, text: str | None, there: Stranger
) -> None:
    there.says("/", answer(body, content_type=content_type))
    result = await fetched(there.url("/"))
    if text is not None:
        assert (result["body"], result["body_encoding"]) == (text, "text")
    else:
        assert (msgspec.convert(result["body"], bytes), result["body_encoding"]) == (body, "base64")


async def test_body_too_large_for_a_result_fails_the_task_and_names_the_setting(there: Stranger) -> None:
    body = b'"' * 40_000  # twice as long in JSON
    there.says("/", chunked([body]))
    assert (await fetched(there.url("/")))["body"] == body.decode()
    narrow = Outbound(HERE, result_limit=65_536)
    for keep in ("inline", "required"):
        error = await failed(there.url("/"), narrow, keep_body=keep)
        assert error.error_class == "BodyTooLarge"
        assert "result_limit_bytes, which is 65536" in str(error)
    assert (await fetched(there.url("/"), narrow, keep_body="none"))["bytes"] == 40_000


async def test_undecodable_headers_do_not_break_the_result(there: Stranger) -> None:
    there.says("/", b"HTTP/1.1 200 OK\r\nServer: \xff\xfe\r\nContent-Length: 0\r\n\r\n")
    assert msgspec.json.encode(await fetched(there.url("/")))


# Requests


BODY = {"key": "Bearer ${secret:KEY}", "${secret:KEY}": ["{{q}}", "q: {{q}}"], "other": "${HOME}"}


async def test_method_headers_and_body_come_from_the_config(there: Stranger) -> None:
    there.says("/api", answer(b"{}"))
    config: dict[str, Any] = {
        "method": "POST",
        "headers": {"Authorization": "Bearer ${secret:FETCH_KEY}"},
        "body": {"query": "{{query}}", "title": "No. {{ n }}: {{tags.0}}", "all": "{{tags}}"},
    }
    await fetched(
        {"url": there.url("/api"), "query": 'say "hi"', "n": 7, "tags": ["a", "b"]},
        secrets=[TaskSecret("FETCH_KEY", "k3y", [])],
        **config,
    )
    (asked,) = there.asked
    assert (asked.method, asked.headers["authorization"]) == ("POST", "Bearer k3y")
    assert asked.headers["content-type"] == "application/json"
    assert msgspec.json.decode(asked.body) == {"query": 'say "hi"', "title": "No. 7: a", "all": ["a", "b"]}


@pytest.mark.parametrize("body", [BODY, msgspec.json.encode(BODY).decode()])
async def test_secrets_of_the_org_are_filled_into_the_body(there: Stranger, body: Any) -> None:
    """What a payload or a secret contains is not a placeholder."""
    there.says("/", answer(b"{}"))
    payload = {"url": there.url("/"), "q": "${secret:KEY}"}
    await fetched(payload, secrets=[TaskSecret("KEY", 'a"b{{q}}', [])], method="POST", body=body)
    expected = {"key": 'Bearer a"b{{q}}', 'a"b{{q}}': ["${secret:KEY}", "q: ${secret:KEY}"], "other": "${HOME}"}
    assert msgspec.json.decode(there.asked[0].body) == expected


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TEMPLATES = st.recursive(
    st.sampled_from(
        ["{{value}}", "a {{value}} b", '"{{value}}"', "{{value}}{{ value }}", "plain", "\\{{value}}", 1, None]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "{{value}}", "x{{value}}"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(TEMPLATES, JSON)
def test_payload_cannot_change_the_structure_of_the_body(template: Any, value: Any) -> None:
    made = msgspec.json.decode(rendered(template, {"value": value}, Placeholders()))
    assert type(made) is type(template) or template == "{{value}}"
    if isinstance(template, list):
        assert len(made) == len(template)


@given(JSON)
def test_string_with_only_a_placeholder_becomes_the_fields_value(value: Any) -> None:
    assert msgspec.json.decode(rendered(["{{value}}"], {"value": value}, Placeholders())) == [value]


async def test_body_may_be_given_as_json_text() -> None:
    config = read_config({"method": "POST", "body": '{"q": "{{q}}"}'}, Placeholders())
    assert rendered(config.body, {"q": [1]}, Placeholders()) == b'{"q":[1]}'


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"body": {"a": 1}}, "A GET request has no body"),
        ({"method": "POST", "body": '{"q": {{q}}}'}, "in quotes"),
        ({"method": "POST", "body": ["{{}}"]}, "names no field"),
        ({"method": "TRACE"}, "method"),
        ({"timeout": 3}, "timeout"),
        ({"headers": {"Host": "other.test"}}, "is set by the HTTP client"),
        ({"headers": {"Transfer-Encoding": "chunked"}}, "is set by the HTTP client"),
        ({"headers": {"X-A": "a\r\nX-B: b"}}, "cannot be sent"),
        ({"headers": {"X-A": "${INTERLOCK_API_KEY}"}}, "does not pass to this org"),
        ({"proxy": "socks5://a.test"}, "http://host:port"),
        ({"max_bytes": 1 << 40}, "max_bytes"),
    ],
)
async def test_invalid_config_fails_with_advice(config: dict[str, Any], message: str) -> None:
    error = await failed("http://a.test/", **config)
    assert error.error_class == "BadConfig"
    assert message in str(error)


@pytest.mark.parametrize("payload", [None, 7, {}, {"url": 3}, ["http://a.test/"]])
async def test_payload_without_a_url_fails_with_advice(payload: Any) -> None:
    error = await failed(payload)
    assert (error.error_class, '{"url": "https://example.com/"}' in str(error)) == ("BadPayload", True)


async def test_missing_field_of_the_payload_is_named(there: Stranger) -> None:
    error = await failed({"url": there.url("/"), "a": {"b": 1}}, method="POST", body=["{{a.c}}"])
    assert (error.error_class, "'a.c'" in str(error), there.asked) == ("BadPayload", True, [])


# Failures


async def test_private_address_is_refused_unless_allowed(there: Stranger) -> None:
    error = await failed(there.url("/"), Outbound())
    assert (error.error_class, there.asked) == ("AddressRefused", [])


@pytest.mark.parametrize(
    ("reply", "config", "error_class"),
    [
        (SILENCE, {"timeout_seconds": 0.05}, "TooSlow"),
        (answer(b"x" * 2_000), {"max_bytes": 1_000}, "ReplyTooLarge"),
        (answer(status=302, location="/"), {}, "TooManyRedirects"),
        (answer(b"x", content_length="9"), {}, "BadReply"),
        (answer(status=404), {}, "HttpRefused"),
        (answer(status=501), {}, "HttpRefused"),
        (answer(status=500), {}, "HttpUnavailable"),
        (answer(status=429), {}, "RateLimited"),
        (answer(status=429, retry_after="9999"), {}, "RateLimited"),
        (answer(status=503, retry_after="9999"), {}, "HttpUnavailable"),
        (answer(status=404), {"retry": [404]}, "HttpUnavailable"),
    ],
)
async def test_each_failure_has_a_documented_error_class(
    reply: bytes, config: dict[str, Any], error_class: str, there: Stranger
) -> None:
    there.says("/", reply)
    assert (await failed(there.url("/"), **config)).error_class == error_class


async def test_accepted_status_is_a_result(there: Stranger) -> None:
    assert (await fetched(there.url("/"), accept=[404]))["status"] == 404
    there.says("/", answer(status=302, location="/next"))
    assert (await fetched(there.url("/"), follow_redirects=0))["headers"]["location"] == "/next"


async def test_request_is_retried_at_the_time_of_retry_after(there: Stranger) -> None:
    there.says("/", answer(status=429, retry_after="0"), answer(status=503, retry_after="0"), answer(b"at last"))
    assert (await fetched(there.url("/")))["body"] == "at last"
    assert len(there.asked) == 3


async def test_retries_stop_after_the_configured_number(there: Stranger) -> None:
    there.says("/", answer(status=429, retry_after="0"))
    assert (await failed(there.url("/"), retries=1)).error_class == "RateLimited"
    assert len(there.asked) == 2


async def test_retry_after_of_a_host_applies_to_all_processes(there: Stranger) -> None:
    there.says("/", answer(status=429, retry_after="600"))
    assert (await failed(there.url("/"))).error_class == "RateLimited"
    assert (await failed(there.url("/other"))).error_class == "HostBusy"
    assert len(there.asked) == 1


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7), (" 7 ", 7), ("Mon, 16 Nov 2026 12:00:30 GMT", 30), ("Mon, 16 Nov 2026 11:00:00 GMT", 0)]
    + [(value, None) for value in (None, "", "soon", "-1", "1.5", "٣", "Mon, 99 Nov 2026 12:00:00 GMT")],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after(value, datetime(2026, 11, 16, 12, tzinfo=UTC)) == seconds


def test_permanent_failures_are_never_retried() -> None:
    classes = [kind for kind in vars(guard).values() if isinstance(kind, type) and issubclass(kind, OutboundFailed)]
    final = {kind.__name__ for kind in classes if not kind.retryable}
    assert set(NEVER_RETRIED["http_fetch"]) == final | {"BadConfig", "BadPayload", "BodyTooLarge", "HttpRefused"}


# Proxies


async def test_proxy_of_the_job_is_checked_unlike_that_of_the_installation(there: Stranger) -> None:
    there.says("http://8.8.8.8/", answer(b"by proxy"))
    proxy = f"http://127.0.0.1:{there.port}"
    assert (await fetched("http://8.8.8.8/", Outbound(proxy=proxy)))["body"] == "by proxy"
    assert (await fetched("http://8.8.8.8/", Outbound(HERE), proxy=proxy))["body"] == "by proxy"
    assert (await failed("http://8.8.8.8/", Outbound(), proxy=proxy)).error_class == "AddressRefused"
    assert "remove `proxy`" in str(await failed("http://8.8.8.8/", Outbound(proxy=proxy), proxy=proxy))


# Limits per host

HOLDER = """
import asyncio, sys
from pathlib import Path
from interlock.workers.http_fetch import Hosts, WaitBudget

async def main():
    async with Hosts(Path(sys.argv[1])).permit("a.test:80", 2, 0, WaitBudget(0)):
        print("held", flush=True)
        sys.stdin.read()

asyncio.run(main())
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts another process that holds a permit for the host until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


async def test_permits_per_host_are_limited_and_freed_by_a_killed_process(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path / "hosts")
    with holder(tmp_path / "hosts") as first, holder(tmp_path / "hosts"):
        with pytest.raises(HostBusy, match="already serves 2 other requests"):
            async with hosts.permit("a.test:80", 2, 0, WaitBudget(0.05)):
                pytest.fail("there was no place")
        async with hosts.permit("b.test:80", 2, 0, WaitBudget(0)):
            pass
        first.kill()
        first.wait()
        async with hosts.permit("a.test:80", 2, 0, WaitBudget(0)):
            pass
    hosts.close()


class Time:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


async def test_delay_and_hold_of_a_host_apply_to_all_processes(tmp_path: Path) -> None:
    clock = Time()
    hosts, others = Hosts(tmp_path / "hosts", clock), Hosts(tmp_path / "hosts", clock)

    async def may_ask(which: Hosts, host: str = "a.test:80") -> bool:
        try:
            async with which.permit(host, 2, 5.0, WaitBudget(0)):
                return True
        except HostBusy:
            return False

    assert await may_ask(hosts)
    assert not await may_ask(others)
    assert await may_ask(others, "b.test:80")
    clock.now += 5.0
    assert await may_ask(others)
    hosts.hold("a.test:80", 60.0)
    clock.now += 59.0
    assert not await may_ask(others)
    clock.now += 1.0
    assert await may_ask(hosts)
    hosts.hold("a.test:80", 1e9)
    clock.now += 3600.0
    assert await may_ask(others)
    clock.now -= 1e6
    assert await may_ask(hosts), "a clock that was set back holds nobody for ever"
    hosts.close()
    others.close()


async def test_request_waits_for_its_permit(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path / "hosts")
    hosts.hold("a.test:80", 0.05)
    budget = WaitBudget(5)
    async with hosts.permit("a.test:80", 1, 0, budget):
        assert budget.left < 5
    hosts.close()


@pytest.mark.parametrize("mode", [0o777, 0o750])
def test_folder_accessible_to_others_is_refused(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "hosts"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(TaskFailed, match="belongs to this user, with mode 0700"):
        Hosts(folder)


def test_symlinked_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "hosts").symlink_to(tmp_path / "mine")
    with pytest.raises(TaskFailed, match="belongs to this user, with mode 0700"):
        Hosts(tmp_path / "hosts")


# Documentation

PAGE = read("docs/http-fetch.md")


def test_documented_settings_match_the_config() -> None:
    table = PAGE.partition("| setting |")[2].partition("\n\n")[0]
    assert {row[0].strip("`") for row in rows(table)} == {field.name for field in msgspec.structs.fields(FetchConfig)}


def test_every_class_of_failure_is_documented() -> None:
    classes = {kind.__name__ for kind in OutboundFailed.__subclasses__()} | {"TlsFailed", "ProxyFailed"}
    classes |= {"HttpUnavailable", "RateLimited", "HostBusy", "BadTempFolder", *NEVER_RETRIED["http_fetch"]}
    assert {name for name in classes if f"`{name}`" not in PAGE} == set()


def test_documented_examples_are_valid() -> None:
    (dag,) = blocks(PAGE, "yaml")
    (job,) = valid(dag).jobs
    assert read_config(job.config, Placeholders([TaskSecret("SEARCH_KEY", "x", [])])).body == {
        "q": "{{query}}",
        "limit": 10,
    }
    (submission,) = blocks(PAGE, "json")
    assert read_config(msgspec.json.decode(submission)["config"], Placeholders()).max_per_host == 2


# Secrets that are bound to hosts

LOCKED = "locked-to-its-hosts"


@pytest.mark.parametrize("hosts", [["127.0.0.1"], ["rpc.test", "127.0.0.1:{port}"]])
async def test_bound_secret_is_sent_to_its_hosts(there: Stranger, hosts: list[str]) -> None:
    there.says("/", answer(b"{}"))
    bound = TaskSecret("KEY", LOCKED, [host.format(port=there.port) for host in hosts])
    await fetched(there.url("/"), secrets=[bound], headers={"x-key": "${secret:KEY}"})
    assert there.asked[0].headers["x-key"] == LOCKED


@pytest.mark.parametrize("hosts", [["rpc.test"], ["127.0.0.1:1"], ["127.0.0.11"], ["::ffff:127.0.0.1"]])
async def test_bound_secret_is_not_sent_to_another_host(there: Stranger, hosts: list[str]) -> None:
    error = await failed(there.url("/"), secrets=[TaskSecret("KEY", LOCKED, hosts)], headers={"x-key": "${secret:KEY}"})
    assert error.error_class == "HostNotBound"
    assert LOCKED not in str(error)
    assert there.asked == []


async def test_bound_secret_forbids_redirects_to_another_host_or_port(there: Stranger) -> None:
    async with stranger() as other:
        there.says("/", answer(status=302, location=other.url("/")))
        bound = TaskSecret("KEY", LOCKED, [f"127.0.0.1:{there.port}"])
        error = await failed(there.url("/"), secrets=[bound], headers={"x-key": "${secret:KEY}"})
        assert error.error_class == "HostNotBound"
        assert other.asked == []


async def test_bound_secret_in_a_body_is_not_sent_to_another_host(there: Stranger) -> None:
    bound = TaskSecret("KEY", LOCKED, ["rpc.test"])
    error = await failed(there.url("/"), secrets=[bound], method="POST", body={"key": "${secret:KEY}"})
    assert error.error_class == "HostNotBound"
    assert there.asked == []


async def test_body_with_a_secret_is_not_sent_to_another_origin(there: Stranger) -> None:
    secret: dict[str, Any] = {"secrets": [TaskSecret("KEY", LOCKED, [])], "method": "POST"}
    async with stranger() as other:
        other.says("/", answer(b"{}"))
        there.says("/", answer(status=307, location=other.url("/")))
        error = await failed(there.url("/"), body={"key": "${secret:KEY}"}, **secret)
        assert (error.error_class, other.asked) == ("HostNotBound", [])
        await fetched(there.url("/"), body={"key": "public"}, **secret)
        there.says("/", answer(status=303, location=other.url("/")))
        await fetched(there.url("/"), body={"key": "${secret:KEY}"}, **secret)
        assert [asked.method for asked in other.asked] == ["POST", "GET"]
        assert not any(LOCKED.encode() in asked.body for asked in other.asked)


async def test_bound_secret_is_not_sent_through_a_proxy_of_the_job(there: Stranger) -> None:
    """Without TLS, the proxy could read the headers."""
    async with stranger() as proxy:
        bound = TaskSecret("KEY", LOCKED, [f"127.0.0.1:{there.port}"])
        asked: dict[str, Any] = {"headers": {"x-key": "${secret:KEY}"}, "proxy": proxy.url("").rstrip("/")}
        error = await failed(there.url("/"), secrets=[bound], **asked)
        assert error.error_class == "HostNotBound"
        assert proxy.asked == []
        password: dict[str, Any] = {"proxy": f"http://user:${{secret:KEY}}@127.0.0.1:{proxy.port}"}
        error = await failed(there.url("/"), secrets=[bound], **password)
        assert error.error_class == "HostNotBound"
        assert proxy.asked == []


@pytest.mark.parametrize(
    ("bound", "asked", "allowed"),
    [
        ("rpc.example.com", "RPC.Example.COM", True),
        ("RPC.example.com.", "rpc.example.com", True),
        ("rpc.example.com", "rpc.example.com.", True),
        ("rpc.example.com", "rpc.example.com.evil.test", False),
        ("rpc.example.com", "evil-rpc.example.com", False),
        ("rpc.example.com", "a.rpc.example.com", False),
        ("2001:DB8::1", "2001:db8:0:0::1", True),
        ("[2001:db8::1]", "2001:db8::1", True),
        ("[2001:db8::1]:443", "2001:db8:0::1", True),
        ("[2001:db8::1]:8545", "2001:db8::1", False),
        ("rpc.example.com:443", "rpc.example.com", True),
        ("rpc.example.com:8545", "rpc.example.com", False),
        ("10.0.0.1", "::ffff:10.0.0.1", False),
        ("127.0.0.1", "2130706433", False),
    ],
)
def test_equivalent_spellings_of_a_host_match(bound: str, asked: str, allowed: bool) -> None:
    binding = Binding.read("KEY", [bound])
    if allowed:
        binding.check(asked, 443)
    else:
        with pytest.raises(HostNotBound):
            binding.check(asked, 443)


@pytest.mark.parametrize(
    "entry", ["https://rpc.test", "rpc.test/path", "*.test", "", "a b", "rpc.test:x", "2130706433"]
)
def test_invalid_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="is not a host"):
        Binding.read("KEY", [entry])


async def test_missing_secret_fails_the_task(there: Stranger) -> None:
    error = await failed(there.url("/"), headers={"x-key": "${secret:OTHER}"})
    assert error.error_class == "SecretMissing"
    gone = TaskSecret("KEY", None, [], "There is no secret 'KEY'.", missing=True)
    error = await failed(there.url("/"), secrets=[gone])
    assert (error.error_class, str(error)) == ("SecretMissing", "There is no secret 'KEY'.")
    assert there.asked == []
