"""The Spark session of a worker."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, SecretStr, field_validator

from interlock.settings.area import Area


class Spark(Area):
    """Drivers and sessions of a Spark worker."""

    spark_master: str = Field("local[*]", min_length=1, description="Master URL of the session of a Spark worker.")
    spark_remote: SecretStr | None = Field(
        None,
        description="sc:// URL of a Spark Connect server, which is then used instead of spark_master; unset: none.",
    )
    spark_memory: str = Field(
        "2g",
        description="Heap of the Spark driver, which with a local master is all of Spark; such as 512m or 4g.",
    )
    spark_tasks: int = Field(
        0, ge=0, le=1000, description="Tasks that a Spark worker runs at once in its session; 0: two per core."
    )
    spark_driver_per_org: bool = Field(
        False,
        description="Whether tasks of different orgs run in different driver processes, each with a session and heap "
        "of its own. With a master, every driver is an application of its own.",
    )
    spark_drivers: int = Field(
        4,
        ge=2,
        le=100,
        description="Driver processes of a Spark worker at most: one for all tasks or one per org, and one for tasks "
        "of the platform. Where another is needed, the one that has been idle longest is stopped.",
    )
    spark_conf: dict[str, SecretStr] = Field(
        default_factory=dict,
        description="Spark properties by name, which win over all others. Shown masked: they may be credentials.",
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
                raise ValueError(f"{name!r} is no property of Spark, whose names begin with `spark.`")
        return {name: _as_spark_writes(one) for name, one in value.items()}


def _as_spark_writes(value: Any) -> Any:
    """Numbers and truth values, as TOML and JSON have them, are text to Spark."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value
