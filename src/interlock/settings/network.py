"""Listeners and their limits, the URLs and credentials of clients, and outbound requests on behalf of users."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator

from interlock.outbound.guard import Exceptions
from interlock.settings.base import Area, HostAndPort, HttpUrl


class Listeners(Area):
    """Settings of the gateway, the dispatcher and the query service, and of their clients."""

    gateway: HostAndPort = Field(
        "127.0.0.1:7070", description="host:port of the public gateway; port 0: any free port."
    )
    internal: HostAndPort = Field(
        "127.0.0.1:7071", description="host:port of the internal dispatcher; port 0: any free port."
    )
    query: HostAndPort = Field("127.0.0.1:7072", description="host:port of the query service; port 0: any free port.")
    tls_cert: Path | None = Field(None, description="PEM certificate chain of all listeners; unset: plain HTTP.")
    tls_key: Path | None = Field(None, description="PEM private key of tls_cert.")
    tls_ca: Path | None = Field(None, description="PEM bundle that clients trust instead of the system's.")
    allow_plaintext_listener: bool = Field(
        False,
        description="Let a non-loopback listener start without TLS, for use behind a TLS-terminating proxy.",
    )
    body_limit_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="Larger request bodies get 413.")
    request_head_seconds: float = Field(
        10.0,
        gt=0,
        description="Time for a client to send the headers of a request, or to complete a TLS handshake; then 408.",
    )
    request_body_bytes_per_second: int = Field(
        256,
        ge=0,
        description="Minimum rate of a request body while the server reads it, averaged over "
        "request_body_window_seconds; below it: 408. 0: no limit.",
    )
    request_body_window_seconds: float = Field(
        20.0, gt=0, description="Window over which the rate of a request body is averaged."
    )
    reply_stall_seconds: float = Field(
        120.0, ge=0, description="A client that reads no byte of a response for this long is disconnected; 0: never."
    )
    max_connections: int = Field(
        4096,
        ge=0,
        description="Maximum open connections of one listener. At the limit, the connections that have waited longest "
        "for a request are closed in favour of new ones; if there are none, new connections get 503. 0: no limit.",
    )
    max_connections_per_peer: int = Field(
        1024,
        ge=0,
        description="Maximum open connections of one client address (for IPv6: one /64 network) to a listener; more "
        "get 429. 0: no limit, for a listener behind a proxy.",
    )
    requests_per_second: int = Field(
        0,
        ge=0,
        description="Rate limit per API key, counted in Valkey, or per gateway while Valkey is unavailable; 0: no "
        "limit.",
    )

    # Clients: the CLI, the SDK and workers
    gateway_url: HttpUrl | None = Field(
        None, description="URL of the gateway for clients; unset: from {dir}/endpoints.json."
    )
    internal_url: HttpUrl | None = Field(
        None,
        description="URL of the dispatcher for workers, and for query services that verify capability tokens; unset: "
        "workers use {dir}/endpoints.json, and query services read the keys from the state database.",
    )
    query_url: HttpUrl | None = Field(
        None, description="URL of the query service for clients; unset: from {dir}/endpoints.json."
    )
    api_key: SecretStr | None = Field(
        None, description="API key of the CLI and SDK; unset: from {dir}/credentials.json."
    )
    org: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="Org that the CLI and SDK act for, if api_key is the token of a user in several orgs; unset: the "
        "user's only org.",
    )
    worker_token: SecretStr | None = Field(None, description="Worker token; unset: from {dir}/credentials.json.")

    @model_validator(mode="after")
    def _certificate(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together: set both or none")
        return self

    @property
    def dispatcher_base_url(self) -> str:
        """The URL of the dispatcher for untrusted code."""
        return (self.internal_url or f"{'https' if self.tls_cert else 'http'}://{self.internal}").rstrip("/")

    @property
    def query_base_url(self) -> str:
        """The URL of the query service for untrusted code."""
        return (self.query_url or f"{'https' if self.tls_cert else 'http'}://{self.query}").rstrip("/")


class Outbound(Area):
    """Requests that leave the platform."""

    # Hosts that user-provided URLs may reach: those of http_fetch, of chains and of webhooks
    outbound_allow: list[str] = Field(
        default_factory=list,
        description="Addresses, networks (`10.1.0.0/16`) and hosts (`hooks.example`, `*.example`) that user-provided "
        "URLs may reach although they are not public; an address or a host may have a port (`127.0.0.1:8545`).",
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
