"""The query service and the limits of one query."""

from __future__ import annotations

from typing import Final, Self

from pydantic import Field, SecretStr, model_validator

from interlock.settings.area import Area

QUERY_OVERHEAD_MB: Final = 256
"""Resident memory of a query's process beyond the query's own: Python, DuckDB, Arrow, what allocators keep."""


class Queries(Area):
    """Per query where not said otherwise."""

    query_data_url: SecretStr | None = Field(
        None,
        description="postgresql:// URL of the data database for the query service, of a role that may read the tables "
        "of datasets and nothing else; unset: `interlock up` makes one in the embedded database, elsewhere only files "
        "can be queried.",
    )
    query_max_rows: int = Field(10_000, ge=1, description="Most rows of a JSON reply; what is beyond is left out.")
    query_max_bytes: int = Field(
        16 * 1024 * 1024, ge=1024, description="Most bytes of a JSON reply; what is beyond is left out."
    )
    query_stream_bytes: int = Field(
        4 * 1024**3, ge=1024, description="Most bytes of a reply that is streamed; past it, the stream breaks off."
    )
    query_timeout_seconds: float = Field(60.0, gt=0, le=3600, description="A query that takes longer is ended.")
    query_memory_mb: int = Field(
        512,
        ge=64,
        description="Memory of one query, in MiB; beyond it, the query uses disk, and 413 where it cannot. Its process "
        "has up to 256 MiB more for the interpreter and the libraries.",
    )
    query_total_memory_mb: int | None = Field(
        None,
        ge=320,
        description="Memory of all queries of one query service together, in MiB, each counted as query_memory_mb + "
        "256: fewer than query_concurrency run at once where it does not hold as many. Unset: query_concurrency "
        "alone bounds them.",
    )
    query_temp_mb: int = Field(2048, ge=1, description="Disk space of one query, and of its export, in MiB.")
    query_threads: int = Field(2, ge=1, le=256, description="Threads of one query.")
    query_concurrency: int = Field(4, ge=1, le=1000, description="Queries that one query service runs at once.")
    query_queue: int = Field(16, ge=0, le=10_000, description="Queries that wait for a place; more get 429.")
    query_queue_seconds: float = Field(5.0, gt=0, description="How long a query waits for a place before it gets 429.")
    query_audit_days: float = Field(90.0, gt=0, description="Records of queries are deleted after this.")
    query_export_hours: float = Field(
        24.0, gt=0, le=7 * 24, description="Exported results of queries are deleted after this."
    )

    @property
    def query_processes(self) -> int:
        """Queries that run at once: as many as concurrency and memory allow."""
        if self.query_total_memory_mb is None:
            return self.query_concurrency
        return min(self.query_concurrency, self.query_total_memory_mb // (self.query_memory_mb + QUERY_OVERHEAD_MB))

    @model_validator(mode="after")
    def _one_query_fits(self) -> Self:
        least = self.query_memory_mb + QUERY_OVERHEAD_MB
        if self.query_total_memory_mb is not None and self.query_total_memory_mb < least:
            raise ValueError(
                f"query_total_memory_mb is {self.query_total_memory_mb}, which holds no query: write at least {least} "
                f"(query_memory_mb + {QUERY_OVERHEAD_MB}), or a smaller query_memory_mb"
            )
        return self
