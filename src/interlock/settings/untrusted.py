"""Untrusted code: bundles, the runner and the limits of one invocation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from interlock.settings.base import Area, HostAndPort, HttpUrl


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
        description="Isolation of untrusted code. auto: the strongest that this machine supports; if it supports "
        "none, every "
        "invocation is refused. none: only resource limits and an empty environment, for code that you trust.",
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
