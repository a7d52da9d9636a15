"""Calls for the command bus: registry, alerts, health of routes, replays; one method per endpoint."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from interlock.client._caller import Caller, path, query
from interlock.wire.bus_events import (
    AlertPage,
    AlertSettings,
    AlertSettingsList,
    AlertSettingsView,
    AlertView,
    Channel,
    RouteHealthPage,
)
from interlock.wire.bus_messages import ReplayPage, ReplayRequest, ReplayView
from interlock.wire.bus_registry import (
    AclPage,
    AclRequest,
    ChangePage,
    LimitPage,
    LimitRequest,
    RegistryChange,
    RegistryKind,
    RoutePage,
    RouteRequest,
    RouteTrial,
    RouteTrialRequest,
    RouteView,
    ServiceKeyPage,
    ServiceKeyRequest,
    ServiceKeyView,
    ServicePage,
    ServiceRequest,
    ServiceView,
    TenantConfig,
)

PAGE: Final = 100


class BusOperationCalls:
    """`client.bus`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def alerts(self, cursor: str | None = None, limit: int = PAGE) -> AlertPage:
        """Returns the org's alerts, newest first."""
        return await self._caller.call("GET", query("/v1/alerts", cursor=cursor, limit=limit), AlertPage)

    async def alert_channels(self) -> AlertSettingsList:
        return await self._caller.call("GET", "/v1/alert-channels", AlertSettingsList)

    async def set_alert_channels(self, event: str, channels: list[Channel]) -> AlertSettingsView:
        """Sets the channels that receive alerts for an event."""
        body = AlertSettings(channels=channels)
        return await self._caller.call("PUT", path("v1", "alert-channels", event), AlertSettingsView, body)

    async def unrouted_alerts(self, cursor: str | None = None, limit: int = PAGE) -> AlertPage:
        """Returns critical alerts of all orgs that were delivered to no channel."""
        return await self._caller.call("GET", query("/v1/operations/alerts", cursor=cursor, limit=limit), AlertPage)

    async def resolve_alert(self, alert_id: UUID) -> AlertView:
        return await self._caller.call("POST", path("v1", "operations", "alerts", alert_id, "resolve"), AlertView)

    async def route_health(
        self, cursor: str | None = None, limit: int = PAGE, *, only_bad: bool = False
    ) -> RouteHealthPage:
        target = query("/v1/route-health", cursor=cursor, limit=limit, bad="true" if only_bad else None)
        return await self._caller.call("GET", target, RouteHealthPage)


class RegistryCalls:
    """`client.registry`. Puts are idempotent. With `dry_run` nothing is changed."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def _put(self, kind: str, request: Any, dry_run: bool) -> RegistryChange:
        return await self._caller.call("POST", _dry(f"/v1/{kind}", dry_run), RegistryChange, request)

    async def _drop(self, target: str) -> RegistryChange:
        return await self._caller.call("DELETE", target, RegistryChange, repeatable=False)

    # Services

    async def put_service(self, request: ServiceRequest, *, dry_run: bool = False) -> RegistryChange:
        return await self._put("services", request, dry_run)

    async def services(self, cursor: str | None = None, limit: int = PAGE) -> ServicePage:
        return await self._caller.call("GET", query("/v1/services", cursor=cursor, limit=limit), ServicePage)

    async def service(self, name: str) -> ServiceView:
        return await self._caller.call("GET", path("v1", "services", name), ServiceView)

    async def drop_service(self, name: str, *, dry_run: bool = False) -> RegistryChange:
        return await self._drop(_dry(path("v1", "services", name), dry_run))

    # Routes

    async def put_route(self, request: RouteRequest, *, dry_run: bool = False) -> RegistryChange:
        return await self._put("routes", request, dry_run)

    async def routes(self, target: str | None = None, cursor: str | None = None, limit: int = PAGE) -> RoutePage:
        return await self._caller.call("GET", query("/v1/routes", target=target, cursor=cursor, limit=limit), RoutePage)

    async def route(self, target: str, name: str) -> RouteView:
        return await self._caller.call("GET", path("v1", "routes", target, name), RouteView)

    async def drop_route(self, target: str, name: str, *, dry_run: bool = False) -> RegistryChange:
        return await self._drop(_dry(path("v1", "routes", target, name), dry_run))

    async def test_route(self, source: str, target: str, name: str) -> RouteTrial:
        """Reports what would happen to a command, without sending one."""
        request = RouteTrialRequest(source=source, target=target, name=name)
        return await self._caller.call("POST", "/v1/routes/test", RouteTrial, request)

    # ACLs

    async def put_acl(self, request: AclRequest, *, dry_run: bool = False) -> RegistryChange:
        return await self._put("acls", request, dry_run)

    async def acls(self, target: str | None = None, cursor: str | None = None, limit: int = PAGE) -> AclPage:
        return await self._caller.call("GET", query("/v1/acls", target=target, cursor=cursor, limit=limit), AclPage)

    async def drop_acl(self, source: str, target: str, name: str, *, dry_run: bool = False) -> RegistryChange:
        """Drops an ACL entry. `source` is the service, without its org."""
        return await self._drop(_dry(path("v1", "acls", target, name, source), dry_run))

    # Limits

    async def put_limit(self, request: LimitRequest, *, dry_run: bool = False) -> RegistryChange:
        return await self._put("limits", request, dry_run)

    async def limits(self, target: str | None = None, cursor: str | None = None, limit: int = PAGE) -> LimitPage:
        return await self._caller.call("GET", query("/v1/limits", target=target, cursor=cursor, limit=limit), LimitPage)

    async def drop_limit(
        self, target: str | None, name: str | None, source: str | None = None, *, dry_run: bool = False
    ) -> RegistryChange:
        """Drops a limit. Without target and name: the limit on `source` alone."""
        place = path("v1", "limits", *(part for part in (target, name) if part is not None))
        return await self._drop(query(place, source=source, dry_run="true" if dry_run else None))

    # Keys

    async def rotate_key(self, service: str, *, overlap_seconds: float | None = None) -> ServiceKeyView:
        """Rotates the service's signing key. The service reads the new secret from its tenant config."""
        request = ServiceKeyRequest(service=service, overlap_seconds=overlap_seconds)
        return await self._caller.call("POST", "/v1/service-keys", ServiceKeyView, request, repeatable=False)

    async def keys(self, service: str | None = None, cursor: str | None = None, limit: int = PAGE) -> ServiceKeyPage:
        target = query("/v1/service-keys", service=service, cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, ServiceKeyPage)

    async def revoke_key(self, service: str, version_id: str) -> ServiceKeyView:
        return await self._caller.call(
            "DELETE", path("v1", "service-keys", service, version_id), ServiceKeyView, repeatable=False
        )

    async def tenant_config(self) -> TenantConfig:
        """Returns the configuration of the service that this client's API key belongs to."""
        return await self._caller.call("GET", "/v1/tenant-config", TenantConfig)

    # The changelog

    async def changes(
        self, kind: RegistryKind | None = None, cursor: str | None = None, limit: int = PAGE
    ) -> ChangePage:
        return await self._caller.call("GET", query("/v1/changes", kind=kind, cursor=cursor, limit=limit), ChangePage)

    async def change(self, change_id: int) -> RegistryChange:
        return await self._caller.call("GET", path("v1", "changes", change_id), RegistryChange)

    async def revert(self, change_id: int, *, dry_run: bool = False) -> RegistryChange:
        target = _dry(path("v1", "changes", change_id, "revert"), dry_run)
        return await self._caller.call("POST", target, RegistryChange, repeatable=False)


def _dry(target: str, dry_run: bool) -> str:
    return query(target, dry_run="true" if dry_run else None)


class ReplayCalls:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def start(self, request: ReplayRequest) -> ReplayView:
        return await self._caller.call("POST", "/v1/replays", ReplayView, request, repeatable=False)

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> ReplayPage:
        return await self._caller.call("GET", query("/v1/replays", cursor=cursor, limit=limit), ReplayPage)

    async def replay(self, replay_id: UUID) -> ReplayView:
        return await self._caller.call("GET", path("v1", "replays", replay_id), ReplayView)

    async def cancel(self, replay_id: UUID) -> ReplayView:
        return await self._caller.call("POST", path("v1", "replays", replay_id, "cancel"), ReplayView)
