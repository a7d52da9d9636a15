"""Who may do what: capability tokens, credentials for objects, users of an identity provider."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from interlock.settings.area import Area, HttpUrl


class Access(Area):
    """Tokens that Interlock makes, and those that it believes."""

    auth_failures_per_second: float = Field(
        10.0,
        ge=0,
        description="Credentials that do not verify which one client address may send, after a burst of 20 times as "
        "many; then 429 for all but credentials that were good before. 0: no limit.",
    )

    # Capability tokens
    keys_dir: Path | None = Field(
        None, description="PEM signing keys, shared by all gateways and dispatchers; unset: {dir}/keys."
    )
    signing: Literal["pem", "kms"] = Field(
        "pem", description="Where rotations make or take signing keys: pem, files in keys_dir; kms, AWS KMS."
    )
    kms_key_id: str | None = Field(
        None,
        min_length=1,
        description="Id, ARN or alias of the KMS key that the next rotation takes, of the spec ECC_NIST_P256; unset: "
        "each rotation makes one.",
    )
    kms_endpoint: HttpUrl | None = Field(
        None, description="URL of a service beside AWS that speaks KMS; unset: that of the region in the environment."
    )
    development_tokens: bool = Field(
        False,
        description="For development: capability tokens are signed with HS256 and a secret in keys_dir, for tools that "
        "know no elliptic curves. Refused unless all listeners are loopback, keys are files, objects are in a "
        "directory and no runner is AWS Lambda; false: HS256 is never believed.",
    )
    token_issuer: str = Field("interlock", min_length=1, description="`iss` of capability tokens.")
    token_ttl_seconds: float = Field(300.0, ge=10, le=3600, description="Life of a capability token.")
    credentials_role_arn: str | None = Field(
        None,
        description="Role that the dispatcher assumes to give tasks credentials for S3; unset: tasks get none for S3.",
    )
    sts_endpoint: HttpUrl | None = Field(
        None, description="URL of the STS that has credentials_role_arn; unset: that of AWS for objects_region."
    )

    # Users of an identity provider
    oidc_issuer: str | None = Field(
        None, description="`iss` of an OpenID Connect provider whose users may be members; unset: API keys only."
    )
    oidc_audience: str | None = Field(None, min_length=1, description="`aud` that its tokens must have.")
    oidc_jwks_url: str | None = Field(
        None, description="Where its public keys are; unset: where {oidc_issuer}/.well-known/openid-configuration says."
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
            raise ValueError("write a URL that starts with https://; without TLS only one on this machine is believed")
        return value

    @model_validator(mode="after")
    def _audience(self) -> Self:
        if (self.oidc_issuer is None) != (self.oidc_audience is None):
            raise ValueError("oidc_issuer and oidc_audience go together: set both or none")
        return self
