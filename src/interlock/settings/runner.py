"""Untrusted code: bundles, the runner and the limits of one invocation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from interlock.settings.area import Area, HostAndPort, HttpUrl


class Runner(Area):
    """Bundles, and the runner that runs them."""

    bundle_limit_bytes: int = Field(64 * 1024 * 1024, ge=1024, description="Largest zip of a bundle; larger gets 413.")
    bundle_unpacked_bytes: int = Field(512 * 1024 * 1024, ge=1024, description="Most bytes in all files of a bundle.")
    runner_url: HttpUrl | None = Field(
        None, description="Where dispatchers find the runner of untrusted code; unset: there is none."
    )
    runner_token: SecretStr | None = Field(None, description="Secret that dispatchers and their runner share.")
    runner_lambda: str | None = Field(
        None, min_length=1, description="Name or ARN of an AWS Lambda function to use as the runner; unset: runner_url."
    )
    runner_lambda_endpoint: HttpUrl | None = Field(
        None, description="Endpoint of AWS Lambda; unset: that of the region in the environment."
    )
    runner: HostAndPort = Field(
        "127.0.0.1:0",
        description="host:port of the runner of untrusted code, loopback only; port 0 takes a free one.",
    )
    runner_concurrency: int = Field(0, ge=0, le=180, description="Invocations a runner has at once; 0: one per core.")
    runner_confinement: Literal["auto", "bubblewrap", "namespaces", "landlock", "none"] = Field(
        "auto",
        description="Walls around untrusted code; auto: the strongest that this machine has, and where there are "
        "none every invocation is refused. none: only limits and an empty environment, for code that you trust.",
    )
    runner_python: Path | None = Field(
        None, description="Python that runs handlers, 3.11 or newer; unset: the one that runs Interlock."
    )
    runner_first_user: int = Field(
        61_000,
        ge=1_000,
        le=2_000_000_000,
        description="A runner that is root runs each invocation as a user of its own: the first of 180 numbers.",
    )
    lambda_concurrency: int = Field(
        8, ge=1, le=1000, description="Invocations of the runner that a dispatcher has open at once."
    )
    lambda_cpu_seconds: int = Field(900, ge=1, description="Processor time of one invocation.")
    lambda_processes: int = Field(64, ge=1, description="Processes and threads of one invocation.")
    lambda_disk_mb: int = Field(512, ge=1, description="Disk space of one invocation, in MiB.")

    @property
    def has_runner(self) -> bool:
        """Whether tasks of runtimes that are invoked can run here."""
        return self.runner_url is not None or self.runner_lambda is not None
