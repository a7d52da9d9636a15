"""`interlock dag` against a real gateway: plan, deploy, wait, roll back, and their output."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cli.test_cli import Terminal
from tests.dags.test_cutover import chain
from tests.support.deployed_dags import DeployedDags
from tests.support.system import System, until


@pytest.fixture
def terminal(system: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", system.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", system.admin_key)
    return Terminal(system, capsys)


def written(folder: Path, text: str) -> str:
    file = folder / "chain.yaml"
    file.write_text(text)
    return str(file)


async def test_file_is_planned_deployed_shown_and_drawn(terminal: Terminal, tmp_path: Path) -> None:
    file = written(tmp_path, chain())
    planned = await terminal("dag", "plan", file)
    assert planned.code == 0
    assert "would be deployed" in planned.out
    assert "+ derive added facts" in " ".join(planned.out.split())
    assert (await terminal("dag", "show", "chain")).code == 1
    deployed = await terminal("dag", "deploy", file, "--wait")
    assert (deployed.code, "is Current" in deployed.out) == (0, True)
    assert [dag["name"] for dag in (await terminal.json("dag", "list"))["dags"]] == ["chain"]
    shown = await terminal("dag", "show", "chain")
    assert "follow" in shown.out
    assert "facts" in shown.out
    drawn, from_file = await terminal("dag", "graph", "chain"), await terminal("dag", "graph", file)
    assert drawn.code == 0
    assert sorted(drawn.out.split()) == sorted(from_file.out.split())
    listed = await terminal("job", "list")
    assert "chain/derive" in listed.out


async def test_problems_of_a_deploy_name_the_users_file(terminal: Terminal, tmp_path: Path) -> None:
    file = written(tmp_path, chain().replace("operator: echo", "operator: ecko", 1))
    for command in ("plan", "deploy"):
        refused = await terminal("dag", command, file)
        assert (refused.code, f"{file}:" in refused.err) == (1, True), refused


async def test_a_dag_is_paused_resumed_and_deleted(terminal: Terminal, tmp_path: Path) -> None:
    file = written(tmp_path, chain())
    assert (await terminal("dag", "deploy", file)).code == 0
    paused = await terminal("dag", "pause", "chain", "--reason", "the node is down")
    assert "interlock dag resume chain" in paused.out
    assert "by root: the node is down" in (await terminal("dag", "show", "chain")).out
    refused = await terminal("job", "pause", "chain/derive")
    assert (refused.code, "interlock dag pause chain" in refused.err) == (1, True)
    assert "chain is resumed." in (await terminal("dag", "resume", "chain")).out
    dry = await terminal("dag", "delete", "chain", "--dry-run")
    assert "would be deleted" in dry.out
    assert (await terminal("dag", "show", "chain")).code == 0
    assert "is deleted" in (await terminal("dag", "delete", "chain", "--yes")).out
    assert (await terminal("dag", "show", "chain")).code == 1


async def test_deploy_wait_shows_build_progress_and_ends_with_the_cutover(terminal: Terminal, tmp_path: Path) -> None:
    deployed = DeployedDags(terminal.system)
    await deployed.deploy(chain())
    await deployed.emit("chain", "follow", (0, 9), (10, 19))
    await deployed.work("chain", "derive", "roll")
    waiting = asyncio.create_task(terminal("dag", "deploy", written(tmp_path, chain(2)), "--wait"))
    await until(lambda: terminal.system.value("select 1 from interlock.dag_versions where state = 'Building'"))
    await deployed.work("chain", "derive", "roll")
    assert await terminal.system.pass_of("cutover") == 1
    done = await waiting
    assert done.code == 0, done
    assert "follow.blocks: 2 partitions" in done.out
    assert done.out.rstrip().endswith("is current.")
    versions = (await terminal.json("dag", "versions", "chain"))["versions"]
    assert [version["state"] for version in versions] == ["Current", "Retired"]
    back = await terminal("dag", "rollback", "chain", "--to", versions[1]["content_hash"][:8])
    assert back.out == f"chain: version {versions[1]['content_hash'][:12]} is Current.\n"
    purged = await terminal("dag", "purge", "chain", versions[0]["content_hash"][:8], "--yes")
    assert purged.out == f"chain: version {versions[0]['content_hash'][:12]} is Purged.\n"
    nothing = await terminal("dag", "cutover", "chain", "--yes")
    assert (nothing.code, "no version under construction" in nothing.err) == (1, True)


async def test_deploy_wait_fails_when_its_version_is_abandoned(terminal: Terminal, tmp_path: Path) -> None:
    deployed = DeployedDags(terminal.system)
    await deployed.deploy(chain())
    await deployed.emit("chain", "follow", (0, 9))
    waiting = asyncio.create_task(terminal("dag", "deploy", written(tmp_path, chain(2)), "--wait"))
    await until(lambda: terminal.system.value("select 1 from interlock.dag_versions where state = 'Building'"))
    await deployed.deploy(chain(3))
    done = await waiting
    assert (done.code, "abandoned" in done.err) == (1, True)


async def test_file_with_problems_is_refused_with_all_of_them(terminal: Terminal, tmp_path: Path) -> None:
    done = await terminal("dag", "deploy", written(tmp_path, chain().replace("job: follow", "job: folow")))
    assert (done.code, "write follow" in done.err) == (1, True)
    missing = await terminal("dag", "deploy", str(tmp_path / "none.yaml"))
    assert missing.code == 2
