"""`interlock dataset` against a real gateway."""

from __future__ import annotations

import pytest

from interlock.wire.access import Role
from tests.cli.test_cli import Terminal
from tests.support.datasets import CHAIN, READER, built, deploy, key_of, waiting
from tests.support.system import System


@pytest.fixture
def terminal(still: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", still.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", still.admin_key)
    return Terminal(still, capsys)


async def test_datasets_are_listed_and_shown_as_table_and_json(terminal: Terminal) -> None:
    await built(terminal.system, (0, 9), (10, 19))
    printed = await terminal("dataset", "list")
    assert "doubled (chain/double/doubled)" in printed.out
    assert "chain/feed/blocks" in printed.out
    listed = await terminal.json("dataset", "list", "--limit", "2")
    assert len(listed["datasets"]) == 2
    rest = await terminal.json("dataset", "list", "--cursor", listed["next_cursor"])
    assert len(rest["datasets"]) == 1
    shown = await terminal("dataset", "show", "chain/double/doubled")
    assert "Current" in shown.out
    assert "0-19" in shown.out
    assert (await terminal.json("dataset", "show", "doubled"))["names"] == ["doubled"]


async def test_partitions_are_shown_within_a_range(terminal: Terminal) -> None:
    await built(terminal.system, (0, 9), (10, 19), (20, 29))
    found = await terminal.json("dataset", "partitions", "doubled", "--within", "12-25")
    assert [one["partition_key"] for one in found["partitions"]] == ["10-19", "20-29"]
    printed = await terminal("dataset", "partitions", "doubled", "--limit", "1")
    assert "0-9" in printed.out
    assert "10-19" not in printed.out
    printed = await terminal("dataset", "partitions", "doubled", "--within", "12")
    assert printed.code == 2
    assert "START-END" in printed.err


async def test_lineage_is_drawn_as_a_tree(terminal: Terminal) -> None:
    await deploy(terminal.system, CHAIN)
    await deploy(terminal.system, READER)
    printed = await terminal("dataset", "lineage", "doubled")
    lines = [line.rstrip() for line in printed.out.splitlines()]
    assert lines == [
        "doubled (chain/double/doubled)",
        "├── written by chain/double",
        '│   └── chain/feed/blocks where "height" > 0',
        "│       └── written by chain/feed",
        "├── read by chain/total",
        "│   └── chain/total/totals",
        "└── read by reader/report",
        "    └── reader/report/reports",
    ]
    near = await terminal("dataset", "lineage", "chain/feed/blocks", "--direction", "down", "--depth", "1")
    assert "truncated; increase --depth" in near.out
    assert "written by" not in near.out
    assert (await terminal.json("dataset", "lineage", "doubled"))["truncated"] is False


async def test_range_is_invalidated_after_a_dry_run(terminal: Terminal) -> None:
    await built(terminal.system, (0, 9), (10, 19))
    printed = await terminal("dataset", "invalidate", "doubled", "0-9", "--reason", "why not", "--dry-run")
    assert printed.out == "1 scopes would be recomputed, and everything downstream of them.\n"
    assert await waiting(terminal.system, "chain", "double") == []
    done = await terminal.json("dataset", "invalidate", "doubled", "0-9", "--reason", "why not", "--yes")
    assert done["scopes"] == 1
    assert len(await waiting(terminal.system, "chain", "double")) == 1
    none = await terminal("dataset", "invalidate", "doubled", "500-600", "--reason", "why not")
    assert none.out == "No data exists in this range; nothing was changed.\n"
    printed = await terminal("dataset", "invalidate", "doubled", "0-9")
    assert printed.code == 2


async def test_refusal_is_shown_as_a_sentence(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    await built(terminal.system, (0, 9))
    printed = await terminal("dataset", "show", "nothing")
    assert (printed.code, printed.out) == (1, "")
    assert "There is no dataset 'nothing'" in printed.err
    monkeypatch.setenv("INTERLOCK_API_KEY", await key_of(terminal.system, Role.READER))
    printed = await terminal("dataset", "invalidate", "doubled", "0-9", "--reason", "why not", "--yes")
    assert printed.code == 1
    assert "jobs:write" in printed.err


async def test_explain_shows_the_state_of_a_scope(terminal: Terminal) -> None:
    await built(terminal.system, (0, 9))
    printed = await terminal("dataset", "explain", "chain/double", "0-9")
    assert "done" in printed.out
    assert (await terminal.json("dataset", "explain", "chain/double", "10-19"))["reason"] == "input_missing"
    assert (await terminal("dataset", "explain", "double", "0-9")).code == 2
