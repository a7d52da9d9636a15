"""Jobs of one task or of millions: submission, lists, ingest, backfills, results, exports, receipts, reruns."""

PUBLIC = (
    "build",
    "list_chunks",
    "run_sources",
    "shard_loading",
    "spark_payloads",
    "submission",
    "task_rows",
)
"""Modules that other capabilities may import. tests/docs checks it."""
