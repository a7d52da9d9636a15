"""The Spark session of a worker."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, SecretStr, field_validator

from interlock.settings.base import Area


class Spark(Area):
    """Settings of the drivers and sessions of a Spark worker."""

    spark_master: str = Field("local[*]", min_length=1, description="Master URL for the session of a Spark worker.")
    spark_remote: SecretStr | None = Field(
        None,
        description="sc:// URL of a Spark Connect server, used instead of spark_master; unset: spark_master.",
    )
    spark_memory: str = Field(
        "2g",
        description="Heap of the Spark driver, for example 512m or 4g. With a local master, this is the heap of all "
        "of Spark.",
    )
    spark_tasks: int = Field(
        0, ge=0, le=1000, description="Concurrent tasks in the session of a Spark worker; 0: two per core."
    )
    spark_driver_per_org: bool = Field(
        False,
        description="Run tasks of different orgs in different driver processes, each with its own session and heap. "
        "With a "
        "master URL of a cluster, each driver is a separate Spark application.",
    )
    spark_drivers: int = Field(
        4,
        ge=2,
        le=100,
        description="Maximum number of driver processes of a Spark worker: one for all tasks or one per org, one per "
        "org for tasks with secrets, and one for platform tasks. If another is needed, the driver that has been idle "
        "longest is stopped.",
    )
    spark_conf: dict[str, SecretStr] = Field(
        default_factory=dict,
        description="Spark properties by name, which override all others. Shown masked, because they may be "
        "credentials.",
    )

    @field_validator("spark_memory")
    @classmethod
    def _java_heap(cls, value: str) -> str:
        if not re.fullmatch(r"[1-9]\d*[kmgt]", value):
            raise ValueError("write a number and a unit of k, m, g or t, for example 512m or 4g")
        return value

    @field_validator("spark_remote")
    @classmethod
    def _spark_connect(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().startswith("sc://"):
            raise ValueError("write a URL that starts with sc://, or set spark_master for a master URL")
        return value

    @field_validator("spark_conf", mode="before")
    @classmethod
    def _spark_properties(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name in value:
            if not str(name).startswith("spark."):
                raise ValueError(f"{name!r} is not a Spark property; write a name that starts with `spark.`")
        return {name: _as_spark_writes(one) for name, one in value.items()}


def _as_spark_writes(value: Any) -> Any:
    """Converts numbers and booleans from TOML and JSON to text, as Spark expects."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value
