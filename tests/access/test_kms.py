"""Signing with KMS, on a real server with the KMS API: tokens, rotation and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock.apps.app import open_app
from interlock.clock import ManualClock
from interlock.errors import ConfigurationError, Unavailable
from interlock.settings import Settings
from tests.support.aws import Aws
from tests.support.system import System, fence, running
from tests.support.token_parts import ORDER, part, raw


@pytest.fixture(autouse=True)
def in_its_environment(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
async def kms(aws: Aws) -> AsyncIterator[Any]:
    async with aws.client("kms") as client:
        yield client


@asynccontextmanager
async def signing(
    state_url: str, folder: Path, aws: Aws, clock: ManualClock | None = None, **settings: Any
) -> AsyncIterator[System]:
    async with running(state_url, folder, clock, signing="kms", kms_endpoint=aws.endpoint, **settings) as system:
        yield system


async def rotate(system: System) -> Any:
    return await system.user("POST", "/v1/signing-keys/rotate")


async def named_key(kms: Any, alias: str | None = None, **more: Any) -> str:
    made = await kms.create_key(**{"KeySpec": "ECC_NIST_P256", "KeyUsage": "SIGN_VERIFY"} | more)
    arn: str = made["KeyMetadata"]["Arn"]
    if alias is not None:
        await kms.create_alias(AliasName=alias, TargetKeyId=arn)
    return arn


async def test_kms_signs_every_token_of_a_batch(state_url: str, tmp_path: Path, aws: Aws) -> None:
    async with signing(state_url, tmp_path, aws) as system:
        run = (await system.submit([{"n": n} for n in range(50)]))["run_id"]
        claims = (await system.claim_many(task_ids=await system.task_ids(run)))["claims"]
        assert len(claims) == 50
        for claim in claims:
            signature = raw(claim["capability_token"].split(".")[2])
            assert len(signature) == 64
            assert 2 * int.from_bytes(signature[32:]) < ORDER
        replies = [await system.attempt("/v1/task/heartbeat", c["capability_token"], fence(c)) for c in claims[:10]]
        assert {reply.status_code for reply in replies} == {200}
        assert not list(system.kernel.settings.signing_keys_dir.glob("*.pem"))


async def test_rotation_creates_a_kms_key_and_later_deletes_the_old_one(
    state_url: str, tmp_path: Path, aws: Aws, clock: ManualClock, kms: Any
) -> None:
    async with signing(state_url, tmp_path, aws, clock) as system:
        old = await system.value("select kms_key from interlock.signing_keys")
        claim = await system.claim(await system.one(policy={"lease_seconds": 3600}))
        kid = (await rotate(system)).json()["kid"]
        assert part((await system.claim(await system.one()))["capability_token"], 0)["kid"] == kid
        assert (await system.attempt("/v1/task/heartbeat", claim["capability_token"], fence(claim))).is_success
        clock.advance(599)
        assert await system.pass_of("retention") == 0
        clock.advance(2)
        assert await system.pass_of("retention") == 1
        assert (await kms.describe_key(KeyId=old))["KeyMetadata"]["KeyState"] == "PendingDeletion"
        new = await system.value("select kms_key from interlock.signing_keys")
        assert (await kms.describe_key(KeyId=new))["KeyMetadata"]["KeyState"] == "Enabled"


async def test_repointed_alias_rotates_and_its_keys_are_not_deleted(
    state_url: str, tmp_path: Path, aws: Aws, clock: ManualClock, kms: Any
) -> None:
    alias = "alias/interlock-named"
    first = await named_key(kms, alias)
    async with signing(state_url, tmp_path, aws, clock, kms_key_id=alias) as system:
        old = await system.claim(await system.one(policy={"lease_seconds": 3600}))
        refused = await rotate(system)
        assert (refused.status_code, refused.json()["code"]) == (409, "same_signing_key")
        second = await named_key(kms)
        await kms.update_alias(AliasName=alias, TargetKeyId=second)
        # Until the rotation, the first key still signs: tokens are never signed with the alias itself.
        assert part((await system.claim(await system.one()))["capability_token"], 0) == part(old["capability_token"], 0)
        assert (await rotate(system)).status_code == 201
        assert part((await system.claim(await system.one()))["capability_token"], 0) != part(old["capability_token"], 0)
        clock.advance(601)
        assert await system.pass_of("retention") == 1
        assert (await kms.describe_key(KeyId=first))["KeyMetadata"]["KeyState"] == "Enabled"


async def test_switch_between_pem_and_kms_refuses_no_token(state_url: str, tmp_path: Path, aws: Aws) -> None:
    async with running(state_url, tmp_path, kms_endpoint=aws.endpoint) as system:
        with_pem = await system.claim(await system.one(policy={"lease_seconds": 3600}))
        changed = system.kernel.settings.model_copy(update={"signing": "kms"})
        async with open_app(changed, process="second") as second:
            kid = (await second.access.keyring.rotate()).kid
            with_kms = await system.claim(await system.one(policy={"lease_seconds": 3600}))
            assert part(with_kms["capability_token"], 0)["kid"] == kid
        assert (await rotate(system)).status_code == 201
        for claim in (with_pem, with_kms, await system.claim(await system.one())):
            reply = await system.attempt("/v1/task/heartbeat", claim["capability_token"], fence(claim))
            assert reply.status_code == 200, reply.text


async def test_claims_use_up_no_attempt_while_kms_does_not_sign(
    state_url: str, tmp_path: Path, aws: Aws, kms: Any
) -> None:
    async with signing(state_url, tmp_path, aws) as system:
        key = await system.value("select kms_key from interlock.signing_keys")
        tasks = [await system.one() for _ in range(4)]
        await kms.disable_key(KeyId=key)
        for task in tasks:
            reply = await system.worker("POST", "/internal/task-claim", json={"task_id": task, "worker_id": "test"})
            assert (reply.status_code, reply.json()["code"]) == (503, "kms_unavailable")
        # The first claim started its attempt before the failure of KMS was known.
        assert await system.value("select count(*) from interlock.tasks where status = 'Running'") == 1
        await kms.enable_key(KeyId=key)
        for task in tasks[1:]:
            claim = await system.claim(task)
            assert (await system.attempt("/v1/task/heartbeat", claim["capability_token"], fence(claim))).is_success


async def test_rotation_to_an_unusable_key_changes_nothing(state_url: str, tmp_path: Path, aws: Aws, kms: Any) -> None:
    alias = "alias/interlock-unfit"
    await named_key(kms, alias)
    async with signing(state_url, tmp_path, aws, kms_key_id=alias) as system:
        await kms.update_alias(AliasName=alias, TargetKeyId=await named_key(kms, KeySpec="RSA_2048"))
        refused = await rotate(system)
        assert (refused.status_code, refused.json()["code"]) == (409, "unfit_signing_key")
        assert (await system.claim(await system.one()))["status"] == "Claimed"


async def started(state_url: str, folder: Path, endpoint: str, key: str | None) -> None:
    settings = Settings(dir=folder, state_url=state_url, signing="kms", kms_endpoint=endpoint, kms_key_id=key)
    async with open_app(settings, process="test"):
        pass


@pytest.mark.parametrize(
    "wrong",
    [
        {"KeySpec": "RSA_2048"},
        {"KeySpec": "ECC_SECG_P256K1"},
        {"KeySpec": "SYMMETRIC_DEFAULT", "KeyUsage": "ENCRYPT_DECRYPT"},
    ],
    ids=lambda wrong: wrong["KeySpec"],
)
async def test_key_without_es256_stops_the_start(
    state_url: str, tmp_path: Path, aws: Aws, kms: Any, wrong: dict[str, str]
) -> None:
    key = await named_key(kms, **wrong)
    with pytest.raises(ConfigurationError, match="kms_key_id"):
        await started(state_url, tmp_path, aws.endpoint, key)


async def test_unknown_key_name_stops_the_start_with_a_message(state_url: str, tmp_path: Path, aws: Aws) -> None:
    with pytest.raises(ConfigurationError, match=r"NotFoundException.*check kms_key_id"):
        await started(state_url, tmp_path, aws.endpoint, "alias/nobody")


async def test_unreachable_kms_is_reported_without_hanging(state_url: str, tmp_path: Path, aws: Aws) -> None:
    with pytest.raises(Unavailable, match="kms_endpoint"):
        await started(state_url, tmp_path, "http://127.0.0.1:9", None)
