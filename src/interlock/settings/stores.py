"""Databases, Valkey and the object store."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, SecretStr, field_validator

from interlock.settings.base import Area, HttpUrl


class Stores(Area):
    """Settings of the stores. Unset means embedded, in `dir`."""

    dir: Path = Field(Path(".interlock"), description="Folder of all local state: servers, keys, objects, logs.")

    state_url: SecretStr | None = Field(None, description="postgresql:// URL of the state database; unset: embedded.")
    data_url: SecretStr | None = Field(None, description="postgresql:// URL of the data database; unset: embedded.")
    valkey_url: SecretStr | None = Field(
        None, description="valkey:// URL for limits and cached reads; unset: embedded."
    )
    objects_url: str | None = Field(
        None, description="Root URL of the object store, file:// or s3://; unset: file://{dir}/objects."
    )
    objects_endpoint: HttpUrl | None = Field(
        None, description="URL of an S3-compatible store; unset: AWS_ENDPOINT_URL, otherwise AWS."
    )
    objects_region: str | None = Field(None, description="Region of the bucket in objects_url; unset: AWS_REGION.")
    objects_public_url: HttpUrl | None = Field(
        None,
        description="URL of the gateway in signed URLs, if objects are in a directory; unset: gateway_url, otherwise "
        "the address of the gateway.",
    )
    object_limit_bytes: int = Field(
        5 * 1024**3,
        ge=1,
        description="Maximum size of an object that the gateway accepts, also for all parts together.",
    )
    upload_stale_seconds: float = Field(
        24 * 3600.0, gt=0, description="An upload to the gateway without activity for this long is removed."
    )
    database_connections: int = Field(10, ge=2, le=1000, description="Connections per process to the state database.")
    database_timeout_seconds: float = Field(
        30.0,
        gt=0,
        description="Timeout of a statement of the control plane, and of a transaction that is idle; the request then "
        "gets 503.",
    )

    @field_validator("objects_url")
    @classmethod
    def _objects(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("file:///", "s3://")):
            raise ValueError("write file:///absolute/path or s3://bucket/prefix")
        return value

    @property
    def objects_root(self) -> str:
        return (self.objects_url or f"file://{self.dir.absolute()}/objects").rstrip("/")

    @property
    def bucket_region(self) -> str:
        """The region that AWS SDKs would use, for code that does not load them."""
        named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return self.objects_region or named or "us-east-1"

    @property
    def bucket_base_url(self) -> str:
        """The URL of the store with the bucket of objects_url, for untrusted code.

        The bucket name goes into the path.
        """
        beside_aws = self.objects_endpoint or os.environ.get("AWS_ENDPOINT_URL")
        return (beside_aws or f"https://s3.{self.bucket_region}.amazonaws.com").rstrip("/")
