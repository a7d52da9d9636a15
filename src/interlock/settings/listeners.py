"""Where the servers listen, and where clients find them."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

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
    def dispatcher_base_url(self) -> str:
        """Where untrusted code finds the dispatcher."""
        return (self.internal_url or f"{'https' if self.tls_cert else 'http'}://{self.internal}").rstrip("/")

    @property
    def query_base_url(self) -> str:
        """Where untrusted code finds the query service."""
        return (self.query_url or f"{'https' if self.tls_cert else 'http'}://{self.query}").rstrip("/")
