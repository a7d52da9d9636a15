"""Code of users: the Spark session of a worker, bundles, the runner and the limits of one invocation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator

from interlock.settings.base import Area, HostAndPort, HttpUrl


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
        "With a master URL of a cluster, each driver is a separate Spark application.",
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


class Runner(Area):
    """Settings of bundles and of the runner that executes them."""

    bundle_limit_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, description="Maximum size of the zip file of a bundle; larger ones get 413."
    )
    bundle_unpacked_bytes: int = Field(
        512 * 1024 * 1024, ge=1024, description="Maximum total size of the files in a bundle."
    )
    runner_url: HttpUrl | None = Field(
        None, description="URL of the runner for untrusted code, used by dispatchers; unset: no runner."
    )
    runner_token: SecretStr | None = Field(None, description="Secret shared by dispatchers and their runner.")
    runner_lambda: str | None = Field(
        None, min_length=1, description="Name or ARN of an AWS Lambda function to use as the runner; unset: runner_url."
    )
    runner_lambda_endpoint: HttpUrl | None = Field(
        None, description="Endpoint of AWS Lambda; unset: that of the region from the environment."
    )
    runner: HostAndPort = Field(
        "127.0.0.1:0",
        description="host:port of the runner for untrusted code, loopback only; port 0: any free port.",
    )
    runner_concurrency: int = Field(0, ge=0, le=180, description="Concurrent invocations of a runner; 0: one per core.")
    runner_confinement: Literal["auto", "bubblewrap", "namespaces", "landlock", "none"] = Field(
        "auto",
        description="Isolation of untrusted code. auto: the strongest that this machine supports; if it supports none, "
        "every invocation is refused. none: only resource limits and an empty environment, for code that you trust.",
    )
    runner_python: Path | None = Field(
        None, description="Python interpreter for handlers, 3.11 or newer; unset: the one that runs Interlock."
    )
    runner_first_user: int = Field(
        61_000,
        ge=1_000,
        le=2_000_000_000,
        description="First of 180 user ids. A runner that runs as root uses a separate user for each invocation.",
    )
    lambda_concurrency: int = Field(8, ge=1, le=1000, description="Concurrent runner invocations of one dispatcher.")
    lambda_cpu_seconds: int = Field(900, ge=1, description="CPU time of one invocation.")
    lambda_processes: int = Field(64, ge=1, description="Maximum processes and threads of one invocation.")
    lambda_disk_mb: int = Field(512, ge=1, description="Disk space of one invocation, in MiB.")

    @property
    def has_runner(self) -> bool:
        """True if this installation can run tasks of runtimes with kind `invoke`."""
        return self.runner_url is not None or self.runner_lambda is not None
