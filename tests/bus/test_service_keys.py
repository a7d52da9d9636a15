"""Keys of services: versions, rotation with an overlap, revocation, and the configuration of producers."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from interlock.access.secrets import Seal, require_seal
from interlock.apps.app import open_app
from interlock.apps.bus import bus
from interlock.bus.registry.keys import KeyRotation, ServiceKeys
from interlock.clock import ManualClock, SystemClock
from interlock.errors import ConfigurationError
from interlock.settings import Settings
from interlock.stores.postgres import Database
from tests.support.bus_tenants import Tenant, tenant
from tests.support.system import System

DAY, HOUR = 86_400.0, 3_600.0


async def producer(system: System) -> tuple[Tenant, str]:
    owner = await tenant(system)
    await owner.services("billing")
    return owner, await owner.service_key("billing")


async def states(owner: Tenant) -> dict[str, str]:
    found = (await owner.get("/v1/service-keys?service=billing"))["keys"]
    return {each["version_id"]: each["state"] for each in found}


async def rotate(owner: Tenant, **more: object) -> str:
    reply = await owner.ask("POST", "/v1/service-keys", json={"service": "billing"} | more)
    assert reply.status_code == 201, reply.text
    version: str = reply.json()["version_id"]
    return version


def rotation(system: System) -> KeyRotation:
    return KeyRotation(system.kernel.bus.service_keys)


async def test_only_the_service_reads_its_secret(shared: System) -> None:
    owner, key = await producer(shared)
    config = await owner.config(key)
    assert (config["tenant"], config["source"]) == (owner.org, f"{owner.org}/billing")
    assert (config["active"]["version_id"], config["previous"]) == ("hmac-v1", None)
    assert len(bytes.fromhex(config["active"]["secret"])) == 32
    assert config["replay_window_seconds"] == 60
    assert config["poll_seconds"] == 12 * 3600
    secret = config["active"]["secret"]
    for path in ("/v1/service-keys", "/v1/changes", "/v1/services/billing"):
        assert secret not in (await owner.ask("GET", path)).text
    assert (await owner.refusal("GET", "/v1/tenant-config"))[0] == 403
    made = await owner.ask("POST", "/v1/keys", json={"user": "x", "role": "admin", "scopes": ["commands:send"]})
    assert made.json()["code"] == "bad_scope"


async def test_database_contains_no_plain_secret(shared: System) -> None:
    owner, key = await producer(shared)
    secret = bytes.fromhex((await owner.config(key))["active"]["secret"])
    assert not await shared.value("select bool_or(position($1 in sealed) > 0) from interlock.bus_keys", secret)


async def test_secret_opens_only_for_its_purpose_and_with_its_key(tmp_path: Path) -> None:
    seal = Seal(tmp_path / "keys")
    sealed = seal.seal(b"secret", "a")
    assert Seal(tmp_path / "keys").open(sealed, "a") == b"secret"
    other_seal = Seal(tmp_path / "others")
    with pytest.raises(ConfigurationError, match="does not exist"):
        other_seal.open(sealed, "a")
    other_seal.seal(b"", "a")
    for other, purpose in ((seal, "b"), (other_seal, "a")):
        with pytest.raises(ConfigurationError, match="was not sealed with"):
            other.open(sealed, purpose)
    (tmp_path / "keys" / "bus-seal.key").write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="32 bytes"):
        Seal(tmp_path / "keys").open(sealed, "a")


async def test_previous_version_is_valid_for_a_week_after_rotation(still: System, clock: ManualClock) -> None:
    owner, key = await producer(still)
    first = (await owner.config(key))["active"]
    assert await rotate(owner) == "hmac-v2"
    config = await owner.config(key)
    assert config["previous"]["secret"] == first["secret"]
    assert config["active"]["secret"] != first["secret"]
    assert await states(owner) == {"hmac-v1": "previous", "hmac-v2": "current"}
    clock.advance(7 * DAY + 1)
    assert (await owner.config(key))["previous"] is None
    assert await states(owner) == {"hmac-v1": "expired", "hmac-v2": "current"}


async def test_at_most_two_versions_are_valid(shared: System) -> None:
    owner, _key = await producer(shared)
    await rotate(owner)
    await rotate(owner, overlap_seconds=3600)
    assert await states(owner) == {"hmac-v1": "expired", "hmac-v2": "previous", "hmac-v3": "current"}


async def test_platform_rotates_once_after_30_days_and_producers_poll_by_then(
    still: System, clock: ManualClock
) -> None:
    owner, key = await producer(still)
    assert await rotation(still).run_once() == 0
    clock.advance(29 * DAY + 20 * HOUR)
    assert (await owner.config(key))["poll_seconds"] == 4 * 3600
    clock.advance(4 * HOUR)
    assert await rotation(still).run_once() == 1
    assert await rotation(still).run_once() == 0
    assert await states(owner) == {"hmac-v1": "previous", "hmac-v2": "current"}
    (change, *_) = (await owner.get("/v1/changes?kind=keys"))["changes"]
    assert (change["subject"], change["changed_by"]) == ("billing/hmac-v2", "platform")
    clock.advance(29 * DAY)
    assert await rotation(still).run_once() == 0
    clock.advance(70 * DAY)
    # The two changes: a rotation, and the deletion of the first version, which expired more than 90 days ago.
    assert await rotation(still).run_once() == 2
    assert await states(owner) == {"hmac-v2": "previous", "hmac-v3": "current"}


async def test_revoked_current_version_is_replaced(shared: System) -> None:
    owner, key = await producer(shared)
    leaked = (await owner.config(key))["active"]
    reply = await owner.ask("DELETE", "/v1/service-keys/billing/hmac-v1")
    assert (reply.status_code, reply.json()["state"]) == (200, "revoked")
    config = await owner.config(key)
    assert (config["active"]["version_id"], config["previous"]) == ("hmac-v2", None)
    assert config["active"]["secret"] != leaked["secret"]
    assert await states(owner) == {"hmac-v1": "revoked", "hmac-v2": "current"}
    for version in ("hmac-v9", "hmac-v0", "v1", "hmac-v" + "9" * 30):
        assert (await owner.refusal("DELETE", f"/v1/service-keys/billing/{version}"))[0] == 404


async def test_key_change_cannot_be_reverted(shared: System) -> None:
    owner, _key = await producer(shared)
    await rotate(owner)
    (change, *_) = (await owner.get("/v1/changes?kind=keys"))["changes"]
    assert await owner.refusal("POST", f"/v1/changes/{change['change_id']}/revert") == (409, "not_reversible")


async def test_dispatchers_learn_when_a_producer_fetches_its_newest_key(still: System, clock: ManualClock) -> None:
    owner, key = await producer(still)
    count = "select version from interlock.bus_versions where org_id = $1 and kind = 'keys'"

    async def polled() -> int:
        await owner.config(key)
        version: int = await still.value(count, owner.org_id)
        return version

    first = await polled()
    assert await polled() == first
    clock.advance(DAY)
    await rotate(owner)
    assert await polled() == first + 2
    assert await polled() == first + 2
    assert await still.value("select polled_at from interlock.service_polls") == clock.now()


async def test_concurrent_first_starts_share_one_seal_key(tmp_path: Path) -> None:
    seals = [Seal(tmp_path / "keys") for _ in range(8)]
    sealed = await asyncio.gather(*(asyncio.to_thread(seal.seal, b"secret", "a") for seal in seals))
    assert {seals[0].open(each, "a") for each in sealed} == {b"secret"}
    assert [path.name for path in (tmp_path / "keys").iterdir()] == ["bus-seal.key"]
    assert (tmp_path / "keys" / "bus-seal.key").stat().st_mode & 0o777 == 0o600


async def test_concurrent_rotations_create_one_version_each(shared: System) -> None:
    owner, _key = await producer(shared)
    made = await asyncio.gather(*(rotate(owner) for _ in range(5)))
    assert sorted(made) == [f"hmac-v{number}" for number in range(2, 7)]
    assert [state for state in (await states(owner)).values() if state in ("current", "previous")] == [
        "previous",
        "current",
    ]


async def test_only_registered_services_have_keys(shared: System) -> None:
    owner, _key = await producer(shared)
    body = {"service": "nobody"}
    assert await owner.refusal("POST", "/v1/service-keys", json=body) == (404, "unknown_service")
    keys = ServiceKeys(
        shared.kernel.stores.database, shared.kernel.settings, Seal(shared.kernel.settings.signing_keys_dir)
    )
    assert (await keys.tenant_config(owner.org_id, owner.org, "billing")).service == "billing"


async def test_host_with_another_seal_does_not_start(state_url: str, tmp_path: Path) -> None:
    first = Settings(dir=tmp_path, state_url=state_url, keys_dir=tmp_path / "first")
    async with open_app(first, process="gateway"):
        pass
    async with bus(first):
        pass
    second = Settings(dir=tmp_path, state_url=state_url, keys_dir=tmp_path / "second")
    for start in (open_app(second, process="gateway"), bus(second)):
        with pytest.raises(ConfigurationError, match=r"bus-seal\.key does not exist.*Copy bus-seal\.key"):
            await start.__aenter__()
    assert not (tmp_path / "second" / "bus-seal.key").exists()
    Seal(tmp_path / "second").seal(b"made by an older version", "any")
    with pytest.raises(ConfigurationError, match="was not sealed with"):
        await open_app(second, process="gateway").__aenter__()
    shutil.copy(tmp_path / "first" / "bus-seal.key", tmp_path / "second")
    async with open_app(second, process="gateway"):
        pass


async def test_seal_is_checked_with_secrets_older_than_the_check_value(shared: System, tmp_path: Path) -> None:
    await producer(shared)
    database = shared.kernel.stores.database
    await shared.value("with gone as (delete from interlock.seals returning 1) select count(*) from gone")
    with pytest.raises(ConfigurationError, match="does not exist"):
        await require_seal(database, Seal(tmp_path))
    assert await shared.value("select count(*) from interlock.seals") == 0
    await require_seal(database, Seal(shared.kernel.settings.signing_keys_dir))
    assert await shared.value("select count(*) from interlock.seals") == 1


async def test_one_of_two_first_starts_with_different_seals_is_refused(state_url: str, tmp_path: Path) -> None:
    database = await Database.open(state_url, size=2, timeout=30, clock=SystemClock(), name="test")
    try:
        seals = [Seal(tmp_path / name) for name in ("one", "two")]
        outcomes = await asyncio.gather(*(require_seal(database, seal) for seal in seals), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes if outcome] == [ConfigurationError]
        await require_seal(database, seals[outcomes.index(None)])
    finally:
        await database.close()
