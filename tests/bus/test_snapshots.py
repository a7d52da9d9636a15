"""Snapshots of the registry: atomic publication, and loading with full validation."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.access import jwt
from interlock.access.secrets import Seal
from interlock.bus import metrics
from interlock.bus.model import Kind
from interlock.bus.path.caches import Caches
from interlock.bus.registry.loader import RegistryReads
from interlock.bus.registry.snapshot import LATEST, OrgEntries, SnapshotPublisher, Snapshots, document_uri
from interlock.client.bus import Command, Producer
from interlock.clock import ManualClock
from tests.support.bus_tenants import Tenant, tenant
from tests.support.system import System

KINDS = [Kind.SERVICES, Kind.KEYS, Kind.ROUTES, Kind.ACLS, Kind.LIMITS]


class Shop:
    """A system with a registry, a publisher and a loader of its snapshots."""

    def __init__(self, system: System, owner: Tenant) -> None:
        self.system, self.owner = system, owner
        self.kernel = system.kernel
        self.seal = Seal(self.kernel.settings.signing_keys_dir)
        self.objects = self.kernel.access.objects

    def publishing(self, **changed: Any) -> SnapshotPublisher:
        known = self.kernel.settings.model_copy(update=changed)
        return SnapshotPublisher(self.kernel.stores.database, known, self.objects, self.kernel.access.keyring)

    def snapshots(self, **changed: Any) -> Snapshots:
        known = self.kernel.settings.model_copy(update=changed)
        return Snapshots(self.objects, self.kernel.access.keyring, self.seal, self.kernel.stores.clock, known)

    async def loaded(self, **changed: Any) -> OrgEntries | None:
        return await self.snapshots(**changed).org(self.owner.org_id)

    async def pointer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self.objects.read(self.objects.uri(LATEST)) or b"")
        return found

    async def document(self) -> bytes:
        version_id = (await self.pointer())["version_id"]
        return await self.objects.read(self.objects.uri(document_uri(version_id))) or b""

    async def put(self, key: str, data: bytes) -> None:
        await self.objects.put(self.objects.uri(key), data)

    async def point(self, **claims: Any) -> None:
        """Writes a pointer with the given claims, signed by the platform."""
        pointer = await self.pointer()
        key = await self.kernel.access.keyring.active()
        public = await self.kernel.access.keyring.public(key["kid"])
        assert public is not None
        known = jwt.payload_of(pointer["token"], public) or {}
        token = await jwt.signed(msgspec.json.encode(known | claims), key["kid"], self.kernel.access.keyring)
        await self.put(LATEST, msgspec.json.encode(pointer | {"token": token}))


@pytest.fixture
async def shop(still: System) -> Shop:
    owner = await tenant(still)
    await owner.services("billing", "bot", "other")
    await owner.put("services", name="other", dispatch_mode="cold-only")
    await owner.put("routes", target="bot", name="say", queue="says", dlq="says-dlq", dedupe_mode="strict")
    await owner.put("routes", target="bot", name="hear", queue="hears", dlq="hears-dlq", fairness={"ban_seconds": 5})
    await owner.put("acls", source="billing", target="bot", name="say", sensitivity="critical")
    await owner.put("acls", source="other", target="bot", name="say", expires_at="2090-01-01T00:00:00Z")
    await owner.put("limits", target="bot", name="say", rate=5, enforcement="shadow")
    await owner.put("limits", target="bot", name="say", source="billing", rate=2)
    await owner.put("limits", source="other", rate=3, enforcement="relaxed")
    await owner.ask("POST", "/v1/service-keys", json={"service": "billing"})
    shop = Shop(still, owner)
    assert await shop.publishing().run_once() == 1
    return shop


def failures(reason: str) -> float:
    return float(metrics.SNAPSHOT_LOAD_FAILURES.labels(reason)._value.get())


async def test_snapshot_equals_the_registry(shop: Shop) -> None:
    found = await shop.loaded()
    registry = RegistryReads(shop.kernel.stores.database, shop.seal)
    assert found is not None
    assert found.versions == await registry.versions(shop.owner.org_id)
    for kind in KINDS:
        asked = await getattr(registry, kind.value)(shop.owner.org_id)
        assert sorted(map(repr, found.entries[kind])) == sorted(map(repr, asked)), kind
        assert asked, kind


async def test_dispatcher_starts_from_a_snapshot_and_then_refreshes(shop: Shop, clock: ManualClock) -> None:
    class Silent(RegistryReads):
        """A registry that returns bans, and fails on any other query."""

        async def versions(self, org_id: UUID) -> Any:
            raise AssertionError

    clock.advance(30)
    caches = Caches(Silent(shop.kernel.stores.database, shop.seal), clock, start=shop.snapshots())
    known = await caches.ready(shop.owner.org_id)
    now = clock.now().timestamp()
    assert {kind: known.age(kind, now) for kind in Kind} == dict.fromkeys(KINDS, 30.0) | {Kind.BANS: 0.0}
    assert ("bot", "say") in known.routes
    assert known.due
    registry = RegistryReads(shop.kernel.stores.database, shop.seal)
    asking = Caches(registry, clock, start=shop.snapshots())
    known = await asking.ready(shop.owner.org_id)
    await shop.owner.ask("DELETE", "/v1/acls/bot/say/billing")
    await asking.refresh_due([known])
    assert len(known.acls) == 1
    assert known.age(Kind.ACLS, now) == 0


async def test_gateway_accepts_commands_by_a_snapshot(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.client.bus._FATE_SECONDS", 0.01)
    key = await shop.owner.service_key("other")
    async with Producer(
        shop.system.gateway_url, key, patience=0, now=lambda: shop.kernel.stores.clock.now().timestamp()
    ) as producer:
        (verdict,) = await producer.send_many([Command(target="bot", name="say", payload=1)])
    assert (verdict.outcome, verdict.reason) == ("pending", "cold_only")
    (known,) = shop.kernel.bus.ingress._caches._tenants.values()
    assert known.versions[Kind.ROUTES] == (await shop.loaded()).versions[Kind.ROUTES]  # type: ignore[union-attr]


async def test_snapshot_contains_no_plain_secret(shop: Shop) -> None:
    config = await shop.owner.config(await shop.owner.service_key("billing"))
    document = await shop.document()
    for version in (config["active"], config["previous"]):
        assert version["secret"].encode() not in document
        assert bytes.fromhex(version["secret"]) not in document


async def test_second_process_does_not_publish_again(shop: Shop, clock: ManualClock) -> None:
    assert await shop.publishing().run_once() == 0
    clock.advance(30)
    assert await shop.publishing(bus_snapshots=False).run_once() == 0
    assert await shop.publishing().run_once() == 1
    await shop.put(LATEST, b"{")
    assert await shop.publishing().run_once() == 1
    assert await shop.loaded() is not None


async def test_old_documents_are_removed_and_the_current_one_stays(shop: Shop, clock: ManualClock) -> None:
    clock.advance(3600)
    assert await shop.publishing().run_once() == 1
    places = [found.uri async for found in shop.objects.list_under(shop.objects.uri("snavio/registry/snapshot/"))]
    newest = shop.objects.uri(document_uri((await shop.pointer())["version_id"]))
    assert set(places) == {newest, shop.objects.uri(LATEST)}


async def test_snapshot_over_the_limit_is_not_published(shop: Shop, clock: ManualClock) -> None:
    before = await shop.pointer()
    clock.advance(60)
    too_large = metrics.SNAPSHOTS_TOO_LARGE._value.get()
    assert await shop.publishing(bus_snapshot_limit_bytes=1024).run_once() == 0
    assert metrics.SNAPSHOTS_TOO_LARGE._value.get() == too_large + 1
    assert await shop.pointer() == before


async def refused(shop: Shop, reason: str, **changed: Any) -> None:
    count = failures(reason)
    assert await shop.loaded(**changed) is None, reason
    assert failures(reason) == count + 1, reason


async def test_unusable_snapshot_is_counted_and_the_registry_is_read(shop: Shop, clock: ManualClock) -> None:
    document, pointer = await shop.document(), await shop.pointer()
    place = document_uri(pointer["version_id"])
    await refused(shop, "too_large", bus_snapshot_limit_bytes=1024)
    for bad, reason in (
        (document[:-1], "corrupted"),
        (document + b" ", "corrupted"),
        (document.replace(b'"critical"', b'"moderate"'), "corrupted"),
        (document.replace(b"says", b"sayz"), "corrupted"),
    ):
        await shop.put(place, bad)
        await refused(shop, reason)
    await shop.objects.delete(shop.objects.uri(place))
    await refused(shop, "missing")
    await shop.put(place, document)
    assert await shop.loaded() is not None
    for broken, reason in (
        (b"", "malformed"),
        (b"[]", "malformed"),
        (b"\xff" * 99, "malformed"),
        (b"x" * 20_000, "malformed"),
        (msgspec.json.encode(pointer | {"token": "x.y.z"}), "unsigned"),
        (msgspec.json.encode(pointer | {"token": pointer["token"][:-5] + "AAAAA"}), "unsigned"),
    ):
        await shop.put(LATEST, broken)
        await refused(shop, reason)
    await shop.objects.delete(shop.objects.uri(LATEST))
    await refused(shop, "missing")
    await shop.put(LATEST, msgspec.json.encode(pointer))
    clock.advance(180)
    await refused(shop, "expired")
    clock.advance(-190)
    await refused(shop, "future")


async def test_signed_snapshot_is_validated_by_registry_rules(shop: Shop) -> None:
    whole = json.loads(await shop.document())
    version_id = whole["version_id"]
    for change, reason in (
        ({"routes": [whole["orgs"][0]["routes"][0] | {"queue": None}]}, "invalid"),
        ({"routes": [whole["orgs"][0]["routes"][0] | {"target": "Bot"}]}, "malformed"),
        ({"acls": [whole["orgs"][0]["acls"][0] | {"source": "others/billing"}]}, "invalid"),
        ({"acls": [whole["orgs"][0]["acls"][0] | {"sensitivity": "none"}]}, "malformed"),
        ({"services": []}, "invalid"),
        ({"limits": [whole["orgs"][0]["limits"][0] | {"rate": 0}]}, "malformed"),
        ({"limits": [{"target": "bot", "rate": 1}]}, "invalid"),
        ({"limits": [{"source": f"{shop.owner.org}/nobody", "rate": 1}]}, "invalid"),
        ({"limits": [{"source": "others/billing", "rate": 1}]}, "invalid"),
        ({"keys": [whole["orgs"][0]["keys"][0] | {"number": 7}]}, "sealed"),
        ({"keys": [whole["orgs"][0]["keys"][0] | {"sealed": "?"}]}, "sealed"),
        ({"more": 1}, "malformed"),
    ):
        bad = json.dumps(whole | {"orgs": [whole["orgs"][0] | change]}).encode()
        await shop.put(document_uri(version_id), bad)
        await shop.point(sha256=hashlib.sha256(bad).hexdigest(), size_bytes=len(bad))
        await refused(shop, reason)
    for claims in ({"aud": "interlock.receipt"}, {"iss": "somebody"}, {"version_id": None}, {"more": 1}):
        await shop.point(**claims)
        await refused(shop, "unsigned")


@given(st.booleans(), st.integers(0, 10_000), st.binary(max_size=8), st.integers(0, 20))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_damaged_snapshot_is_unchanged_or_refused(
    shop: Shop, pointed: bool, at: int, noise: bytes, gone: int
) -> None:
    good = await shop.loaded()
    assert good is not None
    key = LATEST if pointed else document_uri((await shop.pointer())["version_id"])
    whole = await shop.objects.read(shop.objects.uri(key)) or b""
    place = at % len(whole)
    await shop.put(key, whole[:place] + noise + whole[place + gone :])
    found = await shop.loaded()
    await shop.put(key, whole)
    assert found is None or (found.as_of, found.versions) == (good.as_of, good.versions)


async def test_unusable_snapshot_is_not_retried_for_every_org(shop: Shop, clock: ManualClock) -> None:
    pointer = await shop.objects.read(shop.objects.uri(LATEST)) or b""
    await shop.objects.delete(shop.objects.uri(LATEST))
    snapshots = shop.snapshots()
    count = failures("missing")
    for _ in range(5):
        assert await snapshots.org(shop.owner.org_id) is None
    assert failures("missing") == count + 1
    await shop.put(LATEST, pointer)
    clock.advance(31)
    assert await snapshots.org(shop.owner.org_id) is not None
    assert await snapshots.org(UUID(int=1)) is None
