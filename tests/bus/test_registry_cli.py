"""The registry on the command line, with the examples of the documentation."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from typing import Any

import pytest

from interlock.cli.app import execute
from tests.support.bus_services import slow_stage
from tests.support.bus_tenants import Tenant, tenant
from tests.support.documentation import read
from tests.support.system import System


@pytest.fixture
async def owner(shared: System, monkeypatch: pytest.MonkeyPatch) -> Tenant:
    made = await tenant(shared)
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", shared.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", made.key)
    return made


async def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Runs a command in a thread, since it starts an event loop of its own."""
    code = await asyncio.to_thread(execute, list(words))
    said = capsys.readouterr()
    return code, said.out + said.err


async def asked(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    code, said = await run(capsys, *words, "-o", "json")
    assert code == 0, said
    return json.loads(said)


async def documented(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"## Quickstart\n\n```sh\n(.*?)```", read("docs/bus.md"), re.DOTALL)
    for line in block.splitlines():
        code, said = await run(capsys, *shlex.split(line)[1:])
        assert code == 0, said


async def registered(owner: Tenant) -> None:
    """Registers the same entries over HTTP."""
    await owner.services("billing", "discord-bot")
    command = {"target": "discord-bot", "name": "post-message"}
    await owner.put("routes", **command, queue="discord-posts", dlq="discord-posts-dlq")
    await owner.put("acls", **command, source="billing")
    await owner.put("limits", **command, rate=50)


async def test_commands_of_the_documentation_lead_to_a_delivered_command(
    owner: Tenant, capsys: pytest.CaptureFixture[str]
) -> None:
    async with slow_stage(owner.system):
        await documented(capsys)
    trial = await asked(capsys, "route", "test", "billing", "discord-bot", "post-message")
    assert trial["deliverable"]
    shown = {
        kind: await run(capsys, kind, "list") for kind in ("service", "route", "acl", "limit", "service-key", "change")
    }
    assert {kind: code for kind, (code, _) in shown.items()} == dict.fromkeys(shown, 0)
    assert "queue discord-posts" in shown["route"][1]
    assert "50 / 1 s" in shown["limit"][1]
    assert f"{owner.org}/billing" in shown["acl"][1]
    for words in (["service", "show", "billing"], ["route", "show", "discord-bot", "post-message"]):
        assert (await run(capsys, *words))[0] == 0


async def test_trial_of_an_undeliverable_command_shows_the_fix(
    owner: Tenant, capsys: pytest.CaptureFixture[str]
) -> None:
    await registered(owner)
    code, said = await run(capsys, "acl", "revoke", "billing", "discord-bot", "post-message", "--yes")
    assert (code, "removed" in said) == (0, True)
    code, said = await run(capsys, "route", "test", "billing", "discord-bot", "post-message")
    assert (code, "interlock acl allow billing discord-bot post-message" in said) == (1, True)


async def test_change_is_tried_made_and_reverted(owner: Tenant, capsys: pytest.CaptureFixture[str]) -> None:
    await registered(owner)
    words = ["limit", "set", "discord-bot", "post-message", "--rate", "5"]
    assert (await asked(capsys, *words, "--dry-run"))["change_id"] is None
    assert "would be changed" in (await run(capsys, *words, "--dry-run"))[1]
    made = str((await asked(capsys, *words))["change_id"])
    assert (await asked(capsys, "change", "show", made))["after"]["rate"] == 5
    back = await asked(capsys, "change", "revert", made)
    assert (back["after"]["rate"], back["reverts"]) == (50, int(made))
    code, said = await run(capsys, "change", "revert", made)
    assert (code, "was changed again by change" in said) == (1, True)
    for kind, *entry in (["limit", "discord-bot", "post-message"], ["route", "discord-bot", "post-message"]):
        assert (await asked(capsys, kind, "remove", *entry, "--yes"))["action"] == "delete"
    code, said = await run(capsys, "service", "remove", "billing", "--yes")
    assert (code, "acls still refer to" in said) == (1, True)


async def test_source_gets_its_own_limit(owner: Tenant, capsys: pytest.CaptureFixture[str]) -> None:
    await registered(owner)
    made = await asked(capsys, "limit", "set", "--source", "billing", "--rate", "200")
    assert (made["subject"], made["after"]["target"]) == ("*/*/billing", None)
    assert re.search(rf"any +any +{owner.org}/billing +200 / 1 s", (await run(capsys, "limit", "list"))[1])
    assert (
        "200 every 1 s, strict, of all that billing sends"
        in (await run(capsys, "route", "test", "billing", "discord-bot", "post-message"))[1]
    )
    for words in (["remove", "--yes"], ["remove", "discord-bot", "--yes"]):
        assert (await run(capsys, "limit", *words))[0] == 2
    assert (await run(capsys, "limit", "set", "discord-bot", "--rate", "1"))[0] == 1
    assert (await asked(capsys, "limit", "remove", "--source", "billing", "--yes"))["action"] == "delete"


async def test_keys_are_rotated_revoked_and_shown_to_their_service(
    owner: Tenant, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await registered(owner)
    rotated = await asked(capsys, "service-key", "rotate", "billing", "--overlap-hours", "1")
    assert rotated["version_id"] == "hmac-v2"
    assert (await asked(capsys, "service-key", "revoke", "billing", "hmac-v1", "--yes"))["state"] == "revoked"
    code, said = await run(capsys, "service-key", "config")
    assert (code, "commands:send" in said) == (1, True)
    monkeypatch.setenv("INTERLOCK_API_KEY", await owner.service_key("billing"))
    code, said = await run(capsys, "service-key", "config")
    assert (code, "hmac-v2" in said) == (0, True)
