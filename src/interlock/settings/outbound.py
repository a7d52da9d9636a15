"""What Interlock calls at the wish of users: their URLs, their webhooks."""

from __future__ import annotations

import re

from pydantic import Field, SecretStr, field_validator

from interlock.outbound.addresses import Exceptions
from interlock.settings.area import Area


class Outbound(Area):
    """Calls that leave the platform."""

    # What URLs that users choose may lead to: those of http_fetch, of chains and of webhooks
    outbound_allow: list[str] = Field(
        default_factory=list,
        description="Addresses, networks (`10.1.0.0/16`) and hosts (`hooks.example`, `*.example`) that may be reached "
        "although they are not public; an address or a host may have a port (`127.0.0.1:8545`).",
    )
    outbound_ports: list[int] = Field(default_factory=list, description="Ports that may be reached; empty: all.")
    outbound_proxy: SecretStr | None = Field(
        None,
        description="http:// URL of a forward proxy for http_fetch and for chains, with user and password if it wants "
        "them.",
    )

    # Webhooks that are called when runs end
    webhook_seconds: float = Field(1.0, gt=0, description="Calls of webhooks, where no notification came.")
    webhook_concurrency: int = Field(
        32, ge=1, le=1000, description="Calls of webhooks that a dispatcher has open at once."
    )
    webhook_endpoint_concurrency: int = Field(
        4, ge=1, le=100, description="Calls of one webhook that are open at once, of all dispatchers together."
    )
    webhook_timeout_seconds: float = Field(10.0, gt=0, le=300, description="A call of a webhook may take so long.")
    webhook_tries: int = Field(15, ge=1, le=100, description="A call that has come to nothing so often is dead.")
    webhook_expire_hours: float = Field(
        24.0, gt=0, description="What a webhook could not be told for so long, be it paused or away, is dead."
    )
    webhook_keep: int = Field(
        10_000, ge=1, description="Calls of one webhook that are kept, for at most retention_days."
    )

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
