"""The search box: by id, by the beginning of a name, with the rights of the caller, and never in another org."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from tests.support.dags import deploy
from tests.support.system import System

DAG = """
name: tokens
jobs:
  - {name: feed, operator: echo, activation: source, source: {kind: manual}, outputs: [blocks]}
publish:
  token-blocks: {from: {job: feed, output: blocks}}
  token-secrets: {from: {job: feed, output: blocks}, read_roles: [admin]}
"""


async def hits(system: System, text: str, key: str | None = None) -> list[tuple[str, str | None]]:
    reply = await system.user("GET", "/v1/search", params={"q": text}, key=key)
    assert reply.status_code == 200, reply.text
    return [(hit["kind"], hit["name"]) for hit in reply.json()["hits"]]


async def key_of(system: System, **request: Any) -> str:
    return str((await system.user("POST", "/v1/keys", json={"user": "x"} | request)).json()["key"])


async def test_everything_is_found_by_its_id(shared: System) -> None:
    run = await shared.submit([{}], name="by-id")
    (task_id,) = await shared.task_ids(run["run_id"])
    for wanted, kind in ((run["run_id"], "run"), (run["job_id"], "job"), (task_id, "task")):
        assert await hits(shared, wanted) == [(kind, "by-id")]
    body = {"kind": "pause", "filter": {"job": "by-id"}}
    operation = (await shared.user("POST", "/v1/bulk-operations", json=body)).json()
    assert await hits(shared, operation["operation_id"]) == [("operation", "pause")]
    assert await hits(shared, str(uuid4())) == []


async def test_names_are_found_by_their_beginning(shared: System) -> None:
    await deploy(shared, DAG)
    await shared.submit([{}], name="tokenizer")
    assert await hits(shared, "token") == [
        ("dag", "tokens"),
        ("dataset", "token-blocks"),
        ("dataset", "token-secrets"),
        ("job", "tokenizer"),
    ]
    assert await hits(shared, " feed ") == [("job", "tokens/feed")]
    reader = await key_of(shared, role="reader")
    assert ("dataset", "token-secrets") not in await hits(shared, "token", reader)


@pytest.mark.parametrize("text", ["%", "_", "'", "a\x00b", "\N{GRINNING FACE}", "x" * 200, "--"])
async def test_odd_text_finds_nothing(shared: System, text: str) -> None:
    assert await hits(shared, text) == []


async def test_another_org_finds_nothing(shared: System) -> None:
    run = await shared.submit([{}], name="secret-search")
    (task_id,) = await shared.task_ids(run["run_id"])
    await shared.user("POST", "/v1/orgs", json={"name": "elsewhere"})
    stranger = await key_of(shared, role="admin", org="elsewhere")
    for text in ("secret", run["run_id"], run["job_id"], task_id):
        assert await hits(shared, text, stranger) == []
