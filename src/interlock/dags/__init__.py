"""DAGs: files, checks, deployment, routing of dataset changes, sources, backpressure, drawings."""

PUBLIC: tuple[str, ...] = ()
"""Modules that other capabilities may import: none."""
