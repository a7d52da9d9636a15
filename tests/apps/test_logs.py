"""Log contents: what must be logged and what must never be; and logging to a full disk."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from interlock import failpoints
from interlock.telemetry import LOG_LINES_LOST, redact
from tests.support.log_file import logging_to
from tests.support.system import System, fence

MARK = "correct-horse-battery-staple"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "logs" / "test.log"
    with logging_to(file):
        logging.getLogger("test").info("begins")
        yield file


@contextlib.contextmanager
def full_disk() -> Iterator[TextIO]:
    """A file that refuses every write, even on close."""
    with contextlib.suppress(OSError), Path("/dev/full").open("w", buffering=1) as full:
        yield full


@contextlib.contextmanager
def broken(name: str) -> Iterator[None]:
    async def fail() -> None:
        raise failpoints.FailpointError(name)

    failpoints.arm(name, fail)
    try:
        yield
    finally:
        failpoints.disarm(name)


def text_of(log: Path) -> str:
    return log.read_text()


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text_of(log).splitlines()]


async def test_no_secret_and_no_payload_reaches_the_log(still: System, log: Path) -> None:
    secret = {"password": MARK}
    task_id = await still.one(config=secret, name=None)
    claim = await still.claim(task_id)
    token, key, worker = claim["capability_token"], still.admin_key, still.worker_token
    wrong_key, wrong_worker, wrong_token = key[:-5] + "AAAAA", worker[:-5] + "AAAAA", token[:-5] + "AAAAA"
    await still.user("GET", "/v1/jobs", key=wrong_key)
    await still.user("GET", f"/v1/jobs/{key}")
    await still.user("GET", f"/nowhere?token={token}&key={key}")
    await still.worker("POST", "/internal/task-claim", token=wrong_worker, json={"task_id": task_id})
    await still.attempt("/v1/task/heartbeat", wrong_token, fence(claim))
    await still.user("POST", "/v1/jobs", content=f'{{"operator": "{MARK}'.encode())
    with broken("submit.before_commit"):
        reply = await still.user("POST", "/v1/jobs", json={"operator": "echo", "tasks": [secret], "config": secret})
        assert (reply.status_code, MARK in reply.text) == (500, False)
    with broken("complete.before_commit"):
        reply = await still.complete(claim, result=secret, error_message=MARK)
        assert (reply.status_code, MARK in reply.text) == (500, False)
    assert (await still.complete(claim, result=secret)).status_code == 200
    await still.settle()
    text = text_of(log)
    assert text.count("request.failed") == 2
    password = still.kernel.settings.state_url
    assert password is not None
    secrets = [key, worker, token, wrong_key, wrong_worker, wrong_token, password.get_secret_value()]
    assert [secret for secret in [MARK, *secrets] if secret in text] == []
    assert [part for part in (key[-43:], worker[-43:], token.split(".")[2]) if part in text] == []


async def test_row_in_a_postgres_error_is_not_in_log_or_reply(still: System, log: Path) -> None:
    async with still.kernel.stores.database.connection() as connection:
        rule = f"check (payload::text not like '%{MARK}%')"
        await connection.execute(f"alter table interlock.tasks_0 add constraint surprise {rule}")
    reply = await still.user("POST", "/v1/jobs", json={"operator": "echo", "tasks": [MARK]})
    assert (reply.status_code, reply.json()["code"]) == (500, "internal")
    text = text_of(log)
    assert "CheckViolationError" in text
    assert "surprise" in text
    assert MARK not in text + reply.text


async def test_unexpected_error_is_logged_with_its_request_id(still: System, log: Path) -> None:
    with broken("submit.before_commit"):
        reply = await still.user(
            "POST", "/v1/jobs", json={"operator": "echo", "tasks": [1]}, headers={"X-Request-Id": "find-me"}
        )
    assert reply.json()["request_id"] == "find-me"
    (line,) = [line for line in lines(log) if line.get("request_id") == "find-me"]
    assert (line["event"], line["level"]) == ("request.failed", "error")
    assert line["error"] == "FailpointError"
    assert "Traceback" in line["exception"]


async def test_full_disk_loses_only_log_lines(
    still: System, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with full_disk() as full:
        monkeypatch.setattr(sys, "stderr", full)
        lost = LOG_LINES_LOST._value.get()
        with logging_to(Path("/dev/full")), broken("submit.before_commit"):
            reply = await still.user("POST", "/v1/jobs", json={"operator": "echo", "tasks": [1]})
        assert reply.status_code == 500
        with logging_to(Path("/dev/full")):
            logging.getLogger("test").warning("no room")
            claim = await still.claim(await still.one())
            assert (await still.complete(claim)).status_code == 200
        assert LOG_LINES_LOST._value.get() >= lost + 4
    assert "No space left" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ilk_0123456789abcdef_" + "s" * 43, "ilk_0123456789abcdef_***"),
        ("ilw_0123456789abcdef_" + "s" * 43, "ilw_0123456789abcdef_***"),
        ("Bearer eyJhbGciOiJFUzI1NiJ9.eyJpc3MiOiJ4In0.c2ln", "Bearer eyJhbGciOiJFUzI1NiJ9.***"),
        ("postgresql://u:p%40ss@host:5/db", "postgresql://u:***@host:5/db"),
        ("valkey://:hush@127.0.0.1:6379/0", "valkey://:***@127.0.0.1:6379/0"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_credentials_in_text_are_masked(text: str, shown: str) -> None:
    assert redact(f"before {text} after") == f"before {shown} after"
