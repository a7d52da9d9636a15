"""Queries: the SQL gate, the DuckDB engine with a process per statement, the query service, batch queries."""

PUBLIC = (
    "records",
    "relations",
)
"""Modules that other capabilities may import. tests/docs checks it."""
