"""Authentication and authorization: capability tokens, object store credentials, users of an identity provider."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from interlock.settings.base import Area, HttpUrl


class Access(Area):
    """Tokens that Interlock issues, and tokens of others that it accepts."""

    auth_failures_per_second: float = Field(
        10.0,
        ge=0,
        description="Invalid credentials that one client address may send per second, after a burst of 20 times this "
        "number; above that, the address gets 429, except for credentials that were valid before. 0: no limit.",
    )

    # Capability tokens
    keys_dir: Path | None = Field(
        None, description="Folder of PEM signing keys, shared by all gateways and dispatchers; unset: {dir}/keys."
    )
    signing: Literal["pem", "kms"] = Field(
        "pem", description="Where key rotations get signing keys from. pem: files in keys_dir; kms: AWS KMS."
    )
    kms_key_id: str | None = Field(
        None,
        min_length=1,
        description="Id, ARN or alias of the KMS key that the next rotation uses, with key spec ECC_NIST_P256; unset: "
        "each rotation creates a key.",
    )
    kms_endpoint: HttpUrl | None = Field(
        None, description="URL of a KMS-compatible service; unset: AWS KMS in the region from the environment."
    )
    development_tokens: bool = Field(
        False,
        description="For development only: sign capability tokens with HS256 and a secret in keys_dir, for tools "
        "without support for elliptic curves. Requires that all listeners are loopback addresses, keys are files, "
        "objects are in a directory and the runner is not AWS Lambda. false: HS256 tokens are always rejected.",
    )
    token_issuer: str = Field("interlock", min_length=1, description="`iss` of capability tokens.")
    token_ttl_seconds: float = Field(300.0, ge=10, le=3600, description="Lifetime of a capability token.")
    credentials_role_arn: str | None = Field(
        None,
        description="Role that the dispatcher assumes to issue S3 credentials to tasks; unset: tasks get no S3 "
        "credentials.",
    )
    sts_endpoint: HttpUrl | None = Field(
        None, description="URL of the STS endpoint for credentials_role_arn; unset: that of AWS for objects_region."
    )

    # Users of an identity provider
    oidc_issuer: str | None = Field(
        None, description="`iss` of an OpenID Connect provider whose users can be members; unset: API keys only."
    )
    oidc_audience: str | None = Field(None, min_length=1, description="`aud` that its tokens must carry.")
    oidc_jwks_url: str | None = Field(
        None, description="URL of its public keys; unset: taken from {oidc_issuer}/.well-known/openid-configuration."
    )

    oidc_client_id: str | None = Field(
        None,
        min_length=1,
        description="Client id of Interlock at the provider, for sign-in to the dashboard by authorization code with "
        "PKCE. Register {gateway_url}/v1/sign-in/callback as redirect URI. unset: no such sign-in.",
    )
    oidc_client_secret: SecretStr | None = Field(
        None, description="Client secret for oidc_client_id; unset: a public client, which PKCE alone protects."
    )

    # Sessions of the dashboard
    session_hours: float = Field(
        168.0, gt=0, le=8760, description="Hours after which a session of the dashboard ends, however much it is used."
    )
    session_idle_hours: float = Field(
        12.0, gt=0.25, le=8760, description="Hours after which a session of the dashboard ends if no page uses it."
    )
    sign_in_link_seconds: float = Field(
        600.0, ge=10, le=86_400, description="Time for which a link of `interlock open` or `interlock up` signs in."
    )

    @field_validator("credentials_role_arn")
    @classmethod
    def _role(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"arn:[\w-]+:iam:[\w-]*:\d*(:?role)?/[\w+=,.@/-]{1,512}", value):
            raise ValueError("write the ARN of a role, for example arn:aws:iam::123456789012:role/interlock-task")
        return value

    @field_validator("oidc_issuer", "oidc_jwks_url")
    @classmethod
    def _issuer(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        local = parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost")
        if not parts.hostname or parts.username or parts.fragment or not (parts.scheme == "https" or local):
            raise ValueError("write a URL that starts with https://; http:// is accepted only for this machine")
        return value

    @model_validator(mode="after")
    def _audience(self) -> Self:
        if (self.oidc_issuer is None) != (self.oidc_audience is None):
            raise ValueError("oidc_issuer and oidc_audience must be set together: set both or none")
        if self.oidc_client_id is not None and self.oidc_issuer is None:
            raise ValueError("oidc_client_id needs oidc_issuer and oidc_audience: set these too, or unset it")
        return self
