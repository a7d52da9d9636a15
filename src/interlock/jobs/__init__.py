"""Jobs of one task or of millions: submission, lists, ingest, backfills, results, exports, receipts, reruns."""

PUBLIC = (
    "backfills",
    "definitions",
    "run_sources",
    "spark_loads",
    "submission",
    "task_rows",
)
"""Modules that other capabilities may import. tests/docs checks it."""
