"""Where the servers listen, and where clients find them."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from interlock.connections.limits import ConnectionLimits
from interlock.settings.area import Area, HostAndPort, HttpUrl


class Listeners(Area):
    """Of the gateway, the dispatcher and the query service, and what it takes to reach them."""

    gateway: HostAndPort = Field(
        "127.0.0.1:7070", description="host:port of the public gateway; port 0 takes a free one."
    )
    internal: HostAndPort = Field(
        "127.0.0.1:7071", description="host:port of the internal dispatcher; port 0 takes a free one."
    )
    query: HostAndPort = Field("127.0.0.1:7072", description="host:port of the query service; port 0 takes a free one.")
    tls_cert: Path | None = Field(None, description="PEM certificate chain of both listeners; unset: plain HTTP.")
    tls_key: Path | None = Field(None, description="PEM private key of tls_cert.")
    tls_ca: Path | None = Field(None, description="PEM bundle that clients trust instead of the system's.")
    allow_plaintext_listener: bool = Field(
        False,
        description="Let a listener that is not loopback start without TLS, for a TLS-terminating proxy in front.",
    )
    body_limit_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="Larger request bodies get 413.")
    request_head_seconds: float = Field(
        10.0,
        gt=0,
        description="Seconds a client has to send the headers of a request, or to finish a TLS handshake; then 408.",
    )
    request_body_bytes_per_second: int = Field(
        256,
        ge=0,
        description="Least rate of a request body while the server reads it, over request_body_window_seconds; below "
        "it: 408. 0: no limit.",
    )
    request_body_window_seconds: float = Field(
        20.0, gt=0, description="Seconds over which the rate of a request body is measured."
    )
    reply_stall_seconds: float = Field(
        120.0, ge=0, description="A client that reads no byte of a reply for so many seconds is cut off; 0: never."
    )
    max_connections: int = Field(
        4096,
        ge=0,
        description="Open connections of one listener. At the limit the longest idle and half-sent ones are closed "
        "for new ones; with none of these, new ones get 503. 0: no limit.",
    )
    max_connections_per_peer: int = Field(
        1024,
        ge=0,
        description="Open connections of one client address (of IPv6, one /64 network) to a listener; more get 429. "
        "0: no limit, for a listener behind a proxy.",
    )
    requests_per_second: int = Field(
        0,
        ge=0,
        description="Per API key, counted in Valkey over one second, or per gateway while that is away; 0: no limit.",
    )

    # Clients: the CLI, the SDK and workers
    gateway_url: HttpUrl | None = Field(
        None, description="Where clients find the gateway; unset: from {dir}/endpoints.json."
    )
    internal_url: HttpUrl | None = Field(
        None,
        description="Where workers find the dispatcher, and query services the keys of capability tokens; unset: "
        "{dir}/endpoints.json for workers, and the state database for the keys.",
    )
    query_url: HttpUrl | None = Field(
        None, description="Where clients find the query service; unset: {dir}/endpoints.json."
    )
    api_key: SecretStr | None = Field(None, description="API key of the CLI and SDK; unset: {dir}/credentials.json.")
    org: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="Which org the CLI and SDK speak for, when api_key is the token of a user in several; unset: the "
        "only one.",
    )
    worker_token: SecretStr | None = Field(None, description="Worker token; unset: {dir}/credentials.json.")

    @model_validator(mode="after")
    def _certificate(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: set both or none")
        return self

    @property
    def connection_limits(self) -> ConnectionLimits:
        return ConnectionLimits(
            head_seconds=self.request_head_seconds,
            body_bytes_per_second=self.request_body_bytes_per_second,
            body_window_seconds=self.request_body_window_seconds,
            reply_stall_seconds=self.reply_stall_seconds,
            most=self.max_connections,
            most_per_peer=self.max_connections_per_peer,
        )

    @property
    def dispatcher_base_url(self) -> str:
        """Where untrusted code finds the dispatcher."""
        return (self.internal_url or f"{'https' if self.tls_cert else 'http'}://{self.internal}").rstrip("/")

    @property
    def query_base_url(self) -> str:
        """Where untrusted code finds the query service."""
        return (self.query_url or f"{'https' if self.tls_cert else 'http'}://{self.query}").rstrip("/")
