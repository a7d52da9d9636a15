"""Outbound requests on behalf of users: their URLs, their webhooks."""

from __future__ import annotations

import re

from pydantic import Field, SecretStr, field_validator

from interlock.outbound.addresses import Exceptions
from interlock.settings.base import Area


class Outbound(Area):
    """Requests that leave the platform."""

    # Hosts that user-provided URLs may reach: those of http_fetch, of chains and of webhooks
    outbound_allow: list[str] = Field(
        default_factory=list,
        description="Addresses, networks (`10.1.0.0/16`) and hosts (`hooks.example`, `*.example`) that user-provided "
        "URLs may "
        "reach although they are not public; an address or a host may have a port (`127.0.0.1:8545`).",
    )
    outbound_ports: list[int] = Field(
        default_factory=list, description="Ports that user-provided URLs may reach; empty: all."
    )
    outbound_proxy: SecretStr | None = Field(
        None,
        description="http:// URL of a forward proxy for http_fetch and for chains, with user and password if required.",
    )

    # Webhooks that are called at the end of a run
    webhook_seconds: float = Field(
        1.0, gt=0, description="Interval at which pending webhook deliveries are polled, if no notification arrives."
    )
    webhook_concurrency: int = Field(
        32, ge=1, le=1000, description="Maximum concurrent webhook deliveries of one dispatcher."
    )
    webhook_endpoint_concurrency: int = Field(
        4, ge=1, le=100, description="Maximum concurrent deliveries to one webhook, across all dispatchers."
    )
    webhook_timeout_seconds: float = Field(10.0, gt=0, le=300, description="Timeout of one webhook delivery.")
    webhook_tries: int = Field(15, ge=1, le=100, description="Attempts before a webhook delivery is marked dead.")
    webhook_expire_hours: float = Field(
        24.0, gt=0, description="Age at which a pending delivery is marked dead, also if the webhook is paused."
    )
    webhook_keep: int = Field(10_000, ge=1, description="Deliveries kept per webhook, for at most retention_days.")

    @field_validator("outbound_allow")
    @classmethod
    def _exceptions(cls, value: list[str]) -> list[str]:
        Exceptions.read(value)
        return value

    @field_validator("outbound_ports")
    @classmethod
    def _ports(cls, value: list[int]) -> list[int]:
        if not all(0 < port < 65_536 for port in value):
            raise ValueError("write ports from 1 to 65535, for example [80, 443]")
        return value

    @field_validator("outbound_proxy")
    @classmethod
    def _proxy(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"http://[^\s/?#]+/?", value.get_secret_value()):
            raise ValueError("write http://host:port or http://user:password@host:port")
        return value
