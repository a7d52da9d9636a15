"""Addresses and limits of the servers, and the URLs and credentials of clients."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

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
        "for "
        "a request are closed in favour of new ones; if there are none, new connections get 503. 0: no limit.",
    )
    max_connections_per_peer: int = Field(
        1024,
        ge=0,
        description="Maximum open connections of one client address (for IPv6: one /64 network) to a listener; more "
        "get "
        "429. 0: no limit, for a listener behind a proxy.",
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
