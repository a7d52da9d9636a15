"""CLI commands that operate the bus: their output for people and for programs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from interlock.bus.alerts import Monitor
from interlock.bus.loops import TelemetryBatches
from interlock.bus.telemetry import emit
from interlock.cli.app import execute
from interlock.wire.bus_events import CommandInvalid
from tests.support.bus_targets import target
from tests.support.system import System


class Terminal:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def __call__(self, *line: str) -> tuple[int, str]:
        code = await asyncio.to_thread(execute, list(line))
        said = self._capsys.readouterr()
        return code, said.out + said.err

    async def json(self, *line: str) -> Any:
        code, out = await self(*line, "--output", "json")
        assert code == 0, out
        # The system runs in this process, and writes its log to the same stream.
        return json.loads(out[out.index("{\n") :])


@pytest.fixture
def terminal(shared: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", shared.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", shared.admin_key)
    return Terminal(capsys)


async def test_alerts_are_listed_routed_and_resolved(shared: System, terminal: Terminal) -> None:
    assert "There are no alerts." in (await terminal("alert", "list"))[1]
    async with shared.kernel.stores.database.transaction() as connection:
        await emit(connection, [(shared.org_id, CommandInvalid(reason="bad"))] * 10)
    await TelemetryBatches(shared.kernel.stores.database, shared.kernel.settings).run_once()
    (alert,) = (await terminal.json("alert", "list"))["alerts"]
    assert alert["told"] == 10
    (unrouted,) = (await terminal.json("alert", "unrouted"))["alerts"]
    assert unrouted["alert_id"] == alert["alert_id"]
    assert "resolved by root" in (await terminal("alert", "resolve", alert["alert_id"]))[1]
    assert (await terminal("alert", "set", "snavio.command.invalid", "--nowhere"))[0] == 1
    assert (await terminal("alert", "set", "snavio.command.invalid"))[0] == 2
    await shared.user("POST", "/v1/webhooks", json={"name": "oncall", "url": "https://hooks.example/"})
    code, out = await terminal("alert", "set", "snavio.command.invalid", "--webhook", "oncall", "--dashboard")
    assert (code, "dashboard, webhook oncall" in out) == (0, True)
    assert "webhook oncall" in (await terminal("alert", "channels"))[1]


async def test_health_of_routes_is_shown(shared: System, terminal: Terminal) -> None:
    bot = await target(shared)
    await bot.send("a", "b")
    await Monitor(shared.kernel.stores.database, shared.kernel.settings).run_once()
    shown = (await terminal.json("route", "health"))["routes"]
    assert [(each["status"], each["depth"]) for each in shown if each["target"] == bot.service] == [("healthy", 2)]
    assert bot.service in (await terminal("route", "health"))[1]
    assert bot.service not in (await terminal("route", "health", "--bad"))[1]


async def test_replay_is_started_shown_listed_and_canceled(terminal: Terminal) -> None:
    assert "There are no replays." in (await terminal("replay", "list"))[1]
    filters = ("--dead-letters", "mail", "--source", "billing", "--since", "2026-01-31T12:00:00Z")
    started = await terminal.json("replay", "start", "--reason", "it was down", *filters, "--rate", "2", "--dry-run")
    assert (started["state"], started["dry_run"], started["filters"]["queue"]) == ("Selecting", True, "mail")
    shown = (await terminal("replay", "show", started["replay_id"]))[1]
    assert "it was down" in shown
    assert "queue mail, source billing, since 2026-01-31 12:00:00+00:00" in shown
    assert "2 per second, 100000 in total" in shown
    assert "it was down" in (await terminal("replay", "list"))[1]
    assert (await terminal.json("replay", "cancel", started["replay_id"]))["state"] == "Canceled"
    for wrong in ("yesterday", "2026-01-31T12:00:00"):
        assert (await terminal("replay", "start", "--reason", "why", "--since", wrong))[0] == 2
