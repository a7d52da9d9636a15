"""The query service and the limits of one query."""

from __future__ import annotations

from typing import Final, Self

from pydantic import Field, SecretStr, model_validator

from interlock.settings.base import Area

QUERY_OVERHEAD_MB: Final = 256
"""Resident memory of a query process beyond that of the query: Python, DuckDB, Arrow, memory kept by allocators."""


class Queries(Area):
    """Settings of the query service. They apply per query unless stated otherwise."""

    query_data_url: SecretStr | None = Field(
        None,
        description="postgresql:// URL of the data database for the query service, with a role that can only read the "
        "tables of datasets; unset: `interlock up` creates a role in the embedded database, otherwise only files can "
        "be queried.",
    )
    query_max_rows: int = Field(10_000, ge=1, description="Maximum rows of a JSON response; further rows are left out.")
    query_max_bytes: int = Field(
        16 * 1024 * 1024, ge=1024, description="Maximum size of a JSON response; further rows are left out."
    )
    query_stream_bytes: int = Field(
        4 * 1024**3, ge=1024, description="Maximum size of a streamed response; the stream is aborted at this size."
    )
    query_timeout_seconds: float = Field(60.0, gt=0, le=3600, description="Timeout of a query.")
    query_memory_mb: int = Field(
        512,
        ge=64,
        description="Memory of one query, in MiB. A query that needs more spills to disk, or gets 413 if it cannot. "
        "Its process uses up to 256 MiB more for the interpreter and the libraries.",
    )
    query_total_memory_mb: int | None = Field(
        None,
        ge=320,
        description="Memory of all queries of one query service together, in MiB. Each counts as query_memory_mb + "
        "256, so fewer than query_concurrency may run at a time. Unset: only query_concurrency limits them.",
    )
    query_temp_mb: int = Field(2048, ge=1, description="Disk space of one query, and of its export, in MiB.")
    query_threads: int = Field(2, ge=1, le=256, description="Threads of one query.")
    query_concurrency: int = Field(4, ge=1, le=1000, description="Queries that one query service runs concurrently.")
    query_queue: int = Field(16, ge=0, le=10_000, description="Queries that may wait for a slot; more get 429.")
    query_queue_seconds: float = Field(5.0, gt=0, description="Time that a query waits for a slot before it gets 429.")
    query_audit_days: float = Field(90.0, gt=0, description="Audit records of queries are deleted after this time.")
    query_export_hours: float = Field(
        24.0, gt=0, le=7 * 24, description="Exported query results are deleted after this time."
    )

    @property
    def query_processes(self) -> int:
        """The number of queries that run concurrently, limited by concurrency and by total memory."""
        if self.query_total_memory_mb is None:
            return self.query_concurrency
        return min(self.query_concurrency, self.query_total_memory_mb // (self.query_memory_mb + QUERY_OVERHEAD_MB))

    @model_validator(mode="after")
    def _one_query_fits(self) -> Self:
        least = self.query_memory_mb + QUERY_OVERHEAD_MB
        if self.query_total_memory_mb is not None and self.query_total_memory_mb < least:
            raise ValueError(
                f"query_total_memory_mb is {self.query_total_memory_mb}, too little for one query: write at least "
                f"{least} (query_memory_mb + {QUERY_OVERHEAD_MB}), or lower query_memory_mb"
            )
        return self
