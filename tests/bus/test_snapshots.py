"""Snapshots of the registry: published whole or not at all, and never believed further than their signature."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.access import compact
from interlock.bus import metrics
from interlock.bus.caches import Caches
from interlock.bus.model import Kind
from interlock.bus.registry_reads import RegistryReads
from interlock.bus.secrets import Seal
from interlock.bus.snapshot import LATEST, OrgEntries, document_uri
from interlock.bus.snapshot_loading import Snapshots
from interlock.bus.snapshot_publishing import SnapshotPublishing
from interlock.client.bus import Producer
from interlock.clock import ManualClock
from tests.bus.registering import Tenant, tenant
from tests.system import System

KINDS = [Kind.SERVICES, Kind.KEYS, Kind.ROUTES, Kind.ACLS, Kind.LIMITS]


class Shop:
    """A system with a registry, and what publishes and loads its snapshots."""

    def __init__(self, system: System, owner: Tenant) -> None:
        self.system, self.owner = system, owner
        self.kernel = system.kernel
        self.seal = Seal(self.kernel.settings.signing_keys_dir)
        self.objects = self.kernel.objects

    def publishing(self, **changed: Any) -> SnapshotPublishing:
        known = self.kernel.settings.model_copy(update=changed)
        return SnapshotPublishing(self.kernel.database, known, self.objects, self.kernel.keyring)

    def snapshots(self, **changed: Any) -> Snapshots:
        known = self.kernel.settings.model_copy(update=changed)
        return Snapshots(self.objects, self.kernel.keyring, self.seal, self.kernel.clock, known)

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
        """A pointer that the platform itself has signed, with claims of the test's."""
        pointer = await self.pointer()
        key = await self.kernel.keyring.active()
        public = await self.kernel.keyring.public(key["kid"])
        assert public is not None
        known = compact.payload_of(pointer["token"], public) or {}
        token = await compact.signed(msgspec.json.encode(known | claims), key["kid"], self.kernel.keyring)
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


async def test_a_snapshot_says_what_the_registry_says(shop: Shop) -> None:
    found = await shop.loaded()
    registry = RegistryReads(shop.kernel.database, shop.seal)
    assert found is not None
    assert found.versions == await registry.versions(shop.owner.org_id)
    for kind in KINDS:
        asked = await getattr(registry, kind.value)(shop.owner.org_id)
        assert sorted(map(repr, found.entries[kind])) == sorted(map(repr, asked)), kind
        assert asked, kind


async def test_a_dispatcher_starts_from_it_as_old_as_it_is_and_then_asks(shop: Shop, clock: ManualClock) -> None:
    class Silent(RegistryReads):
        """A registry that knows bans, and nothing else may be asked of."""

        async def versions(self, org_id: UUID) -> Any:
            raise AssertionError

    clock.advance(30)
    caches = Caches(Silent(shop.kernel.database, shop.seal), clock, start=shop.snapshots())
    known = await caches.ready(shop.owner.org_id)
    now = clock.now().timestamp()
    assert {kind: known.age(kind, now) for kind in Kind} == dict.fromkeys(KINDS, 30.0) | {Kind.BANS: 0.0}
    assert ("bot", "say") in known.routes
    assert known.due
    registry = RegistryReads(shop.kernel.database, shop.seal)
    asking = Caches(registry, clock, start=shop.snapshots())
    known = await asking.ready(shop.owner.org_id)
    await shop.owner.ask("DELETE", "/v1/acls/bot/say/billing")
    await asking.refresh_due([known])
    assert len(known.acls) == 1
    assert known.age(Kind.ACLS, now) == 0


async def test_a_gateway_takes_commands_by_a_snapshot(shop: Shop) -> None:
    key = await shop.owner.service_key("other")
    async with Producer(shop.system.gateway_url, key, now=lambda: shop.kernel.clock.now().timestamp()) as producer:
        verdict = await producer.send("bot", "say", 1)
    assert verdict.outcome in ("delivered", "escalated")
    (known,) = shop.kernel.ingress._caches._tenants.values()
    assert known.versions[Kind.ROUTES] == (await shop.loaded()).versions[Kind.ROUTES]  # type: ignore[union-attr]


async def test_no_secret_is_in_a_snapshot(shop: Shop) -> None:
    config = await shop.owner.config(await shop.owner.service_key("billing"))
    document = await shop.document()
    for version in (config["active"], config["previous"]):
        assert version["secret"].encode() not in document
        assert bytes.fromhex(version["secret"]) not in document


async def test_another_process_does_not_publish_right_after(shop: Shop, clock: ManualClock) -> None:
    assert await shop.publishing().run_once() == 0
    clock.advance(30)
    assert await shop.publishing(bus_snapshots=False).run_once() == 0
    assert await shop.publishing().run_once() == 1
    await shop.put(LATEST, b"{")
    assert await shop.publishing().run_once() == 1
    assert await shop.loaded() is not None


async def test_old_documents_are_removed_and_the_one_that_counts_stays(shop: Shop, clock: ManualClock) -> None:
    clock.advance(3600)
    assert await shop.publishing().run_once() == 1
    places = [found.uri async for found in shop.objects.list_under(shop.objects.uri("snavio/registry/snapshot/"))]
    newest = shop.objects.uri(document_uri((await shop.pointer())["version_id"]))
    assert set(places) == {newest, shop.objects.uri(LATEST)}


async def test_one_past_the_limit_is_not_published_and_the_last_one_stays(shop: Shop, clock: ManualClock) -> None:
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


async def test_anything_wrong_with_a_snapshot_is_counted_and_the_registry_asked(shop: Shop, clock: ManualClock) -> None:
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


async def test_what_the_platform_signed_is_still_judged_by_the_rules_of_the_registry(shop: Shop) -> None:
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
async def test_a_damaged_snapshot_is_the_same_or_none(
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


async def test_an_unusable_snapshot_is_not_looked_for_with_every_org(shop: Shop, clock: ManualClock) -> None:
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
