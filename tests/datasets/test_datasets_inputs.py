"""The inputs that a task receives, and the read access of its capability token."""

from __future__ import annotations

import base64
import json
from typing import Any

from tests.support.datasets import CHAIN, bring, claim_of, deploy, finish, got, rebuild, scope, waiting, work
from tests.support.system import System, fence

TWO = """
name: two
jobs:
  - name: left
    activation: source
    source: { kind: manual }
    operator: echo
    outputs: [a]
  - name: right
    activation: source
    source: { kind: manual }
    operator: echo
    outputs: [{ name: b, storage: postgres }]
  - name: join
    operator: echo
    wait_for: WAIT
    inputs:
      - { from: { job: left, output: a }, where: "n = 1" }
      - { from: { job: right, output: b } }
    outputs: [c]
"""


def claims_of(token: str) -> dict[str, Any]:
    """Returns the claims of a token without verifying its signature."""
    body = token.split(".")[1]
    claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    return claims


async def claimed(system: System, dag: str, job: str) -> dict[str, Any]:
    (task_id,) = await waiting(system, dag, job)
    return await system.claim(task_id)


async def test_task_receives_the_scope_of_its_input(still: System) -> None:
    await deploy(still, CHAIN)
    await bring(still, scope(0, 9))
    (task_id,) = await waiting(still, "chain", "double")
    blocks = await got(still, "/v1/datasets/chain:feed:blocks")
    fetched = await still.worker("GET", f"/internal/task-fetch?task_id={task_id}")
    claim = await still.claim(task_id)
    (given,) = claim["task"]["inputs"]
    root = still.kernel.settings.objects_root
    assert given == scope(0, 9) | {
        "input_index": 0,
        "dataset_uuid": blocks["dataset_uuid"],
        "dataset_version": blocks["current_version"],
        "storage": "parquet",
        "read_prefix": f"{root}/dataset/{blocks['dataset_uuid']}/version/{blocks['current_version']}/",
        "where": '"height" > 0',
    }
    assert fetched.json()["task"]["inputs"] == [given]


async def test_batch_claim_gives_each_task_its_own_scope(still: System) -> None:
    await deploy(still, CHAIN)
    for start in (0, 10, 20):
        await bring(still, scope(start, start + 9))
    ids = await waiting(still, "chain", "double")
    batch = await still.claim_many(task_ids=ids, grouped=True, tokens=False)
    assert batch.get("groups", []) == []
    keys = [claim["task"]["inputs"][0]["partition_key"] for claim in batch["claims"]]
    assert sorted(keys) == ["0-9", "10-19", "20-29"]


async def test_job_without_inputs_has_none_and_stays_in_groups(still: System) -> None:
    accepted = await still.submit([1, 2, 3])
    ids = await still.task_ids(accepted["run_id"])
    batch = await still.claim_many(task_ids=ids, grouped=True, tokens=False)
    assert [len(group["tasks"]) for group in batch["groups"]] == [3]
    assert (await still.claim(await still.one()))["task"]["inputs"] == []


async def test_wait_for_all_gives_the_same_scope_of_each_input(still: System) -> None:
    await deploy(still, TWO.replace("WAIT", "all"))
    await bring(still, scope(0, 9), dag="two", job="left")
    assert await waiting(still, "two", "join") == []
    await bring(still, scope(0, 9), dag="two", job="right")
    inputs = (await claimed(still, "two", "join"))["task"]["inputs"]
    assert [(one["input_index"], one["partition_key"], one["storage"]) for one in inputs] == [
        (0, "0-9", "parquet"),
        (1, "0-9", "postgres"),
    ]


async def test_wait_for_any_gives_a_scope_of_the_changed_input(still: System) -> None:
    await deploy(still, TWO.replace("WAIT", "any"))
    await bring(still, scope(0, 9), dag="two", job="right")
    inputs = (await claimed(still, "two", "join"))["task"]["inputs"]
    assert [(one["input_index"], one.get("partition_key")) for one in inputs] == [(0, None), (1, "0-9")]


async def test_task_over_a_stream_receives_its_bounds(still: System) -> None:
    await deploy(still, CHAIN)
    await bring(still, {"cursor": 9})
    await work(still, "chain", "double")
    await bring(still, {"cursor": 30})
    (given,) = (await claimed(still, "chain", "double"))["task"]["inputs"]
    assert (given["start"], given["end"], given["cursor"]) == (10, 30, 30)


async def test_token_names_the_datasets_of_the_jobs_inputs_and_their_files(still: System) -> None:
    await deploy(still, TWO.replace("WAIT", "all"))
    for job in ("left", "right"):
        await bring(still, scope(0, 9), dag="two", job=job)
    claim = await claimed(still, "two", "join")
    a, b = claim["task"]["inputs"]
    claims = claims_of(claim["capability_token"])
    assert claims["datasets"] == [
        {
            "dataset_uuid": a["dataset_uuid"],
            "dataset_version": a["dataset_version"],
            "storage_ref": {
                "scheme": "file",
                "prefix": a["read_prefix"].removeprefix("file://"),
                "glob": "*.parquet",
            },
        },
        {"dataset_uuid": b["dataset_uuid"], "dataset_version": b["dataset_version"]},
    ]
    assert claims["s3"]["read_prefixes"] == [a["read_prefix"]]
    assert all("/_attempts/" in prefix or "/buffers/" in prefix for prefix in claims["s3"]["write_prefixes"])
    beat = await still.attempt("/v1/task/heartbeat", claim["capability_token"], fence(claim) | {"token": True})
    renewed = claims_of(beat.json()["capability_token"])
    assert (renewed["datasets"], renewed["s3"]) == (claims["datasets"], claims["s3"])
    await finish(still, claim, scope(0, 9))


async def test_sources_token_reads_nothing(still: System) -> None:
    await deploy(still, CHAIN)
    claims = claims_of((await claim_of(still, "chain", "feed"))["capability_token"])
    assert (claims["datasets"], claims["s3"]["read_prefixes"]) == ([], [])


async def test_next_task_reads_the_version_its_edge_points_to(still: System) -> None:
    reader = "name: reader\njobs:\n  - { name: r, operator: echo, inputs: [{ from: { dataset: doubled } }] }\n"
    await deploy(still, CHAIN)
    await deploy(still, reader)
    await bring(still, scope(0, 9))
    await work(still, "chain", "double")
    first = (await claimed(still, "reader", "r"))["task"]["inputs"][0]["dataset_version"]
    await deploy(still, CHAIN.replace("height > 0", "height > 1"))
    await rebuild(still, "double", "total")
    current = (await got(still, "/v1/datasets/doubled"))["current_version"]
    assert current != first
    while await still.pass_of("scopes"):
        continue
    given = (await claimed(still, "reader", "r"))["task"]["inputs"][0]
    assert given["dataset_version"] == current
