"""The registry over HTTP: names, versions, partitions, events, lineage, and read access."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from interlock.wire.access import Role
from tests.http.test_pages import walked
from tests.support.datasets import CHAIN, READER, bring, built, deploy, got, key_of, rebuild, scope, stranger
from tests.support.system import System

PATHS = ["", "/partitions", "/events", "/lineage"]


async def uuid_of(system: System, output: str) -> str:
    return str(await system.value("select dataset_uuid from interlock.datasets where output_name = $1", output))


async def test_dataset_is_found_by_each_of_its_names(still: System) -> None:
    await deploy(still, CHAIN)
    uuid = await uuid_of(still, "doubled")
    for name in ("doubled", "chain:double:doubled", uuid):
        dataset = await got(still, f"/v1/datasets/{name}")
        assert (dataset["dataset_uuid"], dataset["names"]) == (uuid, ["doubled"])
        assert (dataset["dag"], dataset["job"], dataset["output"]) == ("chain", "double", "doubled")
    unnamed = await got(still, "/v1/datasets/chain:feed:blocks")
    assert unnamed["names"] == []


NOBODYS = "d627e271-4790-41ec-afdd-8d665459ec05"


@pytest.mark.parametrize("name", ["nothing", "chain:feed:nothing", "a:b", "a:b:c:d", NOBODYS, "%00", "a:%00:c"])
@pytest.mark.parametrize("path", PATHS)
async def test_unknown_dataset_is_not_found(shared: System, name: str, path: str) -> None:
    reply = await shared.user("GET", f"/v1/datasets/{name}{path}")
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")


async def test_dataset_shows_its_versions_and_their_contents(still: System) -> None:
    await built(still, (0, 9), (10, 19))
    dataset = await got(still, "/v1/datasets/doubled")
    (version,) = dataset["versions"]
    assert version["dataset_version"] == dataset["current_version"]
    assert (version["state"], version["storage"], version["progress"]) == ("Current", "parquet", "partition")
    assert (version["start"], version["end"], version["partitions"]) == (0, 19, 2)
    assert not version["more_partitions"]
    assert dataset["read_roles"] == ["reader", "writer", "admin"]


async def test_stream_shows_its_cursor(still: System) -> None:
    await deploy(still, CHAIN)
    await bring(still, {"cursor": 41})
    (version,) = (await got(still, "/v1/datasets/chain:feed:blocks"))["versions"]
    assert (version["progress"], version["cursor"], version["partitions"]) == ("cursor", 41, 0)


async def test_replaced_version_is_retired_and_still_readable(still: System) -> None:
    await built(still, (0, 9))
    old = (await got(still, "/v1/datasets/doubled"))["current_version"]
    await deploy(still, CHAIN.replace("height > 0", "height > 1"))
    states = {v["dataset_version"]: v["state"] for v in (await got(still, "/v1/datasets/doubled"))["versions"]}
    assert states.pop(old) == "Current"
    assert list(states.values()) == ["Building"]
    await rebuild(still, "double", "total")
    states = {v["dataset_version"]: v["state"] for v in (await got(still, "/v1/datasets/doubled"))["versions"]}
    assert states.pop(old) == "Retired"
    assert list(states.values()) == ["Current"]
    partitions = await got(still, f"/v1/datasets/doubled/partitions?version={old}")
    assert [one["partition_key"] for one in partitions["partitions"]] == ["0-9"]


async def test_pages_contain_each_dataset_once(still: System) -> None:
    await deploy(still, CHAIN)
    await deploy(still, READER)
    found = await walked(still, "/v1/datasets", "datasets", 2)
    assert sorted(one["output"] for one in found) == ["blocks", "doubled", "reports", "totals"]
    assert len({one["dataset_uuid"] for one in found}) == 4


# Partitions and events


async def test_partitions_are_ordered_and_filtered_by_range(still: System) -> None:
    await built(still, (20, 29), (0, 9), (10, 19), (40, 49))
    partitions = await walked(still, "/v1/datasets/doubled/partitions", "partitions", 3)
    assert [one["partition_key"] for one in partitions] == ["0-9", "10-19", "20-29", "40-49"]
    assert partitions[0]["row_count"] == 3
    assert partitions[0]["location"].endswith("/part.parquet")

    async def within(first: int, last: int) -> list[str]:
        page = await got(still, f"/v1/datasets/doubled/partitions?from={first}&to={last}")
        return [one["partition_key"] for one in page["partitions"]]

    assert await within(5, 12) == ["0-9", "10-19"]
    assert await within(9, 9) == ["0-9"]
    assert await within(30, 39) == []
    assert await within(35, 100) == ["40-49"]
    assert await within(-10, -1) == []
    assert await within(12, 5) == []


async def test_version_of_another_dataset_has_no_partitions_here(still: System) -> None:
    await built(still, (0, 9))
    other = (await got(still, "/v1/datasets/chain:feed:blocks"))["current_version"]
    for version in (other, uuid4()):
        reply = await still.user("GET", f"/v1/datasets/doubled/partitions?version={version}")
        assert reply.status_code == 404


async def test_events_come_newest_first(still: System) -> None:
    await built(still, (0, 9), (10, 19), (20, 29))
    found = await walked(still, "/v1/datasets/doubled/events", "events", 2)
    assert [one["partition_key"] for one in found] == ["20-29", "10-19", "0-9"]
    assert [one["event_id"] for one in found] == sorted((one["event_id"] for one in found), reverse=True)
    assert found[0]["commit"] > found[1]["commit"] > 0


@pytest.mark.parametrize("cursor", ["x", "1.5", "--1", "9" * 40, "%C2%B2", ""])
@pytest.mark.parametrize("path", ["/v1/datasets", "/v1/datasets/doubled/partitions", "/v1/datasets/doubled/events"])
async def test_invalid_cursor_is_refused(shared: System, path: str, cursor: str) -> None:
    reply = await shared.user("GET", f"{path}?cursor={cursor}")
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_cursor")


# Lineage


def drawn(lineage: dict[str, Any]) -> set[str]:
    """Returns edges as `job reads dataset` and `job writes dataset`."""
    jobs = {job["job_id"]: job["job"] for job in lineage["jobs"]}
    datasets = {one["dataset_uuid"]: one["output"] for one in lineage["datasets"]}
    return {f"{jobs[e['job_id']]} {e['kind']} {datasets[e['dataset_uuid']]}" for e in lineage["edges"]}


UP = {"double writes doubled", "double reads blocks", "feed writes blocks"}
DOWN = {"total reads doubled", "total writes totals", "report reads doubled", "report writes reports"}


async def test_lineage_reaches_across_dags_in_both_directions(still: System) -> None:
    await deploy(still, CHAIN)
    await deploy(still, READER)
    for direction, expected in (("up", UP), ("down", DOWN)):
        part = await got(still, f"/v1/datasets/doubled/lineage?direction={direction}")
        assert drawn(part) == expected
    found = await got(still, "/v1/datasets/doubled/lineage")
    assert drawn(found) == UP | DOWN
    assert not found["truncated"]
    depths = {one["output"]: one["depth"] for one in found["datasets"]}
    assert depths == {"blocks": -1, "doubled": 0, "totals": 1, "reports": 1}
    conditions = [edge["where"] for edge in found["edges"] if edge["where"]]
    assert conditions == ['"height" > 0']


async def test_lineage_stops_at_its_depth_and_reports_truncation(still: System) -> None:
    await deploy(still, CHAIN)
    near = await got(still, "/v1/datasets/chain:feed:blocks/lineage?depth=1")
    assert drawn(near) == {"feed writes blocks", "double reads blocks", "double writes doubled"}
    assert near["truncated"]
    far = await got(still, "/v1/datasets/chain:feed:blocks/lineage?depth=2")
    assert "total writes totals" in drawn(far)
    assert not far["truncated"]
    for depth in (0, 51, "x"):
        assert (await still.user("GET", f"/v1/datasets/doubled/lineage?depth={depth}")).status_code == 400


# Read access


async def test_read_roles_protect_a_dataset_under_each_of_its_names(still: System) -> None:
    closed = CHAIN.replace("output: doubled } }\n", "output: doubled }, read_roles: [admin] }\n")
    assert "read_roles" in closed
    await deploy(still, closed)
    reader, uuid = await key_of(still, Role.READER), await uuid_of(still, "doubled")
    for name in ("doubled", "chain:double:doubled", uuid):
        for path in PATHS:
            reply = await still.user("GET", f"/v1/datasets/{name}{path}", key=reader)
            assert (reply.status_code, reply.json()["code"]) == (403, "dataset_not_readable")
            assert (await still.user("GET", f"/v1/datasets/{name}{path}")).status_code == 200
    listed = await got(still, "/v1/datasets", reader)
    assert sorted(one["output"] for one in listed["datasets"]) == ["blocks", "totals"]
    assert (await got(still, "/v1/datasets/doubled"))["read_roles"] == ["admin"]
    writer = await key_of(still, Role.WRITER)
    body = {"start": 0, "end": 9, "reason": "look"}
    reply = await still.user("POST", "/v1/datasets/doubled/invalidate", key=writer, json=body)
    assert reply.status_code == 403


async def test_read_roles_change_with_the_next_deploy_and_rebuild_nothing(still: System) -> None:
    await built(still, (0, 9))
    version = (await got(still, "/v1/datasets/doubled"))["current_version"]
    closed = CHAIN.replace("output: doubled } }\n", "output: doubled }, read_roles: [writer, admin] }\n")
    await deploy(still, closed)
    after = await got(still, "/v1/datasets/doubled")
    assert (after["read_roles"], after["current_version"]) == (["writer", "admin"], version)
    assert (await still.user("GET", "/v1/datasets/doubled", key=await key_of(still, Role.READER))).status_code == 403
    await deploy(still, CHAIN)
    assert (await still.user("GET", "/v1/datasets/doubled", key=await key_of(still, Role.READER))).status_code == 200


async def test_other_org_sees_nothing(still: System) -> None:
    await built(still, (0, 9))
    key, uuid = await stranger(still), await uuid_of(still, "doubled")
    assert (await got(still, "/v1/datasets", key))["datasets"] == []
    for name in ("doubled", "chain:double:doubled", uuid):
        for path in PATHS:
            assert (await still.user("GET", f"/v1/datasets/{name}{path}", key=key)).status_code == 404
        body = {"start": 0, "end": 9, "reason": "curious"}
        reply = await still.user("POST", f"/v1/datasets/{name}/invalidate", key=key, json=body)
        assert reply.status_code == 404
    explain = "/v1/dags/chain/jobs/double/explain?start=0&end=9"
    assert (await still.user("GET", explain, key=key)).status_code == 404


async def test_same_names_in_two_orgs_are_two_datasets(still: System) -> None:
    await built(still, (0, 9))
    org = await still.kernel.access.principals.create_org("elsewhere")
    await deploy(still, CHAIN, org.org_id)
    key = await key_of(still, Role.READER, org.org_id)
    theirs = await got(still, "/v1/datasets/doubled", key)
    assert theirs["dataset_uuid"] != (await got(still, "/v1/datasets/doubled"))["dataset_uuid"]
    assert theirs["versions"][0]["partitions"] == 0
    assert len(drawn(await got(still, "/v1/datasets/doubled/lineage", key))) == 5


async def test_dataset_of_a_job_outside_dags_is_found_by_its_uuid(still: System) -> None:
    output = {"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())}
    claim = await still.claim(await still.one(outputs=[output]))
    reply = await still.complete(claim, events=[output | scope(0, 9)])
    assert reply.status_code == 200
    found = await got(still, f"/v1/datasets/{output['dataset_uuid']}")
    assert (found["dag"], found["versions"][0]["partitions"]) == (None, 1)
    assert (await got(still, f"/v1/datasets/{output['dataset_uuid']}/lineage"))["jobs"] == []
