"""S3 credentials of attempts, on a real S3 with a real STS: they cover the attempt's prefixes and nothing else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

import aioboto3
import pytest
from botocore.exceptions import ClientError

from interlock.access.prefixes import bucket_policy, canonical, session_policy
from interlock.datasets.credentials import session_name
from interlock.errors import Unavailable
from interlock.stores.objects.s3 import Sts
from tests.conftest import copied
from tests.support.dags import deploy
from tests.support.s3 import ROLE, S3
from tests.support.system import System, fence, running

DAG = """
name: chain
jobs:
  - { name: feed, operator: echo, activation: source, source: { kind: manual }, outputs: [logs] }
  - name: derive
    operator: echo
    inputs: [{ from: { job: feed, output: logs } }]
    outputs: [facts]
    heartbeat_timeout_seconds: 3600
    timeout_seconds: 7200
"""

# aioboto3 generates clients at run time, so they have no static types.
Client = Any
Call = Callable[[Client, "Place"], Awaitable[Any]]


@pytest.fixture(scope="module", autouse=True)
def _keys(s3: S3) -> Any:
    """Sets the credentials that the AWS credential chain of the dispatcher finds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            patch.setenv(name, s3.environment[name])
        yield


@pytest.fixture(scope="module")
async def system(
    s3: S3, postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[System]:
    there: dict[str, Any] = {"objects_url": s3.root, "objects_endpoint": s3.endpoint, "objects_region": s3.region}
    asking: dict[str, Any] = {"credentials_role_arn": ROLE, "sts_endpoint": s3.endpoint}
    async with (
        copied(postgres_url, template) as url,
        running(url, tmp_path_factory.mktemp("sts"), **there, **asking) as started,
    ):
        await deploy(started, DAG)
        await started.pass_of("cutover")
        yield started


async def held(system: System, job: str) -> dict[str, Any]:
    task_id = uuid4()
    await system.value(
        "insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, payload)"
        ' select $1, org_id, job_id, 3, 0, \'{"start": 0, "end": 9}\' from interlock.jobs where name = $2',
        task_id,
        job,
    )
    return await system.claim(str(task_id))


async def minted(system: System, claim: dict[str, Any]) -> dict[str, Any]:
    reply = await system.attempt("/v1/task/credentials", claim["capability_token"], fence(claim))
    assert reply.status_code == 200, reply.text
    given: dict[str, Any] = reply.json()
    return given


@asynccontextmanager
async def client(s3: S3, given: dict[str, Any]) -> AsyncIterator[Client]:
    session = aioboto3.Session(
        given["access_key_id"], given["secret_access_key"], given.get("session_token"), region_name=s3.region
    )
    async with session.client("s3", endpoint_url=s3.endpoint) as opened:
        yield opened


def administrator(s3: S3) -> dict[str, str]:
    return {"access_key_id": s3.access_key, "secret_access_key": s3.secret_key}


@dataclass(frozen=True)
class Place:
    bucket: str
    key: str
    readable: str
    """An object that the attempt may read."""
    writable: str
    """A prefix that it may write to."""


@dataclass(frozen=True)
class Attempt:
    client: Client
    claim: dict[str, Any]
    given: dict[str, Any]
    bucket: str

    @property
    def read(self) -> str:
        return self._key(self.claim["task"]["inputs"][0]["read_prefix"])

    @property
    def written(self) -> str:
        return self._key(self.claim["task"]["outputs"][0]["write_prefix"])

    @property
    def buffered(self) -> str:
        return self._key(self.claim["task"]["outputs"][0]["buffer_prefix"])

    def place(self, key: str) -> Place:
        return Place(self.bucket, key, f"{self.read}x", self.written)

    def _key(self, uri: str) -> str:
        return uri.removeprefix(f"s3://{self.bucket}/")


@pytest.fixture(scope="module")
async def attempt(system: System, s3: S3) -> AsyncIterator[Attempt]:
    """An attempt that may read one dataset and write another, with objects in all places that it might attack."""
    claim = await held(system, "derive")
    given = await minted(system, claim)
    async with client(s3, given) as its, client(s3, administrator(s3)) as admin:
        found = Attempt(its, claim, given, s3.bucket)
        for key in (f"{found.read}x", *(outside(found) for outside in OUTSIDE.values())):
            await admin.put_object(Bucket=s3.bucket, Key=key, Body=b"there")
        yield found


OUTSIDE: dict[str, Callable[[Attempt], str]] = {
    "the bucket's top": lambda _: "secret",
    "the root of objects": lambda _: "root/secret",
    "another dataset": lambda _: f"root/dataset/{uuid4()}/version/{uuid4()}/x",
    "another version": lambda one: f"{one.read.rsplit('/', 2)[0]}/{uuid4()}/x",
    "a version that begins alike": lambda one: f"{one.read[:-1]}0/x",
    "the next attempt": lambda one: f"{one.written.removesuffix('1/')}2/x",
    "an attempt that begins alike": lambda one: f"{one.written[:-1]}1/x",
    "batches of another task": lambda one: f"{one.buffered.rsplit('/', 3)[0]}/{uuid4()}/1/x",
}

_INTO: dict[str, Call] = {
    "put": lambda s3, at: s3.put_object(Bucket=at.bucket, Key=at.key, Body=b"x"),
    "copy to": lambda s3, at: s3.copy_object(
        Bucket=at.bucket, Key=at.key, CopySource={"Bucket": at.bucket, "Key": at.readable}
    ),
    "multipart": lambda s3, at: s3.create_multipart_upload(Bucket=at.bucket, Key=at.key),
    "delete": lambda s3, at: s3.delete_object(Bucket=at.bucket, Key=at.key),
    "tag": lambda s3, at: s3.put_object_tagging(Bucket=at.bucket, Key=at.key, Tagging={"TagSet": []}),
    "acl": lambda s3, at: s3.put_object_acl(Bucket=at.bucket, Key=at.key, ACL="public-read"),
}
_FROM: dict[str, Call] = {
    "get": lambda s3, at: s3.get_object(Bucket=at.bucket, Key=at.key),
    "head": lambda s3, at: s3.head_object(Bucket=at.bucket, Key=at.key),
    "copy from": lambda s3, at: s3.copy_object(
        Bucket=at.bucket, Key=f"{at.writable}copy", CopySource={"Bucket": at.bucket, "Key": at.key}
    ),
    "list": lambda s3, at: s3.list_objects_v2(Bucket=at.bucket, Prefix=at.key.rsplit("/", 1)[0] + "/"),
    "list by the beginning of a name": lambda s3, at: s3.list_objects_v2(Bucket=at.bucket, Prefix=at.key[:-1]),
}


async def refused(call: Awaitable[Any]) -> None:
    with pytest.raises(ClientError) as refusal:
        await call
    assert refusal.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


@pytest.mark.parametrize("where", OUTSIDE)
async def test_credentials_have_no_access_outside_their_prefixes(attempt: Attempt, where: str) -> None:
    at = attempt.place(OUTSIDE[where](attempt))
    for call in (_INTO | _FROM).values():
        await refused(call(attempt.client, at))


async def test_read_prefix_cannot_be_written(attempt: Attempt) -> None:
    at = attempt.place(f"{attempt.read}x")
    for call in _INTO.values():
        await refused(call(attempt.client, at))
    await refused(attempt.client.put_object(Bucket=attempt.bucket, Key=f"{attempt.read}_attempts/new", Body=b""))


@pytest.mark.parametrize("prefix", ["", "root", "root/", "root/dataset/", "root/buffers/", "root/data*"])
async def test_parents_of_the_prefixes_cannot_be_listed(attempt: Attempt, prefix: str) -> None:
    await refused(attempt.client.list_objects_v2(Bucket=attempt.bucket, Prefix=prefix))
    await refused(attempt.client.list_objects(Bucket=attempt.bucket, Prefix=prefix))


async def test_bucket_itself_is_inaccessible(attempt: Attempt) -> None:
    its, bucket = attempt.client, {"Bucket": attempt.bucket}
    await refused(its.list_objects_v2(**bucket))
    await refused(its.get_bucket_policy(**bucket))
    await refused(its.put_bucket_policy(**bucket, Policy="{}"))
    await refused(its.delete_bucket(**bucket))
    await refused(its.create_bucket(Bucket=f"new-{uuid4()}"))


async def test_read_prefix_is_readable(attempt: Attempt) -> None:
    at = attempt.place(f"{attempt.read}x")
    for name in ("get", "head", "copy from"):
        await _FROM[name](attempt.client, at)
    listed = await attempt.client.list_objects_v2(Bucket=attempt.bucket, Prefix=attempt.read)
    assert [each["Key"] for each in listed["Contents"]] == [at.key]


async def test_write_prefix_is_writable_and_readable(attempt: Attempt) -> None:
    its, bucket = attempt.client, attempt.bucket
    for prefix in (attempt.written, attempt.buffered):
        await its.put_object(Bucket=bucket, Key=f"{prefix}deep/x", Body=b"rows")
        found = await its.get_object(Bucket=bucket, Key=f"{prefix}deep/x")
        assert await found["Body"].read() == b"rows"
        listed = await its.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}deep/")
        assert [each["Key"] for each in listed["Contents"]] == [f"{prefix}deep/x"]
    whole = {"Bucket": bucket, "Key": f"{attempt.written}large"}
    upload = {"UploadId": (await its.create_multipart_upload(**whole))["UploadId"]}
    part = await its.upload_part(**whole, **upload, PartNumber=1, Body=b"rows")
    assert len((await its.list_parts(**whole, **upload))["Parts"]) == 1
    parts = [{"PartNumber": 1, "ETag": part["ETag"]}]
    await its.complete_multipart_upload(**whole, **upload, MultipartUpload={"Parts": parts})
    upload = {"UploadId": (await its.create_multipart_upload(**whole))["UploadId"]}
    await its.abort_multipart_upload(**whole, **upload)


# Lifetime and identity


async def test_credentials_name_the_endpoint_and_expire_with_the_lease(attempt: Attempt, s3: S3) -> None:
    given, claim = attempt.given, attempt.claim
    assert (given["scheme"], given["endpoint"], given["region"]) == ("s3", s3.endpoint, s3.region)
    assert datetime.fromisoformat(given["expiration"]) <= datetime.fromisoformat(claim["lease_expires_at"])
    assert "object_token" not in given
    assert given["read_prefixes"] == [claim["task"]["inputs"][0]["read_prefix"]]


async def test_short_lease_is_enforced_by_a_policy_condition(system: System, s3: S3) -> None:
    claim = await held(system, "feed")
    given = await minted(system, claim)
    assert given["expiration"] == claim["lease_expires_at"]
    key = given["write_prefixes"][1].removeprefix(f"s3://{s3.bucket}/") + "x"
    async with client(s3, given) as its:
        # This server does not support conditions on the time. It refuses what it cannot evaluate, as any other does.
        await refused(its.put_object(Bucket=s3.bucket, Key=key, Body=b"x"))


async def test_ended_attempt_gets_no_credentials(system: System) -> None:
    claim = await held(system, "derive")
    await system.complete(claim, "Canceled")
    reply = await system.attempt("/v1/task/credentials", claim["capability_token"], fence(claim))
    assert (reply.status_code, reply.json()["code"]) == (409, "fenced")


async def test_session_is_named_after_the_attempt() -> None:
    name = session_name(uuid4(), 2**31 - 1)
    assert len(name) <= 64


@pytest.mark.parametrize("why", ["nobody listens", "no such role", "no keys"])
async def test_sts_failure_is_a_503_with_advice(s3: S3, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    role = f"{ROLE}-of-nobody" if why == "no such role" else ROLE
    endpoint = "http://127.0.0.1:1" if why == "nobody listens" else s3.endpoint
    if why == "no keys":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    sts = Sts(role, endpoint=endpoint, region=s3.region)
    with pytest.raises(Unavailable) as refusal:
        await sts.assume("task", session_policy([canonical("s3://bucket/a/")], []), 900)
    await sts.close()
    assert refusal.value.code == "sts_unavailable"
    assert "credentials_role_arn" in refusal.value.detail
    assert "another" not in refusal.value.detail


# The bucket policy


async def test_bucket_policy_restricts_an_unrestricted_session(s3: S3) -> None:
    """This server treats a session as the principal, while AWS applies the role to all its sessions.
    It does not support NotAction, which is left out."""
    bucket = f"policed-{uuid4()}"
    root, attempt = f"s3://{bucket}/root", "root/dataset/1/version/2/_attempts/3/1/x"
    session = aioboto3.Session(s3.access_key, s3.secret_key, region_name=s3.region)
    async with session.client("sts", endpoint_url=s3.endpoint) as sts, client(s3, administrator(s3)) as admin:
        assumed = await sts.assume_role(RoleArn=ROLE, RoleSessionName="wide")
        keys = assumed["Credentials"]
        policy = bucket_policy(root, assumed["AssumedRoleUser"]["Arn"])
        policy["Statement"] = [each for each in policy["Statement"] if "NotAction" not in each]
        await admin.create_bucket(Bucket=bucket)
        for key in (attempt, "root/buffers/1/2/3/x", "root/x", "x"):
            await admin.put_object(Bucket=bucket, Key=key, Body=b"there")
        await admin.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
    given = {"access_key_id": keys["AccessKeyId"], "secret_access_key": keys["SecretAccessKey"]}
    async with client(s3, given | {"session_token": keys["SessionToken"]}) as its:
        for key in (attempt, "root/buffers/1/2/3/x"):
            await its.get_object(Bucket=bucket, Key=key)
            await its.put_object(Bucket=bucket, Key=f"{key}2", Body=b"x")
        for key in ("root/x", "x"):
            await refused(its.get_object(Bucket=bucket, Key=key))
            await refused(its.put_object(Bucket=bucket, Key=key, Body=b"x"))
        await refused(its.put_object(Bucket=bucket, Key="root/dataset/1/version/2/x", Body=b"x"))
