"""`interlock source`: its output, the events it sends, and its refusals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from interlock.cli.app import execute
from tests.support.source_dags import active_job, deploy, make_tasks, payloads, source_job
from tests.support.system import System


class Terminal:
    """Runs command lines in this process, as an admin of the system's org."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def __call__(self, *line: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(execute, ["source", *line])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    async def json(self, *line: str) -> Any:
        code, out, err = await self(*line, "--output", "json")
        assert code == 0, err
        return json.loads(out)


@pytest.fixture
def terminal(system: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", system.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", system.admin_key)
    return Terminal(capsys)


async def test_all_kinds_of_sources_are_listed(terminal: Terminal, system: System) -> None:
    jobs = [source_job(kind, kind=kind) for kind in ("always_on", "webhook", "manual")]
    await deploy(system, *jobs, source_job("cron", kind="cron", schedule="@daily"))
    await system.pass_of("sources")
    code, out, _ = await terminal("list", "feeds")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert set(lines) == {"always_on", "webhook", "manual", "cron"}
    assert "queued" in lines["always_on"]
    listed = (await terminal.json("list", "feeds"))["sources"]
    assert [(one["job"], one["kind"]) for one in listed] == [(name, name) for name in sorted(lines)]
    assert (await terminal("list", "nothing"))[0] == 1


async def test_events_of_any_form_are_sent_once(terminal: Terminal, system: System) -> None:
    await deploy(system, source_job(outputs=("blocks", "days"), kind="manual"))
    where = ("trigger", "feeds", "src")
    assert await terminal.json(*where, "--payload", '{"n": 1}') == {"events": 0, "triggers": 1}
    assert await terminal.json(*where, "--cursor", "5", "--of", "blocks") == {"events": 1, "triggers": 0}
    assert await terminal.json(*where, "--range", "0-9", "--of", "days") == {"events": 1, "triggers": 0}
    for _ in range(2):
        await terminal.json(*where, "--payload", "2", "--idempotency-key", "k")
    await make_tasks(system)
    assert await payloads(system, await active_job(system)) == ['{"n": 1}', "2"]
    code, _, err = await terminal(*where, "--cursor", "5")
    assert (code, "blocks, days" in err) == (1, True)


@pytest.mark.parametrize(
    "options",
    [(), ("--cursor", "1", "--payload", "1"), ("--range", "9"), ("--payload", "{"), ("--cursor", "-1")],
)
async def test_invalid_event_is_a_usage_error(terminal: Terminal, options: tuple[str, ...]) -> None:
    assert (await terminal("trigger", "feeds", "src", *options))[0] == 2


async def test_secret_is_shown_once_and_replaced_on_request(terminal: Terminal, system: System) -> None:
    await deploy(system, source_job(kind="webhook", auth="token"))
    code, out, _ = await terminal("secret", "feeds", "src")
    assert code == 0
    assert "X-Interlock-Token" in out
    code, _, err = await terminal("secret", "feeds", "src")
    assert (code, "rotate" in err) == (1, True)
    made = await terminal.json("secret", "feeds", "src", "--rotate")
    assert made["path"] in out
    headers = {"X-Interlock-Token": made["secret"]}
    reply = await system.http.post(system.gateway_url + made["path"], content=b"1", headers=headers)
    assert reply.status_code == 200
