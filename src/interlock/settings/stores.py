"""Where the databases, Valkey and objects are."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, SecretStr, field_validator

from interlock.settings.area import Area, HttpUrl


class Stores(Area):
    """Unset means embedded, under `dir`."""

    dir: Path = Field(Path(".interlock"), description="Folder of all local state: servers, keys, objects, logs.")

    state_url: SecretStr | None = Field(None, description="postgresql:// URL of the state database; unset: embedded.")
    data_url: SecretStr | None = Field(None, description="postgresql:// URL of the data database; unset: embedded.")
    valkey_url: SecretStr | None = Field(None, description="valkey:// URL for limits and hot reads; unset: embedded.")
    objects_url: str | None = Field(None, description="Root of objects, file:// or s3://; unset: file://{dir}/objects.")
    objects_endpoint: HttpUrl | None = Field(
        None, description="URL of a store beside AWS that speaks S3; unset: AWS_ENDPOINT_URL, or else AWS itself."
    )
    objects_region: str | None = Field(None, description="Region of the bucket of objects_url; unset: AWS_REGION.")
    objects_public_url: HttpUrl | None = Field(
        None,
        description="Where holders of signed URLs find the gateway, when objects are in a directory; unset: "
        "gateway_url, or else the gateway's own address.",
    )
    object_limit_bytes: int = Field(
        5 * 1024**3, ge=1, description="Largest object that the gateway takes; its parts together have no more."
    )
    upload_stale_seconds: float = Field(
        24 * 3600.0, gt=0, description="An upload to the gateway in which nothing has happened for so long is removed."
    )
    database_connections: int = Field(10, ge=2, le=1000, description="Connections per process to the state database.")
    database_timeout_seconds: float = Field(
        30.0,
        gt=0,
        description="A statement of the control plane that takes longer, or a transaction that stands still longer, is "
        "ended and answered with 503.",
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
        """As AWS's own libraries find it, for code that has none of them."""
        named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return self.objects_region or named or "us-east-1"

    @property
    def bucket_base_url(self) -> str:
        """Where untrusted code finds the bucket of objects_url, whose name is in the path."""
        beside_aws = self.objects_endpoint or os.environ.get("AWS_ENDPOINT_URL")
        return (beside_aws or f"https://s3.{self.bucket_region}.amazonaws.com").rstrip("/")
