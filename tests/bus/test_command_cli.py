"""`interlock command` against a real gateway, with a running slow stage."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.bus.test_registry_cli import registered, run
from tests.support.bus_services import slow_stage
from tests.support.bus_tenants import Tenant, tenant
from tests.support.system import System


@pytest.fixture
async def owner(shared: System, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Tenant]:
    made = await tenant(shared)
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", shared.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", made.key)
    await registered(made)
    async with slow_stage(shared):
        yield made


async def said_as_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Runs a command with `-o json`, and ignores what the gateway in this process logs."""
    code, said = await run(capsys, *words, "-o", "json")
    assert code == 0, said
    return json.loads(said[said.index("{\n") :])


async def test_admin_sends_a_command_as_a_service_without_leaving_a_key(
    owner: Tenant, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["discord-bot", "post-message", '{"text": "paid"}']
    code, said = await run(capsys, "command", "send", *words)
    assert code == 2
    assert "--from SERVICE" in said
    sent = await said_as_json(capsys, "command", "send", *words, "--from", "billing")
    assert sent["outcome"] == "delivered"
    keys = (await owner.get("/v1/keys"))["keys"]
    assert [key["revoked_at"] is not None for key in keys if key["service"] == "billing"] == [True]


async def test_service_key_needs_no_sender_and_shows_fates(
    owner: Tenant, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await owner.put("routes", target="discord-bot", name="once", queue="once", dlq="once-dlq", dedupe_mode="strict")
    await owner.put("acls", target="discord-bot", name="once", source="billing")
    monkeypatch.setenv("INTERLOCK_API_KEY", await owner.service_key("billing"))
    sent = await said_as_json(capsys, "command", "send", "discord-bot", "once")
    code, said = await run(capsys, "command", "show", sent["command_id"])
    assert (code, "delivered" in said) == (0, True)


async def test_refused_command_says_why_and_what_to_do(owner: Tenant, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = await run(capsys, "command", "send", "discord-bto", "post-message", "{}", "--from", "billing")
    assert code == 1
    assert "route-missing" in said
    assert "interlock route add discord-bto post-message" in said


async def test_two_hundred_commands_of_a_file_pass_a_limit_of_fifty_per_second(
    owner: Tenant, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "messages.jsonl"
    file.write_text("".join(f'{{"n": {n}}}\n' for n in range(200)))
    words = ["discord-bot", "post-message", "--payloads", str(file), "--from", "billing"]
    sent = await said_as_json(capsys, "command", "send", *words)
    assert [each["outcome"] for each in sent["results"]] == ["delivered"] * 200
    await owner.put("limits", target="discord-bot", name="post-message", rate=50, window_seconds=3600)
    code, said = await run(capsys, "command", "send", *words, "--patience", "0")
    assert code == 1
    assert "rate-limit-exceeded" in said
