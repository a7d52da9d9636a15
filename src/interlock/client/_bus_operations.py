"""How the command bus fares: alerts, where they are told, and the health of routes, one method per endpoint."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from interlock.client._caller import Caller, path, query
from interlock.wire.bus_alerts import AlertPage, AlertSettings, AlertSettingsList, AlertSettingsView, AlertView, Channel
from interlock.wire.bus_health import RouteHealthPage

PAGE: Final = 100

_alerts = msgspec.json.Decoder(AlertPage)
_alert = msgspec.json.Decoder(AlertView)
_listed = msgspec.json.Decoder(AlertSettingsList)
_settings = msgspec.json.Decoder(AlertSettingsView)
_health = msgspec.json.Decoder(RouteHealthPage)


class BusOperationCalls:
    """`client.bus`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def alerts(self, cursor: str | None = None, limit: int = PAGE) -> AlertPage:
        """Of the org, newest first."""
        return await self._caller.call("GET", query("/v1/alerts", cursor=cursor, limit=limit), _alerts)

    async def alert_channels(self) -> AlertSettingsList:
        return await self._caller.call("GET", "/v1/alert-channels", _listed)

    async def set_alert_channels(self, event: str, channels: list[Channel]) -> AlertSettingsView:
        """Where an event is told from now on."""
        body = AlertSettings(channels=channels)
        return await self._caller.call("PUT", path("v1", "alert-channels", event), _settings, body)

    async def unrouted_alerts(self, cursor: str | None = None, limit: int = PAGE) -> AlertPage:
        """Of all orgs: critical ones that nobody was told of."""
        return await self._caller.call("GET", query("/v1/operations/alerts", cursor=cursor, limit=limit), _alerts)

    async def resolve_alert(self, alert_id: UUID) -> AlertView:
        return await self._caller.call("POST", path("v1", "operations", "alerts", alert_id, "resolve"), _alert)

    async def route_health(
        self, cursor: str | None = None, limit: int = PAGE, *, only_bad: bool = False
    ) -> RouteHealthPage:
        target = query("/v1/route-health", cursor=cursor, limit=limit, bad="true" if only_bad else None)
        return await self._caller.call("GET", target, _health)
